"""`sage-grpo rewards`: all rewards with what they need, and which of a configuration's are ready, without loading any."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sage_grpo.cli import main
from sage_grpo.rewards.spec import RewardSpec, readiness


def listed(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> list[dict[str, Any]]:
    assert main(["rewards", *words, "--json", "true"]) == status
    return json.loads(capsys.readouterr().out)["rewards"]


def test_a_configuration_is_looked_at_file_by_file(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (tmp_path / "head.safetensors").write_bytes(b"x")
    rewards = [
        {"name": "aesthetic", "options": {"model": "nobody/not-there", "head": str(tmp_path / "head.safetensors")}},
        {"name": "clip", "metric_only": True, "label": "mine", "options": {"model": str(tmp_path / "absent")}},
        {"name": "nowhere_to_be_found:reward"},
    ]
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"recipe": "shapes/sage", "rewards": rewards}))
    aesthetic, clip, own = listed(capsys, str(file), status=1)
    assert aesthetic["ready"]
    assert aesthetic["downloads"] == ["nobody/not-there"]
    assert (clip["label"], clip["ready"]) == ("mine", False)
    assert str(tmp_path / "absent") in clip["missing"][0]
    assert "own code" in own["state"]
    assert "nowhere_to_be_found" not in sys.modules
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "nobody/not-there is missing" in listed(capsys, str(file), status=1)[0]["missing"][0]
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("recipe: shapes/sage\n")
    assert [row["name"] for row in listed(capsys, str(run))] == ["shapes"]


def test_packages_keys_and_names_are_checked(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert 'pip install "sage-grpo[ocr]"' in readiness(RewardSpec(name="ocr")).missing
    options = {"url": "https://host/v1", "model": "m", "key_env": "sk-secret"}
    told = readiness(RewardSpec(name="vlm_judge", options=options)).describe()
    assert "environment variable that key_env names is empty" in told
    assert "sk-secret" not in told
    monkeypatch.setenv("JUDGE_KEY", "k")
    assert readiness(RewardSpec(name="vlm_judge", options={**options, "key_env": "JUDGE_KEY"})).ready
    assert "Did you mean 'hpsv2'" in readiness(RewardSpec(name="hpsv22")).missing[0]
