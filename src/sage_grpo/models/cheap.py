"""Approximations of the steps of a rollout that are not trained. Imports nothing heavy.

Only exploring steps are trained, so the other steps, called given, may be approximated as long as clips are ranked alike: `sage-grpo probe`
measures that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from sage_grpo.config.ranges import Count, Positive, Range, Share, checked
from sage_grpo.models import ModelError

Guide = Literal["exact", "whole", "reused", "none"]
"""Guidance of a step of a rollout. exact: an exploring step, not approximated. The others are for given steps: whole runs the negative
branch, reused adds the contribution of guidance at the last whole step, none runs the prompt alone."""
Cache = Literal["first_block", "taylorseer"]
"""diffusers' caches of block outputs whose state is kept apart for every branch of guidance and every length of text."""


@checked
class CheapSpec:
    """Approximations of the given steps of a rollout: those before and after the exploring steps. All are off by default; exploring steps, their
    replays and evaluations are exact in any case."""

    guidance: tuple[Share, Share] | None = None
    """Guide given steps only at noise levels (low, high); at others the negative branch is left out. None guides all of them."""
    negative_every: Count = 1
    """Run the negative branch at every so many guided given steps in a row; between them what guidance added last is added again."""
    cache: Cache | None = None
    """Reuse outputs of blocks between given steps by a cache of diffusers: first_block runs the first block and leaves out the others where that
    changed little; taylorseer extrapolates the network's output from the last ones. None is no cache."""
    cache_threshold: Positive = 0.08
    """first_block: the relative change of the first block's residual below which the other blocks are left out."""
    cache_every: Annotated[int, Range(2)] = 2
    """taylorseer: the network is run at the first, second and fourth of the given steps in a row, and then at every so many."""
    attention: str | None = None
    """Attention backend of given steps by its diffusers name (sage, _flash_3, ...), where its package is installed; None is model.attention."""

    def __post_init__(self) -> None:
        if self.guidance is not None and not self.guidance[0] < self.guidance[1]:
            low, high = self.guidance
            raise ValueError(f"rollout.cheap.guidance [{low:g}, {high:g}] is empty: give the lower noise level first.")

    @property
    def guides_less(self) -> bool:
        """True if the negative branch is left out anywhere."""
        return self.guidance is not None or self.negative_every > 1

    @property
    def changes_passes(self) -> bool:
        """True if a pass itself is approximated."""
        return self.cache is not None or self.attention is not None

    @property
    def on(self) -> bool:
        """True if given steps differ from exact ones."""
        return self.guides_less or self.changes_passes

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
    """Refuse to leave out a negative branch that does not exist; `branches` are the passes of a velocity at a noise level."""
    if spec.guides_less and max(branches(1.0), branches(0.0)) == 1:
        name = "guidance" if spec.guidance is not None else "negative_every"
        raise ModelError(
            f"rollout.cheap.{name} leaves passes of the negative prompt out, and this run has none: model.guidance_scale is 1, guidance is an "
            "input of the network, or model.guidance_in_training is false. Leave it out."
        )
