"""Run a command in several processes on this machine: `sage-grpo launch --nproc 8 train --recipe hunyuan15/sage`."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import field

from sage_grpo.config.ranges import Natural, checked
from sage_grpo.utils.suggest import did_you_mean


@checked
class Options:
    """One node; for several see docs/scale.md."""

    nproc: Natural = 0
    """Processes to start; 0 is one per GPU."""
    max_restarts: Natural = 0
    """How often a run that failed is started again; it continues from its last checkpoint. A mistake in the command ends it at once."""
    grace: Natural = 120
    """Seconds that processes have after SIGTERM to finish their iteration and save."""
    command: list[str] = field(default_factory=list)
    """The command with its options: everything after launch's own."""


def arguments(argv: list[str], commands: Collection[str]) -> list[str]:
    """Launch's own words, and the command that follows them as one value: `--nproc 2 train --out x`."""
    at = next((place for place, word in enumerate(argv) if word in commands), None)
    if at is None:
        # a word that is no option's value was meant as the command
        for before, word in zip(["", *argv], argv):
            if not word.startswith("-") and (not before.startswith("--") or "=" in before):
                raise ValueError(f"There is no command {word!r} to launch.{did_you_mean(word, commands)}")
        return argv
    return [*argv[:at], "--command", json.dumps(argv[at:])]


def run(options: Options) -> int:
    """Start the processes and wait for them."""
    if not options.command:
        raise ValueError("launch needs a command to run, e.g. sage-grpo launch --nproc 2 train --recipe shapes/sage")
    from sage_grpo.distributed.elastic import run_module

    return run_module(
        "sage_grpo",
        options.command,
        processes=options.nproc or _gpus(),
        max_restarts=options.max_restarts,
        grace=options.grace,
    )


def _gpus() -> int:
    import torch

    if not torch.cuda.is_available():
        raise ValueError("There is no GPU to count: say how many processes with --nproc.")
    return torch.cuda.device_count()
