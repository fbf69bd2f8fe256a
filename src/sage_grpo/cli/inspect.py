"""Print tables of samplers on a noise schedule, without a network."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Annotated

from sage_grpo.config.ranges import Count, Positive, Range, checked
from sage_grpo.samplers.kernels import KERNELS, Kernel, KernelSpec, OfGrid, takes_sigma_max, unfit_eta
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.samplers.sde_steps import explore, left_out
from sage_grpo.samplers.windows import Window
from sage_grpo.tools.inspect import KernelReport, inspect_kernel
from sage_grpo.utils.text import narrow_table

if TYPE_CHECKING:
    from rich.table import Table


@checked
class Options:
    """Kernels and schedule to inspect, and the output."""

    kernels: list[str] = field(default_factory=lambda: list(KERNELS))
    """Samplers to compare, by name or your own as module:Class."""
    steps: Count = 20
    """Steps of the rollout."""
    model: str | None = None
    """Checkpoint (folder or hub id) whose scheduler makes the grid; null is an even grid from 1."""
    shift: Positive | None = None
    """Shift of the grid; null is the model's, or 5 without a model."""
    eta: Annotated[float, Range(0, 10)] = 0.5
    """Exploration scale (cps: at most 1)."""
    sigma_max: OfGrid | None = None
    """Upper clamp of the noise level (sage, sage_exact); null is the sampler's default."""
    deterministic_last: bool | None = None
    """Make the last step an ODE step; null is the sampler's default."""
    window: Window = field(default_factory=Window)
    """Steps that explore; random and sliding windows are shown for the first iteration."""
    json: bool = False
    """Print JSON only."""


EVEN_SHIFT = 5.0  # shift of the grid without a model: HunyuanVideo-1.5's


def grid_for(options: Options) -> tuple[Schedule, float]:
    if options.model is None:
        shift = options.shift or EVEN_SHIFT
        return Schedule.shifted(options.steps, shift), shift
    from sage_grpo.models.spec import ModelSpec
    from sage_grpo.plan.architecture import find_architecture

    architecture = find_architecture(ModelSpec(path=options.model))
    return architecture.grid(options.steps, options.shift), options.shift or architecture.model.shift


def report_on(kernel: Kernel, grid: Schedule, options: Options) -> KernelReport:
    """The report of a rollout with this kernel, with a remark on steps that are left deterministic."""
    wanted = options.window.steps(options.steps)
    report = inspect_kernel(kernel, explore(grid, wanted, kernel, options.deterministic_last))
    left = left_out(grid, wanted, kernel, options.deterministic_last)
    return replace(report, warnings=(*report.warnings, f"{left[0].upper()}{left[1:]}.")) if left else report


def build_kernels(options: Options, grid: Schedule) -> list[Kernel]:
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
    grid, shift = grid_for(options)
    reports = [report_on(kernel, grid, options) for kernel in build_kernels(options, grid)]
    if options.json:
        facts = {"steps": options.steps, "model": options.model, "shift": shift, "eta": options.eta}
        kernels = {report.kernel: dataclasses.asdict(report) for report in reports}
        print(json.dumps(facts | {"kernels": kernels}, indent=2, allow_nan=False))
        return 0
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
    for report in reports:
        for text in report.warnings:
            console.print(f"[yellow]![/yellow] [bold]{report.kernel}[/bold]: {text}")
    return 0


def _step_table(report: KernelReport) -> Table:
    title = report.kernel if report.eta is None else f"{report.kernel}  eta = {report.eta:g}"
    heads = ("step", "sigma", "next", "std", "sensitivity", "equalizer", "variance", "")
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


def _summary_table(options: Options, shift: float, reports: Sequence[KernelReport]) -> Table:
    title = f"{options.steps} steps, shift {shift:g}" + (f", grid of {options.model}" if options.model else "")
    table = narrow_table(
        title,
        "kernel",
        *("steps\ntrained", "total\nvariance", "off-\nmanifold", "on-\nmanifold", "peak\nexcess", "sensitivity\nspan"),
        left=("kernel",),
    )
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
