"""Print a script that completes commands, options, recipes and values: add `source <(sage-grpo completion bash)` to ~/.bashrc."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from sage_grpo.cli import COMMANDS

OWN = ("--config", "--print_config", "--help")
"""What every command takes."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which shell."""

    shell: Literal["bash", "zsh", "fish"]
    """Shell to write for. bash: `source <(sage-grpo completion bash)` in ~/.bashrc. zsh: the same with zsh in ~/.zshrc, after
    compinit. fish: `sage-grpo completion fish > ~/.config/fish/completions/sage-grpo.fish`."""


Words = Mapping[str, Mapping[str, list[str]]]
"""Command -> option -> the values that it may have; an empty list completes file names."""


def run(options: Options) -> int:
    """Print the script."""
    writers: dict[str, Callable[[Words], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
    print(writers[options.shell](words()))
    return 0


def words() -> Words:
    """Every command with its options, read from their dataclasses."""
    from sage_grpo.recipes import names
    from sage_grpo.recipes.methods import METHODS
    from sage_grpo.recipes.targets import TARGETS

    found: dict[str, dict[str, list[str]]] = {}
    for name, command in COMMANDS.items():
        module = importlib.import_module(f"sage_grpo.cli.{command.module}")
        recipes = {"--recipe": [*TARGETS, *METHODS, *names()]} if command.recipes else {}
        found[name] = {**{option: [] for option in OWN}, **recipes, **_options(module.Options)}
    return found


def _options(options: type) -> dict[str, list[str]]:
    from sage_grpo.config.help import entries

    found = {}
    for entry in entries(options):
        if "[]." not in entry.key:
            found[f"--{entry.key.removesuffix('[]')}"] = _values(entry.kind)
    return found


def _values(kind: Any) -> list[str]:
    if kind is bool:
        return ["true", "false"]
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    return [value for inner in get_args(kind) if inner is not type(None) for value in _values(inner)]


BASH = r"""# sage-grpo: completion for bash
_sage_grpo() {
  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" command="" options="" values="" one
  local commands=%s
  for one in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case " $commands " in *" $one "*) [ "$command" = "" ] || [ "$command" = launch ] && command="$one" ;; esac
  done
  case "$command" in
%s
    "") COMPREPLY=($(compgen -W "$commands" -- "$word")); return ;;
  esac
  if [ -n "$values" ]; then COMPREPLY=($(compgen -W "$values" -- "$word"))
  elif [ "${word#-}" != "$word" ]; then COMPREPLY=($(compgen -W "$options" -- "$word"))
  elif [ "$command" = launch ]; then COMPREPLY=($(compgen -W "$commands" -- "$word"))
  else COMPREPLY=($(compgen -f -- "$word")); fi
}
complete -F _sage_grpo sage-grpo"""


def bash(found: Words) -> str:
    """For bash 3.2 or later."""
    cases = []
    for name, options in found.items():
        cases += [f"    {name}) options={shlex.quote(' '.join(options))}", '      case "$before" in']
        chosen = {option: shlex.quote(" ".join(values)) for option, values in options.items() if values}
        cases += [*(f"        {option}) values={values} ;;" for option, values in chosen.items()), "      esac ;;"]
    return BASH % (shlex.quote(" ".join(found)), "\n".join(cases))


def zsh(found: Words) -> str:
    """zsh runs bash's completions."""
    return "# sage-grpo: completion for zsh\nautoload -U +X bashcompinit && bashcompinit\n" + bash(found)


def fish(found: Words) -> str:
    """For fish 3 or later."""
    lines = ["# sage-grpo: completion for fish"]
    for name, options in found.items():
        lines.append(f"complete -c sage-grpo -n __fish_use_subcommand -f -a {name}")
        for option, values in options.items():
            choice = f" -x -a {shlex.quote(' '.join(values))}" if values else " -r"
            where = shlex.quote(f"__fish_seen_subcommand_from {name}")
            lines.append(f"complete -c sage-grpo -n {where} -l {option.removeprefix('--')}{choice}")
    return "\n".join(lines)
