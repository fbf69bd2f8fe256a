"""Settings of the sentinel."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from sage_grpo.config.metadata import Effect
from sage_grpo.config.ranges import Count, Positive, Range, checked


@checked
class SentinelConfig:
    """What watches a run, and what it may do; docs/reading-a-run.md has every finding."""

    affects: ClassVar[Effect] = "course"
    action: Literal["off", "warn", "stop", "lower_lr", "rollback"] = "warn"
    """What follows a finding that lasts, after the warning: nothing (off does not even look), stop, lower the step size, or go back to the
    last good checkpoint with a lower step size."""
    patience: Count = 3
    """Iterations in a row that a sign must be there before it is told, and as many again before it is acted on. Held-out signs: one
    evaluation, and the next."""
    window: Annotated[int, Range(5)] = 20
    """Iterations at the start and before now whose medians a figure is compared with."""
    deviations: Positive = 6.0
    """How many robust standard deviations of its own past a figure must be off."""
    lost: Annotated[float, Range(0, 1, open_below=True)] = 0.2
    """Share of its best gain that a held-out score must lose; half of it is enough for one that nothing is trained on, while the total
    rises."""
    stderrs: Positive = 2.0
    """How many standard errors of the paired difference a held-out change must have; one and a half times as many for what is said of
    such a score."""
    lr_factor: Annotated[float, Range(0, 1, open_below=True, open_above=True)] = 0.5
    """lower_lr, rollback: the factor on the step size, each time."""
    rollbacks: Count = 2
    """How often a run goes back at most; then it stops."""
