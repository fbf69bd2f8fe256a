"""Rewards that a program hands over: objects and functions."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from sage_grpo.named import ObjectNeeded
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.spec import RewardSpec, gather_rewards, load_reward, own_reward

CLIPS = torch.stack([torch.full((2, 4, 4, 3), level, dtype=torch.uint8) for level in (0, 51, 255)])


def bright(videos, prompts, fps):
    return videos.float().mean(dim=(1, 2, 3, 4)) / 255


class TwoParts:
    """An object with a state."""

    names = ("level", "half")

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, videos, prompts, fps):
        level = bright(videos, prompts, fps) * self.factor
        return {"level": level, "half": level / 2}


def total(rewards: Any) -> tuple[CompositeReward, list[float]]:
    specs, objects = gather_rewards(rewards)
    composite = CompositeReward(specs, objects=objects)
    return composite, [round(value, 4) for value in composite.score(CLIPS, ["a"] * 3, 8.0)[0].total.tolist()]


def test_a_function_is_a_reward_of_its_own_name() -> None:
    composite, values = total(bright)
    assert (composite.titles, composite.names, values) == (("bright",), ("bright",), [0, 0.2, 1])


def test_an_object_is_called_with_its_state_and_weighted() -> None:
    composite, values = total([own_reward(TwoParts(2.0), weights={"level": 1.0, "half": -1.0}, label="mine"), bright])
    assert composite.titles == ("mine", "bright")
    assert values == [0, 0.4, 2]


def test_names_specs_and_objects_may_be_mixed() -> None:
    specs, objects = gather_rewards(["motion_free", RewardSpec(name="clip"), bright])
    assert [spec.name for spec in specs] == ["motion_free", "clip", "object:bright"]
    assert list(objects) == ["object:bright"]


def test_lambdas_partials_and_options() -> None:
    def scaled(videos, prompts, fps, by: float = 1.0):
        return by * bright(videos, prompts, fps)

    assert total(lambda videos, prompts, fps: [1.0] * len(prompts))[0].names == ("reward",)
    assert total(functools.partial(scaled, by=3.0))[1] == [0, 0.6, 3]
    assert total(own_reward(scaled, options={"by": 2.0}))[1] == [0, 0.4, 2]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: gather_rewards([bright, bright]), "Two rewards are called 'bright'.*label"),
        (lambda: gather_rewards([TwoParts]), "TwoParts is a class: give an object of it"),
        (lambda: gather_rewards([3]), "A int is not a reward"),
        (lambda: gather_rewards({"name": "clip"}), r"RewardSpec\(name='clip'"),
        (lambda: own_reward(bright, weight={"a": 1}), "no setting 'weight'. Did you mean 'weights'"),
        (lambda: own_reward(TwoParts(1.0), options={"factor": 2}), "but TwoParts is an object: set it up yourself"),
        (lambda: own_reward(functools.partial(bright, None, None)), "cannot be called"),
        (lambda: total(TwoParts(1.0)), "has the parts level, half: give the weights"),
    ],
)
def test_what_is_no_reward_is_refused(make: Any, said: str) -> None:
    with pytest.raises(RewardConfigError, match=said):
        make()


def test_an_object_cannot_be_loaded_by_its_name() -> None:
    with pytest.raises(
        ObjectNeeded, match=r"got a reward as an object of a Python program \(object:bright\).*--rewards"
    ):
        load_reward(RewardSpec(name="object:bright"))
