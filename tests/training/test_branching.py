"""One exploring step from a shared state, replayed once, is the same mathematics as replaying every member."""

from __future__ import annotations

import math

import pytest
import torch

from double import CLOSE
from sage_grpo.objectives.trust_region import TrustRegion
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.samplers.kernels import KernelSpec
from sage_grpo.samplers.windows import Window
from sage_grpo.training.config import BatchConfig, OptimizerConfig, SurrogateConfig, UpdateConfig
from sage_grpo.training.kl_coefficient import KlCoefficient
from trainer_helpers import assert_alike, plan_of, watch_gradients

ETA = {"flow": 0.7, "dance": 0.4, "sage": 0.5, "cps": 0.5, "sage_exact": math.sqrt(2)}
SURROGATES = {
    "clip": SurrogateConfig(clip_range=2e-3),
    "mask": SurrogateConfig(kind="kl_mask", kl_mask_scale=1e-2),
    "centred": SurrogateConfig(clip_range=2e-3, centred=True),
    "scaled": SurrogateConfig(clip_range=1e-3, centred="scaled"),
}
FAILING = RewardSpec(name="trainer_toys:bright_but", options={"bad": [1, 6]}, batch_size=0, try_out=False)


def branching(make_config, *, share: bool, updates: int = 1, window: Window | None = None, **fields):
    window = window or Window(kind="drawn", at=[1, 2])
    given = {
        "rollout": {"steps": 5, "same_noise": True, "share": share, "window": window, **fields.pop("rollout", {})},
        "kernel": KernelSpec(name="sage_exact", eta=math.sqrt(2)),
        "update": UpdateConfig(updates_per_rollout=updates, repeat=True),
        "kl": KlCoefficient(kind="constant", lambda_min=0.0, lambda_max=3.0),
        "optimizer": OptimizerConfig(lr=3e-3, eps=1e-4, weight_decay=0.0),
    }
    return make_config(**given | fields)


def watch(trainer, iterations: int) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, float]]]:
    gradients = watch_gradients(trainer)
    for _ in range(iterations):
        assert trainer.step()["ratio/first_log"] == 0.0
    return gradients, trainer.log


def assert_same_run(shared, plain) -> None:
    """Both in float64 (`in_double`)."""
    for left, right in zip(*(run[0] for run in (shared, plain)), strict=True):
        assert_alike(left, right, CLOSE)
    for left, right in zip(*(run[1] for run in (shared, plain)), strict=True):
        assert left.keys() == right.keys()
        for name in left:
            if "gradient/raw" in name or "gradient/equalized" in name or "gradient/sent" in name:
                continue  # norms at the velocity: of one row for all members, or of a row for each
            assert left[name] == pytest.approx(right[name], rel=CLOSE, abs=1e-12), name


@pytest.mark.parametrize(
    ("surrogate", "kernel", "updates"),
    [
        ("clip", "sage_exact", 3),
        ("mask", "flow", 2),
        ("scaled", "cps", 2),
        ("centred", "dance", 1),
    ],
)
@pytest.mark.usefixtures("in_double")
def test_shared_replay_equals_the_plain_path(surrogate, kernel, updates, make_config, make_trainer) -> None:
    runs = []
    for share in (True, False):
        config = branching(
            make_config,
            share=share,
            updates=updates,
            kernel=KernelSpec(name=kernel, eta=ETA[kernel]),
            surrogate=SURROGATES[surrogate],
            rewards=[FAILING],
            batch=BatchConfig(prompts=2, group_size=4, micro_batch=3),
        )
        runs.append(watch(make_trainer(config), 2))
    assert_same_run(*runs)
    if updates > 1:
        assert any(log["ratio/largest_log"] > 1e-4 for log in runs[0][1])


@pytest.mark.parametrize("mode", ["none", "dual", "stepwise"])
@pytest.mark.usefixtures("in_double")
def test_groups_side_by_side_learn_as_groups_apart(mode, make_config, make_trainer) -> None:
    runs = []
    for micro in (1, 8):
        batch = BatchConfig(prompts=4, group_size=4, micro_batch=micro)
        config = branching(
            make_config,
            share=True,
            updates=2,
            batch=batch,
            trust_region=TrustRegion(mode=mode),
            surrogate=SurrogateConfig(centred=mode == "none"),
            optimizer=OptimizerConfig(lr=3e-3, eps=1e-4, weight_decay=0.0, max_kl=1e4),
        )
        trainer = make_trainer(config)
        plan = plan_of(trainer)
        assert max(replay.rows for replay in plan.replays(0, 0)) == (1 if micro == 1 else 2)
        runs.append(watch(trainer, 2))
    assert_same_run(*runs)
