"""The signal-to-noise ratio that the gradient of an iteration can be expected to have, from a small probe (docs/probe.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sage_grpo.doctor.finding import Finding, skipped
from sage_grpo.models.base import VelocityModel
from sage_grpo.probe.estimate import LEAST, effect
from sage_grpo.probe.prober import Prober, ProbeSpec, passes
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.planning.plan import Plan
from sage_grpo.types import Conditioning

PATIENCE = 120.0
"""Seconds that a probe may take where nobody asked for one."""
WHY = "with the same reward, a gradient that is mostly noise needs more clips, another step or another eta"


def plan_probe(prober: Prober, plan: Plan) -> list[Plan]:
    """Branches as the run explores: at all steps, or at the first that it trains."""
    whole = prober.config.rollout.window.kind == "all"
    group = plan.groups[0]
    return prober.exploring(prober.config.kernel.eta, None if whole else group.label(group.trained[0][0]))


def make_prober(
    config: TrainConfig, model: VelocityModel, reward: CompositeReward, plan: Plan, conditions: Sequence[Conditioning]
) -> Prober:
    """A prober of the check-up's own prompts."""
    prompts = list(dict.fromkeys(plan.prompts))
    return Prober(config, ProbeSpec(prompts=max(2, len(prompts))), model, reward, prompts, conditions)


def seconds(plans: Sequence[Plan], per_pass: float, per_clip: float) -> float:
    """How long a probe would take."""
    clips = sum(len(plan.groups) * plan.group_size for plan in plans)
    return passes(plans) * per_pass + clips * per_clip


def signal(prober: Prober, plans: Sequence[Plan], *, asked: bool | None, forecast: float) -> Finding:
    """Expected signal-to-noise ratio of an iteration's gradient: sqrt(n R / D) with n clips, R of the probe and D dimensions."""
    config, name = prober.config, "signal"
    if asked is False:
        return skipped(name, "doctor.probe is false", WHY)
    if len(prober.prompts) < 2:
        return skipped(name, "an interval needs two prompts", WHY)
    if asked is None and forecast > PATIENCE:
        return skipped(name, f"about {forecast / 60:.0f} minutes: ask for it with --doctor.probe true", WHY)
    with torch.no_grad():
        clips = prober.run(plans, config.kernel.eta)
    found = effect(clips.reward, clips.reward.mean(2))  # without deterministic clips: its changes of means are not read
    count = config.batch.prompts * (config.batch.group_size - 1) * config.rollout.window.branches
    dims = math.prod(prober.model.latent_shape())
    ratio = math.sqrt(max(0.0, found.linear.value) * count / dims)
    return Finding(
        name=name,
        status="warn" if found.explored.high < LEAST else "pass",
        value=f"{ratio:.2g} with {config.batch.prompts} x {config.batch.group_size} clips; exploration makes {found.explored.value:.0%} of the "
        f"reward's variance, R {found.linear.value:.2f} ({found.linear.low:.2f} to {found.linear.high:.2f})",
        why=WHY,
        remedy="`sage-grpo probe` compares steps and etas; raise batch.group_size or batch.prompts",
        number=ratio,
    )
