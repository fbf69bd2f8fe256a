"""`train` from the command line to files on disk, on every family, with frame rewards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tiny
from sage_grpo.cli import main

pytestmark = pytest.mark.slow


def config_file(folder: Path, text: str) -> Path:
    file = folder / "run.yaml"
    file.write_text(text)
    return file


def yaml(model: Path, prompts: Path, out: Path, extra: str = "") -> str:
    return f"""
out: {out}
iterations: 2
model: {{path: {model}, frames: 5, height: 16, width: 16, cache: null, guidance_scale: 2.0{extra}}}
rewards:
- {{name: "e2e_rewards:redness", options: {{per_frame: true, num_frames: 2}}}}
- {{name: video_stats, weights: {{brightness: 0.5}}}}
data: {{prompts: {prompts}, eval_prompts: {prompts}}}
batch: {{prompts: 2, group_size: 2, micro_batch: 4}}
rollout: {{steps: 3, deterministic_last: true}}
optimizer: {{lr: 1.0e-3}}
evaluate: {{every: 0, prompts: 2, steps: 2, show: 2}}
keep: {{checkpoint_every: 1, videos_every: 1, videos: 1}}
log: {{progress: false}}
"""


def save_picture(file: Path, seed: int) -> None:
    from PIL import Image

    Image.fromarray(tiny.image(seed, 16, 16).numpy()).save(file)


@pytest.mark.filterwarnings("ignore:While injecting the PEFT adapters")  # it names modules that it then loads
@pytest.mark.parametrize("kind", ["hunyuan15_t2v", "wan_t2v", "wan_i2v"])
def test_the_whole_loop(kind: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    if kind.endswith("i2v"):
        save_picture(tmp_path / "one.png", 1)
        save_picture(tmp_path / "two.png", 2)
        prompts = tmp_path / "prompts.csv"
        prompts.write_text('prompt,seed,image\n"a cat, running",5,one.png\na dog,,two.png\na bird,7,one.png\n')
    else:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt": "a cat", "seed": 5}\n"a dog"\n"a bird"\n')
    out = tmp_path / "run"
    lora = ", lora: {rank: 2}" if kind == "wan_i2v" else ""
    assert main(["train", "--config", str(config_file(tmp_path, yaml(checkpoint(kind), prompts, out, lora)))]) == 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 1, 2, 2]
    steps, evaluations = [r for r in rows if "reward/total" in r], [r for r in rows if "eval/total" in r]
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
    assert (out / "config.yaml").is_file()
    check_export(kind, out / "final", checkpoint(kind))


def check_export(kind: str, final: Path, base: Path) -> None:
    """What the run leaves loads into stock diffusers and differs from the base."""
    pipe = tiny.pipeline(final if kind != "wan_i2v" else base)
    before = tiny.pipeline(base).transformer.state_dict()
    if kind == "wan_i2v":
        pipe.load_lora_weights(str(final))
        pipe.fuse_lora()
        after = {name.replace(".base_layer", ""): t for name, t in pipe.transformer.state_dict().items()}
    else:
        after = pipe.transformer.state_dict()
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    assert changed
    assert len(changed) < len(before) or kind != "wan_i2v"


def test_a_rerun_of_the_written_configuration_is_the_same_run(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\na dog\n")
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["train", "--config", str(config_file(tmp_path, yaml(checkpoint("wan_t2v"), prompts, first)))]) == 0
    assert main(["train", "--config", str(first / "config.yaml"), "--out", str(second)]) == 0

    def rows(out: Path) -> list[dict]:
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in lines]

    assert rows(first) == rows(second)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--recipe", "flow_gpro"], "Did you mean 'flow_grpo'"),
        (["--optimizer.lrr", "1"], "optimizer.lr"),
        (["--data.prompts", "nowhere.txt", "--model.path", "{model}"], "nowhere.txt\n      your training prompts"),
        (["--batch.group_size", "1"], "group_size must be at least 2"),
        (["--kernel.eta", "0", "--model.path", "{model}", "--data.prompts", "{prompts}"], "kernel.eta is 0"),
    ],
)
def test_mistakes_are_answered_with_the_next_action(
    arguments: list[str], says: str, checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("a cat\n")
    given = [word.format(model=checkpoint("wan_t2v"), prompts=prompts) for word in arguments]
    rewards = ["--rewards", '[{"name": "video_stats", "weights": {"brightness": 1.0}}]']
    assert main(["train", "--out", str(tmp_path / "run"), *rewards, *given]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
