"""Where the variance of a reward comes from, without any gradient: which steps to branch at, how often, and with how much noise.

Takes every option of `train`, so that a recipe, a configuration file or a run's folder says which model, reward and prompts are
meant; what is about updates changes nothing here. Runs in one process.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sage_grpo.commands import train
from sage_grpo.commands.export import read_config, trusted
from sage_grpo.commands.run_folder import Choice
from sage_grpo.inside import replace_text
from sage_grpo.probe.estimate import Effect, advise, best_step, effect, spread
from sage_grpo.probe.prober import Clips, Finding, Prober, ProbeSpec, passes
from sage_grpo.ranges import Natural
from sage_grpo.recipes import meanings, remarks
from sage_grpo.tables import narrow_table
from sage_grpo.training.config import TrainConfig

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Options", "defaults", "meanings", "remarks", "run"]

TOLERANCE = 0.1
"""Changes of reward and drift below this part of their standard deviation over start noises do not speak against an eta."""


@dataclass(frozen=True, kw_only=True)
class Options(TrainConfig):
    """What to probe."""

    run: str | None = None
    """Folder of a run: its configuration becomes the defaults of all options, and its weights are used."""
    weights: Literal["final", "best", "base"] | None = None
    """Which weights of the run: after training (the default), of its best evaluation, or those it started from."""
    checkpoint: Natural | None = None
    """Weights of the run's checkpoint of this iteration."""
    ema: bool | None = None
    """Moving average of the weights, or the weights themselves; None is the average where the run keeps one."""
    trust_run: bool = False
    """Also load Python code and call reward servers that the run's config.yaml names. Code runs with all your rights."""
    probe: ProbeSpec = ProbeSpec()
    """How much to sample."""


def defaults(argv: list[str]) -> tuple[Options | None, list[str]]:
    """What the options start from, and the words without `--recipe NAME`: a run's configuration, or what `train` starts from."""
    from sage_grpo.configure import given

    run = given(argv, "run")
    if run is not None and "--recipe" in argv:
        raise ValueError(f"--run {run} and --recipe both say what to start from: give one of them.")
    if run is not None:
        config = read_config(Path(run), trust=trusted(argv), rewards=given(argv, "rewards") is None)
        return train.extended(Options, config, run=run), argv
    start, argv = train.defaults(argv)
    return train.extended(Options, start), argv


def run(options: Options) -> int:
    """Probe, print and write."""
    from sage_grpo.rewards.base import RewardFailure

    try:
        prober = _prober(options)
        finding = _probe(prober, options)
    except RewardFailure as failure:
        print(f"sage-grpo probe stopped: {failure}", file=sys.stderr)
        return 1
    for text in dict.fromkeys(prober.failures):
        print(text, file=sys.stderr)
    _write(prober, finding, options)
    return 0


def _prober(options: Options) -> Prober:
    from sage_grpo.parallel.world import World
    from sage_grpo.training.scoring import load_rewards
    from sage_grpo.training.sources import first_frame, prompts_from

    spec = options.probe
    prompts = prompts_from(options.data.prompts, split="train")
    if len(prompts) < spec.prompts:
        raise ValueError(
            f"probe.prompts is {spec.prompts}, but {options.data.prompts} has only {len(prompts)} prompts."
        )
    prompts = prompts[: spec.prompts]
    for eta in _etas(options):
        dataclasses.replace(options.kernel, eta=eta).build()  # an eta that the kernel does not take fails here
    choice = Choice(run=options.run, weights=options.weights, checkpoint=options.checkpoint, ema=options.ema)
    found = choice.find(options.model)
    reward = load_rewards(options, prompts[0], World())
    model = found.load()  # last: it takes minutes, and a mistake above is found in seconds
    Prober(options, spec, model, reward, prompts, []).steps()
    conditions = model.encode([prompt.text for prompt in prompts], [first_frame(prompt) for prompt in prompts])
    model.unload_text()  # the network needs their memory
    return Prober(options, spec, model, reward, prompts, conditions)


def _etas(options: Options) -> list[float]:
    """Values of eta besides the configuration's."""
    eta, given = options.kernel.eta, options.probe.etas
    if given is None:
        given = [eta / 2, *([1.5 * eta] if options.kernel.name != "cps" or 1.5 * eta <= 1 else [])]
    return [value for value in sorted(given) if value != eta]


def _probe(prober: Prober, options: Options) -> Finding:
    from rich.console import Console

    console = Console(quiet=options.probe.json, highlight=False)
    eta, others = options.kernel.eta, _etas(options)
    steps = prober.steps()
    still, every = prober.still(), prober.exploring(eta, None)
    branches = {step: prober.exploring(eta, step) for step in steps}
    first = passes(still) + passes(every) + sum(map(passes, branches.values()))
    later = [len(others) * passes(plans) for plans in branches.values()]
    console.print(_forecast(options, len(steps), first, later), soft_wrap=True)
    with _bar(console, options, "steps", first) as advance:
        prober = dataclasses.replace(prober, progress=advance)
        base = prober.run(still, eta)
        whole = _effect(prober.run(every, eta), base)
        rows = [(step, _effect(prober.run(plans, eta), base)) for step, plans in branches.items()]
    best = best_step(rows)
    second = len(others) * passes(branches[best])
    with _bar(console, options, f"eta at step {best}", second) as advance:
        prober = dataclasses.replace(prober, progress=advance)
        etas = [(value, _effect(prober.run(prober.exploring(value, best), value), base)) for value in others]
    etas = sorted([*etas, (eta, dict(rows)[best])], key=lambda row: row[0])
    drift = 0.0 if base.drift is None else TOLERANCE * spread(base.drift[..., 0])
    advice = advise(rows, etas, loss=TOLERANCE * spread(base.reward[..., 0]), drift=drift)
    return Finding(eta, rows, whole, best, etas, base, advice, first + second)


def _forecast(options: Options, steps: int, first: int, later: Sequence[int]) -> str:
    spec, least, most = options.probe, min(later), max(later)
    span = f"{most}" if least == most else f"{least} to {most}"
    return (
        f"{spec.prompts} prompts x {spec.starts} start noises x {spec.members} clips, for each of {steps} steps and for all at once, in "
        f"micro-batches of {options.batch.micro_batch}: {first} passes of the network, then {span} to compare eta at the best step."
    )


def _effect(clips: Clips, still: Clips) -> Effect:
    drift = None if still.drift is None else still.drift[..., 0]
    return effect(clips.reward, still.reward[..., 0], clips.drift, drift)


@contextmanager
def _bar(console: Console, options: Options, name: str, total: int) -> Iterator[Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = not options.log.progress or options.probe.json
    with Progress(*columns, console=console, disable=hidden) as progress:
        task = progress.add_task(name, total=total)
        yield lambda: progress.advance(task)


def snippet(finding: Finding, options: Options) -> str | None:
    """The recommendation as YAML for `sage-grpo train --config`; None where no step can be recommended."""
    import yaml

    advice = finding.advice
    if not advice.steps:
        return None
    window = {"kind": "drawn", "length": 1, "at": advice.steps, "weights": advice.weights, "branches": 1}
    document = {
        "kernel": {"name": options.kernel.name, "eta": advice.eta},
        "rollout": {"steps": options.rollout.steps, "same_noise": True, "share": True, "window": window},
        "update": {"updates_per_rollout": 1, "step_fraction": 1.0},
        "objective": {"kind": "surrogate", "weight": "uniform"},  # others do not explore
    }
    return "# What `sage-grpo probe` recommends.\n" + yaml.safe_dump(document, sort_keys=False)


def document(prober: Prober, finding: Finding, options: Options) -> dict[str, Any]:
    """What probe.json holds."""
    spec, grid, kernel = options.probe, prober.grid, options.kernel.build(prober.grid)
    steps = [
        {
            "step": step,
            "sigma": float(grid.sigmas[step]),
            "sigma_next": float(grid.sigmas[step + 1]),
            "sensitivity": float(kernel(*grid.pair(step)).sensitivity),
            **dataclasses.asdict(row),
        }
        for step, row in finding.steps
    ]
    still = finding.still
    return {
        "kernel": {"name": options.kernel.name, "eta": finding.eta},
        "sampled": {"prompts": spec.prompts, "starts": spec.starts, "members": spec.members, "passes": finding.passes},
        "deterministic": {
            "reward": float(still.reward.nanmean()),
            "start_std": spread(still.reward[..., 0]),
            "drift": None if still.drift is None else float(still.drift.nanmean()),
        },
        "steps": steps,
        "all_steps": dataclasses.asdict(finding.every),
        "eta_step": finding.best,
        "etas": [{"eta": eta, **dataclasses.asdict(row)} for eta, row in finding.etas],
        "recommended": dataclasses.asdict(finding.advice),
    }


def _write(prober: Prober, finding: Finding, options: Options) -> None:
    from sage_grpo.commands.probe_figure import save_figure

    out, text = Path(options.probe.out), snippet(finding, options)
    out.mkdir(parents=True, exist_ok=True)
    body = json.dumps(document(prober, finding, options), indent=1)
    _replace(out / "probe.json", body + "\n")
    save_figure(finding, options, out / "probe.png")
    if text is None:
        (out / "snippet.yaml").unlink(missing_ok=True)  # an older one would pass for this probe's
    else:
        _replace(out / "snippet.yaml", text)
    if options.probe.json:
        print(body)
    else:
        _print(finding, options, text)


def _replace(file: Path, text: str) -> None:
    replace_text(file, text)


def _print(finding: Finding, options: Options, text: str | None) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    steps = [(str(step), row) for step, row in finding.steps]
    title = f"{options.kernel.name} at eta {finding.eta:g}: exploring at"
    console.print(_table(title, "step", [*steps, ("all", finding.every)]))
    etas = [(f"{eta:.4g}", row) for eta, row in finding.etas]
    console.print(_table(f"exploring at step {finding.best} with", "eta", etas))
    console.print(
        "start, explored: shares of the reward's variance over clips with start noises of their own; R: part of the explored that is linear\n"
        "std: of the reward within a branch; reward, drift: change against deterministic clips; 95% intervals over prompts",
        style="dim",
    )
    if finding.every.drift is None:
        console.print(
            "The reward has no part named drift: whether clips stay natural is yours to look at.", style="dim"
        )
    advice = finding.advice
    if not advice.eta_is_safe:
        console.print(
            f"[yellow]![/yellow] Every eta costs reward or adds drift; {advice.eta:.4g} is the smallest tried."
        )
    if options.kernel.name == "sage_exact":
        console.print("For sage_exact, eta = sqrt 2 = 1.414 explores most per unit of log-probability.", style="dim")
    if text is None:
        console.print(
            "[yellow]![/yellow] No step's R is distinguishable from 0: raise probe.prompts or probe.members. No snippet."
        )
        return
    if advice.eta != finding.eta:
        console.print(
            f"Steps were compared at eta {finding.eta:g}; probe again with kernel.eta {advice.eta:g} to be sure."
        )
    console.print(f"\n{text}", markup=False)
    console.print(f"In {options.probe.out}: snippet.yaml (for train --config), probe.json, probe.png", soft_wrap=True)


def _table(title: str, first: str, rows: Sequence[tuple[str, Effect]]) -> Any:
    table = narrow_table(title)
    names = [name for name in ("start", "explored", "linear", "std", "reward", "drift") if getattr(rows[0][1], name)]
    for name in (first, *names):
        table.add_column("R" if name == "linear" else name, justify="right", no_wrap=True)
    for label, row in rows:
        values = {name: getattr(row, name) for name in names}
        forms = {name: "{:+.3f}" if name in ("reward", "drift") else "{:.2f}" for name in names}
        table.add_row(label, *(forms[name].format(value.value) for name, value in values.items()))
        spans = {name: f"{forms[name]}..{forms[name]}".format(value.low, value.high) for name, value in values.items()}
        # Six intervals do not fit a line of 80 characters: that of `start` is that of `explored` turned round, and the std's is in the file.
        spans |= {"start": "", "std": ""}
        table.add_row("", *spans.values(), style="dim")
    return table
