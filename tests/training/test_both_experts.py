"""Runs that train both experts of Wan 2.2, each by steps of its noise; and runs on a model with a frozen adapter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sage_grpo.flow.kernels import KernelSpec
from sage_grpo.flow.windows import Window
from sage_grpo.models.spec import LoraSpec
from sage_grpo.training.config import BatchConfig, OptimizerConfig, UpdateConfig

EXPERTS = ("transformer.", "transformer_2.")


@pytest.fixture
def both(make_config):
    """A run whose window covers steps of the first expert, of the second, or of both."""

    def make(steps: tuple[int, int], **fields):
        start, stop = steps
        config = make_config(
            kind="wan22_t2v",
            model={"expert": "both", "lora": LoraSpec(rank=2)},
            rollout={"steps": 6, "window": Window(kind="fixed", start=start, length=stop - start)},
            batch=BatchConfig(prompts=1, group_size=2, micro_batch=2),
            update=UpdateConfig(updates_per_rollout=1),
            **{"optimizer": OptimizerConfig(lr=1e-2), **fields},
        )
        return replace(config, kernel=KernelSpec(name="sage_exact", eta=1.0))

    return make


def moved(trainer) -> set[str]:
    before = {name: p.detach().clone() for name, p in trainer.state.params.items()}
    metrics = trainer.step()
    assert metrics["ratio/first_log"] == 0.0
    return {
        e
        for e in EXPERTS
        for name, p in trainer.state.params.items()
        if name.startswith(e) and not torch.equal(p, before[name])
    }


def test_a_step_moves_the_expert_of_its_noise(both, make_trainer) -> None:
    """Sigmas of the grid and the boundary (0.8) say which steps are whose."""
    trainer = make_trainer(both((0, 6)))
    networks = [trainer.planner.network(sigma) for sigma in trainer.planner.grid.sigmas[:-1].tolist()]
    first = networks.index(1)
    assert networks == [0] * first + [1] * (6 - first)
    assert first >= 2
    assert moved(make_trainer(both((0, first)))) == {"transformer."}
    assert moved(make_trainer(both((first, 6)))) == {"transformer_2."}
    assert moved(trainer) == set(EXPERTS)
