"""The check-up of `sage-grpo doctor`: every check is a small function that returns a Check; `examine.py` makes them in order."""

from __future__ import annotations

from typing import Annotated

from sage_grpo.config.ranges import Range, checked


@checked
class DoctorSpec:
    """Size of the test rollout."""

    prompts: Annotated[int, Range(2)] = 4
    """Prompts of the small rollout that all checks share."""
    members: Annotated[int, Range(2)] = 4
    """Clips per prompt."""
