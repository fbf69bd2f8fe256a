"""Approximations of the steps of a rollout that are not trained. Imports nothing heavy.

Only exploring steps are trained, so the other steps, called given, may be approximated as long as clips are ranked alike: `sage-grpo probe`
measures that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from sage_grpo.config.ranges import Count, Share, checked
from sage_grpo.models import ModelError

Guide = Literal["exact", "whole", "reused", "none"]
"""Guidance of a step of a rollout. exact: an exploring step, not approximated. The others are for given steps: whole runs the negative
branch, reused adds the contribution of guidance at the last whole step, none runs the prompt alone."""


@checked
class CheapSpec:
    """Approximations of the given steps of a rollout: those before and after the exploring steps. All are off by default; exploring steps, their
    replays and evaluations are exact in any case."""

    guidance: tuple[Share, Share] | None = None
    """Guide given steps only at noise levels (low, high); at others the negative branch is left out. None guides all of them."""
    negative_every: Count = 1
    """Run the negative branch at every so many guided given steps in a row; between them what guidance added last is added again."""

    def __post_init__(self) -> None:
        if self.guidance is not None and not self.guidance[0] < self.guidance[1]:
            low, high = self.guidance
            raise ValueError(f"rollout.cheap.guidance [{low:g}, {high:g}] is empty: give the lower noise level first.")

    @property
    def on(self) -> bool:
        return self.guidance is not None or self.negative_every > 1

    def guides(
        self, sigmas: Sequence[float], explores: Sequence[bool], network: Callable[[float], int]
    ) -> tuple[Guide, ...]:
        """The guidance of every step of a schedule. Its contribution is reused neither across an exploring step nor by another expert."""
        low, high = self.guidance or (0.0, 1.0)
        guides: list[Guide] = []
        age, last = None, None
        for sigma, noisy in zip(sigmas, explores):
            if noisy:
                guides.append("exact")
                age = None
            elif not low <= sigma <= high:
                guides.append("none")
            else:
                again = age is None or age + 1 == self.negative_every or network(sigma) != last
                guides.append("whole" if again else "reused")
                age, last = 0 if again else (age or 0) + 1, network(sigma)
        return tuple(guides)


def check_negative(spec: CheapSpec, branches: Callable[[float], int]) -> None:
    if spec.on and max(branches(1.0), branches(0.0)) == 1:
        name = "guidance" if spec.guidance is not None else "negative_every"
        raise ModelError(
            f"rollout.cheap.{name} leaves passes of the negative prompt out, and this run has none: model.guidance_scale is 1, guidance is an "
            "input of the network, or model.guidance_in_training is false. Leave it out."
        )
