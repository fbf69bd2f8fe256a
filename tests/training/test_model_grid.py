"""The grid is the model's: rollouts, evaluation and generation visit the sigmas that it says, and no others."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from sage_grpo.models import ModelError
from sage_grpo.models.spec import ModelSpec
from sage_grpo.training.config import EvalConfig
from trainer_zoo import toy


class Bent(toy.ToyModel):
    """Its grid is no shifted even one; it also notes where it was asked for a velocity."""

    visited: list[float]

    def __init__(self, spec):
        super().__init__(spec)
        self.visited = []

    def sigmas(self, num_steps, shift=None):
        return torch.linspace(1, 0, num_steps + 1) ** (self.shift if shift is None else shift)

    def velocity(self, x, sigma, conditions, *, guidance=None):
        self.visited.append(float(sigma))
        return super().velocity(x, sigma, conditions, guidance=guidance)


def load(spec, device=None):
    return Bent(spec)


@pytest.fixture
def family(monkeypatch):
    """This module as a family, and the last model that it loaded."""
    monkeypatch.setitem(sys.modules, "bent.family", sys.modules[__name__])
    loaded = []
    monkeypatch.setattr(
        sys.modules[__name__], "load", lambda spec, device=None: loaded.append(Bent(spec)) or loaded[-1]
    )
    return loaded


def grid(num_steps: int, power: float) -> list[float]:
    return (torch.linspace(1, 0, num_steps + 1) ** power)[:-1].tolist()


def test_training_and_evaluation(family, make_config, make_trainer) -> None:
    spec = ModelSpec(family="bent.family", shift=3.0)
    config = replace(make_config(rollout={"steps": 5}, evaluate=EvalConfig(prompts=2, steps=4)), model=spec)
    for shift, power in ((None, 3.0), (2.0, 2.0)):
        trainer = make_trainer(replace(config, rollout=replace(config.rollout, shift=shift)))
        model = family[-1]
        trainer.step()
        assert sorted(set(model.visited), reverse=True) == pytest.approx(grid(5, power))
        model.visited.clear()
        trainer.evaluate()
        assert model.visited == pytest.approx(grid(4, 3.0))


def test_evaluation_takes_the_solver_of_its_configuration(family, make_config, make_trainer) -> None:
    spec, config = ModelSpec(family="bent.family"), make_config(evaluate=EvalConfig(prompts=1, solver="checkpoint"))
    with pytest.raises(ModelError, match='solver "checkpoint" needs a model that brings one'):
        make_trainer(replace(config, model=spec)).evaluate()
