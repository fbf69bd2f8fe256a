"""The command `sage-grpo`: a table of subcommands; only the one that is called is imported."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sage_grpo import __version__


@dataclass(frozen=True)
class Command:
    """A subcommand: a module with `Options`, `run` and optionally `recipe(name) -> Options`."""

    module: str
    summary: str
    positional: Literal["", "action", "command"] = ""
    """What a first word without dashes means: nothing, the option `action`, or another command to run."""
    recipes: bool = False
    """Whether the module's function `defaults` takes a `--recipe NAME` out of the words, and `remarks` compares with it."""
    runs: bool = False
    """Whether the module's function `defaults` reads what the options start from in the folder of a `--run`."""


COMMANDS = {
    "demo": Command("demo", "train the miniature video model on this machine and show what changed"),
    "train": Command("train", "align a video model with a reward (SAGE-GRPO and its baselines)", recipes=True),
    "generate": Command("generate", "prompts to mp4 with any kernel, LoRA or checkpoint", runs=True),
    "evaluate": Command(
        "evaluate", "score a model on held-out prompts, or existing mp4 files, with any rewards", runs=True
    ),
    "export": Command("export", "write a checkpoint as LoRA, merged or full diffusers weights"),
    "inspect": Command("inspect", "tables and a figure of what a sampler and a schedule will do"),
    "probe": Command(
        "probe", "which steps to branch at and with how much noise, from a few clips of a model", recipes=True
    ),
    "launch": Command("launch", "run a command on several GPUs of this machine", positional="command"),
    "serve-reward": Command("serve_reward", "host rewards over HTTP for training on another machine"),
    "shapes": Command("shapes", "the embedded world: pretrain, score and render it", positional="action"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"sage-grpo {__version__}")
        return 0
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        return _fail(f"there is no command {name!r}.{_nearest(name, list(COMMANDS))} Try: sage-grpo --help")
    return _run(name, rest)


def _run(name: str, argv: list[str]) -> int:
    from sage_grpo.configure import ConfigError, parse

    command = COMMANDS[name]
    module = importlib.import_module(f"sage_grpo.commands.{command.module}")
    try:
        defaults = None
        if command.positional == "command":
            argv = module.arguments(argv, COMMANDS)
        elif command.positional == "action" and argv and not argv[0].startswith("-"):
            argv = ["--action", *argv]
        if command.recipes or command.runs:
            defaults, argv = module.defaults(argv)
        options = parse(
            module.Options, argv, prog=f"sage-grpo {name}", description=module.__doc__ or "", defaults=defaults
        )
        if command.recipes and defaults is not None and os.environ.get("RANK", "0") == "0":
            for remark in module.remarks(options, defaults):
                print(f"sage-grpo: {remark}", file=sys.stderr)
        return module.run(options)
    except (ConfigError, ValueError, FileNotFoundError) as error:
        # What a user can mend is said in one message; anything else keeps its traceback.
        return _fail(str(error))


def _nearest(name: str, names: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _fail(message: str) -> int:
    print(f"sage-grpo: {message}", file=sys.stderr)
    return 2


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    return f"""sage-grpo {__version__}: reinforcement-learning post-training of flow-matching video generators

usage: sage-grpo COMMAND [--config FILE.yaml] [--option value ...]

{rows}

`sage-grpo COMMAND --help` lists a command's options; `--print_config` prints them as YAML to start from."""


if __name__ == "__main__":
    sys.exit(main())
