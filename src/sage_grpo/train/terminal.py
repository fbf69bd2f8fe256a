"""What a run says to the person at the terminal."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sage_grpo.train.config import TrainConfig
from sage_grpo.train.plan import Plan


class Terminal:
    """A bar for the run (with reward and time left), a bar for the phase, and a line per iteration where there is no bar."""

    def __init__(self, *, enabled: bool, progress: bool, total: int) -> None:
        self.console = Console(quiet=not enabled, highlight=False)
        self.total = total
        self._seconds: deque[float] = deque(maxlen=10)
        live = enabled and progress and sys.stdout.isatty()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            disable=not live,
        )
        self._live = live
        self._run = self._progress.add_task("run", total=total, note="")
        self._phase = self._progress.add_task("", total=1, note="")

    def __enter__(self) -> Terminal:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print above the bars."""
        self.console.print(text, soft_wrap=True)

    def start_at(self, iteration: int) -> None:
        """Where a resumed run stands."""
        self._progress.update(self._run, completed=iteration)

    def listen(self, phase: str, done: int, total: int) -> None:
        """Ticks of a phase."""
        self._progress.update(self._phase, description=f"  {phase}", completed=done, total=total)

    def iteration(self, number: int, metrics: Mapping[str, float]) -> None:
        """One iteration is done."""
        note = f"reward {metrics['reward/total']:.3f} ± {metrics['reward/group_std']:.3f}"
        self._progress.update(self._run, completed=number, note=note)
        if not self._live:
            self._seconds.append(metrics["time/total"])
            left = sum(self._seconds) / len(self._seconds) * (self.total - number)
            self.say(
                f"iteration {number}/{self.total}  {note}  kl {metrics['kl/total']:.2e}  "
                f"clip {metrics['ratio/clip_fraction']:.0%}  grad {metrics['gradient/norm']:.3g}  "
                f"{metrics['time/total']:.1f} s  {_minutes(left)} left"
            )

    def evaluation(self, number: int, metrics: Mapping[str, float]) -> None:
        """An evaluation is done."""
        shown = {k.removeprefix("eval/"): v for k, v in metrics.items() if k.count("/") == 1}
        shown = {k: v for k, v in shown.items() if k not in ("failed", "total_stderr")}
        text = "  ".join(f"{name} {value:.3f}" for name, value in shown.items())
        self.say(f"[bold]held-out after {number}[/bold]  {text}")

    def failures(self, report: str) -> None:
        """Rewards that failed, below the limit at which a run stops; prompts may hold what looks like markup."""
        if report:
            self.say(f"[yellow]{escape(report)}[/yellow]")


def plan_table(config: TrainConfig, plan: Plan, *, dims: int, clip: float) -> Table:
    """The arithmetic of an iteration, for people; read off the plan that it executes."""
    batch, ranks = config.batch, len(plan.shares)
    rollouts = len(plan.groups) * plan.group_size
    group = plan.groups[0]
    trained = [len(steps) for steps in group.trained]
    backward = sum(plan.rounds)
    forward = max(plan.rollout_passes(rank).total() for rank in range(ranks))
    branches = f" x {config.rollout.window.branches} branches" if config.rollout.window.branches > 1 else ""
    shared = ", what a group shares runs once" if group.shared else ""
    rounds = max(len(plan.batches(rank)) for rank in range(ranks))
    table = Table(show_header=False, box=None, padding=(0, 2))
    rows = [
        ("rollouts", f"{batch.prompts} prompts{branches} x {batch.group_size} = {rollouts} clips per iteration"),
        (
            "micro-batches",
            f"{rollouts} clips / {ranks} rank(s) = {rounds} micro-batch(es) of up to {batch.micro_batch} each",
        ),
        (
            "steps",
            f"{group.schedule.num_steps} denoising steps, {sum(group.schedule.stochastic)} explore, "
            f"trained {' + '.join(map(str, trained))}{shared}",
        ),
        ("passes", f"{forward} to sample, {backward} forward and backward over {plan.updates} update(s)"),
        ("total", f"{config.iterations} iterations = {config.iterations * plan.updates} optimizer updates"),
        ("clip range", f"{clip:.2e} at {dims:,} latent dimensions"),
        (
            "kernel",
            f"{config.kernel.name}, eta {config.kernel.eta:.4g}; trust region {config.trust_region.mode}, KL {config.kl.kind}",
        ),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"
