"""Defaults of a command's options: a recipe, a YAML file or the folder of a run that its words name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sage_grpo.cli import say
from sage_grpo.config.parsing import ConfigError, given, in_file
from sage_grpo.recipes import recipe
from sage_grpo.training.config import TrainConfig

if TYPE_CHECKING:
    from sage_grpo.generation.evaluate import EvaluateSpec
    from sage_grpo.generation.generate import GenerateSpec

Options = TypeVar("Options", bound=TrainConfig)


def from_recipe(kind: type[Options], argv: list[str], *, runs: bool = False) -> tuple[Options | None, list[str]]:
    """The defaults of `train`'s options, or of a command that has more of them, and the words with the recipe, if there is one, at
    their end. A YAML file in place of the recipe (with `runs`, also the folder of a run) is taken as --config.

    A recipe on the command line wins over that of a file. Without a recipe, a file or a model it is the embedded world's, which
    runs on any machine; with a model or a file, the options' own defaults, which are the paper's.
    """
    words, named = _without_recipe(_with_files(argv, runs=runs))
    if named is None:
        named = given(words, "recipe")
    file = given(words, "config")
    if file and not os.path.isfile(file):
        raise FileNotFoundError(f"--config {file}: there is no such file to read.")
    chosen = any(word.split("=")[0] in ("--model", "--model.path", "--model.family") for word in words)
    if named is None and not file and not chosen:
        named = "shapes/sage"
    if named in (None, "None", "null"):
        whole = file and all(in_file(file, name) for name in TrainConfig.__dataclass_fields__)  # as a run writes it
        if not whole:
            say(
                f"no recipe is named: what {file or 'the options'} leaves out has the paper's defaults "
                "(--print_config shows them). Add `recipe: NAME` to the file or --recipe NAME to start from a recipe."
            )
        return None, words
    if str(named).endswith((".yaml", ".yml")):
        raise FileNotFoundError(f"There is no file {named}.")
    if os.path.isfile(f"{named}/config.yaml"):
        raise ConfigError(
            f"{named} is the folder of a run, not a recipe: --config {named}/config.yaml has its settings."
        )
    return extended(kind, recipe(str(named), given(words, "rollout.steps"))), [*words, f"--recipe={named}"]


def extended(kind: type[Options], config: TrainConfig, **more: Any) -> Options:
    """A configuration as the options of a command that has more of them."""
    return kind(**{field.name: getattr(config, field.name) for field in fields(config)}, **more)


def plain(options: TrainConfig) -> TrainConfig:
    return TrainConfig(**{field.name: getattr(options, field.name) for field in fields(TrainConfig)})


def _with_files(argv: list[str], *, runs: bool) -> list[str]:
    """The words with --config in place of --recipe where its value is a YAML file or, with `runs`, the folder of a run."""
    words = list(argv)
    for place, word in enumerate(words[:-1]):
        file = Path(words[place + 1])
        if runs and (file / "config.yaml").is_file():
            file = file / "config.yaml"
        if word == "--recipe" and file.is_file():
            words[place : place + 2] = ["--config", str(file)]
    return words


def _without_recipe(argv: list[str]) -> tuple[list[str], str | None]:
    words, name = [], None
    for word, before in zip(argv, ["", *argv]):
        if word == "--recipe" or word.startswith("--recipe="):
            name = word.partition("=")[2]
        elif before == "--recipe" and not word.startswith("--"):
            name = word
        else:
            words.append(word)
    return words, name


def say_whose_model(options: GenerateSpec | EvaluateSpec) -> None:
    if options.run is None and options.model.path is None and options.model.family is None:
        say("neither --run nor --model.path is given: this is the miniature included in the package.")


def trusted(argv: Sequence[str]) -> bool:
    """True if the words have --trust_run, for commands that read a run before their options."""
    value = given(argv, "trust_run")
    return value is not None and (value.lower() == "true" or value == "" or value.startswith("--"))
