"""Presets against the code that their authors released: its formulas written out here, with the constants that it ships (docs/method.md).

Everything is float64. `theirs` is what the released code computes of one denoising step; ours is the surrogate, the step weight and the KL that the
preset's settings make of the same step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from double import CLOSE, in_double
from sage_grpo.data.prompts import Prompt
from sage_grpo.objectives.base import ReplayedStep
from sage_grpo.objectives.build import build
from sage_grpo.objectives.options import ObjectiveSpec
from sage_grpo.objectives.policy_gradient import equalizing_weights
from sage_grpo.objectives.trust_region import closed_form_kl
from sage_grpo.recipes.methods import METHODS
from sage_grpo.recipes.targets import TARGETS
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.samplers.transition import Transition
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.planner import Planner

SD3 = 16 * 64 * 64
WAN = 16 * 21 * 60 * 104


def preset(method: str, target: str = "hunyuan15", *, steps: int, group: int = 4) -> TrainConfig:
    base = TARGETS[target]()
    base = replace(
        base, rollout=replace(base.rollout, steps=steps), batch=replace(base.batch, prompts=4, group_size=group)
    )
    return METHODS[method](base)


@dataclass(frozen=True)
class Step:
    """Three clips at one step of a grid, a policy that has moved from the rollout's, and the initial one."""

    x: Tensor
    x_next: Tensor
    v: Tensor
    v_old: Tensor
    v_ref: Tensor
    advantage: Tensor
    sigma: Tensor
    sigma_next: Tensor
    ours: Transition
    weight: float
    """Of the step, among all that explore."""

    @property
    def dt(self) -> Tensor:
        return self.sigma_next - self.sigma


def steps_of(config: TrainConfig, grid: Schedule, *, moved: float = 0.02) -> list[Step]:
    kernel = config.kernel.build(grid)
    generator = torch.Generator().manual_seed(0)
    laws = [kernel(*grid.pair(index)) for index in range(grid.num_steps - 1)]
    sensitivity = torch.stack([law.sensitivity for law in laws])
    weights = equalizing_weights(sensitivity) if config.surrogate.equalize else torch.ones(len(laws))
    found = []
    for index, law in enumerate(laws):
        x, v_old, noise = (torch.randn(3, 48, generator=generator) for _ in range(3))
        v = (v_old + moved * torch.randn(3, 48, generator=generator)).requires_grad_()
        v_ref = v_old + 0.1 * torch.randn(3, 48, generator=generator)
        x_next = law.a * x + law.b * v_old + law.std * noise
        advantage = torch.tensor([1.2, -0.7, 0.4])
        found.append(Step(x, x_next, v, v_old, v_ref, advantage, *grid.pair(index), law, float(weights[index])))
    return found


def ours(config: TrainConfig, step: Step) -> Tensor:
    law, old = step.ours(step.x, step.v), step.ours(step.x, step.v_old)
    sensitivity = step.ours.sensitivity.expand(3)
    replayed = ReplayedStep(
        velocity=step.v,
        velocity_old=step.v_old,
        velocity_reference=step.v_ref,
        x_next=step.x_next,
        sigma=float(step.sigma),
        log_prob=law.log_prob(step.x_next),
        log_prob_old=old.log_prob(step.x_next),
        advantage=step.advantage,
        kl_old=closed_form_kl(step.v, step.v_old, sensitivity),
        std=step.ours.std,
    )
    return step.weight * build(ObjectiveSpec(), config.surrogate).loss(replayed).loss.mean()


def flow_noise(config: TrainConfig, grid: Schedule, step: Step) -> Tensor:
    """FlowGRPO's std_dev_t (sd3_sde_with_logprob.py), without the root of the step's length; noise level 0.7."""
    sigma = grid.sigmas[1] if float(step.sigma) == 1.0 else step.sigma
    return torch.sqrt(step.sigma / (1 - sigma)) * 0.7


def wan_noise(config: TrainConfig, grid: Schedule, step: Step) -> Tensor:
    """FlowGRPO's and Flash-GRPO's on Wan (wan_pipeline_with_logprob.py)."""
    least, most = grid.sigmas[-1], grid.sigmas[1]
    return least + (most - least) * step.sigma


def dance_noise(config: TrainConfig, grid: Schedule, step: Step) -> Tensor:
    """DanceGRPO's eta, whose step has eta sqrt(delta_t) (train_grpo_hunyuan.py); 0.25 in its script."""
    return torch.tensor(0.25)


def their_mean(step: Step, noise: Tensor, v: Tensor) -> Tensor:
    """FlowGRPO's mean of the next state; DanceGRPO's is the same in other words (see below)."""
    sigma = step.sigma
    return step.x * (1 + noise**2 / (2 * sigma) * step.dt) + v * (1 + noise**2 * (1 - sigma) / (2 * sigma)) * step.dt


def their_log_prob(step: Step, noise: Tensor, v: Tensor) -> Tensor:
    std = noise * torch.sqrt(-step.dt)
    log_prob = -((step.x_next - their_mean(step, noise, v)) ** 2) / (2 * std**2) - torch.log(std)
    return (log_prob - math.log(math.sqrt(2 * math.pi))).mean(1)


def their_clipped(step: Step, ratio: Tensor, clip: float) -> Tensor:
    return torch.maximum(-step.advantage * ratio, -step.advantage * torch.clamp(ratio, 1 - clip, 1 + clip))


def their_ratio(step: Step, noise: Tensor) -> Tensor:
    return torch.exp(their_log_prob(step, noise, step.v) - their_log_prob(step, noise, step.v_old))


def same_loss(theirs: Tensor, mine: Tensor, step: Step, factor: float = 1.0) -> None:
    """Equal in value and in gradient, up to a factor that is the same for every clip and step."""
    (expected,) = torch.autograd.grad(theirs, step.v, retain_graph=True)
    (found,) = torch.autograd.grad(mine, step.v, retain_graph=True)
    assert float(expected.abs().max()) > 0
    torch.testing.assert_close(factor * mine, theirs, rtol=CLOSE, atol=1e-12)
    torch.testing.assert_close(factor * found, expected, rtol=CLOSE, atol=1e-12)


CLIPPED = {
    "flow_grpo": ("hunyuan15", 10, flow_noise),
    "flow_grpo on Wan": ("wan", 20, wan_noise),
    "dance_grpo": ("hunyuan15", 16, dance_noise),
    "mix_grpo": ("hunyuan15", 25, flow_noise),
}


@pytest.mark.parametrize("name", CLIPPED)
@in_double
def test_the_clipped_losses(name: str) -> None:
    target, steps, noise_of = CLIPPED[name]
    config = preset(name.split()[0], target, steps=steps)
    config = replace(config, surrogate=replace(config.surrogate, clip_range=0.004))  # binds for some of these clips
    grid = Schedule.shifted(steps, 3.0)
    bound = 0
    for step in steps_of(config, grid):
        noise = noise_of(config, grid, step)
        torch.testing.assert_close(step.ours.std, noise * torch.sqrt(-step.dt), rtol=CLOSE, atol=0)
        ratio = their_ratio(step, noise)
        same_loss(their_clipped(step, ratio, 0.004).mean(), ours(config, step), step)
        bound += int(((ratio - 1).abs() > 0.004).sum())
    assert 0 < bound < 3 * (steps - 1)


def kls(step: Step, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The squared move of their mean from the initial policy's over twice their variance without its length, and our KL."""
    moved = their_mean(step, noise, step.v) - their_mean(step, noise, step.v_ref)
    mine = closed_form_kl(step.v, step.v_ref, step.ours.sensitivity.expand(3))
    return (moved**2).mean(1) / (2 * noise**2), mine


@in_double
def test_flow_grpos_kl_is_ours_times_the_steps_length() -> None:
    """(mu - mu_ref)^2 / (2 std_dev_t^2): its variance has no length, so that beta 0.04 is 0.04 dt, and 0.04 / steps in the mean."""
    config, grid = preset("flow_grpo", steps=10), Schedule.shifted(10, 3.0)
    assert (config.trust_region.mode, config.kl.kind) == ("fixed", "constant")
    for step in steps_of(config, grid):
        theirs, mine = kls(step, flow_noise(config, grid, step))
        torch.testing.assert_close(theirs, -step.dt * mine, rtol=CLOSE, atol=0)
    lengths = -grid.sigmas.diff()
    assert config.kl.lambda_max == pytest.approx(0.04 * float(lengths.mean()), rel=CLOSE)


@in_double
def test_flow_grpos_kl_on_wan_is_ours() -> None:
    """There it divides by (std_dev_t sqrt(dt))^2, the whole variance: beta 0.004 is our coefficient."""
    config, grid = preset("flow_grpo", "wan", steps=20), Schedule.shifted(20, 3.0)
    for step in steps_of(config, grid):
        theirs, mine = kls(step, wan_noise(config, grid, step))
        torch.testing.assert_close(0.004 * theirs / -step.dt, config.kl.lambda_max * mine, rtol=CLOSE, atol=0)


@in_double
def test_flow_dppos_mask() -> None:
    """flowdppo.py: -ratio A, dropped where the mean squared move over 2 sigma_t^2 is at least 1e-5 and aggressive.

    The first step of a grid from 1 is not compared: its code has sigma clamped at 0.99 for this KL, which is not the law that it samples.
    """
    config, grid = preset("flow_dppo", steps=10), Schedule.shifted(10, 3.0)
    assert config.surrogate.kl_mask_scale / SD3 == pytest.approx(1e-5, rel=CLOSE)
    dropped = []
    for step in steps_of(config, grid, moved=1.0)[1:]:
        noise = torch.sqrt(step.sigma / (1 - step.sigma.clamp(max=0.99))) * 0.7
        ratio = their_ratio(step, noise)
        moved = their_mean(step, noise, step.v) - their_mean(step, noise, step.v_old)
        kl = (moved**2 / (2 * (noise * torch.sqrt(-step.dt)) ** 2)).mean(1)
        far = kl >= config.surrogate.kl_mask_scale / 48
        aggressive = ((ratio > 1) & (step.advantage > 0)) | ((ratio < 1) & (step.advantage < 0))
        loss = torch.where(far & aggressive, 0.0, -step.advantage * ratio).mean()
        dropped += (far & aggressive).tolist()
        if not bool((far & aggressive).all()):
            same_loss(loss, ours(config, step), step)
    assert 0 < sum(dropped) < len(dropped)


@in_double
def test_grpo_guards_ratio_and_step_weights() -> None:
    """train_sd3_GRPO_Guard.py: exp((log r + KL) std), the KL with its gradient, and the loss over dt.

    Ours has the same loss and gradient at every step, times one number for all: 1 + eta^2 / 2 over the median sensitivity. At the first
    step of a grid from 1, where noise has no drift along v, it lacks the 1 + eta^2 / 2.
    """
    config, grid = preset("grpo_guard", steps=10), Schedule.shifted(10, 3.0)
    assert config.build_objective().clip_range(SD3) == pytest.approx(2e-6, rel=CLOSE)
    config = replace(config, surrogate=replace(config.surrogate, clip_range=2e-4))
    steps = steps_of(config, grid)
    median = float(torch.stack([step.ours.sensitivity for step in steps]).median())
    bound = 0
    for index, step in enumerate(steps):
        noise = flow_noise(config, grid, step)
        width = noise * torch.sqrt(-step.dt)
        moved = their_mean(step, noise, step.v) - their_mean(step, noise, step.v_old)
        bias = moved.pow(2).mean(1) / (2 * width**2)
        log_ratio = their_log_prob(step, noise, step.v) - their_log_prob(step, noise, step.v_old)
        ratio = torch.exp((log_ratio + bias) * width)
        theirs = their_clipped(step, ratio, 2e-4).mean() / -step.dt
        same_loss(theirs, ours(config, step), step, factor=(1 + 0.7**2 / 2 if index else 1.0) / median)
        bound += int(((ratio - 1).abs() > 2e-4).sum())
    assert 0 < bound < 3 * len(steps)


@in_double
def test_flash_grpos_step_weights() -> None:
    """train_wanx2_1_flash.py: 1 / (sqrt(dt) / std + std sqrt(dt) (1 - sigma) / (2 sigma)) over its mean in the batch.

    That is the equalizer, whose weights are over the median of the steps that may be drawn: one factor for all clips of a batch.
    """
    config, grid = preset("flash_grpo", "wan", steps=20), Schedule.shifted(20, 3.0)
    assert config.build_objective().clip_range(WAN) == pytest.approx(1e-3, rel=CLOSE)
    config = replace(config, surrogate=replace(config.surrogate, clip_range=0.004))
    steps = steps_of(config, grid)
    values = []
    for step in steps:
        noise, root = wan_noise(config, grid, step), torch.sqrt(-step.dt)
        values.append(1 / (root / noise + noise * root * (1 - step.sigma) / (2 * step.sigma)))
    drawn = [0, 3, 7, 9]  # a batch
    mean = sum(float(values[index]) for index in drawn) / len(drawn)
    median = float(torch.stack([step.ours.sensitivity for step in steps]).quantile(0.5))
    for index in drawn:
        step = steps[index]
        theirs = values[index] / mean * their_clipped(step, their_ratio(step, wan_noise(config, grid, step)), 0.004)
        same_loss(theirs.mean(), ours(config, step), step, factor=1 / (median * mean))


def test_flash_grpos_table_of_weights_is_one_over_our_sensitivity() -> None:
    """The numbers that its code has written down for the first ten timesteps of Wan at 20 steps (UniPC, shift 3)."""
    even = (1 - torch.linspace(1, 1 / 1000, 21, dtype=torch.float64)).flip(0)[:-1]
    grid = Schedule(torch.cat([3 * even / (1 + 2 * even), torch.zeros(1)]))
    kernel = preset("flash_grpo", "wan", steps=20).kernel.build(grid)
    table = [7.4770, 7.0414, 6.6112, 6.1867, 5.7682, 5.3559, 4.9502, 4.5513, 4.1596, 3.7754]
    found = [1 / float(kernel(*grid.pair(index)).sensitivity) for index in range(10)]
    assert found == pytest.approx(table, rel=2e-5)


def planned(config: TrainConfig, iteration: int = 0):
    grid = Schedule.shifted(config.rollout.steps, 3.0)
    planner = Planner(config, grid, config.kernel.build(grid), trains=lambda sigma: True)
    planner.check()
    return planner.foresee(planner.plan(iteration, [Prompt(str(place)) for place in range(config.batch.prompts)]))


def test_flow_grpo_trains_all_steps_but_the_last_in_two_updates() -> None:
    on_wan, steps = preset("flow_grpo", "wan", steps=20), 10
    config = preset("flow_grpo", steps=steps)
    assert on_wan.build_objective().clip_range(16 * 9 * 30 * 52) == pytest.approx(1e-3, rel=CLOSE)
    assert config.build_objective().clip_range(SD3) == pytest.approx(1e-4, rel=CLOSE)
    assert config.surrogate.clip_range is None
    plan = planned(config)
    assert sorted(plan.groups[0].trained[0]) == sorted(plan.groups[0].trained[1]) == list(range(steps - 1))
    assert [len(part) for part in plan.chosen] == [8, 8]


def test_flash_grpo_draws_one_step_of_the_first_half_for_every_prompt() -> None:
    config = preset("flash_grpo", "wan", steps=20)
    seen = set()
    for iteration in range(12):
        plan = planned(config, iteration)
        assert [len(part) for group in plan.groups for part in group.trained] == [1, 1] * 4
        assert sum(map(len, plan.chosen)) == 16  # each clip is trained once
        seen |= {group.label(group.trained[0][0]) for group in plan.groups}
    assert seen == set(range(10))
