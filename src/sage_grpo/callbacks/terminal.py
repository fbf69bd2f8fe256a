"""Terminal output of a run: a line per iteration, progress bars and the plan."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sage_grpo.training.config import TrainConfig
from sage_grpo.training.plan import Plan
from sage_grpo.utils.safe_io import printable
from sage_grpo.utils.text import fixed, lines_on_the_way, minutes, percent

WIDTH = 80
"""Columns that every terminal has; lines for comparison do not wrap."""


class Outlet:
    """An output stream that becomes silent, and does not end the run, if its other end is closed or its disk is full."""

    def __init__(self, stream: Any) -> None:
        self._stream = _silence() if stream is None else stream  # None: the process was started without one
        self.over = False  # after the run a logger may still write here, but its failures are not reported

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write unless the stream is lost; letters that it cannot encode become question marks."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._call("write", text.encode(encoding, "replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        self._call("flush")

    def isatty(self) -> bool:
        return not self._stream.closed and self._stream.isatty()

    def _call(self, method: str, *text: str) -> None:
        try:
            getattr(self._stream, method)(*text)
        except (OSError, ValueError) as error:
            lost, self._stream = self._stream, _silence()
            if self.over:
                return
            with suppress(OSError, ValueError):  # its buffer must not fail at the end of the process
                os.dup2(self._stream.fileno(), lost.fileno())
            name = getattr(lost, "name", "an output stream")
            warnings.warn(f"{name} cannot be written any more ({error}): the run continues without it.", stacklevel=3)


def _silence() -> IO[str]:
    return open(os.devnull, "w", encoding="utf-8")


@contextmanager
def outliving_output() -> Iterator[None]:
    """Context in which printing never raises, even if the terminal, the pipe or the log file is gone. The streams belong to
    the whole process, so only the main thread replaces them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = outlets = Outlet(before[0]), Outlet(before[1])
    try:
        yield
    finally:
        for outlet in outlets:
            outlet.flush()
            outlet.over = True
        sys.stdout, sys.stderr = before


@dataclass(kw_only=True, eq=False)
class Terminal:
    """Prints a line per iteration, and on a terminal a bar for the run and one for the phase."""

    enabled: bool
    progress: bool
    total: int

    def __post_init__(self) -> None:
        in_thread = threading.current_thread() is not threading.main_thread()  # see `outliving_output`
        file = cast(IO[str], Outlet(sys.stdout)) if in_thread else None
        self.console = Console(quiet=not self.enabled, highlight=False, file=file)
        self._seconds: deque[float] = deque(maxlen=10)
        self._evaluating = lines_on_the_way("evaluation", self.say)
        live = self.enabled and self.progress and Outlet(sys.stdout).isatty()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            disable=not live,
        )
        self._run = self._progress.add_task("run", total=self.total, note="")
        self._phase = self._progress.add_task("", total=1, note="")

    def __enter__(self) -> Terminal:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def say(self, text: str, *, style: str | None = None) -> None:
        """Print above the bars, without markup, because paths may have brackets in them."""
        self.console.print(printable(text), soft_wrap=True, markup=False, style=style)

    def start_at(self, iteration: int) -> None:
        self._progress.update(self._run, completed=iteration)

    def listen(self, phase: str, done: int, total: int) -> None:
        """Show progress of a phase; without bars an evaluation prints lines, because it takes minutes."""
        self._progress.update(self._phase, description=f"  {phase}", completed=done, total=total)
        if phase == "evaluate" and self._progress.disable:
            if done == 0:
                self._evaluating = lines_on_the_way("evaluation", self.say)
            self._evaluating(done, total)

    def iteration(self, number: int, metrics: Mapping[str, float]) -> None:
        self._progress.update(self._run, completed=number, note=_reward(metrics))
        self._seconds.append(metrics["time/total"])
        left = sum(self._seconds) / len(self._seconds) * (self.total - number)
        self.say(iteration_line(number, self.total, metrics, left))

    def evaluation(self, number: int, metrics: Mapping[str, float]) -> None:
        shown = {k.removeprefix("eval/"): v for k, v in metrics.items() if k.count("/") == 1}
        shown = {k: v for k, v in shown.items() if k not in ("failed", "total_stderr")}
        order = sorted(shown, key=lambda name: name != "total")  # the total first
        lines = [f"held-out after {number}"]
        for part in (f"{name} {fixed(shown[name], 3)}" for name in order):
            if len(lines[-1]) + 2 + len(part) > WIDTH:
                lines.append(f"    {part}")
            else:
                lines[-1] += f"  {part}"
        self.say("\n".join(lines), style="bold")


def iteration_line(number: int, total: int, metrics: Mapping[str, float], left: float) -> str:
    """An iteration as one line; if it is too long, the least important numbers are dropped."""
    spread = f" ± {fixed(metrics['reward/group_std'], 3)}" if "reward/group_std" in metrics else ""
    must = [f"{number}/{total}", f"{_reward(metrics)}{spread}"]
    may = []
    if "crew/workers" in metrics:
        may = [f"{metrics['crew/workers']:.0f} workers", f"waited {fixed(metrics['crew/waited_s'], 1)} s"]
    if metrics.get("crew/staleness"):
        may.append(f"{metrics['crew/staleness']:.0f} old")
    if "kl/total" not in metrics:
        may.append("kl skipped")
    elif "kl/position" in metrics or "kl/velocity" in metrics:
        may.append(f"kl {metrics['kl/total']:.1e}")
    # In the first update of a rollout all ratios are 1, so that the clip is shown where there is a second one.
    if "ratio/clip_fraction" in metrics and metrics.get("ratio/first_log") != metrics.get("ratio/largest_log"):
        may.append(f"clip {percent(metrics['ratio/clip_fraction'])}")
    may.append(f"grad {metrics['gradient/norm']:.2g}")
    end = [f"{metrics['time/total']:.1f} s", f"{minutes(left)} left"]
    while may and len("  ".join([*must, *may, *end])) > WIDTH:
        may.pop()
    return "  ".join([*must, *may, *end])


def _reward(metrics: Mapping[str, float]) -> str:
    """The reward of rollouts, or for given clips the loss."""
    name = "reward/total" if "reward/total" in metrics else "loss/policy"
    return f"{name.split('/')[0]} {fixed(metrics[name], 3)}"


def plan_table(
    config: TrainConfig,
    plan: Plan,
    *,
    dims: int,
    clip_range: float,
    device: str,
    parameters: int,
    evaluations: str,
    choices: Mapping[str, str] | None = None,
) -> Table:
    """An iteration's sampling and training; `evaluations` describes its network evaluations."""
    batch, model, ranks, group = config.batch, config.model, len(plan.shares), plan.groups[0]
    clips = len(plan.groups) * plan.group_size
    trained = " + ".join(str(len(steps)) for steps in group.trained)
    shared = ", what a group shares runs once" if group.shared else ""
    rounds = max(len(plan.batches(rank)) for rank in range(ranks))
    weights = "all weights" if model.lora is None else f"a LoRA of rank {model.lora.rank}"
    sampled = f"{batch.prompts} prompts x {plan.group_size} = {clips} clips per iteration{plan.selection}"
    rows = {
        "model": model.path or "shapes (comes with the package)",
        "device": f"{device}, computes in {model.dtype}",
        "trains": f"{parameters:,} parameters: {weights}",
        **(choices or {}),
        "given clips" if plan.examples else "rollouts": sampled,
        "micro-batches": f"{clips} clips / {ranks} rank(s) = {rounds} micro-batch(es) of up to {batch.micro_batch} each",
        "steps": f"{group.schedule.num_steps} denoising steps, {sum(group.schedule.stochastic)} explore, trained {trained}{shared}",
        "network": evaluations,
        "total": f"{config.iterations} iterations = {config.iterations * plan.updates} optimizer updates",
        "clip range": f"{clip_range:.2e} at {dims:,} latent dimensions",
        "kernel": f"{config.kernel.name}, eta {config.kernel.eta:.4g}; trust region {config.trust_region.mode}, KL {config.kl.kind}",
    }
    table = Table(show_header=False, box=None, padding=(0, 2))
    for row in rows.items():
        table.add_row(*row)
    return table
