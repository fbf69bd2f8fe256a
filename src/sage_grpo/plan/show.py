"""Shows a forecast as tables, as a few lines at the start of training, or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from sage_grpo.plan.changes import Change, outcome, over_memory, way_to_fit
from sage_grpo.plan.costs import Forecast, worker_costs
from sage_grpo.plan.costs import forecast as make_forecast
from sage_grpo.plan.formulas import GIB, tokens, trainable
from sage_grpo.plan.hardware import here
from sage_grpo.plan.passes import PHASES, PassCount
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.offload import kept
from sage_grpo.training.plan import Plan
from sage_grpo.utils.text import narrow_table

ESTIMATED = "seconds and memory are estimates: operations and bytes are counted on the network without weights, and nothing of this family was measured on a GPU"


def arithmetic(forecast: Forecast) -> dict[str, str]:
    config, plan, layout = forecast.config, forecast.plan, forecast.layout
    batch, schedule = config.batch, plan.groups[0].schedule
    clips = len(plan.groups) * plan.group_size
    own = [sum(len(one.members) for one in plan.batches(rank)) for rank in range(layout.data)]
    spread = f"{own[0]} each" if len(set(own)) == 1 else f"{min(own)} to {max(own)} each"
    grid = f"{layout.replicate} x {layout.shard} data-parallel x {layout.sequence} sequence-parallel"
    trained = " + ".join(str(len(steps)) for steps in plan.groups[0].trained)
    held_out, evaluations = forecast.held_out, len(config.evaluate.points(config.iterations))
    judged = f"{evaluations} evaluations of {held_out} prompts" if held_out else "no evaluation"
    rows = {
        "clips": f"{batch.prompts} prompts x {batch.group_size} = {clips} per iteration{plan.selection}",
        "ranks": f"{layout.processes} = {grid}; {layout.data} share the clips: {spread}",
        "micro-batches": _micro_batches(plan, batch.micro_batch),
        "steps": f"{schedule.num_steps}, of which {sum(schedule.stochastic)} explore; {trained} trained in {plan.updates} update(s)",
        "held noise": forecast.unexplored(),
        "run": f"{config.iterations} iterations = {config.iterations * plan.updates} updates, {judged}",
        "idle": _idle(forecast),
        "rewards": "; ".join(config.rewards_over_time),
    }
    return {name: text for name, text in rows.items() if text}


def _micro_batches(plan: Plan, size: int) -> str:
    batches = [one for share in plan.shares for one in share]
    sizes = {len(one.members) for one in batches}
    filled = f"of {size}" if sizes == {size} else f"of {min(sizes)} to {max(sizes)} (micro_batch {size})"
    mixed = max(len({member.group for member in one.members}) for one in batches)
    note = f"; up to {mixed} prompts in one, which run apart where their texts differ in length" if mixed > 1 else ""
    return f"{max(map(len, plan.shares))} a rank, {filled}{note}"


def _idle(forecast: Forecast) -> str:
    """Text on padding passes, and on the nearest number of prompts without them."""
    plan, ranks = forecast.plan, forecast.layout.data
    wasted = sum(row["idle"].clips for row in forecast.passes) + forecast.counts[0].padding
    if not wasted:
        return ""
    size, first = plan.group_size, len(plan.groups)
    clips = first * size
    prompts = next(n for n in range(first, first + ranks) if n * size % ranks == 0)
    advice = f"; batch.prompts {prompts} divides evenly" if prompts != first else ""
    return f"{clips} clips over {ranks} ranks take {wasted} padding passes{advice}"


def passes_table(forecast: Forecast) -> Table:
    heads = ("phase", "velocities", "network", "clips", "all ranks", "")
    table = narrow_table("passes of the first iteration", *heads, left=("phase", ""))
    for phase, meaning in PHASES.items():
        rows = [row[phase] for row in forecast.passes]
        if any(row.velocities for row in rows):
            table.add_row(phase, *_most(rows), f"[dim]{meaning}[/dim]")
    if forecast.held_out:
        table.add_row("evaluation", *_most(forecast.evaluation), "[dim]each time[/dim]")
    return table


def _most(rows: Sequence[PassCount]) -> list[str]:
    busy = max(rows, key=lambda row: row.clips)
    return [f"{busy.velocities:,}", f"{busy.forwards:,}", f"{busy.clips:,}", f"{sum(row.clips for row in rows):,}"]


def phases_table(forecast: Forecast) -> Table:
    kind = "" if forecast.hardware.is_cpu else "one GPU of " if forecast.config.model.memory is None else "a budget of "
    heads = ("phase", "seconds", "GiB", "weights", "optimizer", "activations", "states", "VAE, reward")
    title = f"{kind}{forecast.gib:.0f} GiB ({forecast.hardware.title})"
    table = narrow_table(title, *heads, left=("phase",))
    for phase in forecast.phases:
        m = phase.memory
        held, optimizer = m.weights + m.gathered, m.gradients + m.optimizer + m.copies
        parts = (held, optimizer, m.activations, m.trajectories, m.visitor)
        over = m.total > forecast.room
        total = f"[red]{m.total / GIB:.1f}[/red]" if over else f"{m.total / GIB:.1f}"
        table.add_row(phase.name, f"{phase.seconds:,.1f}", total, *(f"{part / GIB:.1f}" for part in parts))
    return table


def memory_table(rows: Sequence[Forecast]) -> Table:
    table = narrow_table(
        "seconds over memory (model.memory)", "GiB", "peak", "s / it.", "blocks keep", left=("blocks keep",)
    )
    for one in rows:
        seconds = f"{one.iteration_seconds:,.1f}" if one.fits else "-"
        table.add_row(f"{one.gib:.0f}", f"{one.peak / GIB:.1f}", seconds, outcome(one))
    return table


def changes_table(now: Forecast, found: Sequence[Change], most: int = 10) -> Table:
    title = "what would make it faster" if now.fits else "what to change, best first"
    heads = ("change", "GiB", "fits", "s / it.", f"{_kind(now)}-h", "run")
    table = narrow_table(title, *heads, left=("change",))
    rows = [("(as it is)", "", now), *((one.option, one.run, one.after) for one in found[:most])]
    for option, run, after in rows:
        numbers = f"{after.iteration_seconds:,.1f}", f"{after.gpu_hours:,.1f}"
        table.add_row(option, f"{after.peak / GIB:.1f}", "yes" if after.fits else "no", *numbers, run)
    return table


def show(
    forecast: Forecast, found: Sequence[Change], way: Sequence[Change], console: Console, workers: Forecast
) -> None:
    head = Table(show_header=False, box=None, padding=(0, 2))
    for row in (model_rows(forecast) | arithmetic(forecast)).items():
        head.add_row(*row)
    console.print(head, passes_table(forecast), phases_table(forecast))
    for line in verdict(forecast, way):
        console.print(line, soft_wrap=True, style=None if forecast.fits else "red")
    crew = worker_costs(forecast, workers)
    if crew is not None:
        console.print(
            f"{crew['workers']} workers ({workers.hardware.title}) do {crew['tasks']} tasks an iteration, {crew['rounds']} each at most: "
            f"sampling {_time(crew['sampling_seconds'])}, updates {_time(crew['updating_seconds'])}, {_time(crew['iteration_seconds'])} an "
            f"iteration; a worker takes {crew['gib']:.1f} GiB; the bottleneck: {crew['bottleneck']}",
            soft_wrap=True,
        )
    console.print(f"seconds: {forecast.hardware.origin}", style="dim", soft_wrap=True)
    rows = over_memory(forecast)
    if rows:
        console.print(memory_table(rows))
    if found:
        console.print(changes_table(forecast, found))


def model_rows(forecast: Forecast) -> dict[str, str]:
    network, job, video = forecast.network, forecast.job, forecast.architecture.model.video
    advice = forecast.advice()
    kind = "all weights" if job.lora_rank is None else f"a LoRA of rank {job.lora_rank}"
    guided = "guided" if job.guidance else "without guidance"
    size = f"{video.frames} frames of {video.height} x {video.width}"
    return {
        "model": f"{forecast.architecture.family}, from {forecast.architecture.source}",
        **({"distilled": advice} if advice else {}),
        **({"small": small} if (small := forecast.size_advice()) else {}),
        "trains": f"{trainable(network, job) / 1e6:,.1f} M of {network.trained_networks * network.parameters / 1e6:,.0f} M parameters: {kind}",
        "blocks": f"keep {kept(forecast.activations)}; {'compiled' if job.compiled else 'not compiled'}",
        "clip": f"{size} = {tokens(network, job):,} tokens, {guided}, {forecast.config.model.dtype}",
    }


def _kind(forecast: Forecast) -> str:
    return "CPU" if forecast.hardware.is_cpu else "GPU"


def verdict(forecast: Forecast, way: Sequence[Change] = ()) -> Iterator[str]:
    seconds, gpus = forecast.iteration_seconds, forecast.layout.processes
    hours = forecast.gpu_hours / gpus
    kind = _kind(forecast)
    yield f"{_time(seconds)} an iteration; the run: {_time(3600 * hours)} on {gpus} {kind}(s) = {forecast.gpu_hours:,.1f} {kind}-hours"
    if forecast.architecture.estimated:
        yield ESTIMATED
    if any(phase.name == "gradient" for phase in forecast.phases):
        yield "gradient leaves out the memory of the rewards' own backward passes"
    worst = max(forecast.phases, key=lambda phase: phase.memory.total)
    need = f"{worst.memory.total / GIB:.1f} of {forecast.gib:.0f} GiB at the peak ({worst.name})"
    if forecast.fits:
        yield f"fits: {need}"
        return
    yield f"does not fit: {need}; {forecast.room / GIB:.0f} can be used"
    if way:
        end = way[-1].after
        result = "then it fits" if end.fits else "which is not enough yet"
        yield f"change first: {', then '.join(one.option for one in way)}: {end.peak / GIB:.1f} GiB, {result}"


def short(forecast: Forecast, way: Sequence[Change] = ()) -> list[str]:
    lines = [
        text
        for text in (
            forecast.advice(),
            forecast.size_advice(),
            forecast.unexplored(),
            *forecast.config.rewards_over_time,
        )
        if text
    ]
    if not forecast.hardware.is_cpu:
        parts = ", ".join(f"{phase.name} {_time(phase.seconds)}" for phase in forecast.phases if phase.seconds >= 0.05)
        lines.append(f"forecast on {forecast.hardware.title}: {parts}")
        lines += verdict(forecast, way)
    return lines


def opening(config: TrainConfig, processes: int) -> list[str]:
    """A few lines on steps, time and memory on this machine; empty without a forecast.

    A run does not need one: errors in its model or its layout are raised elsewhere.
    """
    try:
        found = make_forecast(config, here(processes), gpus=processes)
    except ValueError:
        return []
    return short(found, [] if found.hardware.is_cpu else way_to_fit(found))


def document(forecast: Forecast, found: Sequence[Change], way: Sequence[Change], workers: Forecast) -> dict[str, Any]:
    crew = worker_costs(forecast, workers)
    return {
        "model": model_rows(forecast),
        "arithmetic": arithmetic(forecast),
        "layout": asdict(forecast.layout),
        "passes": [{phase: asdict(one) for phase, one in row.items()} for row in forecast.passes],
        "evaluation": [asdict(one) for one in forecast.evaluation] if forecast.held_out else [],
        "hardware": asdict(forecast.hardware),
        "phases": {
            phase.name: {
                "seconds": phase.seconds,
                "gib": phase.memory.total / GIB,
                **{f"gib_{name}": size / GIB for name, size in asdict(phase.memory).items()},
            }
            for phase in forecast.phases
        },
        **costs(forecast),
        **({} if crew is None else {"crew": crew}),
        "over_memory": [{"gib": one.gib, "keep": kept(one.activations), **costs(one)} for one in over_memory(forecast)],
        "change_first": [one.option for one in way],
        "changes": [{"change": one.option, "run": one.run, **costs(one.after)} for one in found],
    }


def costs(forecast: Forecast) -> dict[str, Any]:
    return {
        "fits": forecast.fits,
        "peak_gib": forecast.peak / GIB,
        "iteration_seconds": forecast.iteration_seconds,
        "evaluation_seconds": forecast.evaluation_seconds,
        "estimated": forecast.architecture.estimated,
        "gpu_hours": forecast.gpu_hours,
    }


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
