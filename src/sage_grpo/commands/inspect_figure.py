"""The figure of `sage-grpo inspect`: kernels side by side, after the paper's figures 1, 4 and 9."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sage_grpo.flow.kernels import Flow, Kernel, Linear, Sage, SageExact
from sage_grpo.flow.schedule import Schedule
from sage_grpo.inside import replacing
from sage_grpo.inspector import KernelReport, final_variance, kernel_name

COLOURS = {
    "ode": "#7f7f7f",
    "flow": "#e08a00",
    "linear": "#8a6d3b",
    "dance": "#c8352b",
    "sage": "#1368aa",
    "cps": "#a6549d",
    "sage_exact": "#00875f",
}
MARKERS = {"ode": "x", "flow": "s", "linear": "v", "dance": "^", "sage": "o", "cps": "D", "sage_exact": "P"}
INTEGRAL, EXCESS = "#bcd7ee", "#8e44ad"
DASHES, DOTS = (0, (4.0, 2.5)), (0, (1.0, 1.2))
STEP_COUNTS = (5, 10, 20, 40, 80, 160, 320)
STYLE = {
    "font.size": 10.5,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.7,
    "lines.markersize": 4.2,
    "legend.frameon": False,
    "figure.facecolor": "white",
}


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What all kernels of a figure share."""

    steps: int
    shift: float
    eta: float
    make: Callable[[int], Schedule]
    """The grid of so many steps."""


def save_figure(grid: Grid, kernels: Sequence[Kernel], reports: Sequence[KernelReport], path: Path) -> Path:
    """Draw six panels and write them to `path` at once (a reader never sees half a file)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(2, 3, figsize=(16.5, 9.8))
        _draw_std(axes[0, 0], reports)
        _draw_integral(axes[0, 1], grid)
        _draw_against_flow(axes[0, 2], grid)
        _draw_sensitivity(axes[1, 0], reports)
        _draw_off_manifold(axes[1, 1], kernels, grid)
        _draw_on_manifold(axes[1, 2], kernels, grid)
        figure.suptitle(
            f"{grid.steps} steps, shift {grid.shift:g}, η = {grid.eta:g}",
            x=0.012,
            y=0.985,
            ha="left",
            fontsize=15,
            fontweight="bold",
        )
        handles = [_handle(report.kernel) for report in reports]
        figure.legend(
            handles=handles, loc="upper right", ncols=len(handles), bbox_to_anchor=(0.995, 0.992), fontsize=12
        )
        figure.tight_layout(rect=(0, 0, 1, 0.965), w_pad=2.2, h_pad=2.6)
        with replacing(path) as fresh:
            figure.savefig(fresh, format=path.suffix.lower().removeprefix("."), dpi=130)
        pyplot.close(figure)
    return path


def _handle(name: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], **_look(name), label=name)


def _look(name: str) -> dict[str, Any]:
    return {"color": COLOURS.get(name, "#333333"), "marker": MARKERS.get(name, "v")}


def _noise_to_data(axis: Any, report: KernelReport) -> None:
    """One place per step, named by its sigma: an axis in sigma would crowd the steps of a large shift at 1."""
    every = max(1, round(len(report.rows) / 7))
    ticks = [row.step for row in report.rows[::every]]
    axis.set_xticks(ticks, [f"{report.rows[step].sigma:.3g}" for step in ticks])
    axis.set_xlim(-0.5, len(report.rows) - 0.5)
    axis.set_xlabel("σ at the start of the step   (noise → data)")


def _draw_std(axis: Any, reports: Sequence[KernelReport]) -> None:
    axis.set_title("a   Noise injected per step")
    for report in reports:
        rows = [row for row in report.rows if row.std > 0]
        axis.plot([row.step for row in rows], [row.std for row in rows], **_look(report.kernel))
    axis.set_ylabel("std of the step")
    axis.set_ylim(bottom=0)
    _noise_to_data(axis, reports[0])


def _draw_integral(axis: Any, grid: Grid) -> None:
    """The paper's figure 1 (a.1): Euler's rectangles over the diffusion, and the true integral under it."""
    from matplotlib.patches import Patch

    axis.set_title("b   Euler's rectangles and the true integral")
    sigmas = grid.make(grid.steps).sigmas.to(torch.float64)
    shown = min(len(sigmas) - 1, 7)
    right, left = sigmas[:shown], sigmas[1 : shown + 1]
    clamp = Sage().sigma_max
    heights = (Flow(eta=grid.eta)(right, left).std.square() / (right - left)).tolist()
    top = 1.45 * max([*heights, 1e-12])
    for p, q, height in zip(right.tolist(), left.tolist(), heights):
        s = torch.linspace(q, p, 200, dtype=torch.float64).clamp(max=1 - 1e-9)
        curve = (grid.eta**2 * s / (1 - s)).tolist()
        axis.fill_between(s.tolist(), curve, height, where=[c < height for c in curve], color=EXCESS, alpha=0.42, lw=0)
        axis.plot([q, q, p, p], [0, height, height, 0], color="#6c3483", lw=1.0)
    s = torch.linspace(float(left[-1]), 1 - 1e-6, 4000, dtype=torch.float64)
    whole = (grid.eta**2 * s / (1 - s)).clamp(max=2 * top).tolist()
    inside = (s <= clamp).tolist()
    axis.fill_between(s.tolist(), whole, where=inside, color=INTEGRAL, alpha=0.75, lw=0, zorder=0.5)
    axis.plot(s.tolist(), whole, color="#10304f", lw=2)
    axis.axvline(clamp, color=COLOURS["sage"], lw=1.1, ls=(0, (3, 2)))
    axis.set_xlim(1.0, float(left[-1]))
    axis.set_ylim(0, top)
    axis.set_xlabel(f"σ   (first {shown} steps)")
    axis.set_ylabel("diffusion  η² σ / (1 − σ)")
    dashes = _dashed(COLOURS["sage"], f"sage's clamp, {clamp:g}")
    axis.legend(
        handles=[
            Patch(color=INTEGRAL, label="true integral (sage)"),
            Patch(color=EXCESS, alpha=0.42, label="excess of the rectangle (flow)"),
            dashes,
        ],
        loc="upper right",
    )


def _draw_against_flow(axis: Any, grid: Grid) -> None:
    """The paper's figure 9: std step by step, minus FlowGRPO's."""
    from matplotlib.ticker import MaxNLocator

    axis.set_title("c   Std minus that of flow")
    sigmas = grid.make(grid.steps).sigmas.to(torch.float64)
    flow = Flow(eta=grid.eta, first=float(sigmas[0]))(sigmas[:-1], sigmas[1:]).std
    kernels: list[Kernel] = [Sage(eta=grid.eta), SageExact(eta=grid.eta)]
    differences = [(kernel(sigmas[:-1], sigmas[1:]).std - flow).tolist() for kernel in kernels]
    # The first step is special (sage_exact renews all noise, sage may be clamped): to scale it would flatten the rest.
    limit = 1.35 * max([1e-6, *(abs(value) for row in differences for value in row[1:])])
    width = 0.42
    for offset, kernel, difference in zip((-0.5, 0.5), kernels, differences):
        name = kernel_name(kernel)
        places = [index + offset * width for index in range(grid.steps)]
        axis.bar(places, difference, width, color=COLOURS[name], label=f"{name} − flow")
        for place, value in zip(places, difference):
            if abs(value) > limit:
                arrow, edge = ("↑", 0.92 * limit) if value > 0 else ("↓", -0.92 * limit)
                axis.text(place + 0.6, edge, f"{arrow} {value:+.2f}", color=COLOURS[name], va="center")
    axis.axhline(0, color=COLOURS["flow"], lw=1.8)
    axis.set_ylim(-limit, limit)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("step   (all stochastic)")
    axis.set_ylabel("difference of std")
    axis.grid(axis="x", visible=False)
    axis.legend(loc="upper right")


def _draw_sensitivity(axis: Any, reports: Sequence[KernelReport]) -> None:
    """The paper's figure 4, with |b| in it: raw, and after the equaliser."""
    from matplotlib.lines import Line2D

    axis.set_title("d   Size of the gradient, raw and equalised")
    handles = [
        Line2D([], [], color="#444444", marker="o", label="raw: |b| / std"),
        _dashed("#444444", "after the equaliser", DOTS),
    ]
    for report in reports:
        rows = [(row.step, row.std, row.sensitivity, row.weight) for row in report.rows]
        trained = [(step, std, s, w) for step, std, s, w in rows if s is not None and w is not None]
        if not trained:
            continue
        steps, colour = [row[0] for row in trained], COLOURS.get(report.kernel, "#333333")
        axis.plot(steps, [s for _, _, s, _ in trained], **_look(report.kernel))
        axis.plot(steps, [s * w for _, _, s, w in trained], color=colour, ls=DOTS, lw=1.6, alpha=0.85)
        if report.kernel == "sage":
            middle = trained[len(trained) // 2]
            axis.plot(steps, [middle[2] * middle[1] / std for _, std, _, _ in trained], color=colour, ls=DASHES, lw=1.2)
            handles.append(_dashed(colour, "1 / std alone (paper's Eq. 8, sage)"))
    axis.legend(handles=handles, loc="upper left")
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * 4)
    axis.set_ylabel("sensitivity  |b| / std")
    _noise_to_data(axis, reports[0])


def _dashed(colour: str, label: str, pattern: tuple[int, tuple[float, float]] | None = None) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, ls=pattern or DASHES, label=label)


def _rebuilt(kernel: Kernel, grid: Schedule) -> Kernel:
    """The same kernel on another grid."""
    if isinstance(kernel, Linear):
        return dataclasses.replace(kernel, second=float(grid.sigmas[1]))
    return kernel


def _over_steps(axis: Any, kernels: Sequence[Kernel], grid: Grid, c: float, draw: Callable[..., None]) -> None:
    """One curve per kernel over the number of steps, every step stochastic."""
    for kernel in kernels:
        values = [final_variance(_rebuilt(kernel, grid.make(n)), grid.make(n), c) for n in STEP_COUNTS]
        draw(kernel_name(kernel), values)
    axis.axvline(grid.steps, color="#555555", lw=1, ls=(0, (4, 3)), zorder=0)
    axis.set_xscale("log")
    axis.set_xticks(STEP_COUNTS, [str(n) for n in STEP_COUNTS])
    axis.minorticks_off()
    axis.set_xlabel(f"number of steps   (all stochastic, shift {grid.shift:g})")


def _draw_off_manifold(axis: Any, kernels: Sequence[Kernel], grid: Grid) -> None:
    axis.set_title("e   Noise left in the video (point data)")
    exact: list[str] = []

    def draw(name: str, values: list[float]) -> None:
        if max(values) == 0:
            exact.append(name)
            return
        axis.plot(STEP_COUNTS, values, **_look(name))

    _over_steps(axis, kernels, grid, 0.0, draw)
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.set_ylim(max(low, 1e-7), min(high, 1e4))
    axis.set_ylabel("variance off the manifold  (0 is right)")
    if exact:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
        text = f"exactly 0: {', '.join(exact)}"
        axis.text(0.03, 0.05, text, transform=axis.transAxes, color="#00704f", fontsize=11, bbox=box)


def _draw_on_manifold(axis: Any, kernels: Sequence[Kernel], grid: Grid) -> None:
    axis.set_title("f   Variance of the data (unit data)")

    def draw(name: str, values: list[float]) -> None:
        axis.plot(STEP_COUNTS, [min(value, 9.0) for value in values], **_look(name))

    axis.axhline(1.0, color="#222222", lw=1.2)
    _over_steps(axis, kernels, grid, 1.0, draw)
    low, high = axis.get_ylim()
    axis.set_ylim(max(0.0, low), min(high, 2.0))
    axis.set_ylabel("variance along the manifold  (1 is right)")
