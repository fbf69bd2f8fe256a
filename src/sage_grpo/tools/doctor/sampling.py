"""The rollout that the checks share, and its guidance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sage_grpo.tools.doctor.check import Check, graded, relative
from sage_grpo.training import loss
from sage_grpo.training.loss import TrainItem
from sage_grpo.training.plan import Plan, Replay
from sage_grpo.training.rollout import Rollout
from sage_grpo.training.trainer import Trainer


@dataclass(frozen=True)
class Sample:
    """One small rollout, which all later checks share."""

    trainer: Trainer
    plan: Plan

    @cached_property
    def rollout(self) -> Rollout:
        """Sampled on first use."""
        return self.trainer.engine.sampler(self.plan).run()

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
