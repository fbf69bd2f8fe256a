"""A grid that is stated: the same in rollouts, evaluation and generation, or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sage_grpo.flow.schedule import Schedule
from sage_grpo.models import ModelError
from sage_grpo.models.policy import build_solver
from sage_grpo.models.spec import ModelSpec
from sage_grpo.training.config import EvalConfig, RolloutConfig, TrainConfig

LEVELS = [1.0, 0.875, 0.75, 0.5]


@pytest.mark.parametrize("kind", ["wan_t2v", "ltx"])
def test_rollouts_and_solvers_visit_the_stated_levels(kind, model):
    ours = model(kind, sigmas=LEVELS)
    assert ours.sigmas(4).tolist() == [*LEVELS, 0.0]
    visited = []

    def velocity(x, sigma):
        visited.append(float(sigma))
        return torch.zeros_like(x)

    solver = build_solver(ours, "euler", 4)
    for step in range(solver.num_steps):
        solver.step(step, torch.zeros(1), velocity)
    assert visited == LEVELS
    assert model(kind).sigmas(4).tolist() != ours.sigmas(4).tolist()
    for steps, shift in ((5, None), (4, 3.0)):
        with pytest.raises(ModelError, match=r"model\.sigmas"):
            ours.sigmas(steps, shift)
    with pytest.raises(ModelError, match=r"model\.sigmas"):
        build_solver(ours, "checkpoint", 4)


@pytest.mark.parametrize("levels", [[0.5, 0.9], [1.0, 1.0, 0.5], [1.1, 0.5], [1.0, 0.0], [1.0, -0.1]])
def test_levels_fall_strictly_within_one_and_zero(levels):
    with pytest.raises((ModelError, ValueError), match=r"fall strictly|must be in \(0, 1\]"):
        ModelSpec(sigmas=levels)


def test_a_run_whose_steps_are_others_is_refused_before_anything_is_loaded():
    spec = ModelSpec(sigmas=LEVELS)
    whole = TrainConfig(model=spec, rollout=RolloutConfig(steps=4), evaluate=EvalConfig(steps=4))
    assert Schedule(torch.tensor([*whole.model.sigmas, 0.0])).num_steps == 4
    for change, why in (
        ({"rollout": RolloutConfig(steps=5)}, r"rollout\.steps 5"),
        ({"evaluate": EvalConfig(steps=40)}, r"evaluate\.steps 40"),
        ({"rollout": RolloutConfig(steps=4, shift=2.0)}, r"rollout\.shift"),
        ({"evaluate": EvalConfig(steps=4, solver="checkpoint")}, "solver"),
    ):
        with pytest.raises(ValueError, match=why):
            replace(whole, **change)
    with pytest.raises(ModelError, match="leave one"):
        ModelSpec(sigmas=LEVELS, shift=3.0)


def test_a_family_that_knows_no_grid_refuses_it():
    with pytest.raises(ModelError, match="does not know them"):
        ModelSpec(family="trainer_zoo.toy", sigmas=LEVELS).load("cpu")
