"""Rows of runs, by hand."""

from __future__ import annotations

from typing import Any


def row(
    arm: str, seed: int, curve: dict[int, float], *, cost: int = 10, status: str = "done", **more: Any
) -> dict[str, Any]:
    """A row of a run with this curve; `cost` passes an iteration. Its drift is a tenth of the score."""
    iterations = more.pop("iterations", max(curve, default=0))
    return {
        "format": 1, "arm": arm, "recipe": "shapes/sage", "seed": seed, "key": f"{arm}/{seed}", "kind": "train", "status": status,
        "error": None if status == "done" else "why", "iterations": iterations, "settings": {"optimizer.lr": 1e-3}, "reached": iterations,
        "evaluations": {str(n): {"total": value, "drift": value / 10} for n, value in curve.items()},
        "passes": {str(n): n * cost for n in curve}, "updates": 2 * iterations, "training": {"iteration": []},
        "steps": {"0": {"std": 0.5, "sensitivity": 2.0, "raw": 4.0, "sent": 1.0}},
        "seconds": {"iteration": 1.0, "evaluate": 2.0, "total": 3.0},
        "machine": {"device": "a machine"}, "versions": {"torch": "2"}, "commit": "abc", "code": "1/2", **more,
    }  # fmt: skip
