"""The subcommands, as a table: each module has an Options dataclass and a run function."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass

from sage_grpo.utils.safe_io import printable


@dataclass(frozen=True)
class Command:
    """A subcommand: a module with `Options`, `run` and, where defaults depend on the words, `defaults`."""

    module: str
    summary: str
    positional: str = ""
    """The option that takes the first word without dashes."""
    many: bool = False
    """True where `positional` is a list that takes all words without an option."""
    recipes: bool = False
    """True where there is a `--recipe NAME`, which may be the first word."""
    runs: bool = False
    """True where the folder of a run may be in the recipe's place."""
    slow: bool = False
    """True where the command takes seconds until its first line."""

    @property
    def first(self) -> str:
        """The option that takes the first word without dashes; empty for none, or where several words are."""
        return "recipe" if self.recipes else "" if self.many else self.positional


def say(text: str) -> None:
    """Print a remark once, whatever the number of processes; to stderr, since stdout may be JSON. A closed terminal does not end a run."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError, ValueError):
            print(f"sage-grpo: {printable(text)}", file=sys.stderr, flush=True)


GROUPS = {
    "run": {
        "demo": Command("demo", "train the miniature video model here and show what changed", slow=True),
        "train": Command("train", "align a video model with a reward", recipes=True, slow=True),
        "generate": Command("generate", "prompts to mp4 with any kernel, LoRA or checkpoint", slow=True),
        "evaluate": Command("evaluate", "score a model, or existing mp4 files, with any rewards", slow=True),
        "compare": Command(
            "compare",
            "recipes and settings over seeds: tables with intervals, figures",
            positional="recipes",
            slow=True,
        ),
    },
    "look": {
        "plan": Command(
            "plan", "passes, memory and time of a run, before any weights are there", recipes=True, runs=True, slow=True
        ),
        "doctor": Command(
            "doctor", "check machine, model, reward and configuration before a run", recipes=True, slow=True
        ),
        "inspect": Command("inspect", "tables of samplers on a schedule"),
        "probe": Command("probe", "measure which steps to branch at and with how much noise", recipes=True, slow=True),
        "rewards": Command("rewards", "every reward with its requirements, and which are ready here", positional="of"),
        "report": Command(
            "report", "a page about runs: curves, scores, clips side by side", positional="runs", many=True
        ),
    },
    "publish": {
        "export": Command("export", "a checkpoint as LoRA, merged or full weights", positional="source", slow=True),
        "download": Command("download", "fetch and check all files of a recipe, with sizes first", recipes=True),
    },
    "serve": {
        "serve-reward": Command("serve_reward", "host rewards over HTTP for training on another machine"),
        "study": Command("study", "a blind study in the browser: people compare two videos", positional="action"),
    },
}
"""The commands by the groups that `sage-grpo --help` shows."""
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
GONE = {
    "shapes": "python -m research.pretraining.shapes takes its options, in the project's repository (research/README.md).",
    "scenes": "python -m research.pretraining.scenes takes its options, in the project's repository (research/README.md).",
    "launch": "torchrun --nproc-per-node N -m sage_grpo train ... starts a run on N GPUs (docs/scale.md).",
    "completion": "sage-grpo COMMAND --help lists its options.",
    "convert": "sage-grpo export SOURCE --out FOLDER takes its options (docs/hub.md).",
}
"""Earlier commands, and what to use in their place."""
