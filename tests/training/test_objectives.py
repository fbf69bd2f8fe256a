"""Objectives without an SDE: clips are sampled with the ODE, noised again at fresh levels, and learned there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from double import CLOSE
from sage_grpo.flow.kernels import KernelSpec
from sage_grpo.flow.schedule import Schedule
from sage_grpo.rl.objective import ObjectiveSpec
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.training.config import BatchConfig, OptimizerConfig, RolloutConfig, UpdateConfig
from sage_grpo.training.planner import Planner
from trainer_helpers import plan_of, weights_of

PROMPTS, SIZE, STEPS, CLIP, DECAY = 2, 3, 4, 2e-3, 0.4


def configured(make_config, kind: str, *, micro_batch: int = 3, objective: dict | None = None, **fields):
    """A small run of an objective alone: two updates, no KL. What the presets add to it is tested with them."""
    config = make_config(
        rollout={"steps": STEPS},
        batch=BatchConfig(prompts=PROMPTS, group_size=SIZE, micro_batch=micro_batch),
        optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.0, max_grad_norm=1e9),
        kernel=KernelSpec(name="ode"),
        trust_region=TrustRegion(mode="none"),
        update=UpdateConfig(updates_per_rollout=2),
    )
    surrogate, kl = replace(config.surrogate, equalize=False), replace(config.kl, kind="constant")
    plain = {"surrogate": surrogate, "kl": kl, "objective": ObjectiveSpec(**{"kind": kind, **(objective or {})})}
    return replace(config, **{**plain, **fields})


@pytest.mark.parametrize("kind", ["nft", "awm"])
@pytest.mark.usefixtures("in_double")
def test_micro_batches_are_a_matter_of_memory(kind, make_config, make_trainer) -> None:
    found = []
    for micro_batch in (1, 2, 6):
        trainer = make_trainer(configured(make_config, kind, micro_batch=micro_batch, objective={"old_decay": DECAY}))
        found.append([trainer.step() for _ in range(2)])
    for other in found[1:]:
        for row, expected in zip(other, found[0]):
            same = [name for name in expected if name.startswith(("reward/", "loss/", "matching/", "gradient/"))]
            assert {n: row[n] for n in same} == pytest.approx({n: expected[n] for n in same}, rel=CLOSE, abs=1e-12)


def test_the_old_policy_samples_and_the_newest_is_evaluated(make_config, make_trainer) -> None:
    trainer = make_trainer(configured(make_config, "nft", objective={"old_decay": 0.9}))
    start = weights_of(trainer)
    trainer.step()
    seen = []
    run = trainer.model.velocity
    trainer.model.velocity = lambda *a, **k: (seen.append(weights_of(trainer)), run(*a, **k))[1]
    trainer.roll_out(plan_of(trainer, 1))
    live = weights_of(trainer)
    name = next(iter(live))
    torch.testing.assert_close(seen[0][name], 0.9 * start[name] + 0.1 * live[name])
    seen.clear()
    trainer.evaluate()
    assert torch.equal(seen[0][name], live[name])


def planned(make_config, trains=lambda sigma: True, steps: int = 6, **objective):
    config = configured(make_config, "nft", objective=objective, update=UpdateConfig(updates_per_rollout=2))
    config = replace(config, rollout=RolloutConfig(steps=steps))
    return Planner(config, Schedule.shifted(steps, 3.0), config.kernel.build(), trains)


def test_too_many_levels_are_refused_before_the_run(make_config) -> None:
    with pytest.raises(ValueError, match=r"objective.levels is 7, but the trained network runs at 6 step"):
        planned(make_config, levels=7).check()
    planned(make_config, levels=7, draw="uniform").check()
    with pytest.raises(ValueError, match="needs two steps of the schedule"):
        planned(make_config, lambda sigma: sigma > 0.99, draw="uniform", levels=2).check()
