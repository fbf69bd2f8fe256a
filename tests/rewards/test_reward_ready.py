"""Steps between a reward and its first score on this machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from sage_grpo.rewards.spec import Need, RewardSpec, readiness


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
    note = "the server is called when the reward is tried out"
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
