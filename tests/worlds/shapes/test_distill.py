"""Distilling the miniature to few steps: the targets are the teacher's own way, and a stopped training goes on to the bit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sage_grpo.flow.schedule import Schedule
from sage_grpo.models.policy import build_solver, solve
from sage_grpo.models.spec import ModelSpec
from sage_grpo.worlds.making.shapes.distill import fit, trajectories
from sage_grpo.worlds.making.shapes.options import DistillOptions
from sage_grpo.worlds.making.training import OutOfTime

TEXTS = ["a red ball moves right", "a blue square falls"]


def small(tmp_path, **fields) -> DistillOptions:
    given = {"steps": 2, "teacher_steps": 4, "clips": 2, "updates": 3, "batch": 2, "lr": 1e-3, "report_seconds": 1e9}
    return DistillOptions(out=tmp_path, **{**given, **fields})


def model():
    return ModelSpec(guidance_scale=1.0, cache=None).load("cpu")


@pytest.mark.slow
def test_states_lie_on_the_teachers_way_at_the_levels_of_the_few_steps(tmp_path):
    teacher, options = model(), small(tmp_path)
    ways = trajectories(teacher, TEXTS, options)
    end = solve(teacher, build_solver(teacher, "euler", 4), ways[0], teacher.encode(TEXTS))
    assert torch.equal(ways[-1], end)
    assert len(ways) == 3
    fine, coarse = (Schedule(teacher.sigmas(steps)).sigmas for steps in (4, 2))
    torch.testing.assert_close(fine[::2], coarse)
    assert torch.equal(trajectories(None, TEXTS, replace(options, resume=True)), ways)  # kept, not made again


def test_a_teacher_of_as_many_steps_is_fitted_already(tmp_path, capsys):
    """The mean velocity of one step is the velocity: no update has anything to learn."""
    student, options = model(), small(tmp_path, teacher_steps=2, updates=1, report_seconds=0.0)
    before = {name: p.detach().clone() for name, p in student.trainable().items()}
    fit(student, TEXTS, trajectories(student, TEXTS, options), options)
    assert "loss 0.0000" in capsys.readouterr().out
    assert before.keys() == student.trainable().keys()


@pytest.mark.slow
def test_a_training_that_was_stopped_goes_on_to_the_bit(tmp_path):
    whole, parts, options = model(), model(), small(tmp_path / "whole")
    ways = trajectories(whole, TEXTS, options)
    torch.manual_seed(1)
    fit(whole, TEXTS, ways, options)
    options = small(tmp_path / "parts")
    torch.manual_seed(1)
    with pytest.raises(OutOfTime):
        fit(parts, TEXTS, ways, options, until=0.0)
    torch.manual_seed(2)
    again = model()
    fit(again, TEXTS, ways, replace(options, resume=True), until=math.inf)
    assert all(torch.equal(again.trainable()[name], p) for name, p in whole.trainable().items())


def test_the_teacher_stops_at_every_level(tmp_path):
    with pytest.raises(ValueError, match="multiple"):
        small(tmp_path, teacher_steps=5)
