"""Figures of a comparison: learning curves with bands, gradient norms by step, final scores."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sage_grpo.tools.compare.design import Column
from sage_grpo.tools.compare.summary import Summary
from sage_grpo.utils.safe_io import replacing

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
"""Okabe and Ito's, which color-blind readers tell apart (brown in place of yellow, too pale for a line)."""
BASE = {"color": "#999999", "lw": 0.9, "ls": ":"}
"""A line that an axis is read by."""
STYLES = ("-", "--", ":", "-.")
"""After every eight arms the next style; together with the colours they name an arm."""


def draw(summary: Summary, folder: Path) -> list[Path]:
    if not any(arm.counts["done"] for arm in summary.arms.values()):
        return []
    try:
        import matplotlib  # noqa: F401
    except ImportError as missing:
        warnings.warn(
            f"No figures: matplotlib cannot be imported ({missing}). pip install matplotlib; sage-grpo compare --table FOLDER then draws them.",
            stacklevel=2,
        )
        return []
    return [file for name in summary.suite.figures if (file := DRAW[name](summary, folder / f"{name}.png")) is not None]


def _curves(summary: Summary, path: Path) -> Path | None:
    """Rows: columns of the table; left over iterations, right over network evaluations."""
    columns = [c for c in summary.suite.columns if any(len(a.curves[c.key]) > 1 for a in summary.arms.values())]
    if not columns:
        return None
    figure, axes = _panels(len(columns), 2, height=2.7)
    for column, row in zip(columns, axes):
        for place, arm in enumerate(summary.arms.values()):
            curve = arm.curves[column.key]
            points = sorted(curve)
            low = [curve[p].mean - _band(curve[p].half) for p in points]
            high = [curve[p].mean + _band(curve[p].half) for p in points]
            for axis, x in ((row[0], points), (row[1], [arm.passes_at.get(p, math.nan) for p in points])):
                axis.plot(x, [curve[p].mean for p in points], **_look(place), label=arm.name)
                axis.fill_between(x, low, high, color=_look(place)["color"], alpha=0.15, lw=0)
        for axis in row:
            axis.set_ylabel(_label(column))
        if not math.isnan(summary.budget):
            row[1].axvline(summary.budget, **BASE)
    axes[-1][0].set_xlabel("iterations")
    for row in axes:
        row[0].xaxis.get_major_locator().set_params(integer=True)
        row[1].xaxis.get_major_locator().set_params(nbins=5)  # long numbers
    axes[-1][1].set_xlabel("network passes (samples; forward 1, forward and backward 3)")
    return _save(figure, axes, path, "held-out prompts, mean and 95% interval over seeds")


def _steps(summary: Summary, path: Path) -> Path | None:
    """By denoising step: the measured gradient norm at the velocity, before and after the equaliser, and what |b| / std predicts."""
    arms = [(n, a) for n, a in enumerate(summary.arms.values()) if any("raw" in v for v in a.steps.values())]
    if not arms:
        return None
    figure, axes = _panels(1, 3, height=3.6)
    panels = (
        ("sensitivity", "predicted: |b| / std"),
        ("raw", "measured gradient norm"),
        ("sent", "gradient norm sent to the network"),
    )
    for axis, (name, title) in zip(axes[0], panels):
        for place, arm in arms:
            points = [step for step, values in arm.steps.items() if name in values and "raw" in values]
            axis.plot(
                points, [arm.steps[step][name] for step in points], marker="o", ms=3, **_look(place), label=arm.name
            )
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("denoising step")
        axis.locator_params(axis="x", integer=True)
        axis.set_yscale("log")
    return _save(figure, axes, path, "by denoising step, mean over iterations and seeds")


def _bars(summary: Summary, path: Path) -> Path | None:
    arms = [arm for arm in summary.arms.values() if arm.counts["done"]]
    columns = summary.suite.columns
    figure, axes = _panels(1, len(columns), height=1.2 + 0.32 * len(arms), width=3.6)
    for axis, column in zip(axes[0], columns):
        found = [arm.final[column.key] for arm in arms]
        places = list(range(len(arms)))[::-1]
        for place, value, colour in zip(places, found, range(len(arms))):
            axis.errorbar(value.mean, place, xerr=_band(value.half), fmt="o", capsize=3, color=_look(colour)["color"])
        if arms[0].base.get(column.key) is not None:
            axis.axvline(arms[0].base[column.key], **BASE)
        axis.set_yticks(places, [arm.name for arm in arms] if axis is axes[0][0] else [""] * len(arms))
        axis.set_ylim(-0.6, len(arms) - 0.4)
        axis.set_xlabel(_label(column))
    return _save(figure, axes, path, "after the last iteration, mean and 95% interval over seeds", legend=False)


DRAW: dict[str, Callable[[Summary, Path], Path | None]] = {"curves": _curves, "steps": _steps, "bars": _bars}


def _panels(rows: int, columns: int, *, height: float, width: float = 4.6) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (width * columns + 2.4, height * rows + 0.5)
    return pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)


def _label(column: Column) -> str:
    return f"{column.title} ({'higher' if column.higher else 'lower'} is better)"


def _look(place: int) -> dict[str, Any]:
    return {"color": COLOURS[place % len(COLOURS)], "ls": STYLES[place // len(COLOURS) % len(STYLES)], "lw": 1.6}


def _band(half: float) -> float:
    return 0.0 if math.isnan(half) else half


def _save(figure: Any, axes: Any, path: Path, title: str, *, legend: bool = True) -> Path:
    """Write the file at once, with the legend beside the panels, where it hides no line."""
    from matplotlib import pyplot

    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, lw=0.6)
    if legend:
        handles, names = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside right upper", frameon=False, fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    with replacing(path) as fresh:
        figure.savefig(fresh, format="png", dpi=120)
    pyplot.close(figure)
    return path
