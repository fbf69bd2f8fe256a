"""The figure of `sage-grpo probe`: shares of variance by step, and the effect of eta on R, reward and drift."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_grpo.utils.safe_io import replacing

if TYPE_CHECKING:
    from sage_grpo.tools.probe.estimate import Estimate
    from sage_grpo.tools.probe.probe import ProbeResult
    from sage_grpo.training.config import TrainConfig

COLOURS = {"start": "#c9ced6", "explored": "#8fbbe0", "linear": "#1368aa", "reward": "#222222", "drift": "#d62728"}


def save_figure(finding: ProbeResult, config: TrainConfig, path: Path) -> Path:
    """Write the figure at once (a reader never sees half a file)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    has_drift = finding.every.drift is not None
    panels = 4 if has_drift else 3
    figure, axes = pyplot.subplots(1, panels, figsize=(4 * panels + 1, 4.2), layout="constrained")
    _draw_shares(axes[0], finding)
    etas = [eta for eta, _ in finding.etas]
    rows = [row for _, row in finding.etas]
    _draw_eta(axes[1], etas, [row.linear for row in rows], "linear", "R")
    _draw_eta(axes[2], etas, [row.reward for row in rows], "reward", "reward minus deterministic")
    if has_drift:
        drifts = [row.drift for row in rows if row.drift is not None]
        _draw_eta(axes[3], etas, drifts, "drift", "drift minus deterministic")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_title(f"exploring at step {finding.best}", loc="left", fontsize=11)
    figure.suptitle(f"{config.kernel.name}, η = {finding.eta:.4g}, {config.rollout.steps} steps", x=0.012, ha="left")
    with replacing(path) as fresh:
        figure.savefig(fresh, format="png", dpi=110)
    pyplot.close(figure)
    return path


def _draw_shares(axis: Any, finding: ProbeResult) -> None:
    """Bars of the start's and the exploration's share; R beside them with its interval."""
    rows = [(str(step), row) for step, row in finding.steps] + [("all", finding.every)]
    places = list(range(len(rows)))
    start = [row.start.value for _, row in rows]
    axis.bar(places, start, 0.62, color=COLOURS["start"], label="start noise")
    explored = [row.explored.value for _, row in rows]
    axis.bar(places, explored, 0.62, bottom=start, color=COLOURS["explored"], label="exploration noise")
    _points(axis, places, [row.linear for _, row in rows], "linear", "R: linear part of it")
    axis.set_xticks(places, [name for name, _ in rows])
    axis.set_xlabel("exploring step")
    axis.set_ylim(min(0, axis.get_ylim()[0]), max(1.02, axis.get_ylim()[1]))
    axis.set_title("share of the reward's variance", loc="left", fontsize=11)
    axis.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.14),
        ncols=3,
        columnspacing=1.0,
        handlelength=1.2,
        frameon=False,
        fontsize=9,
    )


def _draw_eta(axis: Any, etas: Sequence[float], values: Sequence[Estimate], name: str, label: str) -> None:
    axis.axhline(0, color="#999999", lw=0.9)
    _points(axis, etas, values, name, label)
    axis.plot(etas, [value.value for value in values], color=COLOURS[name], lw=1.2, alpha=0.6)
    axis.set_xlabel("η")
    axis.set_ylabel(label)


def _points(axis: Any, places: Sequence[float], values: Sequence[Estimate], name: str, label: str) -> None:
    # The interval may lie off its estimate when that was limited: lengths are then 0.
    below = [max(0.0, value.value - value.low) for value in values]
    above = [max(0.0, value.high - value.value) for value in values]
    points = [value.value for value in values]
    axis.errorbar(places, points, [below, above], fmt="o", ms=4, capsize=3, color=COLOURS[name], label=label)
