"""What a Python program hands to a run in place of what its configuration would name: model, rewards, prompts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sage_grpo.configure import ConfigError
from sage_grpo.data.prompts import Frame, Prompt, Row, prompts_of
from sage_grpo.folder.prints import Fingerprinted
from sage_grpo.models.base import VelocityModel
from sage_grpo.models.spec import ModelSpec
from sage_grpo.objects import name_of
from sage_grpo.rewards.spec import RewardLike, gather_rewards
from sage_grpo.training.config import TrainConfig
from sage_grpo.types import Reward


@dataclass(frozen=True, kw_only=True)
class Own:
    """Objects; what is None comes from the configuration."""

    model: VelocityModel | None = None
    rewards: Mapping[str, Reward] = field(default_factory=dict)
    """By the names in their specs; rewards of other names are loaded."""
    prompts: Sequence[Prompt] | None = None
    held_out: Sequence[Prompt] | None = None

    def unknown(self) -> list[str]:
        """Names of objects of which only the code can be compared with that of an earlier run."""
        return [name for name, reward in self.rewards.items() if not isinstance(reward, Fingerprinted)]


def adopt(
    config: TrainConfig,
    *,
    model: VelocityModel | None = None,
    rewards: RewardLike | Sequence[RewardLike] | None = None,
    prompts: Iterable[Row] | Frame | None = None,
    held_out: Iterable[Row] | Frame | None = None,
) -> tuple[TrainConfig, Own]:
    """The objects, and the configuration that says that they were used."""
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
    return config, Own(model=model, rewards=objects, prompts=train, held_out=test)


def check_model(model: VelocityModel) -> ModelSpec:
    """What a model was made from; refuses what is no model, by what it lacks."""
    if inspect.isclass(model):
        raise ConfigError(f"{model.__name__} is a class: give an object of it.")
    if isinstance(model, VelocityModel):
        if not isinstance(model.spec, ModelSpec):
            raise ConfigError(f"{type(model).__name__}.spec must be a ModelSpec, got a {type(model.spec).__name__}.")
        return model.spec
    members = [name for name in (*VelocityModel.__annotations__, *vars(VelocityModel)) if not name.startswith("_")]
    missing = [name for name in members if name not in dir(model)]
    raise ConfigError(
        f"A {type(model).__name__} is no VelocityModel: it lacks {', '.join(missing)}. docs/extending.md says what each one does; "
        "a diffusers checkpoint is loaded with ModelSpec(path=...).load()."
    )
