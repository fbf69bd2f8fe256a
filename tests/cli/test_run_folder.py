"""evaluate, generate and export on the folder of a run: its settings unless told otherwise, any of its weights, to the bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sage_grpo.cli.main import main
from sage_grpo.models.lora import FILE
from sage_grpo.models.spec import LoraSpec, ModelSpec
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.session import run as train
from sage_grpo.training.config import (
    BatchConfig,
    DataConfig,
    EvalConfig,
    KeepConfig,
    LogConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
)

BRIGHT = [RewardSpec(name="video_stats", weights={"brightness": 1.0}, options={"parts": ["brightness"]})]
Run = Callable[[str], Path]


@pytest.fixture(scope="module")
def finished(checkpoint, tmp_path_factory) -> Run:
    """kind -> folder of a finished run; nothing in its settings is a default: "full" with an EMA, or "lora"."""
    root = tmp_path_factory.mktemp("runs")
    (root / "train.txt").write_text("a cat\na red dog\n")
    (root / "held_out.csv").write_text("prompt,seed\na bird,\nthe sea,7\na tree,\n")

    def get(kind: str) -> Path:
        if (root / kind).is_dir():
            return root / kind
        model = ModelSpec(
            path=str(checkpoint("wan_t2v")), frames=5, height=16, width=32, fps=4.0, shift=3.0, guidance_scale=2.0,
            negative_prompt="bad", cache=None, lora=LoraSpec(rank=2) if kind == "lora" else None,
        )  # fmt: skip
        config = TrainConfig(
            out=str(root / kind), iterations=2, model=model, rewards=BRIGHT, max_failed_fraction=0.5,
            data=DataConfig(prompts=str(root / "train.txt"), eval_prompts=str(root / "held_out.csv")),
            batch=BatchConfig(prompts=2, group_size=2, micro_batch=3),
            rollout=RolloutConfig(steps=3, deterministic_last=True),
            optimizer=OptimizerConfig(lr=1e-2 if kind == "full" else 0.3, ema=0.5 if kind == "full" else None),
            evaluate=EvalConfig(every=1, prompts=2, per_prompt=2, steps=3, seed=5, show=1),
            keep=KeepConfig(checkpoint_every=1, videos_every=1 if kind == "lora" else 0, videos=1),
            log=LogConfig(tensorboard=False, progress=False),
        )  # fmt: skip
        train(config)
        return root / kind

    return get


@pytest.fixture
def evaluated(capsys) -> Callable[..., dict[str, float]]:
    def get(run: Path, *words: str) -> dict[str, float]:
        assert main(["evaluate", "--run", str(run), *words, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return get


def own(run: Path, iteration: int) -> dict[str, float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    (row,) = (row for row in rows if row["iteration"] == iteration and "eval/total" in row)
    return {name.removeprefix("eval/"): value for name, value in row.items() if name.startswith("eval/")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_evaluations_of_a_run_are_repeated_to_the_bit(kind: str, finished: Run, evaluated, tmp_path: Path) -> None:
    run = finished(kind)
    found = {0: evaluated(run, "--weights", "base"), 1: evaluated(run, "--checkpoint", "1")}
    found[2] = evaluated(run, "--out", str(tmp_path))
    assert (tmp_path / "clips.png").is_file()
    assert found == {iteration: own(run, iteration) for iteration in found}
    assert len({one["total"] for one in found.values()}) == 3
    if kind == "full":
        assert evaluated(run, "--ema") == found[2]
        assert evaluated(run, "--ema", "false")["total"] != found[2]["total"]


@pytest.mark.slow
def test_pairs_are_two_plain_evaluations(finished: Run, evaluated, tmp_path: Path) -> None:
    found = evaluated(finished("lora"), "--pairs", "true", "--out", str(tmp_path))
    assert found["base"] == own(finished("lora"), 0)  # which are those of plain evaluations, as the test above says
    assert found["tuned"] == own(finished("lora"), 2)
    total = found["differences"]["total"]
    assert (total["prompts"], total["pairs"]) == (2, 4)
    assert total["change"] == pytest.approx(found["tuned"]["total"] - found["base"]["total"], abs=1e-6)
    assert total["change"] != 0
    assert json.loads((tmp_path / "pairs.json").read_text()) == found
    assert (tmp_path / "pairs.png").is_file()
    words = ["--lora", str(finished("lora") / "final"), "--pairs", "true"]  # an adapter alone, on the run's base
    assert evaluated(finished("lora"), *words)["base"] == found["base"]


@pytest.mark.slow
def test_an_export_holds_the_average_where_there_is_one(finished: Run, tmp_path: Path) -> None:
    run, file = finished("full"), "transformer/diffusion_pytorch_model.safetensors"
    for words in ((), ("--ema",), ("--ema", "false")):
        out = tmp_path / "-".join(("export", *words))
        assert main(["export", "--run", str(run), "--out", str(out), *words]) == 0
        exported, final = load_file(out / file), load_file(run / "final" / file)  # which is the average
        assert all(torch.equal(exported[name], final[name]) for name in final) == (words != ("--ema", "false"))


@pytest.mark.slow
def test_the_best_weights_are_exported_from_their_checkpoint_or_from_what_is_left(
    finished: Run, tmp_path: Path
) -> None:
    run, out = shutil.copytree(finished("lora"), tmp_path / "run"), tmp_path / "out"
    for number in range(2):
        assert main(["export", "--run", str(run), "--weights", "best", "--out", str(out / str(number))]) == 0
        best, exported = (load_file(folder / FILE) for folder in (run / "best", out / str(number)))
        assert best.keys() == exported.keys()
        assert all(torch.equal(best[name], exported[name]) for name in best)
        shutil.rmtree(run / "checkpoints")
        (run / "checkpoints").mkdir()
        (out / str(number) / FILE).unlink()
    words = ["--weights", "best", "--format", "comfy", "--out", str(out)]
    assert main(["export", "--run", str(run), *words]) == 0
    up = load_file(out / "lora_comfy.safetensors")["diffusion_model.blocks.0.ffn.0.lora_up.weight"]
    assert torch.equal(up, best["transformer.blocks.0.ffn.net.0.proj.lora_B.weight"])
    assert main(["export", "--run", str(run), "--weights", "best", "--merged", "--out", str(out / "whole")]) == 2
