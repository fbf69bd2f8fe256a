"""Checks of workers that sample for the trainer."""

from __future__ import annotations

from collections.abc import Mapping

from sage_grpo.tools.doctor.check import Check, Status


def honest(gaps: Mapping[str, float], limit: float, asked: int, *, refused: float) -> Check:
    """Workers store the log-probabilities of the trainer's replay; `gaps` has the largest difference of each."""
    worst = max(gaps, key=lambda worker: gaps[worker])
    value = f"{len(gaps)} of {asked} workers; {worst} differs by {gaps[worst]:.2g} at most, {limit:.2g} is allowed"
    status: Status = "fail" if refused or not gaps[worst] <= limit else "warn" if len(gaps) < asked else "pass"
    return Check("workers", status, f"{value}, and {refused:.0f} were refused" if refused else value)
