"""From a configuration to what a trainer works with: cheap parts first, the model last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sage_grpo.configure import ConfigError
from sage_grpo.data.prompts import Prompt
from sage_grpo.models.base import Explains, VelocityModel
from sage_grpo.models.devices import choose_device
from sage_grpo.models.network.blocks import worth_compiling
from sage_grpo.parallel.world import World
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.own import Own
from sage_grpo.training.placing import get_ready
from sage_grpo.training.scoring import load_rewards
from sage_grpo.training.sources import load_sources


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a trainer is handed."""

    model: VelocityModel
    reward: CompositeReward
    prompts: Sequence[Prompt]
    """What it learns on."""
    held_out: Sequence[Prompt] = ()
    """What it is evaluated on; without any there is no evaluation."""


def build(config: TrainConfig, world: World | None = None, own: Own | None = None) -> Inputs:
    """Everything that the configuration names, except what a program hands over.

    Prompts and rewards come first (which are tried out): it takes seconds to find out that one is broken, and minutes to load a model.
    """
    world, own = world or World(), own or Own()
    get_ready(wanted=config.model.deterministic)
    prompts, held_out = load_sources(config, own)
    reward = load_rewards(config, prompts[0], world, own)
    if own.model is not None:
        _check_place(own.model, world)
        return Inputs(model=own.model, reward=reward, prompts=prompts, held_out=held_out)
    torch.manual_seed(config.seed)
    device = choose_device(config.model.device if world.device is None else world.device)
    compiled, why = compiles(config, device)
    model = replace(config.model, compile=compiled).load(device, sharded=world.control is not None)
    if isinstance(model, Explains):
        model.choices["compile"] = why
    return Inputs(model=model, reward=reward, prompts=prompts, held_out=held_out)


def compiles(config: TrainConfig, device: torch.device) -> tuple[bool, str]:
    """Whether a run compiles its blocks, and why."""
    passes = config.iterations * config.batch.prompts * config.batch.group_size * config.rollout.steps
    return worth_compiling(config.model.compile, device, config.model.dtype, passes)


def _check_place(model: VelocityModel, world: World) -> None:
    if world.device is not None and model.device != world.device:
        raise ConfigError(
            f"The model is on {model.device}, but this process computes on {world.device}: load it there, for example with "
            f"ModelSpec(...).load({str(world.device)!r})."
        )
