"""The command `sage-grpo`. Only the module of the subcommand that is called is imported."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress

from sage_grpo.cli import COMMANDS, GONE, GROUPS, say
from sage_grpo.utils.redact import hide
from sage_grpo.utils.safe_io import printable
from sage_grpo.utils.suggest import did_you_mean
from sage_grpo.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    try:
        status = _main(list(sys.argv[1:] if argv is None else argv))
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a closed pipe can be handled
        return status
    except BrokenPipeError:  # the reader of the output is gone (`... | head`)
        _discard_output()
        return UNREAD
    except SystemExit as ended:
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        return UNREAD  # rich noticed the closed pipe and ends the program, with a status that has another meaning here
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _discard_output()
        return _fail(f"Nothing more can be written: {error.strerror}. Make room on the disk.")


UNREAD = 141  # exit status when the reader of the output is gone, as a shell reports SIGPIPE


def _discard_output() -> None:
    """Redirect stdout to /dev/null, so that the interpreter writes nothing to a closed pipe when it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _main(argv: list[str]) -> int:
    if argv[:1] == ["help"] and len(argv) > 1:  # `help train model` is `train --help model`
        argv = [argv[1], "--help", *argv[2:]]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"sage-grpo {__version__}")
        return 0
    name, rest = argv[0], argv[1:]
    if name in GONE:
        return _fail(f"There is no command {name!r} any more: {GONE[name]}")
    if name not in COMMANDS:
        return _fail(f"There is no command {name!r}.{did_you_mean(name, COMMANDS)} sage-grpo --help lists them.")
    formatted = warnings.formatwarning
    # Warnings name files and values of untrusted folders.
    warnings.formatwarning = lambda *words: printable(formatted(*words))
    try:
        return _run(name, rest)
    except (ValueError, FileNotFoundError) as error:
        # A user's mistake is one message; any other error keeps its traceback.
        return _fail(str(error))
    except OSError as error:
        if error.filename is None:
            raise
        return _fail(f"{error.filename}: {error.strerror or error}.")
    except KeyboardInterrupt as stop:
        return _fail(str(stop) or "interrupted.", 130)
    finally:
        warnings.formatwarning = formatted


def _run(name: str, argv: list[str]) -> int:
    command = COMMANDS[name]
    topic, argv = _help_topic(argv)
    if command.first and argv and not argv[0].startswith("-"):
        argv = [f"--{command.first}", *argv]
    if command.slow and topic is None and "--print_config" not in argv:
        # Before anything is imported: the libraries take seconds, and a silent terminal looks broken.
        say(f"version {__version__}, {name}: starting ...")
    module = importlib.import_module(f"sage_grpo.cli.{command.module}")
    from sage_grpo.config.parsing import given, loose_words, parse

    if command.many:
        argv = loose_words(argv, command.positional, module.Options)
    defaults, named = None, given(argv, "recipe")
    if hasattr(module, "defaults"):
        defaults, argv = module.defaults(argv)
    elif command.recipes:
        from sage_grpo.cli.starting import from_recipe

        defaults, argv = from_recipe(module.Options, argv, runs=command.runs)
    if topic is not None:
        from sage_grpo.config.help import manual
        from sage_grpo.recipes import meanings

        recipes = meanings() if command.recipes else None
        about = module.__doc__ or ""
        print(manual(module.Options, topic, prog=f"sage-grpo {name}", about=about, values=defaults, recipes=recipes))
        return 0
    options = parse(module.Options, argv, prog=f"sage-grpo {name}", defaults=defaults, recipes=command.recipes)
    if command.recipes and defaults is not None:
        from sage_grpo.recipes import remarks

        if named is None:
            start = argv[-1].partition("=")[2]
            say(f"no recipe is named: this is {start}, the miniature included in the package.")
        for remark in remarks(options, defaults):
            say(remark)
    return module.run(options)


def _help_topic(argv: list[str]) -> tuple[str | None, list[str]]:
    """The group of options that the words ask help on (empty: all groups, None: no help asked), and the words without that."""
    place = next((place for place, word in enumerate(argv) if word in ("-h", "--help")), None)
    if place is None:
        return None, argv
    topic = "".join(one for one in argv[place + 1 : place + 2] if not one.startswith("-"))
    return topic, argv[:place] + argv[place + 1 + bool(topic) :]


def _fail(message: str, status: int = 2) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # a refusal of all processes is printed once
        from sage_grpo.distributed.heartbeat import is_first_to_say

        if not is_first_to_say(message):
            return status
    print(f"sage-grpo: {printable(hide(message))}", file=sys.stderr)
    return status


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(
        line
        for group, commands in GROUPS.items()
        for line in (f"{group}:", *(f"  {name:<{width}}  {command.summary}" for name, command in commands.items()))
    )
    return f"""sage-grpo {__version__}: reinforcement-learning post-training of flow-matching
video generators

usage: sage-grpo COMMAND [--config FILE.yaml] [--option value ...]

{rows}

`sage-grpo COMMAND --help` lists the groups of a command's options, `--help GROUP` the
options of one; `--print_config` prints them as YAML to start from. Several GPUs:
torchrun --nproc-per-node N -m sage_grpo COMMAND ..."""


if __name__ == "__main__":
    sys.exit(main())
