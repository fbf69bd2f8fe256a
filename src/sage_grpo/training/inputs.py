"""A run's prompts, rewards and model, from its configuration or from objects of a Python program; and the encoding of prompts and given clips."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from sage_grpo.config.parsing import ConfigError
from sage_grpo.data.examples import Examples, content_hash, fitted, load_examples, usable
from sage_grpo.data.prompts import SETS, Frame, Prompt, PromptStream, Row, load_prompts, look_ahead, prompts_of
from sage_grpo.distributed.world import World
from sage_grpo.models.base import VelocityModel, abilities, encoder_of
from sage_grpo.models.checkpoints.cache import EncodingCache
from sage_grpo.models.devices import choose_device
from sage_grpo.models.network.blocks import worth_compiling
from sage_grpo.models.policy import conditions_of
from sage_grpo.models.spec import ModelSpec
from sage_grpo.objectives.build import find_objective
from sage_grpo.rewards.base import SMALL, TRIED, CompositeReward
from sage_grpo.rewards.functions import RewardConfigError, check_known
from sage_grpo.rewards.spec import RewardLike, RewardSpec, gather_rewards
from sage_grpo.training.config import DataConfig, TrainConfig
from sage_grpo.training.offload import DEVICES, get_ready, hold_to_budget
from sage_grpo.training.planner import Planner
from sage_grpo.training.scoring import metadata_of
from sage_grpo.types import Conditioning, Reward
from sage_grpo.utils.clock import Clock
from sage_grpo.utils.imports import name_of, refuse_object
from sage_grpo.utils.video import read_video
from sage_grpo.worlds.world import WORLDS, Listed

NAMES = (*WORLDS, *SETS)
"""Prompts that need no file."""
MOVED = {"scenes": "research/scenes/train.txt (held out: heldout.txt beside it)"}
"""Files that have taken the place of prompts that earlier versions knew by a name."""


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Objects of a Python program that replace parts of the configuration; None keeps the configured part."""

    model: VelocityModel | None = None
    rewards: Mapping[str, Reward] = field(default_factory=dict)
    """By the names in their specs; rewards with other names are loaded."""
    prompts: Sequence[Prompt] | None = None
    held_out: Sequence[Prompt] | None = None


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Inputs of a trainer."""

    model: VelocityModel
    reward: CompositeReward
    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt] = ()
    examples: Examples | None = None
    """Clips to learn from, where prompts come with them."""


def adopt(
    config: TrainConfig,
    *,
    model: VelocityModel | None = None,
    rewards: RewardLike | Sequence[RewardLike] | None = None,
    prompts: Iterable[Row] | Frame | None = None,
    held_out: Iterable[Row] | Frame | None = None,
) -> tuple[TrainConfig, Overrides]:
    """Take objects in place of configured parts: the configuration that names them, and the objects."""
    objects: dict[str, Reward] = {}
    if rewards is not None:
        specs, objects = gather_rewards(rewards)
        config = replace(config, rewards=specs)
    train = None if prompts is None else prompts_of(prompts, "prompts")
    test = None if held_out is None else prompts_of(held_out, "held_out")
    if train is not None:
        config = replace(config, data=replace(config.data, prompts=name_of(type(prompts).__name__)))
    if test is not None:
        config = replace(config, data=replace(config.data, eval_prompts=name_of(type(held_out).__name__)))
    if model is not None:
        spec = check_model(model)
        config = replace(config, model=replace(spec, family=name_of(type(model).__name__)))
    return config, Overrides(model=model, rewards=objects, prompts=train, held_out=test)


def check_model(model: VelocityModel) -> ModelSpec:
    """The spec of a model; raises a ConfigError that names the missing members of anything else."""
    if inspect.isclass(model):
        raise ConfigError(f"{model.__name__} is a class: give an object of it.")
    if isinstance(model, VelocityModel):
        if not isinstance(model.spec, ModelSpec):
            raise ConfigError(f"{type(model).__name__}.spec must be a ModelSpec, got a {type(model.spec).__name__}.")
        return model.spec
    members = [name for name in (*VelocityModel.__annotations__, *vars(VelocityModel)) if not name.startswith("_")]
    missing = [name for name in members if name not in dir(model)]
    raise ConfigError(
        f"A {type(model).__name__} is not a VelocityModel: it lacks {', '.join(missing)}. docs/extending.md describes each one; "
        "a diffusers checkpoint is loaded with ModelSpec(path=...).load()."
    )


def build(
    config: TrainConfig,
    world: World | None = None,
    given: Overrides | None = None,
    sources: tuple[list[Prompt], list[Prompt]] | None = None,
) -> Inputs:
    """Build all inputs that the configuration names, except those that a program passes; what fails in seconds comes before the model.

    `sources` are the prompts of `load_sources`, where they are loaded already."""
    world, given = world or World(), given or Overrides()
    get_ready(wanted=config.model.deterministic)
    wanted = config.model.device if world.device is None else world.device
    device = choose_device(wanted) if given.model is None else given.model.device
    differentiates = find_objective(config.objective.kind).differentiates
    hold_to_budget(config.model, device)
    prompts, held_out = sources or load_sources(config, given)
    reward = load_rewards(config, device, given.rewards)
    try_rewards(reward, prompts, config.model, world, gradient=differentiates)
    model = load_model(config, device, sharded=world.control is not None) if given.model is None else given.model
    if given.model is not None and world.device is not None and model.device != world.device:
        raise ConfigError(
            f"The model is on {model.device}, but this process computes on {world.device}: load it there, for example with "
            f"ModelSpec(...).load({str(world.device)!r})."
        )
    examples = None
    if config.data.clips is not None:
        encoder_of(model)
        examples = usable(config.data.clips, prompts, model.video)
        prompts = list(examples.prompts)
    return Inputs(model=model, reward=reward, prompts=prompts, held_out=held_out, examples=examples)


def load_model(config: TrainConfig, device: torch.device, *, sharded: bool = False) -> VelocityModel:
    torch.manual_seed(config.seed)
    compiled, why = compiles(config, device)
    model = replace(config.model, compile=compiled).load(device, sharded=sharded)
    abilities(model).choices["compile"] = why
    return model


def compiles(config: TrainConfig, device: torch.device) -> tuple[bool, str]:
    if config.model.deterministic and device.type in DEVICES:
        if config.model.compile:
            raise ConfigError(
                "model.compile true does not go with model.deterministic true on a GPU: a backward pass in a fixed order must be compiled in that "
                "mode, apart from the rollout's passes, and replays would round otherwise than rollouts. Leave one of them out."
            )
        return False, "no: model.deterministic has backward passes that are not compiled"
    passes = config.iterations * config.batch.prompts * config.batch.group_size * config.rollout.steps
    return worth_compiling(config.model.compile, device, config.model.dtype, passes)


def load_rewards(
    config: TrainConfig, device: torch.device, objects: Mapping[str, Reward] | None = None
) -> CompositeReward:
    """The rewards of a run. Between their calls they leave the accelerator to the policy."""
    return CompositeReward(
        config.rewards,
        max_failed_fraction=config.max_failed_fraction,
        device=device,
        offload_between=device.type != "cpu",
        objects=objects,
        optional=config.data.clips is not None,
    )


def try_rewards(
    reward: CompositeReward,
    prompts: Sequence[Prompt],
    model: ModelSpec,
    world: World | None = None,
    *,
    gradient: bool = False,
) -> None:
    """Call every reward once, before anything expensive; RewardConfigError on all ranks when one fails on any."""
    asked = {name: getattr(model, name) for name in ("frames", "height", "width", "fps")}
    asked = {name: value for name, value in asked.items() if value is not None}
    video = replace(SMALL, **asked) if asked else None
    by_route: dict[tuple[str, ...], list[Prompt]] = {}
    for prompt in prompts:
        by_route.setdefault(prompt.rewards, []).append(prompt)
    tried = [prompt for some in by_route.values() for prompt in some[:TRIED]]
    (text, metadata), *others = ((prompt.text, metadata_of(prompt)) for prompt in tried)
    problem = reward.try_out(
        text,
        metadata=metadata,
        others=others,
        video=video,
        gradient=gradient,
        sampled=True,
        routes=[prompt.rewards for prompt in tried],
    )
    problems = [text for text in (world or World()).texts(problem) if text]
    if problems:
        raise RewardConfigError("\n".join(dict.fromkeys(problems)))


def load_sources(config: TrainConfig, given: Overrides | None = None) -> tuple[list[Prompt], list[Prompt]]:
    given, source, clips = given or Overrides(), config.held_out, config.data.clips
    if clips is not None:
        if given.prompts is not None:
            raise ConfigError(f"There are prompts as an object and in data.clips ({clips}): leave one of them out.")
        prompts: Sequence[Prompt] = load_examples(clips, pairs=config.group_size > 1)
    else:
        prompts = given.prompts if given.prompts is not None else training_prompts(config.data)
    held_out = given.held_out if given.held_out is not None else prompts_from(source) if source is not None else ()
    check_routes(config.rewards, [*prompts, *held_out])
    return list(prompts), list(held_out)


def training_prompts(data: DataConfig) -> list[Prompt]:
    """The prompts of data.prompts; of several sources each prompt knows its own."""
    if isinstance(data.prompts, str):
        return prompts_from(data.prompts, split="train")
    return [replace(one, source=source) for source in data.sources for one in prompts_from(source.path, split="train")]


def check_routes(specs: Sequence[RewardSpec], prompts: Sequence[Prompt]) -> None:
    """Refuse prompts that name rewards of which none counts, or which do not exist."""
    titles, counting = [spec.title for spec in specs], {spec.title for spec in specs if spec.counts}
    for prompt in prompts if specs else ():
        check_known(prompt.rewards, titles, f"rewards of the prompt {prompt.text[:60]!r}: there is no reward")
        if prompt.rewards and counting.isdisjoint(prompt.rewards):
            raise RewardConfigError(
                f"rewards of the prompt {prompt.text[:60]!r}: none of {', '.join(prompt.rewards)} counts (metric_only). Name one of "
                f"{', '.join(sorted(counting))}, or leave the column out."
            )


def prompts_from(source: str, *, split: Listed = "heldout") -> list[Prompt]:
    """The prompts of a file, of a set of the package, or of a split of a world."""
    refuse_object(source, "its prompts", "Give a file (--prompts, --data.prompts)")
    if source in WORLDS:
        return [Prompt(text) for text in WORLDS[source].texts(split)]
    if source in MOVED and not Path(source).is_file():
        raise ConfigError(
            f"The prompts {source!r} are not in the package any more: {MOVED[source]} of the project's repository has them."
        )
    return load_prompts(source, NAMES, split=split)


@dataclass
class EncodeAhead:
    """Encodes this rank's prompts of the iterations up to `data.encode_ahead`, and the held-out ones, so that text encoders leave the memory."""

    model: VelocityModel
    planner: Planner
    held_out: Sequence[Prompt]
    rank: int
    clock: Clock
    encoded: dict[Prompt, Conditioning] = field(default_factory=dict)
    """The model itself keeps no conditionings in memory."""
    until: int = 0
    """Iteration up to which prompts are encoded."""

    def run(self, stream: PromptStream, iteration: int) -> None:
        planner, config = self.planner, self.planner.config
        later = 1 + config.rollout.staleness
        if self.until >= min(config.iterations, iteration + later):
            return
        coming = PromptStream(stream.prompts, config.seed)
        coming.position = stream.position
        batches = (coming.take(config.batch.prompts) for _ in range(iteration, config.iterations))
        places = [planner.places(rank) for rank in range(planner.ranks)]
        least = later * config.batch.prompts if later > 1 else 0
        near = look_ahead(batches, places, max(config.data.encode_ahead, least))
        training = [batch[place] for batch in near for place in places[self.rank]]
        prompts = list(dict.fromkeys([*training, *self.held_out[: config.evaluate.prompts]]))
        with self.clock("encode"):
            tick = self.clock.ticker(len(prompts))
            self.encoded = {prompt: self.encoded[prompt] for prompt in prompts if prompt in self.encoded}
            for prompt in prompts:
                if prompt not in self.encoded:
                    (self.encoded[prompt],) = conditions_of(self.model, [prompt])
                tick()
        self.model.unload_text()
        self.until = iteration + len(near)


LATENTS = "latents"
"""Folder of a run's encoded clips."""


@dataclass
class Encoder:
    """Latents of clip files in the model's format, cached by content of the file, format and VAE."""

    model: VelocityModel
    folder: Path
    placed: Callable[[], AbstractContextManager[None]]
    """Context inside which the VAE is on the model's device."""

    def __post_init__(self) -> None:
        self._cache = EncodingCache(self.folder, encoder_of(self.model).key(), "Encoded clips")

    def __call__(self, file: Path) -> Tensor:
        """Latents of one clip on the CPU."""
        key = content_hash(file), str(self.model.video)
        return self._cache.get(key, lambda: {"latents": self._encode(file)})["latents"]

    def _encode(self, file: Path) -> Tensor:
        clip, fps = read_video(file)
        try:
            clip = fitted(clip, fps, self.model.video)
        except ValueError as error:  # the header promised more
            raise ValueError(f"{file} is {error}. Take its row out of data.clips.") from error
        with self.placed():
            return encoder_of(self.model).to_latents(clip[None])[0]
