"""The subcommands, as a table: each module has an Options dataclass and a run function."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A subcommand: a module with `Options` and `run`."""

    module: str
    summary: str
    positional: str = ""
    """The option that a first word without dashes is the value of; "command" is another command to run."""
    many: bool = False
    """Whether all words that belong to no option are values of `positional`, which is a list."""
    recipes: bool = False
    """Whether there is a `--recipe NAME`, which may be the first word: the module's function `defaults` reads it."""
    runs: bool = False
    """Whether the module's function `defaults` looks at the words first: it reads what the options start from in the folder of a
    `--run`, or puts together what is given several times."""
    slow: bool = False
    """Whether it takes seconds until it has something to say."""

    @property
    def first(self) -> str:
        """The option that a first word without dashes is the value of; empty for none, or where several words are."""
        return "recipe" if self.recipes else "" if self.many or self.positional == "command" else self.positional


COMMANDS = {
    "demo": Command("demo", "train the miniature video model here and show what changed", slow=True),
    "train": Command("train", "align a video model with a reward", recipes=True, slow=True),
    "plan": Command("plan", "what a run will do and cost, before any weights are there", recipes=True, slow=True),
    "doctor": Command(
        "doctor", "a check-up of machine, model, reward and configuration before a run", recipes=True, slow=True
    ),
    "generate": Command("generate", "prompts to mp4 with any kernel, LoRA or checkpoint", runs=True, slow=True),
    "evaluate": Command("evaluate", "score a model, or existing mp4 files, with any rewards", runs=True, slow=True),
    "export": Command("export", "write a checkpoint as LoRA, merged or full diffusers weights"),
    "download": Command("download", "fetch and check everything that a recipe needs, with sizes first", recipes=True),
    "convert": Command(
        "convert",
        "HunyuanVideo-1.5 weights from the original layout to diffusers' and back",
        positional="source",
        slow=True,
    ),
    "inspect": Command("inspect", "tables and a figure of what a sampler and a schedule will do"),
    "probe": Command(
        "probe",
        "which steps to branch at and with how much noise, from a few clips of a model",
        recipes=True,
        slow=True,
    ),
    "compare": Command(
        "compare",
        "recipes and settings over seeds, side by side: tables with intervals, figures, a report",
        positional="recipes",
        runs=True,
        slow=True,
    ),
    "report": Command("report", "a page about runs: curves, scores, clips side by side", positional="runs", many=True),
    "launch": Command("launch", "run a command on several GPUs of this machine", positional="command"),
    "serve-reward": Command("serve_reward", "host rewards over HTTP for training on another machine"),
    "rewards": Command("rewards", "every reward with what it needs, and which are ready here", positional="of"),
    "study": Command(
        "study", "a blind study in the browser: which of two videos do people prefer?", positional="action"
    ),
    "completion": Command("completion", "print a script that completes words in your shell", positional="shell"),
}
SCRIPTS = {name: f"python -m research.pretraining.{name}" for name in ("shapes", "scenes")}
"""Commands of earlier versions that are scripts of the project's repository now."""
