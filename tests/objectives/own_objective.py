"""An objective outside the package, as docs/extending.md shows one: regression of the log-ratio onto the advantage."""

from dataclasses import dataclass

from sage_grpo.config.ranges import Positive
from sage_grpo.objectives.base import LossTerms, Objective


@dataclass(frozen=True)
class RatioRegression(Objective):
    """(log-ratio - temperature A)^2, as in REBEL (arXiv 2404.16767) for one clip."""

    temperature: Positive = 0.01

    def loss(self, step):
        gap = step.log_prob - step.log_prob_old - self.temperature * step.advantage
        return LossTerms(gap.square(), metrics={"regression/gap": gap.detach().abs()})


@dataclass(frozen=True)
class NoLoss(Objective):
    """Lacks its loss."""


@dataclass(frozen=True)
class OtherRatio(RatioRegression):
    """A ratio of its own, which rollouts do not record."""

    def log_prob(self, gaussian, velocity, x_next, sigma):
        return x_next.flatten(1).mean(1)
