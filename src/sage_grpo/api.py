"""The package from Python: train, evaluate and generate, with objects of your own in place of names. docs/api.md is the guide.

The same names can be imported from `sage_grpo` itself; nothing heavy is imported before it is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

from sage_grpo.config.parsing import ConfigError
from sage_grpo.utils.suggest import did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

    from sage_grpo.data.prompts import Frame, Row
    from sage_grpo.generation.evaluate import Difference, EvaluateSpec
    from sage_grpo.models.base import VelocityModel
    from sage_grpo.models.spec import ModelSpec
    from sage_grpo.rewards.spec import RewardLike
    from sage_grpo.samplers.kernels import KernelSpec
    from sage_grpo.samplers.solvers import SolverName
    from sage_grpo.training.config import EvalConfig, TrainConfig
    from sage_grpo.training.evaluate import Evaluation
    from sage_grpo.training.events import CheckpointEvent, EvaluationEvent, IterationEvent, SentinelEvent, StopRequest
    from sage_grpo.training.inputs import Overrides
    from sage_grpo.types import Sound


class WeightsSettings(TypedDict, total=False):
    """The weights that `evaluate`, `evaluate_pairs` and `generate` use; the keys mean the same as the commands' options of these names."""

    weights: Literal["final", "best", "base"] | None
    checkpoint: int | None
    ema: bool | None
    lora: str | None
    trust_run: bool


class EvaluateSettings(WeightsSettings, total=False):
    """The options of `evaluate` and `evaluate_pairs`."""

    settings: EvalConfig
    micro_batch: int
    max_failed_fraction: float


class GenerateSettings(WeightsSettings, total=False):
    """The options of `generate`."""

    kernel: KernelSpec
    solver: SolverName
    deterministic_last: bool | None
    steps: int
    per_prompt: int
    batch: int
    seed: int
    images: list[str]
    progress: bool


@dataclass(frozen=True)
class TrainResult:
    """The result of a run."""

    out: Path
    """Its folder: config.yaml, metrics.jsonl, report.html, checkpoints, videos, and weights in best/ and final/."""
    iteration: int
    """Iterations completed."""
    stopped: bool
    """True if it was stopped before its last iteration; the same call continues it."""
    metrics: list[dict[str, float]]
    """The rows of metrics.jsonl: one per iteration (`reward/total`, ...) and one per evaluation (`eval/total`, ...)."""
    model: VelocityModel | None
    """The model with its weights as training left them; None where the run was finished before and nothing was loaded."""


@dataclass(frozen=True)
class Pairs:
    """Evaluations of a base model and a tuned one, on the same prompts and noises."""

    base: Evaluation
    tuned: Evaluation
    differences: dict[str, Difference]
    """By score, the total first: `base`, `tuned`, `change`, its 95% interval `low` to `high`, `win_share` and more."""


@dataclass(frozen=True)
class Clips:
    """Generated videos."""

    videos: Tensor
    """uint8 N x F x H x W x 3."""
    prompts: list[str]
    seeds: list[int]
    fps: float
    names: list[str]
    """File names, as `sage-grpo generate` gives them."""
    sound: Sound | None = None
    """Their sound, where the model makes one."""

    def save(self, folder: str | Path) -> list[Path]:
        """Write mp4 files and a contact sheet; returns the mp4 files."""
        from sage_grpo.utils.video import contact_sheet, write_mp4

        files = [Path(folder) / name for name in self.names]
        for place, (file, video) in enumerate(zip(files, self.videos)):
            write_mp4(file, video, self.fps, sound=None if self.sound is None else self.sound[place])
        contact_sheet(Path(folder) / "contact_sheet.png", list(self.videos), self.prompts)
        return files


def train(
    config: TrainConfig,
    *,
    model: VelocityModel | None = None,
    rewards: RewardLike | Sequence[RewardLike] | None = None,
    prompts: Iterable[Row] | Frame | None = None,
    held_out: Iterable[Row] | Frame | None = None,
    on_iteration: Callable[[IterationEvent], object] | None = None,
    on_evaluation: Callable[[EvaluationEvent], object] | None = None,
    on_checkpoint: Callable[[CheckpointEvent], object] | None = None,
    on_sentinel: Callable[[SentinelEvent], object] | None = None,
    stop: StopRequest | None = None,
    quiet: bool = False,
) -> TrainResult:
    """Train as `sage-grpo train` does, in any thread; a run that is in `config.out` is continued.

    model: a VelocityModel in place of config.model; it is trained in place.
    rewards: in place of config.rewards; a name, a RewardSpec, an object with `names` and `__call__`, a function, the
        result of `own_reward`, or a list of such.
    prompts, held_out: rows in place of config.data: strings, mappings, Prompts, a Hugging Face dataset, a data frame.
    on_iteration, on_evaluation, on_checkpoint, on_sentinel: called by the main process. An exception from them ends the run, saved.
    stop: `stop.set()` ends the run after the current iteration, saved. In the main thread signals do so too.
    quiet: print nothing; callbacks, metrics.jsonl and warnings remain.
    """
    from sage_grpo.callbacks.journal import read_rows
    from sage_grpo.run import session
    from sage_grpo.tools.report.page import leave_report
    from sage_grpo.training.config import TrainConfig
    from sage_grpo.training.events import Hooks
    from sage_grpo.training.inputs import adopt

    if not isinstance(config, TrainConfig):
        raise ConfigError(f"train needs a TrainConfig, got {config!r:.100}: sage_grpo.recipe('shapes/sage') makes one.")
    config, overrides = adopt(config, model=model, rewards=rewards, prompts=prompts, held_out=held_out)
    hooks = Hooks(iteration=on_iteration, evaluation=on_evaluation, checkpoint=on_checkpoint, sentinel=on_sentinel)
    with session.session(config, overrides, remark=lambda text: warnings.warn(text, stacklevel=4)) as world:
        ended = session.run(config, world, overrides, hooks, stop, quiet=quiet)
    out = Path(config.out)
    message = leave_report(out) if world.is_main else ""
    if message and not quiet:
        print(message)
    return TrainResult(out, ended.iteration, ended.stopped, read_rows(out / "metrics.jsonl"), ended.model)


def evaluate(
    run: str | Path | None = None,
    *,
    model: VelocityModel | ModelSpec | None = None,
    rewards: RewardLike | Sequence[RewardLike] | None = None,
    prompts: str | Iterable[Row] | Frame | None = None,
    **options: Unpack[EvaluateSettings],
) -> Evaluation:
    """Score clips of a model with the ODE and fixed seeds, as `sage-grpo evaluate` does.

    run: the folder of a run, whose model, weights, rewards, prompts and settings are the defaults.
    model, rewards, prompts: as in `train`; a model object gets the run's weights. Prompts may also be the name of a file.
    options: weights, checkpoint, ema, lora, settings (an EvalConfig), micro_batch, max_failed_fraction, trust_run.
    """
    from sage_grpo.generation.evaluate import measure

    return measure(*_evaluation("evaluate", run, model, rewards, prompts, options))


def evaluate_pairs(
    run: str | Path | None = None,
    *,
    model: ModelSpec | None = None,
    rewards: RewardLike | Sequence[RewardLike] | None = None,
    prompts: str | Iterable[Row] | Frame | None = None,
    **options: Unpack[EvaluateSettings],
) -> Pairs:
    """A run's weights, or a LoRA, against the base model, clip by clip, as `sage-grpo evaluate --pairs` does.

    Arguments are those of `evaluate`, but not a model object: its base weights are not known.
    """
    from sage_grpo.generation.evaluate import compare, measure_pair

    if _either(model)[1] is not None:
        raise ConfigError(
            "evaluate_pairs loads the base and then the tuned model: give a ModelSpec, a run or a LoRA, not a model object."
        )
    base, tuned = measure_pair(*_evaluation("evaluate_pairs", run, model, rewards, prompts, options))
    return Pairs(base, tuned, compare(base, tuned))


def _evaluation(
    function: str,
    run: str | Path | None,
    model: VelocityModel | ModelSpec | None,
    rewards: RewardLike | Sequence[RewardLike] | None,
    prompts: str | Iterable[Row] | Frame | None,
    options: EvaluateSettings,
) -> tuple[EvaluateSpec, Overrides]:
    """The spec of an evaluation, and the objects that replace the names in it."""
    from sage_grpo.generation.evaluate import EvaluateSpec
    from sage_grpo.training.config import TrainConfig
    from sage_grpo.training.inputs import adopt

    _check_names(function, options, EvaluateSettings.__annotations__)
    base, trust = EvaluateSpec(), options.get("trust_run", False)
    if run is not None:
        base = EvaluateSpec.of_run(str(run), trust=trust, rewards=rewards is None)
    if isinstance(prompts, str):
        base, prompts = replace(base, prompts=prompts), None
    spec, thing = _either(model)
    start = spec or base.model
    config = TrainConfig(rewards=base.rewards, model=replace(start, train=True))  # it refuses one that does not train
    config, overrides = adopt(config, model=thing, rewards=rewards, prompts=prompts)
    if run is None and overrides.prompts is not None:  # all given prompts; a run has its own number
        options.setdefault("settings", replace(base.settings, prompts=len(overrides.prompts)))
    chosen = replace(base, model=replace(config.model, train=start.train), rewards=config.rewards, **options)
    return chosen, overrides


def generate(
    prompts: str | Iterable[Row] | Frame,
    *,
    run: str | Path | None = None,
    model: VelocityModel | ModelSpec | None = None,
    **options: Unpack[GenerateSettings],
) -> Clips:
    """Videos of prompts (one, rows as in `train`, or the name of a file), as `sage-grpo generate` makes them.

    options: weights, checkpoint, ema, lora, kernel, solver, deterministic_last, steps, per_prompt, batch, seed, images, progress, trust_run.
    """
    import torch

    from sage_grpo.data.prompts import prompts_of
    from sage_grpo.generation.generate import GenerateSpec, clips_of, sample
    from sage_grpo.training.inputs import check_model
    from sage_grpo.types import Sound

    _check_names("generate", options, GenerateSettings.__annotations__)
    spec, thing = _either(model)
    if thing is not None:
        spec = check_model(thing)
    if spec is not None or run is None:
        start = GenerateSpec(run=None if run is None else str(run), model=spec or GenerateSpec().model)
    else:
        start = GenerateSpec.of_run(str(run), trust=options.get("trust_run", False))
    options.setdefault("progress", False)
    chosen = replace(start, prompts=prompts if isinstance(prompts, str) else "", **options)
    clips = clips_of(chosen, None if isinstance(prompts, str) else prompts_of(prompts))
    loaded = chosen.find(chosen.model).load(thing)
    made = [(videos, sound) for _, videos, sound in sample(chosen, loaded, clips)]
    sounds = [sound for _, sound in made if sound is not None]
    return Clips(
        videos=torch.cat([videos for videos, _ in made]),
        sound=Sound(torch.cat([sound.waves for sound in sounds]), sounds[0].rate) if sounds else None,
        prompts=[clip.prompt.text for clip in clips],
        seeds=[clip.seed for clip in clips],
        fps=loaded.video.fps,
        names=[clip.file for clip in clips],
    )


def _either(model: VelocityModel | ModelSpec | None) -> tuple[ModelSpec | None, VelocityModel | None]:
    from sage_grpo.models.spec import ModelSpec

    return (model, None) if isinstance(model, ModelSpec) else (None, model)


def _check_names(function: str, options: Mapping[str, object], allowed: Mapping[str, object]) -> None:
    for name in options:
        if name not in allowed:
            hint = did_you_mean(name, allowed)
            raise ConfigError(f"{function} has no option {name!r}; it has {', '.join(allowed)}.{hint}")
