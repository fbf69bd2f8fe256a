"""Tables and a figure of what samplers and a schedule will do, before any network runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sage_grpo.flow.exploring import explore, left_out
from sage_grpo.flow.kernels import KERNELS, Kernel, KernelSpec, OfGrid, takes_sigma_max, unfit_eta
from sage_grpo.flow.schedule import Schedule
from sage_grpo.flow.windows import Window
from sage_grpo.inspector import KernelReport, inspect_kernel
from sage_grpo.ranges import Count, Positive, Range, checked
from sage_grpo.tables import narrow_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FIGURES = (".png", ".pdf", ".svg", ".jpg", ".jpeg")
"""Endings of figures that are drawn, each in the format of its name."""


@checked
class Options:
    """What to inspect, and where to write it."""

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
    """Whether the last step is an ODE step; null asks the kernel, as rollout.deterministic_last of a run does."""
    window: Window = field(default_factory=Window)
    """Which steps explore (a random or sliding window is shown as in the first iteration)."""
    json: bool = False
    """Print JSON to stdout, and nothing else."""
    figure: Path | None = Path("inspect.png")
    """Where to write the figure (.png, .pdf, .svg or .jpg); null for none."""


EVEN_SHIFT = 5.0
"""Shift of the grid where no model says one: HunyuanVideo-1.5's."""


@dataclass(frozen=True)
class Grids:
    """The grids of a model, or shifted even ones."""

    shift: float
    make: Callable[[int], Schedule]
    """The grid of so many steps."""


def grids_for(options: Options) -> Grids:
    """Where the grid comes from."""
    if options.model is None:
        shift = options.shift or EVEN_SHIFT
        return Grids(shift, lambda steps: Schedule.shifted(steps, shift))
    from sage_grpo.forecast.architecture import find_architecture
    from sage_grpo.models.spec import ModelSpec

    found = find_architecture(ModelSpec(path=options.model))
    return Grids(options.shift or found.shift, lambda steps: found.grid(steps, options.shift))


def report_on(kernel: Kernel, grid: Schedule, options: Options) -> KernelReport:
    """What a rollout with this kernel would do; with a remark on steps that were left deterministic."""
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
    grids = grids_for(options)
    grid = grids.make(options.steps)
    kernels = build_kernels(options, grid)
    reports = [report_on(kernel, grid, options) for kernel in kernels]
    if options.json:
        print(json.dumps(_document(options, grids.shift, reports), indent=2, allow_nan=False))
    else:
        _print_tables(options, grids.shift, reports)
    if options.figure is not None:
        from sage_grpo.commands.inspect_figure import Grid, save_figure

        drawn = Grid(steps=options.steps, shift=grids.shift, eta=options.eta, make=grids.make)
        path = save_figure(drawn, kernels, reports, options.figure)
        print(f"figure: {path}", file=sys.stderr if options.json else sys.stdout)
    return 0


def _check_figure(file: Path) -> None:
    """Refuse a kind of figure that is not drawn, before anything is: the name would promise what the file is not."""
    if file.suffix.lower() not in FIGURES:
        raise ValueError(
            f"--figure {file} must end in one of {', '.join(FIGURES)}, got {file.suffix or 'no ending'!r}."
        )
    if file.is_dir():
        raise ValueError(f"--figure {file} is a folder: give the name of a file.")


def _document(options: Options, shift: float, reports: Sequence[KernelReport]) -> dict[str, object]:
    return {
        "steps": options.steps,
        "model": options.model,
        "shift": shift,
        "eta": options.eta,
        "kernels": {report.kernel: report.to_dict() for report in reports},
    }


def _print_tables(options: Options, shift: float, reports: Sequence[KernelReport]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for report in reports:
        console.print(_step_table(report))
    console.print(_summary_table(options, shift, reports))
    console.print(
        "off-manifold: variance left for point data (0 is right)\n"
        "on-manifold: variance for data of variance 1 (1 is right)\n"
        "peak excess: noise the network meets over what it was trained for (1 is right)",
        style="dim",
    )
    _print_warnings(console, reports)


def _step_table(report: KernelReport) -> Table:
    title = report.kernel if report.eta is None else f"{report.kernel}  eta = {report.eta:g}"
    table = narrow_table(title)
    peak = max(row.share for row in report.rows)
    for name in ("step", "sigma", "next", "std", "sensitivity", "equaliser", "variance"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
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


def _summary_table(options: Options, shift: float, reports: Sequence[KernelReport]) -> Table:
    title = f"{options.steps} steps, shift {shift:g}" + (f", grid of {options.model}" if options.model else "")
    table = narrow_table(title)
    table.add_column("kernel", no_wrap=True)
    for name in (
        "steps\ntrained",
        "total\nvariance",
        "off-\nmanifold",
        "on-\nmanifold",
        "peak\nexcess",
        "sensitivity\nspan",
    ):
        table.add_column(name, justify="right", no_wrap=True)
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


def _print_warnings(console: Console, reports: Sequence[KernelReport]) -> None:
    for report in reports:
        for text in report.warnings:
            console.print(f"[yellow]![/yellow] [bold]{report.kernel}[/bold]: {text}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
