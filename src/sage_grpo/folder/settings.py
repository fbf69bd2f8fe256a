"""The configuration in the folder of a run, which may come from somebody else."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from sage_grpo.configure import ConfigError, parse, read_yaml
from sage_grpo.hints import groups
from sage_grpo.inside import inside
from sage_grpo.models.spec import FAMILIES
from sage_grpo.named import is_object
from sage_grpo.rewards.spec import BUILT_IN
from sage_grpo.secrecy import hide
from sage_grpo.training.config import TrainConfig


def read_config(run: Path, *, trust: bool = False, rewards: bool = True) -> TrainConfig:
    """The configuration that a run was started with.

    A folder may come from somebody else: it does not decide which code runs here, nor where data and tokens are sent, unless
    `trust` says so. `rewards` is whether the caller will load the run's rewards too.
    """
    file = inside(run, "config.yaml")
    if not file.is_file():
        raise FileNotFoundError(
            f"{run or '.'} is not the folder of a run: it has no config.yaml. Give --run runs/NAME."
        )
    _check_sections(file)
    config = parse(TrainConfig, ["--config", str(file)], prog="sage-grpo")
    foreign = [] if trust else _foreign(config, rewards=rewards)
    if foreign:
        raise ValueError(
            f"{file} names {' and '.join(foreign)}. A run's folder does not decide what runs on this machine: if the run is yours, "
            "or you know what this does, add --trust_run true."
        )
    # Nor where files are written: encoded prompts go to the user's own cache, unless the command line says --model.cache.
    if config.model.cache not in (None, "auto"):
        warnings.warn(
            f"{file}: model.cache {config.model.cache} is not used; encoded prompts are kept in your own cache folder. --model.cache names another.",
            stacklevel=2,
        )
        config = replace(config, model=replace(config.model, cache="auto"))
    return config


def _foreign(config: TrainConfig, *, rewards: bool) -> list[str]:
    """What a configuration would load that the package does not carry, and servers that it would send clips and a token to."""
    found = []
    family = config.model.family
    if family is not None and family not in FAMILIES and not is_object(family):  # objects are refused by who needs them
        found.append(f"the code {config.model.family} (model.family)")
    if ":" in config.kernel.name:
        found.append(f"the code {config.kernel.name} (kernel.name)")
    for spec in config.rewards if rewards else []:
        if spec.name == "remote":
            found.append(hide(f"the reward server {spec.options.get('urls')}"))
        elif spec.name == "vlm_judge":
            found.append(hide(f"the judge at {spec.options.get('url')}"))
        elif spec.name not in BUILT_IN and not is_object(spec.name):
            found.append(f"the code {spec.name} (rewards)")
    return found


def _check_sections(file: Path) -> None:
    """A run writes its whole configuration into one file; the parser would also open others that are named in it."""
    content = read_yaml(file)
    for section in groups(TrainConfig):
        value: Any = content
        for part in section.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if not isinstance(value, dict | None):
            raise ConfigError(f"{file}: {section} must be a group of options, got {str(value)[:100]!r}.")
