"""Checks of sampling: noise, guidance, and the expected signal-to-noise ratio of the gradient (docs/probe.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import torch
from torch import Tensor

from sage_grpo.data.groups import Member
from sage_grpo.tools.doctor.check import Check, graded, relative
from sage_grpo.tools.probe.estimate import LEAST, effect
from sage_grpo.tools.probe.probe import Prober
from sage_grpo.training import loss
from sage_grpo.training.loss import TrainItem
from sage_grpo.training.plan import Group, Plan, Replay
from sage_grpo.training.rollout import Rollout, Sampler
from sage_grpo.training.trainer import Trainer

ENOUGH = 1 << 16
"""Values of a noise that are compared."""
PATIENCE = 120.0
"""Most seconds of a probe by default."""


@dataclass(frozen=True)
class Sample:
    """One small rollout, which all later checks share."""

    trainer: Trainer
    plan: Plan

    @cached_property
    def sampler(self) -> Sampler:
        """The trainer's sampler."""
        return self.trainer.engine.sampler(self.plan)

    @cached_property
    def rollout(self) -> Rollout:
        """Sampled on first use."""
        return self.sampler.run()

    @property
    def members(self) -> list[Member]:
        """This rank's clips."""
        return [member for batch in self.plan.batches(self.trainer.world.rank) for member in batch.members]

    def group(self, member: Member) -> Group:
        """A clip's group."""
        return self.plan.groups[member.group]

    def items(self) -> list[TrainItem]:
        """One replay of every trained step, with made-up advantages: these checks must not depend on a reward, unless it is
        differentiated.

        Ranks of one network make equally many passes, so that several take all of theirs.
        """
        items, steps = [], set()
        by_gradient = self.trainer.config.build_objective().differentiates
        pushes = self.trainer.engine.differentiate(self.plan, self.rollout) if by_gradient else {}
        for replay in self._replays():
            group = self.plan.groups[replay.members[0].group]
            label = group.label(replay.step)
            if label in steps and self.trainer.world.size == 1:
                continue
            steps.add(label)
            ones = torch.ones(len(replay.members))
            signs = torch.tensor([1.0 if member.index % 2 else -1.0 for member in replay.members])
            items.append(
                TrainItem(
                    record=self.rollout.records[replay],
                    step=replay.step,
                    label=label,
                    advantage=signs,
                    weight=ones / len(ones),
                    equalizer=self.plan.equalizer[label],
                    reward_signal=pushes.get(replay.members),
                    length=group.length(replay.step) if pushes else 0.0,
                )
            )
        return items

    def _replays(self) -> list[Replay]:
        rank = self.trainer.world.rank
        return list(dict.fromkeys(r for number in range(self.plan.updates) for r in self.plan.replays(rank, number)))


def noise(sample: Sample) -> Check:
    """Start and exploration noise: standard normal, different or equal as it should be."""
    keys, shape = sample.sampler.keys, sample.trainer.model.latent_shape()
    starts = {m: _flat(keys.start(sample.group(m), m, shape)[None]) for m in sample.members}
    same_start = sample.trainer.config.rollout.same_noise
    faults = []
    for one, other in combinations(sample.members, 2):
        alike = _alike(starts[one], starts[other])
        if alike != _share_start(sample.group(one), sample.group(other), one, other, same_start):
            faults.append(f"{_name(one)} and {_name(other)} start from {'the same' if alike else 'different'} noise")
    steps = sorted({label for number in range(sample.plan.updates) for label in sample.plan.labels(number)})[:2]
    drawn = [(m, s, _flat(keys.step([m], s, shape))) for s in steps for m in sample.members]
    for (one, step, a), (other, step_other, b) in combinations(drawn, 2):
        if _alike(a, b):
            faults.append(
                f"{_name(one)} at step {step} and {_name(other)} at step {step_other} explore with the same noise"
            )
    noises = torch.stack([*starts.values(), *(row for _, _, row in drawn)])
    off = abs(float(noises.std()) - 1.0)
    if off > 0.02 + 6 / math.sqrt(2 * noises.numel()):
        faults.append(f"its std is {float(noises.std()):.3f}, not 1")
    std = float(noises.std())
    value = f"{len(starts)} starts and {len(drawn)} explorations: std {std:.3f}, different where they should be"
    if faults:
        value = "; ".join(faults[:2]) + (f"; {len(faults) - 2} more" if len(faults) > 2 else "")
    return Check("noise", "fail" if faults else "pass", value, std)


def _share_start(group: Group, other: Group, one: Member, two: Member, same_start: bool) -> bool:
    """True if two clips should start from one noise."""
    seeds = group.prompt.seed, other.prompt.seed
    same_key = group.number == other.number if seeds == (None, None) else seeds[0] == seeds[1]
    return same_key and (same_start or one.index == two.index)


def _name(member: Member) -> str:
    return f"clip {member.index} of prompt {member.group}"


def _flat(noise: Tensor) -> Tensor:
    return noise.detach().float().cpu().flatten()[:ENOUGH]


def _alike(a: Tensor, b: Tensor) -> bool:
    """True if two noises are one; independent ones of few dimensions can be close, too."""
    limit = min(0.999, max(0.5, 6 / math.sqrt(len(a))))
    return float(torch.dot(a, b) / (a.norm() * b.norm()).clamp(min=1e-30)) > limit


@torch.no_grad()
def guidance(sample: Sample, items: Sequence[TrainItem]) -> Check:
    """Rollout and replay against the velocity at the configuration's guidance."""
    model, scale = sample.trainer.model, sample.trainer.config.model.training_guidance
    asked = model.guidance_scale if scale is None else scale
    gaps = []
    for item in dict.fromkeys((0, len(items) - 1)):
        record, index = items[item].record, items[item].step
        x = record.x.to(model.device, torch.float32)
        sigma, _ = record.policy.schedule.pair(index)
        wanted = model.velocity(x, sigma, record.conditions, guidance=scale)
        gaps.append(("update", relative(loss.replay(items[item], model.device).velocity, wanted)))
        gaps.append(("rollout", _rollout_gap(items[item], x, wanted)))
    where, largest = max(gaps, key=lambda row: row[1])
    status = graded(largest, warn=1e-4, fail=1e-2)
    value = f"scale {asked:g}; {where} and a pass at that scale differ by {largest:.2g}"
    if status == "pass" and asked != model.guidance_scale:
        return Check(
            "guidance",
            "warn",
            f"{value}; but evaluation and generate sample at scale {model.guidance_scale:g}",
            largest,
            why="what is trained without guidance is not what is sampled with it: a gain there may be less, or none",
            remedy="model.guidance_in_training true trains what is sampled; or sample as it is trained, with model.guidance_scale 1",
        )
    return Check("guidance", status, value, largest)


def _rollout_gap(item: TrainItem, x: Tensor, wanted: Tensor) -> float:
    """Difference of the rollout's log-probabilities from those of a velocity; sizes differ by steps, so in units of noise."""
    record = item.record
    if record.log_prob_old is None:  # a fresh noise level, which no rollout visited
        return 0.0
    x_next = record.x_next.to(x.device, torch.float32)
    law = record.policy.at(item.step, x, wanted).gaussian.expand(len(x_next))
    return float((law.log_prob(x_next) - record.log_prob_old.to(x.device)).abs().max())


def plan_probe(prober: Prober, plan: Plan) -> list[Plan]:
    """Branches as the run explores: at all steps, or at the first that it trains."""
    whole = prober.config.rollout.window.kind == "all"
    group = plan.groups[0]
    return prober.exploring(prober.config.kernel.eta, None if whole else group.label(group.trained[0][0]))


def signal(prober: Prober, plans: Sequence[Plan], *, asked: bool | None, forecast: float) -> Check:
    """Expected signal-to-noise ratio of an iteration's gradient: sqrt(n R / D) with n clips, R of the probe and D dimensions."""
    config, batch = prober.config, prober.config.batch
    if asked is False:
        return Check("signal", "skip", "doctor.probe is false")
    if len(prober.prompts) < 2:
        return Check("signal", "skip", "an interval needs two prompts")
    if asked is None and forecast > PATIENCE:
        return Check("signal", "skip", f"about {forecast / 60:.0f} minutes: ask for it with --doctor.probe true")
    with torch.no_grad():
        clips = prober.run(plans, config.kernel.eta)
    found = effect(clips.reward, clips.reward.mean(2))  # without deterministic clips: its changes of means are not read
    count = config.batch.prompts * (config.batch.group_size - 1) * config.rollout.window.branches
    dims = math.prod(prober.model.latent_shape())
    ratio = math.sqrt(max(0.0, found.linear.value) * count / dims)
    value = (
        f"{ratio:.2g} with {batch.prompts} x {batch.group_size} clips; exploration makes {found.explored.value:.0%} of the "
        f"reward's variance, R {found.linear.value:.2f} ({found.linear.low:.2f} to {found.linear.high:.2f})"
    )
    return Check("signal", "warn" if found.explored.high < LEAST else "pass", value, ratio)
