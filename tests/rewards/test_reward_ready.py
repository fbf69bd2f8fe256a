"""What a reward still needs on this machine, and rewards in processes of their own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_rewards import clips, toy

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.ray_reward import RewardActor
from sage_grpo.rewards.spec import Need, RewardSpec, readiness
from sage_grpo.types import Sound


def told(name: str, **options: Any) -> str:
    return readiness(RewardSpec(name=name, options=options)).describe()


def test_what_stands_between_a_reward_and_its_first_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    here, gone = str(tmp_path), str(tmp_path / "gone")
    source = "a CLIP model in transformers' format, a folder or a hub name (openai/clip-vit-large-patch14)"
    assert told("clip") == "needs the option model"
    assert told("clip", model=here) == "ready"
    assert told("clip", model=gone) == f"model {gone} is missing ({source})"
    assert told("clip", model="a/b", tokenizer="a/b") == "downloads a/b"
    assert told("ocr") == 'pip install "sage-grpo[ocr]"'
    assert told("toy_rewards:worth") == "own code (toy_rewards:worth): train and evaluate try it out"
    assert "Did you mean 'videoalign'" in told("videoaling")
    server = {"url": "http://localhost/v1", "model": "m", "key_env": "NO_SUCH_KEY"}
    note = "the server is asked when it is tried out"
    assert told("vlm_judge", **server) == f"the environment variable that key_env names is empty; {note}"
    monkeypatch.setenv("NO_SUCH_KEY", "x")
    assert told("vlm_judge", **server) == note
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert told("clip", model="a/b") == f"model a/b is missing ({source})"
    assert not readiness(RewardSpec(name="clip")).ready
    assert readiness(RewardSpec(name="clip", options={"model": here})).ready


@pytest.mark.parametrize(("value", "named"), [("a/b", True), ("a/b/c", False), ("a", False), ("./b", False)])
def test_names_on_the_hub_have_an_owner_and_no_path(value: str, named: bool) -> None:
    assert Need("k", value, "s", hub="config.json").is_hub_id is named
    assert not Need("k", value, "s").is_hub_id
    assert not Need("k", value, "s", hub="config.json", pinned=True).is_hub_id
    assert Need("k", f"{value}@c0ffee", "s", hub="config.json", pinned=True).is_hub_id is named


class Here:
    def __init__(self, spec: RewardSpec) -> None:
        self.judge, self.asked = RewardActor(spec, torch.get_num_threads(), [], lambda: None, "cpu"), []

    def ask(self, method: str, *given: Any) -> Any:
        self.asked.append((method, *given))
        return getattr(self.judge, method)(*given)


def latent_level(latents, prompts, fps):
    return latents.flatten(1).mean(1)


def heard_level(videos, prompts, fps, sound):
    return sound.waves.flatten(1).mean(1)


def test_rewards_of_other_processes_score_as_here_and_only_what_they_read_travels() -> None:
    specs = [
        toy("mean_level"),
        RewardSpec(name=f"{__name__}:latent_level", options={"reads": "latents"}),
        RewardSpec(name=f"{__name__}:heard_level", weights={"heard_level": 2.0}),
        toy("ranked", options={"takes": "group"}),
    ]
    judges = {spec.title: Here(spec) for spec in specs}
    ours, theirs = CompositeReward(specs), CompositeReward(specs, away=judges)
    latents, sound = torch.arange(8.0).view(4, 2), Sound(torch.arange(16.0).view(4, 1, 4), 8_000)
    given = {"latents": latents, "sound": sound}
    (wanted, _), (found, _) = (one.score(clips(4), ["a", "b", "a", "b"], 8.0, **given) for one in (ours, theirs))
    assert torch.equal(found.total, wanted.total)
    facts = [[(one.hears, one.compares, one.reads_latents) for one in way._members] for way in (ours, theirs)]
    assert facts[0] == facts[1]
    sent = {title: one.asked[-1][1] for title, one in judges.items()}
    assert [len(one.videos[0]) for one in sent.values()] == [4, 0, 4, 4]
    assert [one.latents is not None for one in sent.values()] == [False, True, False, False]
    assert [one.sound is not None for one in sent.values()] == [False, False, True, False]
    before = len(judges["mean_level"].asked)
    assert [theirs.frames_read(9, 8.0) for _ in range(2)] == [None, None]
    assert len(judges["mean_level"].asked) == before + 1
    with pytest.raises(RewardConfigError, match="has actors: leave them out"):
        theirs.gradient(torch.zeros(1, 2), lambda latents: latents, "a", 8.0)
