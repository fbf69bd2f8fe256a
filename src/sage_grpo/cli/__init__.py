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
        "demo": Command("demo", "train the miniature video model on this machine", slow=True),
        "train": Command("train", "train a video model with a reward", recipes=True, slow=True),
        "generate": Command("generate", "generate clips with any sampler, LoRA or checkpoint", slow=True),
        "evaluate": Command("evaluate", "score a model, or video files, with any rewards", slow=True),
        "compare": Command(
            "compare",
            "compare recipes and settings over several seeds",
            positional="recipes",
            slow=True,
        ),
    },
    "look": {
        "plan": Command(
            "plan", "estimate memory and time of a run without weights", recipes=True, runs=True, slow=True
        ),
        "rehearse": Command(
            "rehearse", "run a recipe once with random weights of its real size", recipes=True, slow=True
        ),
        "doctor": Command("doctor", "check machine, model, reward and settings before a run", recipes=True, slow=True),
        "inspect": Command("inspect", "print tables of samplers on a noise schedule"),
        "probe": Command("probe", "measure which steps to branch at, and how much noise", recipes=True, slow=True),
        "rewards": Command("rewards", "list rewards, their requirements and which are ready", positional="of"),
        "report": Command("report", "write a page with curves, scores and clips of runs", positional="runs", many=True),
    },
    "publish": {
        "export": Command(
            "export", "export a checkpoint as LoRA, merged or full weights", positional="source", slow=True
        ),
        "download": Command("download", "download and check all files of a recipe", recipes=True),
    },
    "serve": {
        "serve-reward": Command("serve_reward", "serve rewards over HTTP to another machine"),
        "study": Command("study", "run a blind study of clips in the browser", positional="action"),
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
