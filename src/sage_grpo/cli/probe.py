"""Measure how much reward variance each denoising step causes: steps to branch at, their weights, and the noise level.

Takes every option of `train` for model, reward and prompts; options of updates have no effect. Runs in one process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from sage_grpo.cli import starting
from sage_grpo.config.parsing import given
from sage_grpo.config.ranges import Natural
from sage_grpo.run.saved import Choice, read_config
from sage_grpo.tools.probe.estimate import Effect
from sage_grpo.tools.probe.probe import Prober, ProbeResult, ProbeSpec
from sage_grpo.training.config import TrainConfig
from sage_grpo.utils.safe_io import replace_text
from sage_grpo.utils.text import narrow_table, progress_bar


@dataclass(frozen=True, kw_only=True)
class Options(TrainConfig):
    """The configuration or run to probe."""

    run: str | None = None
    """Folder of a run; its settings become the defaults and its weights are used."""
    weights: Literal["final", "best", "base"] | None = None
    """Weights of the run: final (the default), best, or base (before training)."""
    checkpoint: Natural | None = None
    """Use the weights of the checkpoint of this iteration."""
    ema: bool | None = None
    """Use the moving average of the weights; None does so where the run keeps one."""
    trust_run: bool = False
    """Also load Python code and call reward servers that the run's config.yaml names, with all your rights."""
    probe: ProbeSpec = ProbeSpec()
    """Size of the probe."""


def defaults(argv: list[str]) -> tuple[Options | None, list[str]]:
    """The configuration of a `--run` or the defaults of `train`, and the words without `--recipe NAME`."""
    run = given(argv, "run")
    if run is not None and "--recipe" in argv:
        raise ValueError(f"--run {run} and --recipe both give a configuration: choose one of them.")
    if run is not None:
        config = read_config(Path(run), trust=starting.trusted(argv), rewards=given(argv, "rewards") is None)
        return starting.extended(Options, config, run=run), argv
    return starting.from_recipe(Options, argv)


def run(options: Options) -> int:
    from rich.console import Console

    from sage_grpo.rewards.member import RewardFailure
    from sage_grpo.tools.probe.probe import prepare, probe

    console = Console(quiet=options.probe.json, highlight=False)
    shown = options.log.progress and not options.probe.json
    choice = Choice(run=options.run, weights=options.weights, checkpoint=options.checkpoint, ema=options.ema)
    say, counting = partial(console.print, soft_wrap=True), partial(progress_bar, shown=shown, console=console)
    try:
        prober = prepare(options, options.probe, choice)
        finding = probe(prober, say, counting)
    except RewardFailure as failure:
        print(f"sage-grpo probe stopped: {failure}", file=sys.stderr)
        return 1
    for text in dict.fromkeys(prober.failures):
        print(text, file=sys.stderr)
    _write(prober, finding, options)
    return 0


def _write(prober: Prober, finding: ProbeResult, options: Options) -> None:
    from sage_grpo.tools.probe.probe import document, snippet

    out, text = Path(options.probe.out), snippet(finding, options)
    body = json.dumps(document(prober, finding), indent=1)
    replace_text(out / "probe.json", body + "\n")
    if text is None:
        (out / "snippet.yaml").unlink(missing_ok=True)  # an older one would pass for this probe's
    else:
        replace_text(out / "snippet.yaml", text)
    if options.probe.json:
        print(body)
    else:
        _print(finding, options, text)


def _print(finding: ProbeResult, options: Options, text: str | None) -> None:
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
        console.print("The reward has no part named drift: look yourself whether clips stay natural.", style="dim")
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
    console.print(f"In {options.probe.out}: snippet.yaml (for train --config), probe.json", soft_wrap=True)


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
