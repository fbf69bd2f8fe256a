"""Print a script that completes commands, options, recipes and values in your shell: `sage-grpo completion bash > FILE`, and `source FILE`
in ~/.bashrc. It needs shtab: pip install "sage-grpo[completion]"."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from sage_grpo.cli import COMMANDS
from sage_grpo.config.parsing import ConfigError, lists_of_parts, new_parser


@dataclass(frozen=True, kw_only=True)
class Options:
    """The shell."""

    shell: Literal["bash", "zsh", "tcsh"]
    """Shell of the script. bash: source it in ~/.bashrc. zsh: save it as _sage-grpo in a folder of $fpath. tcsh: source it in ~/.cshrc."""


def run(options: Options) -> int:
    if find_spec("shtab") is None:
        raise ConfigError('completion needs shtab: pip install "sage-grpo[completion]".')
    from jsonargparse import ArgumentParser

    from sage_grpo.recipes import names
    from sage_grpo.recipes.methods import METHODS
    from sage_grpo.recipes.targets import TARGETS

    parser = ArgumentParser(prog="sage-grpo")
    commands = parser.add_subcommands()
    for name, command in COMMANDS.items():
        module = importlib.import_module(f"sage_grpo.cli.{command.module}")
        one = new_parser(module.Options, name, command.recipes, lists_of_parts(module.Options))
        if command.recipes:
            one._option_string_actions["--recipe"].choices = [*TARGETS, *METHODS, *names()]
        commands.add_subcommand(name, one, help=command.summary)
    print(parser.get_completion_script(f"shtab-{options.shell}"))
    return 0
