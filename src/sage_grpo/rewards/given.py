"""Rewards that a Python program hands over: objects and functions, beside rewards by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from sage_grpo.objects import name_of
from sage_grpo.rewards.functions import FunctionReward, RewardConfigError, nearest
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.types import Reward


@dataclass(frozen=True)
class GivenReward:
    """A reward object with its settings."""

    spec: RewardSpec
    reward: Reward


RewardLike = str | RewardSpec | GivenReward | Reward | Callable[..., Any]
"""What `gather_rewards` takes for a reward: its name, or what can be called."""


class RewardSettings(TypedDict, total=False):
    """The fields of a RewardSpec but for its name."""

    label: str
    weights: dict[str, float]
    metric_only: bool
    standardize: dict[str, list[float]]
    options: dict[str, Any]
    batch_size: int | None
    device: str
    overlap: bool
    isolate_failures: bool | None
    try_out: bool


def own_reward(target: Reward | Callable[..., Any], **settings: Unpack[RewardSettings]) -> GivenReward:
    """An object or a function as a reward, with the settings of a RewardSpec (label, weights, metric_only, batch_size, ...).

    An object has `names` and `__call__(videos, prompts, fps)`. A function is as docs/rewards.md has it; `options` are its
    further arguments (or `per_frame` and its friends), and its parts are the keys of `weights`, or it has one of its own name.
    """
    known = list(RewardSettings.__annotations__)
    for name in settings:
        if name not in known:
            raise RewardConfigError(f"own_reward has no setting {name!r}.{nearest(name, known)}")
    if inspect.isclass(target):
        raise RewardConfigError(f"{target.__name__} is a class: give an object of it, {target.__name__}(...).")
    label = settings.get("label") or _label(target)
    spec = RewardSpec(name=name_of(label), **settings)
    if isinstance(target, Reward):
        if spec.options:
            raise RewardConfigError(
                f"options are arguments of a function, but {label} is an object: set it up yourself."
            )
        return GivenReward(spec, target)
    if not callable(target):
        raise RewardConfigError(
            f"A {type(target).__name__} is no reward: give a function (videos, prompts, fps), or an object with `names` and "
            "__call__(videos, prompts, fps); see docs/rewards.md."
        )
    return GivenReward(spec, FunctionReward(target, **{"parts": list(spec.weights) or [label], **spec.options}))


def gather_rewards(rewards: RewardLike | Sequence[RewardLike]) -> tuple[list[RewardSpec], dict[str, Reward]]:
    """Specs and objects (by the names in their specs) of one reward or a list of them: names of built-in rewards, specs, objects,
    functions, or what `own_reward` makes of them."""
    given = list(rewards) if isinstance(rewards, Sequence) and not isinstance(rewards, str) else [rewards]
    specs: list[RewardSpec] = []
    objects: dict[str, Reward] = {}
    for one in given:
        if isinstance(one, str):
            one = RewardSpec(name=one)
        if isinstance(one, Mapping):
            raise RewardConfigError(
                f"A reward was given as a mapping: write RewardSpec(name={one.get('name')!r}, ...)."
            )
        if isinstance(one, RewardSpec):
            specs.append(one)
            continue
        one = one if isinstance(one, GivenReward) else own_reward(one)
        if one.spec.name in objects:
            raise RewardConfigError(
                f"Two rewards are called {one.spec.title!r}: give each its own, own_reward(..., label='...')."
            )
        specs.append(one.spec)
        objects[one.spec.name] = one.reward
    return specs, objects


def _label(target: Any) -> str:
    if inspect.isroutine(target):
        return "reward" if target.__name__ == "<lambda>" else target.__name__
    return type(target).__name__
