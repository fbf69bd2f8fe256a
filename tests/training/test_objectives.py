"""Objectives without an SDE: clips are sampled with the ODE, noised again at fresh levels, and learned there."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

from double import CLOSE
from sage_grpo.data.prompts import Prompt
from sage_grpo.flow.kernels import KernelSpec
from sage_grpo.flow.noise import keyed_noise
from sage_grpo.flow.schedule import Schedule
from sage_grpo.flow.windows import Window
from sage_grpo.rl.objective import ObjectiveSpec
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.training.config import BatchConfig, OptimizerConfig, RolloutConfig, SurrogateConfig, UpdateConfig
from sage_grpo.training.planner import Planner, draw_levels
from trainer_helpers import assert_alike, assert_resumes_to_the_bit, plan_of, watch_updates, weights_of
from trainer_toys import bright

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


class Oracle:
    """One iteration from the formulas, on the toy model."""

    def __init__(self, trainer, iteration: int, plan, clips, old: dict) -> None:
        self.trainer, self.model, self.params = trainer, trainer.model, trainer.state.params
        self.iteration, self.plan, self.old = iteration, plan, old
        self.conditions = self.model.encode([prompt.text for prompt in plan.prompts])
        members = [(group, member) for group in range(PROMPTS) for member in range(SIZE)]
        shape = self.model.latent_shape()
        sigmas = [5.0 * s / (1 + 4.0 * s) for s in (1 - index / STEPS for index in range(STEPS + 1))]
        self.set_weights(old)
        x = torch.stack([keyed_noise(shape, "start", 0, iteration, *member) for member in members])
        with torch.no_grad():
            for sigma, following in itertools.pairwise(sigmas):
                rows = [self.conditions[group] for group, _ in members]
                x = x + (following - sigma) * self.model.velocity(x, torch.tensor(sigma), rows)
        assert (self.model.decode(x).int() - clips.int()).abs().max() <= 1
        self.x0, reward = x, bright(clips, [], 8.0).double().view(PROMPTS, SIZE)
        self.advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, correction=0, keepdim=True) + 1e-6)

    def set_weights(self, weights: dict) -> None:
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(weights[name])
                p.grad = None

    def gradients(self, update: int, weights: dict, config) -> dict:
        spec, dims = config.objective, math.prod(self.model.latent_shape())
        for group in range(PROMPTS):
            levels = self.plan.groups[group].levels
            for level in self.plan.groups[group].trained[update]:
                sigma = levels.schedule.sigmas[level]
                w = float(sigma) if spec.weight == "sigma" else 1.0
                keys = [("fresh", 0, self.iteration, group, member, level) for member in range(SIZE)]
                eps = torch.stack([keyed_noise(self.model.latent_shape(), *key) for key in keys])
                x0 = self.x0[group * SIZE : (group + 1) * SIZE]
                x, u = (1 - sigma) * x0 + sigma * eps, eps - x0
                kept = {name: p.grad for name, p in self.params.items()}
                self.set_weights(self.old)
                with torch.no_grad():
                    v_old = self.model.velocity(x, sigma, [self.conditions[group]] * SIZE)
                self.set_weights(weights)
                for name, p in self.params.items():
                    p.grad = kept[name]
                v = self.model.velocity(x, sigma, [self.conditions[group]] * SIZE)
                losses = []
                for row in range(SIZE):
                    a = float(self.advantage[group, row])
                    if spec.kind == "nft":
                        r, beta = 0.5 + 0.5 * min(1.0, max(-1.0, a / spec.saturation)), spec.beta
                        good = w * ((1 - beta) * v_old + beta * v - u)[row].square().mean()
                        bad = w * ((1 + beta) * v_old - beta * v - u)[row].square().mean()
                        losses.append(spec.saturation * (r * good + (1 - r) * bad) / beta)
                    else:
                        errors = [w * (one - u)[row].square().mean() for one in (v, v_old)]
                        ratio = (errors[1] - errors[0]).exp()
                        bounded = ratio.clamp(1 - CLIP, 1 + CLIP)
                        losses.append(-torch.minimum(a * ratio, a * bounded))
                        losses[-1] = losses[-1] + config.kl.lambda_min * w * (v - v_old)[row].square().mean()
                count = PROMPTS * SIZE * len(self.plan.groups[group].trained[update])
                (math.sqrt(dims) * sum(losses) / count).backward()
        return {name: p.grad.clone() for name, p in self.params.items()}


@pytest.mark.parametrize(
    ("kind", "objective"),
    [
        ("nft", {"beta": 0.4, "saturation": 2.0, "old_decay": DECAY}),
        ("nft", {"draw": "logit_normal", "weight": "sigma"}),
        ("awm", {"weight": "sigma", "draw": "uniform"}),
        ("awm", {"old_decay": DECAY}),
    ],
)
@pytest.mark.usefixtures("in_double")
def test_gradients_of_every_update_are_those_of_the_formulas(kind, objective, make_config, make_trainer) -> None:
    """Sampling by the old policy, fresh noise, both losses, the step-wise KL of awm, and the old policy's average."""
    config = configured(make_config, kind, objective=objective)
    if kind == "awm":
        region, kl = TrustRegion(mode="stepwise"), replace(config.kl, lambda_min=0.7, lambda_max=0.7)
        surrogate = SurrogateConfig(equalize=False, clip_range=CLIP)
        config = replace(config, trust_region=region, kl=kl, surrogate=surrogate)
    trainer = make_trainer(config)
    caught = watch_updates(trainer)
    old, runs = weights_of(trainer), []
    for iteration in range(2):
        plan = plan_of(trainer, iteration)
        trainer.step()
        runs.append((plan, trainer.videos, old))
        decay = config.objective.old_decay
        old = {name: decay * old[name] + (1 - decay) * now for name, now in weights_of(trainer).items()}
    for update, (weights, gradients) in enumerate(caught):
        plan, clips, before = runs[update // 2]
        expected = Oracle(trainer, update // 2, plan, clips, before).gradients(update % 2, weights, config)
        assert_alike(gradients, expected, CLOSE)
    if kind == "awm":
        assert any(0 < log["ratio/clip_fraction"] < 1 for log in trainer.log)  # else the clip was not tested
        assert (trainer.log[2]["ratio/largest_log"] == 0) == (config.objective.old_decay == 0)
    else:
        assert not any(name.startswith("ratio/") for name in trainer.log[1])


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


@pytest.mark.parametrize(
    ("kind", "objective"), [("nft", {"old_decay": 0.6, "old_ramp": 3}), ("awm", {"draw": "uniform"})]
)
def test_a_resumed_run_is_the_same_run(kind, objective, make_config, make_trainer, tmp_path) -> None:
    config = configured(make_config, kind, objective=objective, iterations=4)
    assert_resumes_to_the_bit(make_trainer, config, tmp_path / "checkpoints")


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


@pytest.mark.parametrize("draw", ["schedule", "uniform", "logit_normal"])
def test_levels_lie_along_the_schedule_and_are_keyed(draw, make_config) -> None:
    planner = planned(make_config, draw=draw, levels=5)
    grid, prompts = planner.grid.sigmas.tolist(), [Prompt("a"), Prompt("b")]
    seen = set()
    for iteration in range(20):
        groups = planner.plan(iteration, prompts).groups
        again = planner.plan(iteration, prompts).groups
        assert [g.levels.schedule.sigmas.tolist() for g in groups] == [g.levels.schedule.sigmas.tolist() for g in again]
        for group in groups:
            values = group.levels.schedule.sigmas[:-1].tolist()
            seen.add(tuple(values))
            assert sorted(level for part in group.trained for level in part) == list(range(5))
            for level, sigma in enumerate(values):
                label = group.label(level)
                assert group.sigma(level) == sigma
                assert grid[label] >= sigma > grid[label + 1]
                assert (sigma == grid[label]) == (draw == "schedule")
    assert len(seen) > (5 if draw == "schedule" else 39)  # every prompt and iteration draws for itself
    if draw == "logit_normal":  # more in the middle of the schedule
        rng = random.Random(0)
        spec = ObjectiveSpec(kind="nft", draw=draw, levels=200)
        labels = draw_levels(spec, Schedule.shifted(6, 3.0), lambda sigma: True, rng).labels
        assert labels.count(2) + labels.count(3) > 2 * (labels.count(0) + labels.count(5))


@pytest.mark.parametrize("draw", ["schedule", "uniform"])
@pytest.mark.parametrize("high", [True, False])
def test_levels_are_the_trained_experts(draw, high, make_config) -> None:
    def trains(sigma: float) -> bool:
        return (sigma >= 0.7) == high

    planner = planned(make_config, trains, steps=9, draw=draw, levels=3)
    for iteration in range(20):
        (group,) = planner.plan(iteration, [Prompt("a")]).groups
        assert all(trains(sigma) for sigma in group.levels.schedule.sigmas[:-1].tolist())


def test_too_many_levels_are_refused_before_the_run(make_config) -> None:
    with pytest.raises(ValueError, match=r"objective.levels is 7, but the trained network runs at 6 step"):
        planned(make_config, levels=7).check()
    planned(make_config, levels=7, draw="uniform").check()
    with pytest.raises(ValueError, match="needs two steps of the schedule"):
        planned(make_config, lambda sigma: sigma > 0.99, draw="uniform", levels=2).check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kernel": KernelSpec(name="sage")}, "kernel.name sage: it samples with the ODE"),
        ({"rollout": RolloutConfig(steps=4, window=Window(kind="fixed", length=2))}, "rollout.window.kind fixed"),
        ({"rollout": RolloutConfig(steps=4, same_noise=True)}, "rollout.same_noise true: without exploration a group"),
        ({"surrogate": SurrogateConfig()}, "surrogate.equalize true"),
        ({"update": UpdateConfig(step_fraction=0.5)}, "update.step_fraction 0.5"),
        ({"optimizer": OptimizerConfig(target_kl=0.1)}, "optimizer.target_kl or max_kl"),
        ({"update": UpdateConfig(updates_per_rollout=5)}, "objective.levels 4 for 5 updates"),
    ],
)
def test_what_needs_exploration_is_refused(fields, message, make_config) -> None:
    with pytest.raises(ValueError, match=f"objective.kind awm does not go with {message}"):
        configured(make_config, "awm", **fields)
    repeat = UpdateConfig(updates_per_rollout=5, repeat=True)
    assert configured(make_config, "awm", update=repeat).objective.levels == 4
