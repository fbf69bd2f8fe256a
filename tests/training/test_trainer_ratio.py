"""The first update after a rollout is on-policy to the bit; later ones are not."""

from __future__ import annotations

import pytest

from sage_grpo.flow.kernels import KernelSpec
from sage_grpo.training.config import BatchConfig, UpdateConfig

KERNELS = ("flow", "dance", "sage", "cps", "sage_exact")


@pytest.mark.parametrize("kernel", [pytest.param(k, marks=[pytest.mark.slow] * (k != "sage")) for k in KERNELS])
def test_first_update_ratio_is_exactly_one(kernel: str, make_config, make_trainer) -> None:
    """Every kernel with both storages and with and without checkpointing, which over the kernels meet in all pairs."""
    turned = KERNELS.index(kernel) % 2 == 1
    for checkpointing, storage in ((turned, "float32"), (not turned, "bfloat16")):
        config = make_config(
            kind="hunyuan15_t2v",
            kernel=KernelSpec(name=kernel, eta=0.5),
            rollout={"storage": storage, "steps": 3},
            batch=BatchConfig(prompts=2, group_size=4, micro_batch=8),
            update=UpdateConfig(updates_per_rollout=2, gradient_checkpointing=checkpointing),
        )
        trainer = make_trainer(config)
        metrics = trainer.step()
        assert metrics["ratio/first_log"] == 0.0
        assert trainer.log[0]["ratio/mean"] == pytest.approx(1.0, abs=1e-12)
        assert trainer.log[0]["ratio/std"] == 0.0
        assert trainer.log[0]["ratio/clip_fraction"] == 0.0
        # The second update replays the same rollout with other weights: a statistic that never moves would test nothing.
        assert trainer.log[1]["ratio/largest_log"] > 0
        assert 0 < trainer.log[1]["ratio/std"] <= trainer.log[1]["ratio/largest_log"] * 1.1
