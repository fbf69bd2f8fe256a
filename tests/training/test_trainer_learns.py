"""Every family trains an iteration of every way to learn, and the held-out reward rises with every method."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from PIL import Image

import tiny
from sage_grpo.flow.kernels import Flow, KernelSpec
from sage_grpo.recipes.methods import METHODS
from sage_grpo.training.config import BatchConfig, DataConfig, EvalConfig, OptimizerConfig
from trainer_helpers import of_method, same, weights_of
from trainer_zoo import toy

EVAL = EvalConfig(prompts=5, per_prompt=4, steps=6)


def gain(trainer, iterations: int) -> tuple[float, float]:
    """Rise of the held-out reward, and the standard error of a single evaluation."""
    before = trainer.evaluate().metrics
    for _ in range(iterations):
        trainer.step()
    after = trainer.evaluate().metrics
    return after["eval/total"] - before["eval/total"], before["eval/total_stderr"]


@pytest.mark.parametrize("method", [m if m == "branch" else pytest.param(m, marks=pytest.mark.slow) for m in METHODS])
def test_every_method_learns(method: str, make_config, make_trainer) -> None:
    config = make_config(
        evaluate=EVAL,
        batch=BatchConfig(prompts=4, group_size=6, micro_batch=24),
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0),
        rollout={"steps": 6},
        iterations=24,
    )
    # Flash-GRPO explores little, at one step of the first half: it takes more rollouts.
    rise, error = gain(make_trainer(of_method(method, config)), 72 if method == "flash_grpo" else 24)
    assert rise > 4 * error


WAYS = ("sage", "branch", "mix_grpo_flash", "grpo_guard", "nft", "awm", "draft")
"""All steps, one shared step, a window with another solver after it, scaled ratios, both without an SDE, and a gradient of the reward."""
WITHOUT_RATIO = ("nft", "dpo", "rft", "refl", "draft", "adjoint")
FAMILIES = (
    "wan_t2v",
    "wan22_t2v",
    "ltx",
    "ltx2",
    "hunyuan",
    "sana_video",
    "flux",
    "flux2",
    "sd3",
    "qwen_image",
    "z_image",
    "qwen_image_edit",
)
PICTURED = ("ltx_condition", "ltx2_3", "wan_i2v", "qwen_image_edit")
"""Those that are trained from a picture."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", dict.fromkeys((*FAMILIES, *PICTURED)))
def test_every_method_trains_every_family(kind: str, make_config, make_trainer, tmp_path) -> None:
    sides = {"flux": 8, "sd3": 8, "sana_video": 32, "ltx2": 32, "ltx2_3": 32, "ltx_condition": 32}
    small = {"height": sides[kind], "width": sides[kind]} if kind in sides else {}
    small |= {"expert": "both"} if kind == "wan22_t2v" else {}
    small |= {"options": {"picture_pixels": 4096}} if kind == "qwen_image_edit" else {}
    batch = BatchConfig(prompts=2, group_size=2, micro_batch=2)  # a clip for each of mix_grpo's four updates
    if kind in PICTURED:
        small |= {"frames": 1 if kind in tiny.IMAGES else 5}
        Image.fromarray(tiny.image(1, 40, 80).numpy()).save(tmp_path / "first.png")
        rows = "".join(f'{{"prompt": "{prompt}", "image": "first.png"}}\n' for prompt in ("a cat", "a dog"))
        (tmp_path / "rows.jsonl").write_text(rows)
    config = make_config(kind=kind, model=small, rollout={"steps": 4}, batch=batch)
    if kind in PICTURED:
        config = replace(config, data=DataConfig(prompts=str(tmp_path / "rows.jsonl"), eval_prompts=None))
    for method in METHODS if kind == "wan_t2v" else WAYS:
        # One with guidance: two branches, or a scale that is an input.
        scale = 3.0 if method == "sage" else 1.0
        trainer = make_trainer(of_method(method, replace(config, model=replace(config.model, guidance_scale=scale))))
        before = weights_of(trainer)
        metrics = trainer.step()
        assert all(math.isfinite(value) for value in metrics.values()), method
        assert metrics.get("ratio/first_log", 0.0 if method in WITHOUT_RATIO else None) == 0.0, method
        assert not same(before, weights_of(trainer)), method


def test_flow_on_a_grid_that_starts_below_one(make_config, make_trainer, monkeypatch) -> None:
    """DPM-Solver's grids start at 0.999 and more: the kernel that samples and replays knows that this is the first step."""
    sigmas = torch.tensor([0.999875, 0.97, 0.8, 0.4, 0.0])
    monkeypatch.setattr(toy.ToyModel, "sigmas", lambda model, steps, shift=None: sigmas)
    trainer = make_trainer(make_config(kernel=KernelSpec(name="flow", eta=0.5), rollout={"steps": 4}))
    assert trainer.planner.kernel == Flow(0.5, first=float(sigmas[0]))
    assert trainer.step()["ratio/first_log"] == 0.0
