"""Tables and a figure of samplers and a schedule, without a network."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sage_grpo.config.ranges import Count, Positive, Range, checked
from sage_grpo.samplers.kernels import (
    KERNELS,
    Kernel,
    KernelSpec,
    Linear,
    OfGrid,
    takes_sigma_max,
    unfit_eta,
)
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.samplers.sde_steps import explore, left_out
from sage_grpo.samplers.windows import Window
from sage_grpo.tools.inspect import KernelReport, final_variance, inspect_kernel, kernel_name
from sage_grpo.utils.safe_io import replacing
from sage_grpo.utils.text import narrow_table

if TYPE_CHECKING:
    from rich.table import Table

FIGURES = (".png", ".pdf", ".svg", ".jpg", ".jpeg")
"""Endings of figures that are drawn, each in the format of its name."""


LOOKS = {
    "ode": ("#7f7f7f", "x"),
    "flow": ("#e08a00", "s"),
    "linear": ("#8a6d3b", "v"),
    "dance": ("#c8352b", "^"),
    "sage": ("#1368aa", "o"),
    "cps": ("#a6549d", "D"),
    "sage_exact": ("#00875f", "P"),
}
"""Colour and marker of every kernel."""
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


@checked
class Options:
    """Kernels and schedule to inspect, and the output."""

    kernels: list[str] = field(default_factory=lambda: list(KERNELS))
    """Kernels to compare: ode, flow, linear, dance, sage, cps, sage_exact, or your own as module:Class."""
    steps: Count = 20
    """Steps of the rollout."""
    model: str | None = None
    """Folder or hub name of a checkpoint whose scheduler makes the grid (its configuration files are enough); null is an even grid from 1."""
    shift: Positive | None = None
    """Shift of the grid: 1 leaves it even. null is the model's own, and 5 without a model."""
    eta: Annotated[float, Range(0, 10)] = 0.5
    """Exploration scale (cps: at most 1)."""
    sigma_max: OfGrid | None = None
    """Clamp of sage and sage_exact near pure noise; null takes each kernel's default."""
    deterministic_last: bool | None = None
    """Make the last step an ODE step; null takes the kernel's default, as rollout.deterministic_last of a run does."""
    window: Window = field(default_factory=Window)
    """Steps that explore (a random or sliding window is shown as in the first iteration)."""
    json: bool = False
    """Print JSON only."""
    figure: Path | None = Path("inspect.png")
    """File of the figure (.png, .pdf, .svg or .jpg); null for none."""


EVEN_SHIFT = 5.0
"""Shift of the grid without a model: HunyuanVideo-1.5's."""


@dataclass(frozen=True)
class GridOptions:
    """The noise grids that all kernels share."""

    steps: int
    shift: float
    eta: float
    make: Callable[[int], Schedule]  # the grid with a number of steps: a model's own, or a shifted even one


def grid_for(options: Options) -> GridOptions:
    """The source of the grid."""
    if options.model is None:
        shift = options.shift or EVEN_SHIFT
        return GridOptions(options.steps, shift, options.eta, lambda steps: Schedule.shifted(steps, shift))
    from sage_grpo.models.spec import ModelSpec
    from sage_grpo.plan.architecture import find_architecture

    found = find_architecture(ModelSpec(path=options.model))
    shift = options.shift or found.model.shift
    return GridOptions(options.steps, shift, options.eta, lambda steps: found.grid(steps, options.shift))


def report_on(kernel: Kernel, grid: Schedule, options: Options) -> KernelReport:
    """The report of a rollout with this kernel, with a remark on steps that are left deterministic."""
    wanted = options.window.steps(options.steps)
    report = inspect_kernel(kernel, explore(grid, wanted, kernel, options.deterministic_last))
    left = left_out(grid, wanted, kernel, options.deterministic_last)
    return replace(report, warnings=(*report.warnings, f"{left[0].upper()}{left[1:]}.")) if left else report


def build_kernels(options: Options, grid: Schedule) -> list[Kernel]:
    """The kernels in the order they were named."""
    if not options.kernels:
        raise ValueError(f"kernels is empty: name one or more of {', '.join(KERNELS)}.")
    for name in options.kernels:
        fault = unfit_eta(name, options.eta)
        if fault:
            others = json.dumps([other for other in options.kernels if other != name])
            raise ValueError(f"{fault} Lower eta, or leave {name} out with --kernels {others}.")
    clamps = [options.sigma_max if takes_sigma_max(name) else None for name in options.kernels]
    specs = [KernelSpec(name=name, eta=options.eta, sigma_max=clamp) for name, clamp in zip(options.kernels, clamps)]
    return [spec.build(grid) for spec in specs]


def run(options: Options) -> int:
    """Inspect the kernels; the exit status is 0 with warnings too."""
    if options.figure is not None:
        _check_figure(options.figure)
    grid = grid_for(options)
    schedule = grid.make(options.steps)
    kernels = build_kernels(options, schedule)
    reports = [report_on(kernel, schedule, options) for kernel in kernels]
    if options.json:
        facts = {"steps": options.steps, "model": options.model, "shift": grid.shift, "eta": options.eta}
        found = {"kernels": {report.kernel: report.to_dict() for report in reports}}
        print(json.dumps(facts | found, indent=2, allow_nan=False))
    else:
        _print_tables(options, grid, reports)
    if options.figure is not None:
        path = save_figure(grid, kernels, reports, options.figure)
        print(f"figure: {path}", file=sys.stderr if options.json else sys.stdout)
    return 0


def _check_figure(file: Path) -> None:
    """Refuse an unknown file format before the kernels are inspected."""
    if file.suffix.lower() not in FIGURES:
        raise ValueError(
            f"--figure {file} must end in one of {', '.join(FIGURES)}, got {file.suffix or 'no ending'!r}."
        )
    if file.is_dir():
        raise ValueError(f"--figure {file} is a folder: give the name of a file.")


def _print_tables(options: Options, grid: GridOptions, reports: Sequence[KernelReport]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for report in reports:
        console.print(_step_table(report))
    console.print(_summary_table(options, grid, reports))
    console.print(
        "off-manifold: variance left for point data (0 is right)\n"
        "on-manifold: variance for data of variance 1 (1 is right)\n"
        "peak excess: noise the network meets over what it was trained for (1 is right)",
        style="dim",
    )
    for report in reports:
        for text in report.warnings:
            console.print(f"[yellow]![/yellow] [bold]{report.kernel}[/bold]: {text}")


def _step_table(report: KernelReport) -> Table:
    title = report.kernel if report.eta is None else f"{report.kernel}  eta = {report.eta:g}"
    heads = ("step", "sigma", "next", "std", "sensitivity", "equaliser", "variance", "")
    table, peak = narrow_table(title, *heads, left=("",)), max(row.share for row in report.rows)
    for row in report.rows:
        table.add_row(
            str(row.step),
            f"{row.sigma:.4f}",
            f"{row.sigma_next:.4f}",
            f"{row.std:.4f}" if row.std > 0 else "-",
            _number(row.sensitivity),
            _number(row.weight),
            f"{row.share:.1%}",
            "█" * round(10 * row.share / peak) if peak > 0 else "",
            style="" if row.std > 0 else "dim",
        )
    return table


def _summary_table(options: Options, grid: GridOptions, reports: Sequence[KernelReport]) -> Table:
    title = f"{grid.steps} steps, shift {grid.shift:g}" + (f", grid of {options.model}" if options.model else "")
    heads = (
        "steps\ntrained",
        "total\nvariance",
        "off-\nmanifold",
        "on-\nmanifold",
        "peak\nexcess",
        "sensitivity\nspan",
    )
    table = narrow_table(title, "kernel", *heads, left=("kernel",))
    for report in reports:
        table.add_row(
            report.kernel,
            str(sum(row.std > 0 for row in report.rows)),
            f"{report.total_variance:.4g}",
            f"{report.off_manifold_variance:.4g}",
            f"{report.on_manifold_variance:.4f}",
            f"{report.peak_excess:.3g}",
            "-" if report.sensitivity_span is None else f"{report.sensitivity_span:.0f}x",
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def save_figure(grid: GridOptions, kernels: Sequence[Kernel], reports: Sequence[KernelReport], path: Path) -> Path:
    """Draw four panels and write them to `path` at once (a reader never sees half a file)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(2, 2, figsize=(11.5, 9.8))
        _draw_std(axes[0, 0], reports)
        _draw_sensitivity(axes[0, 1], reports)
        _draw_off_manifold(axes[1, 0], kernels, grid)
        _draw_on_manifold(axes[1, 1], kernels, grid)
        title = f"{grid.steps} steps, shift {grid.shift:g}, η = {grid.eta:g}"
        figure.suptitle(title, x=0.012, y=0.985, ha="left", fontsize=15, fontweight="bold")
        handles = [Line2D([], [], **_look(report.kernel), label=report.kernel) for report in reports]
        figure.legend(handles=handles, loc="upper right", ncols=len(handles), bbox_to_anchor=(0.995, 0.965))
        figure.tight_layout(rect=(0, 0, 1, 0.94), w_pad=2.2, h_pad=2.6)
        with replacing(path) as fresh:
            figure.savefig(fresh, format=path.suffix.lower().removeprefix("."), dpi=130)
        pyplot.close(figure)
    return path


def _look(name: str) -> dict[str, Any]:
    colour, marker = LOOKS.get(name, ("#333333", "v"))
    return {"color": colour, "marker": marker}


def _noise_to_data(axis: Any, report: KernelReport) -> None:
    """Set one tick per step, labeled by its sigma: an axis in sigma would crowd the steps of a large shift at 1."""
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


def _draw_sensitivity(axis: Any, reports: Sequence[KernelReport]) -> None:
    """The paper's figure 4, with |b| in it: raw, and after the equaliser."""
    from matplotlib.lines import Line2D

    axis.set_title("b   Size of the gradient, raw and equalised")
    handles = [
        Line2D([], [], color="#444444", marker="o", label="raw: |b| / std"),
        _dashed("#444444", "after the equaliser", DOTS),
    ]
    for report in reports:
        rows = [(row.step, row.std, row.sensitivity, row.weight) for row in report.rows]
        trained = [(step, std, s, w) for step, std, s, w in rows if s is not None and w is not None]
        if not trained:
            continue
        steps, colour = [row[0] for row in trained], _look(report.kernel)["color"]
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


def _over_steps(axis: Any, kernels: Sequence[Kernel], grid: GridOptions, c: float) -> dict[str, list[float]]:
    """The final variance of every kernel for each number of steps, every step stochastic; also sets up the axis."""
    axis.axvline(grid.steps, color="#555555", lw=1, ls=(0, (4, 3)), zorder=0)
    axis.set_xscale("log")
    axis.set_xticks(STEP_COUNTS, [str(n) for n in STEP_COUNTS])
    axis.minorticks_off()
    axis.set_xlabel(f"number of steps   (all stochastic, shift {grid.shift:g})")
    grids = [grid.make(n) for n in STEP_COUNTS]

    def on(kernel: Kernel, one: Schedule) -> Kernel:  # the same kernel on another grid
        return replace(kernel, second=float(one.sigmas[1])) if isinstance(kernel, Linear) else kernel

    return {kernel_name(one): [final_variance(on(one, made), made, c) for made in grids] for one in kernels}


def _draw_off_manifold(axis: Any, kernels: Sequence[Kernel], grid: GridOptions) -> None:
    axis.set_title("c   Noise left in the video (point data)")
    curves = _over_steps(axis, kernels, grid, 0.0)
    for name, values in curves.items():
        if max(values) > 0:
            axis.plot(STEP_COUNTS, values, **_look(name))
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    axis.set_ylim(max(low, 1e-7), min(high, 1e4))
    axis.set_ylabel("variance off the manifold  (0 is right)")
    exact = [name for name, values in curves.items() if max(values) == 0]
    if exact:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
        text = f"exactly 0: {', '.join(exact)}"
        axis.text(0.03, 0.05, text, transform=axis.transAxes, color="#00704f", fontsize=11, bbox=box)


def _draw_on_manifold(axis: Any, kernels: Sequence[Kernel], grid: GridOptions) -> None:
    axis.set_title("d   Variance of the data (unit data)")
    axis.axhline(1.0, color="#222222", lw=1.2)
    for name, values in _over_steps(axis, kernels, grid, 1.0).items():
        axis.plot(STEP_COUNTS, [min(value, 9.0) for value in values], **_look(name))
    low, high = axis.get_ylim()
    axis.set_ylim(max(0.0, low), min(high, 2.0))
    axis.set_ylabel("variance along the manifold  (1 is right)")
