"""Align a video model with a reward: `sage-grpo train RECIPE` (or FILE.yaml, which may name its `recipe`) starts from a whole configuration."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from sage_grpo.configure import ConfigError, given, in_file
from sage_grpo.recipes import meanings, recipe, remarks
from sage_grpo.training.config import TrainConfig as Options

__all__ = ["Options", "defaults", "meanings", "remarks", "run"]

EMBEDDED = "shapes/sage"


def defaults(argv: list[str]) -> tuple[Options | None, list[str]]:
    """What the options start from, and the words with the recipe, if there is one, at their end; a YAML file in its place stands
    for --config.

    A recipe on the command line wins over that of a file. Without a recipe, a file or a model it is the embedded world's, which
    runs on any machine; with a model or a file, the options' own defaults, which are the paper's.
    """
    words, names = _without_recipe(with_files(argv))
    in_files = given(words, "recipe")
    named = names[-1] if names else in_files
    for other in (*names[:-1], in_files):
        if other not in (None, "None", "null", named):
            recipe(str(other))  # one that is overruled must be one all the same
    files = [value for value in (given(words, "config"),) if value]
    chosen = any(word.split("=")[0] in ("--model", "--model.path", "--model.family") for word in words)
    if named is None and not files and not chosen:
        named = EMBEDDED
    if named in (None, "None", "null"):
        _say_what_it_stands_on(files)
        return None, words
    if os.path.isfile(f"{named}/config.yaml"):
        raise ConfigError(f"{named} is the folder of a run, no recipe: --config {named}/config.yaml has its settings.")
    return recipe(str(named)), [*words, f"--recipe={named}"]


Extended = TypeVar("Extended", bound=Options)


def extended(kind: type[Extended], config: Options | None, **more: Any) -> Extended | None:
    """A configuration as the options of a command that has more of them; None stays None."""
    if config is None:
        return None
    return kind(**{field.name: getattr(config, field.name) for field in fields(config)}, **more)


def plain(options: Options) -> Options:
    """The configuration in a command's options."""
    return Options(**{field.name: getattr(options, field.name) for field in fields(Options)})


def with_files(argv: list[str], *, runs: bool = False) -> list[str]:
    """The words with --config where the word for a recipe is a YAML file or, with `runs`, the folder of a run."""
    words = list(argv)
    for place, word in enumerate(words[:-1]):
        file = Path(words[place + 1])
        if runs and (file / "config.yaml").is_file():
            file = file / "config.yaml"
        if word == "--recipe" and file.is_file():
            words[place : place + 2] = ["--config", str(file)]
    return words


def _without_recipe(argv: list[str]) -> tuple[list[str], list[str]]:
    """The words without `--recipe NAME` and `--recipe=NAME`, and the names."""
    words, rest, names = [], list(argv), []
    while rest:
        word = rest.pop(0)
        if word.startswith("--recipe="):
            names.append(word.partition("=")[2])
        elif word == "--recipe":
            names.append(rest.pop(0) if rest and not rest[0].startswith("--") else "")
        else:
            words.append(word)
    return words, names


def _say_what_it_stands_on(files: list[str]) -> None:
    """Without a recipe most options have defaults that nobody chose; a whole file, as a run writes it, leaves none."""
    if any(all(in_file(file, name) for name in Options.__dataclass_fields__) for file in files):
        return
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError, ValueError):  # nobody may be reading
            print(
                f"sage-grpo: no recipe is named: what {files[-1] if files else 'the options'} leaves out has the paper's defaults "
                "(--print_config shows them). Add `recipe: NAME` to the file or --recipe NAME to start from a recipe.",
                file=sys.stderr,
                flush=True,
            )


def run(options: Options) -> int:
    """Train."""
    from sage_grpo import session
    from sage_grpo.parallel.checkpoint import SaveFailed
    from sage_grpo.parallel.world import RankLost
    from sage_grpo.report.build import leave_report
    from sage_grpo.rewards.base import RewardFailure
    from sage_grpo.telling.terminal import outliving_output
    from sage_grpo.training.update import Diverged

    status = 0
    with outliving_output():
        try:
            with session.session(options, remark=_remark) as world:
                try:
                    session.run(options, world)
                except (Diverged, RewardFailure, SaveFailed) as stopped:  # all ranks decide alike
                    if world.is_main:
                        print(f"sage-grpo train stopped: {stopped}")
                    status = 1
        except RankLost as lost:
            print(f"sage-grpo train stopped: {lost}", file=sys.stderr, flush=True)
            os._exit(1)  # an orderly exit would wait for the rank that is gone
        told = leave_report(Path(options.out)) if world.is_main else ""
        if told:
            print(told)
    return status


def _remark(text: str) -> None:
    print(f"sage-grpo: {text}", file=sys.stderr, flush=True)
