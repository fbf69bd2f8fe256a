"""Reads a run's folder, which is untrusted: its configuration, and a model with any of its weights."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sage_grpo.config.parsing import parse
from sage_grpo.config.ranges import Natural
from sage_grpo.models.spec import FAMILIES
from sage_grpo.rewards.spec import BUILT_IN
from sage_grpo.training.config import TrainConfig
from sage_grpo.utils.imports import is_object
from sage_grpo.utils.redact import hide
from sage_grpo.utils.safe_io import inside, whole


def read_config(run: Path, *, trust: bool = False, rewards: bool = True) -> TrainConfig:
    """The configuration that a run was started with; with `rewards` the caller will load the run's rewards too.

    The folder is untrusted: without `trust` it cannot name code that runs here, nor servers for data and tokens.
    """
    file = inside(run, "config.yaml")
    if not file.is_file():
        raise FileNotFoundError(
            f"{run or '.'} is not the folder of a run: it has no config.yaml. Give --run runs/NAME."
        )
    config = parse(TrainConfig, ["--config", str(file)], prog="sage-grpo")
    foreign = [] if trust else _foreign(config, rewards=rewards)
    if foreign:
        raise ValueError(
            f"{file} names {' and '.join(foreign)}. A run's folder does not decide which code runs here: if the run is yours, "
            "or you know what this does, add --trust_run true."
        )
    # Nor may it name the place of the encoding cache: that is the user's own, or --model.cache.
    if config.model.cache not in (None, "auto"):
        warnings.warn(
            f"{file}: model.cache {config.model.cache} is not used; encoded prompts are kept in your own cache folder. --model.cache names another.",
            stacklevel=2,
        )
        config = replace(config, model=replace(config.model, cache="auto"))
    return config


def _foreign(config: TrainConfig, *, rewards: bool) -> list[str]:
    """Code from outside the package, and servers that would get clips and a token; objects are refused on loading."""
    found, family = [], config.model.family
    if family is not None and family not in FAMILIES and not is_object(family):
        found.append(f"the code {family} (model.family)")
    for path, option in ((config.kernel.name, "kernel.name"), (config.objective.kind, "objective.kind")):
        if ":" in path:
            found.append(f"the code {path} ({option})")
    for spec in config.rewards if rewards else []:
        if spec.name == "remote":
            found.append(hide(f"the reward server {spec.options.get('urls')}"))
        elif spec.name == "vlm_judge":
            found.append(hide(f"the judge at {spec.options.get('url')}"))
        elif spec.name not in BUILT_IN and not is_object(spec.name):
            found.append(f"the code {spec.name} (rewards)")
    return found


if TYPE_CHECKING:
    from sage_grpo.models.base import VelocityModel
    from sage_grpo.models.spec import ModelSpec


def find_checkpoint(run: Path, number: int | None = None) -> Path:
    """An intact checkpoint of a run, by default the newest."""
    from sage_grpo.distributed.checkpoint import find_fault, newest_good

    root = whole(run, "checkpoints")
    folder = newest_good(root) if number is None else root / f"{number:06d}"
    if folder is None or not folder.is_dir():
        there = ", ".join(str(one) for one in _numbers(run)) or "none"
        wanted = "usable checkpoint" if number is None else f"checkpoint {number}"
        raise FileNotFoundError(f"No {wanted} under {root} (there: {there}).")
    fault = None if number is None else find_fault(folder)  # the newest good one has been checked
    if fault is not None:
        raise ValueError(f"Checkpoint {folder} is damaged: {fault}.")
    return folder


def refuse_own(out: Path, run: Path) -> None:
    """Refuse to write into the folder of the run that is read, because its files would mix with the output."""
    if out.expanduser().resolve().is_relative_to(run.expanduser().resolve()):
        raise ValueError(f"--out {out} lies in the run's own folder {run}: choose a folder outside of it.")


def _numbers(run: Path) -> list[int]:
    return sorted(int(folder.name) for folder in inside(run, "checkpoints").glob("[0-9]*") if folder.name.isdigit())


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Weights to load."""

    run: str | None = None
    """Folder of a run; its settings become the defaults and its weights are used."""
    weights: Literal["final", "best", "base"] | None = None
    """Weights of the run: final (the default), best, or base (before training)."""
    checkpoint: Natural | None = None
    """Use the weights of the checkpoint of this iteration."""
    ema: bool | None = None
    """Use the moving average of the weights; None does so where the run keeps one."""
    lora: str | None = None
    """Folder of a saved LoRA to load instead of the run's own."""
    trust_run: bool = False
    """Also load Python code and call reward servers that the run's config.yaml names, with all your rights."""

    @property
    def tunes(self) -> bool:
        return self.lora is not None or (self.run is not None and self.weights != "base")

    def base(self) -> Choice:
        """The weights before training."""
        return Choice(run=self.run, weights=None if self.run is None else "base")

    def find(self, spec: ModelSpec) -> Weights:
        """Locate the weights; refuses all errors that can be found without loading a model."""
        from sage_grpo.distributed.checkpoint import continuing, read_meta

        self._check(spec)
        if self.lora is not None and Path(self.lora).is_dir():
            from sage_grpo.models.lora import read_header

            read_header(self.lora)
        if self.lora is not None:  # it replaces the run's adapter
            return Weights(spec if self.run is None else replace(spec, lora=None, train=False), lora=self.lora)
        if self.run is None or self.weights == "base":
            return Weights(spec)
        run = Path(self.run)
        if self.checkpoint is not None:
            return Weights(spec, checkpoint=find_checkpoint(run, self.checkpoint), ema=self.ema)
        if not _numbers(run):
            return Weights(self._exported(spec, run, "it has no checkpoint"), exported=True)
        newest = find_checkpoint(run)
        meta = read_meta(newest, {"config": dict, "best": dict})
        with continuing(newest):
            last, best = int(meta["config"]["iterations"]), int(meta["best"].get("iteration", -1))
        if self.weights == "best" and best == 0:
            raise ValueError(
                "The best evaluation of this run is the one before training, so there are no weights to export. evaluate and generate take --weights base."
            )
        number = best if self.weights == "best" else last
        if number in _numbers(run):
            found = newest if number == int(newest.name) else find_checkpoint(run, number)
            return Weights(spec, checkpoint=found, ema=self.ema)
        ending = f"its newest checkpoint is --checkpoint {int(newest.name)}, of {last} iterations"
        return Weights(self._exported(spec, run, ending), exported=True)

    def _check(self, spec: ModelSpec) -> None:
        given = {"weights": self.weights, "checkpoint": self.checkpoint, "ema": self.ema}
        named = [f"--{name}" for name, value in given.items() if value is not None]
        if self.run is None and named:
            raise ValueError(f"{', '.join(named)} chooses among the weights of a run: give --run runs/NAME as well.")
        if self.lora is not None and named and named != ["--weights"]:
            raise ValueError(f"--lora and {', '.join(named)} both name weights: give one of them.")
        if self.lora is not None and self.weights not in (None, "base"):
            raise ValueError(f"--lora and --weights {self.weights} both name weights: a LoRA goes on --weights base.")
        if self.lora is not None and self.run is None and spec.lora is not None:
            raise ValueError("--lora and --model.lora both name an adapter: give one of them.")
        if self.weights is not None and self.checkpoint is not None:
            raise ValueError(f"--weights {self.weights} and --checkpoint {self.checkpoint}: give one of them.")
        if self.weights == "base" and self.ema is not None:
            raise ValueError("--ema is about trained weights; --weights base has none.")

    def _exported(self, spec: ModelSpec, run: Path, ending: str) -> ModelSpec:
        """The model of a run's exported weights: an adapter for its base model, or a whole model."""
        name = self.weights or "final"
        folder = run / name
        # A final/ next to checkpoints that end earlier belongs to a shorter run that was then continued.
        if not folder.is_dir() or (name == "final" and _numbers(run)):
            raise FileNotFoundError(
                f"{run} has no {name} weights: {ending}. --weights base is the model before training."
                + (" Best weights need held-out prompts (data.eval_prompts)." if name == "best" else "")
            )
        whole(run, name)
        if self.ema is not None:
            raise ValueError(f"These weights exist only in {folder}, as the run exported them: leave --ema out.")
        if spec.lora is not None:
            return replace(spec, lora=replace(spec.lora, path=str(folder)))
        return replace(spec, path=str(folder), revision=None)


@dataclass(frozen=True)
class Weights:
    """A model and the location of its weights."""

    spec: ModelSpec
    checkpoint: Path | None = None
    ema: bool | None = None
    lora: str | None = None
    exported: bool = False  # the spec names the folder of the exported weights

    def load(self, model: VelocityModel | None = None) -> VelocityModel:
        """Load the model, or use the given one. A run's weights are loaded into the model as it was trained, so that it
        computes the same bits."""
        import torch

        from sage_grpo.training.state import has_ema, load_weights

        if model is None:
            model = self.spec.load()
        elif self.exported:
            raise ValueError(
                "These weights exist only in the folder that the run exported, which does not go into a model object: give "
                "--checkpoint N, or load the folder yourself and leave the run out."
            )
        else:
            model.place("vae", model.device)  # training leaves it in CPU memory
        if self.lora is not None:
            model.load_lora(self.lora)
        if self.checkpoint is not None:
            params = model.trainable()
            weights = load_weights(
                self.checkpoint, model, ema=has_ema(self.checkpoint) if self.ema is None else self.ema
            )
            with torch.no_grad():
                for name, parameter in params.items():
                    parameter.copy_(weights[name])
        return model
