"""A reward in processes of its own gives the scores that it gives here, to the bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.ray_reward import RewardActor
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.types import Sound

PROMPTS = ["a cat", "a cat", "a dog", "a dog", "a dog"]


class Near:
    def __init__(self, spec: RewardSpec) -> None:
        self.judge, self.sent = RewardActor(spec, torch.get_num_threads(), [], lambda: None, "cpu"), []

    def ask(self, method: str, *given: Any) -> Any:
        self.sent.append((method, given))
        return getattr(self.judge, method)(*given)


def both(spec: RewardSpec, **more: Any) -> tuple[Any, Any, Near]:
    generator = torch.Generator().manual_seed(0)
    videos = torch.randint(0, 256, (5, 9, 16, 16, 3), dtype=torch.uint8, generator=generator)
    other = RewardSpec(name="worker_rewards:first_frame", label="other", options={"per_frame": True, "num_frames": 2})
    near = Near(spec)
    found = []
    for away in ({}, {spec.title: near}):
        reward = CompositeReward([spec, other], away=away)
        scores, report = reward.score(videos, PROMPTS, 8.0, **more)
        facts = reward.names, reward.weights, reward.reads_clips, reward.compares, reward.hears
        found.append((scores, report, facts, reward.frames_read(9, 8.0)))
    return found[0], found[1], near


@pytest.mark.parametrize(
    ("spec", "more"),
    [
        (RewardSpec(name="worker_rewards:slow", batch_size=2), {}),
        (RewardSpec(name="worker_rewards:first_frame", options={"per_frame": True, "num_frames": 3}), {}),
        (
            RewardSpec(name="worker_rewards:known", options={"reads": "latents"}),
            {"latents": torch.arange(10.0).view(5, 2)},
        ),
        (RewardSpec(name="worker_rewards:better", options={"takes": "pairs"}), {"groups": [0, 0, 1, 1, 1]}),
        (RewardSpec(name="worker_rewards:loud"), {"sound": Sound(torch.arange(10.0).view(5, 1, 2) / 10, 2)}),
        (RewardSpec(name="worker_rewards:picky"), {"metadata": [{"number": n} for n in range(5)]}),
    ],
)
def test_scores_failures_and_what_is_read_are_those_of_here(spec: RewardSpec, more, monkeypatch) -> None:
    monkeypatch.setattr("worker_rewards.SECONDS", 0.0)
    here, there, near = both(spec, **more)
    assert torch.equal(here[0].total.nan_to_num(-1), there[0].total.nan_to_num(-1))
    assert here[0].total.isfinite().any()
    for name, part in here[0].parts.items():
        assert torch.equal(part.nan_to_num(-1), there[0].parts[name].nan_to_num(-1)), name
    assert here[1:] == there[1:]
    assert (here[3] is None) == (spec.name not in ("worker_rewards:first_frame", "worker_rewards:known"))
    (sent,) = [given[0] for method, given in near.sent if method == "score"]
    assert (sent.videos.numel() > 0) != (spec.options.get("reads") == "latents")
    assert (sent.latents is None) == (spec.options.get("reads") != "latents")
    assert (sent.sound is None) == (spec.name != "worker_rewards:loud")


def test_what_does_not_go_with_actors_is_refused(make_config) -> None:
    spec = RewardSpec(name="worker_rewards:smooth", actors=1)
    with pytest.raises(ValueError, match="actors of rewards: they are processes on a Ray cluster"):
        make_config(rewards=[spec])
    with pytest.raises(RewardConfigError, match="actors have devices of their own"):
        dataclasses.replace(spec, device="cpu")
    with pytest.raises(RewardConfigError, match="actor_gpus and actor_cpus are about actors"):
        dataclasses.replace(spec, actors=0, actor_gpus=1.0)
