"""Settings of the sentinel."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from sage_grpo.config.metadata import Effect
from sage_grpo.config.ranges import Count, Positive, Range, checked


@checked
class SentinelConfig:
    """Health checks of a run (docs/reading-a-run.md)."""

    affects: ClassVar[Effect] = "course"
    action: Literal["off", "warn", "stop", "lower_lr", "rollback"] = "warn"
    """Response to a lasting finding: off (no checks), warn, stop, lower the learning rate, or roll back and lower
    it."""
    patience: Count = 3
    """Consecutive iterations with a finding before a warning, and again before an action."""
    window: Annotated[int, Range(5)] = 20
    """Iterations in the two medians that are compared: at the start, and now."""
    deviations: Positive = 6.0
    """Robust standard deviations from its past at which a metric is flagged."""
    lost: Annotated[float, Range(0, 1, open_below=True)] = 0.2
    """Share of its best gain that a held-out score must lose to be flagged."""
    stderrs: Positive = 2.0
    """Standard errors by which a held-out score must change to be flagged."""
    lr_factor: Annotated[float, Range(0, 1, open_below=True, open_above=True)] = 0.5
    """Factor on the learning rate at each action."""
    rollbacks: Count = 2
    """Most rollbacks; then the run stops."""
