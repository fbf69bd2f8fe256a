"""Settings of the sentinel."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from sage_grpo.config.metadata import Effect
from sage_grpo.config.ranges import Count, Positive, Range, checked


@checked
class SentinelConfig:
    """Checks of a run, and the action on a lasting finding; docs/reading-a-run.md has every finding."""

    affects: ClassVar[Effect] = "course"
    action: Literal["off", "warn", "stop", "lower_lr", "rollback"] = "warn"
    """Action on a lasting finding, after the warning: none (off does not even check), stop, lower the step size, or
    roll back to the last good checkpoint with a lower step size."""
    patience: Count = 3
    """Consecutive iterations with a finding before a warning, and as many again before an action. Held-out findings: one
    evaluation, and the next."""
    window: Annotated[int, Range(5)] = 20
    """Iterations at the start and before now whose medians a figure is compared with."""
    deviations: Positive = 6.0
    """Robust standard deviations from its own past at which a metric is out of range."""
    lost: Annotated[float, Range(0, 1, open_below=True)] = 0.2
    """Share of its best gain that a held-out score must lose; half of it is enough for one that nothing is trained on, while the total
    rises."""
    stderrs: Positive = 2.0
    """Standard errors of the paired difference that a held-out change must have; one and a half times as many for
    findings about a held-out reward."""
    lr_factor: Annotated[float, Range(0, 1, open_below=True, open_above=True)] = 0.5
    """lower_lr, rollback: the factor on the step size, each time."""
    rollbacks: Count = 2
    """Most rollbacks of a run; then it stops."""
