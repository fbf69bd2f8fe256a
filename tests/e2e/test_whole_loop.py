"""`train` from the command line to files on disk, with frame rewards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tiny
from sage_grpo.cli.main import main

pytestmark = pytest.mark.slow


def config_file(folder: Path, text: str) -> Path:
    file = folder / "run.yaml"
    file.write_text(text)
    return file


def yaml(model: Path, prompts: Path, out: Path) -> str:
    return f"""
out: {out}
iterations: 2
model: {{path: {model}, frames: 5, height: 16, width: 16, cache: null, guidance_scale: 2.0}}
rewards:
- {{name: "e2e_rewards:redness"}}
- {{name: video_stats, weights: {{brightness: 0.5}}}}
data: {{prompts: {prompts}, eval_prompts: {prompts}}}
batch: {{prompts: 2, group_size: 2, micro_batch: 4}}
rollout: {{steps: 3, deterministic_last: true}}
optimizer: {{lr: 1.0e-3}}
evaluate: {{every: 0, prompts: 2, steps: 2, show: 2}}
keep: {{checkpoint_every: 1, videos_every: 1, videos: 1}}
log: {{progress: false}}
"""


def test_the_whole_loop_and_a_rerun_of_the_written_configuration(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    base, prompts, out = checkpoint("hunyuan15_t2v"), tmp_path / "prompts.jsonl", tmp_path / "run"
    prompts.write_text('{"prompt": "a cat", "seed": 5}\n"a dog"\n"a bird"\n')
    assert main(["train", "--config", str(config_file(tmp_path, yaml(base, prompts, out)))]) == 0
    found = rows(out)
    assert [row["iteration"] for row in found] == [0, 1, 2, 2]
    steps, evaluations = [r for r in found if "reward/total" in r], [r for r in found if "eval/total" in r]
    assert len(steps) == len(evaluations) == 2
    for row in steps:
        assert row["reward/failed"] == 0
        assert row["ratio/first_log"] == 0.0
        assert row["reward/total"] == pytest.approx(row["reward/redness"] + 0.5 * row["reward/brightness"], abs=1e-5)
    assert evaluations[0]["eval/total"] != evaluations[1]["eval/total"]
    videos = {file.name for file in (out / "videos").glob("*.mp4")}
    assert videos == {
        "heldout-000000-00.mp4", "heldout-000000-01.mp4", "heldout-000002-00.mp4", "heldout-000002-01.mp4",
        "rollout-000001-00.mp4", "rollout-000002-00.mp4",
    }  # fmt: skip
    assert list((out / "tensorboard").glob("events.*"))
    before, after = (tiny.pipeline(folder).transformer.state_dict() for folder in (base, out / "final"))
    assert before.keys() == after.keys(), "what the run leaves loads into stock diffusers"
    assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())

    again = tmp_path / "again"
    assert main(["train", "--config", str(out / "config.yaml"), "--out", str(again)]) == 0
    assert rows(again) == found


def rows(out: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in lines]
