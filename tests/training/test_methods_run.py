"""Methods, trust regions, KL coefficients, kernels and families run together: ratios start at exactly 1, weights move, rewards rise, and
runs resume to the bit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from PIL import Image

import tiny
from sage_grpo import recipes
from sage_grpo.models.spec import LoraSpec
from sage_grpo.recipes.methods import METHODS
from sage_grpo.samplers.kernels import Flow, KernelSpec
from sage_grpo.samplers.windows import Window
from sage_grpo.training.config import BatchConfig, DataConfig, EvalConfig, OptimizerConfig, UpdateConfig
from sage_grpo.training.kl_coefficient import KlCoefficient
from trainer_helpers import assert_resumes_to_the_bit, of_method, plan_of, same, weights_of
from trainer_zoo import toy

WITHOUT_RATIO = ("nft", "dpo", "rft", "refl", "draft", "adjoint")


def some(names, *quick: str) -> list:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


# Settings -----------------------------------------------------------------------------------------------------------

MODES = ("none", "fixed", "stepwise", "moving", "dual")
KINDS = ("constant", "two_stage", "paper", "ppo")


@pytest.mark.parametrize("method", METHODS)
def test_settings_run_together(method: str, make_config, make_trainer) -> None:
    row = list(METHODS).index(method)
    mode, kind, equalize = MODES[row % len(MODES)], KINDS[row % len(KINDS)], row // len(KINDS) % 2 == 0
    batch = BatchConfig(prompts=2, group_size=3, micro_batch=6)
    base = of_method(method, make_config(rollout={"steps": 5}, iterations=8, batch=batch))
    if base.objective.credit == "exact":
        mode = "none"  # no other goes with it
    if base.build_objective().chooses:
        mode = "fixed"  # a choice needs its anchor and has no old policy
    config = replace(
        base,
        trust_region=replace(base.trust_region, mode=mode),
        kl=KlCoefficient(kind=kind, warmup_updates=1),
        surrogate=replace(base.surrogate, equalize=equalize and base.explores),
    )
    trainer = make_trainer(config)
    before, plan = weights_of(trainer), plan_of(trainer)
    metrics = trainer.step()
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics.get("ratio/first_log") == (0.0 if config.objective.kind in ("surrogate", "awm") else None)
    assert ("matching/error" in metrics) == (config.objective.kind not in ("surrogate", "gradient"))
    assert not same(before, weights_of(trainer))
    region = config.trust_region
    assert ("kl/position" in metrics) == region.uses_anchor == (trainer.state.anchor is not None)
    assert ("kl/velocity" in metrics) == region.uses_stepwise
    # With one update the policy is still its own reference.
    assert (metrics["kl/total"] > 0) == (region.mode != "none" and plan.updates > 1)
    steps = [name.removeprefix("gradient/raw/") for name in metrics if name.startswith("gradient/raw/")]
    assert {int(step) for step in steps} == {label for update in range(plan.updates) for label in plan.labels(update)}
    unchanged = [metrics[f"gradient/raw/{s}"] == metrics[f"gradient/equalized/{s}"] for s in steps]
    assert all(unchanged) or config.surrogate.equalize


def test_nothing_of_another_method_is_left_in_sage_paper() -> None:
    """What a target's defaults become, when they follow the evidence, does not reach it: it states all that methods set."""
    paper, target = METHODS["sage_paper"], recipes.recipe("shapes/sage")
    for method in METHODS:
        other = paper(METHODS[method](target))
        other = replace(other, update=replace(other.update, step_fraction=target.update.step_fraction))  # the target's
        other = replace(other, surrogate=replace(other.surrogate, clip_scale=target.surrogate.clip_scale))  # likewise
        other = replace(other, model=target.model)  # guidance is the checkpoint's, unless a method takes it away
        if method == "branch_long":  # the one that says how long and how fast, which is the target's too
            other = replace(other, iterations=target.iterations, batch=target.batch, optimizer=target.optimizer)
        assert other == paper(target), method


@pytest.mark.parametrize("method", some(METHODS, "branch", "nft", "dpo"))
def test_every_method_resumes_to_the_bit(method: str, make_config, make_trainer, tmp_path) -> None:
    config = of_method(method, make_config(rollout={"steps": 4}, iterations=4))
    assert_resumes_to_the_bit(make_trainer, config, tmp_path / "checkpoints")


# Learning -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", some(METHODS, "branch"))
def test_every_method_learns(method: str, make_config, make_trainer) -> None:
    config = make_config(
        evaluate=EvalConfig(prompts=5, per_prompt=4, steps=6),
        batch=BatchConfig(prompts=4, group_size=6, micro_batch=24),
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0),
        rollout={"steps": 6},
        iterations=24,
    )
    trainer = make_trainer(of_method(method, config))
    before = trainer.evaluate().metrics
    for _ in range(72 if method == "flash_grpo" else 24):  # Flash-GRPO explores little, at one step of the first half
        trainer.step()
    assert trainer.evaluate().metrics["eval/total"] > before["eval/total"] + 4 * before["eval/total_stderr"]


WAYS = ("sage", "branch", "mix_grpo", "grpo_guard", "nft", "awm", "draft")
"""All steps, one shared step, a window with another solver after it, scaled ratios, both without an SDE, and a gradient of the reward."""
SIDES = {"flux": 8, "sd3": 8, "ltx2": 32, "ltx2_3": 32}
PICTURED = ("ltx2_3", "wan_i2v", "qwen_image_edit")
"""Those that are trained from a picture."""
OTHERS = ("wan_t2v", "wan22_t2v", "ltx", "flux2", "qwen_image", "z_image")


@pytest.mark.slow
@pytest.mark.parametrize("kind", dict.fromkeys([*OTHERS, *SIDES, *PICTURED]))
def test_every_method_trains_every_family(kind: str, make_config, make_trainer, tmp_path) -> None:
    small = {"height": SIDES[kind], "width": SIDES[kind]} if kind in SIDES else {}
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


@pytest.mark.slow
def test_a_step_moves_the_expert_of_its_noise(make_config, make_trainer) -> None:
    """Wan 2.2, both experts trained: sigmas of the grid and the boundary (0.8) say which steps are whose."""

    def trainer_of(start: int, stop: int):
        config = make_config(
            kind="wan22_t2v",
            model={"expert": "both", "lora": LoraSpec(rank=2)},
            rollout={"steps": 6, "window": Window(kind="fixed", start=start, length=stop - start)},
            batch=BatchConfig(prompts=1, group_size=2, micro_batch=2),
            update=UpdateConfig(updates_per_rollout=1),
            optimizer=OptimizerConfig(lr=1e-2),
        )
        return make_trainer(replace(config, kernel=KernelSpec(name="sage_exact", eta=1.0)))

    trainer = trainer_of(0, 6)
    networks = [trainer.planner.network(sigma) for sigma in trainer.planner.grid.sigmas[:-1].tolist()]
    first = networks.index(1)
    assert networks == [0] * first + [1] * (6 - first)
    assert first >= 2
    for steps, experts in (((0, first), {"transformer"}), ((first - 1, first + 1), {"transformer", "transformer_2"})):
        trainer = trainer_of(*steps)
        before = weights_of(trainer)
        assert trainer.step()["ratio/first_log"] == 0.0
        moved = [name for name, p in trainer.state.params.items() if not torch.equal(p, before[name])]
        assert {name.split(".")[0] for name in moved} == experts


# Ratios -------------------------------------------------------------------------------------------------------------

KERNELS = {
    "flow": (False, "bfloat16"),
    "dance": (True, "float32"),
    "sage": (True, "bfloat16"),
    "cps": (False, "float32"),
}
"""Each with checkpointing or without, and one way to store states."""


@pytest.mark.parametrize("kernel", some(KERNELS, "sage"))
def test_first_update_ratio_is_exactly_one(kernel: str, make_config, make_trainer) -> None:
    checkpointing, storage = KERNELS[kernel]
    config = make_config(
        kind="hunyuan15_t2v",
        kernel=KernelSpec(name=kernel, eta=0.5),
        rollout={"storage": storage, "steps": 3},
        batch=BatchConfig(prompts=1, group_size=4, micro_batch=4),
        update=UpdateConfig(updates_per_rollout=2, gradient_checkpointing=checkpointing),
    )
    trainer = make_trainer(config)
    assert trainer.step()["ratio/first_log"] == 0.0
    first, second = trainer.log
    assert first["ratio/mean"] == pytest.approx(1.0, abs=1e-12)
    assert first["ratio/std"] == first["ratio/clip_fraction"] == 0.0
    # The second update replays the same rollout with other weights: a statistic that never moves would test nothing.
    assert second["ratio/largest_log"] > 0
    assert 0 < second["ratio/std"] <= second["ratio/largest_log"] * 1.1


def test_flow_on_a_grid_that_starts_below_one(make_config, make_trainer, monkeypatch) -> None:
    """DPM-Solver's grids start at 0.999 and more: the kernel that samples and replays knows that this is the first step."""
    sigmas = torch.tensor([0.999875, 0.97, 0.8, 0.4, 0.0])
    monkeypatch.setattr(toy.ToyModel, "sigmas", lambda model, steps, shift=None: sigmas)
    trainer = make_trainer(make_config(kernel=KernelSpec(name="flow", eta=0.5), rollout={"steps": 4}))
    assert trainer.planner.kernel == Flow(0.5, first=float(sigmas[0]))
    assert trainer.step()["ratio/first_log"] == 0.0
