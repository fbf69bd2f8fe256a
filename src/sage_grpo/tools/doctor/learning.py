"""The rollout that the checks share, and the checks of learning: guidance, the first ratio, gradients, one update, ranks, the trust region."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from sage_grpo.distributed.fsdp import disagreeing, local
from sage_grpo.distributed.world import World
from sage_grpo.tools.doctor.check import Check, graded, relative
from sage_grpo.training import loss
from sage_grpo.training.loss import TrainItem
from sage_grpo.training.plan import Plan
from sage_grpo.training.rollout import Rollout
from sage_grpo.training.trainer import Trainer

WATCHED = 4096  # values of every parameter that are watched during the update
FAR, TOO_FAR = 0.4, 1.0
"""Limits of the relative change of a velocity by one update: the recipes' is 0.001 (a LoRA) to 0.12 (all weights)."""


@dataclass(frozen=True)
class Sample:
    """One small rollout, which all later checks share."""

    trainer: Trainer
    plan: Plan

    @cached_property
    def rollout(self) -> Rollout:
        return self.trainer.engine.sampler(self.plan).run()

    def items(self) -> list[TrainItem]:
        """One replay of every trained step, with made-up advantages: these checks must not depend on a reward, unless it is
        differentiated.

        Ranks of one network make equally many passes, so that several take all of theirs.
        """
        items, steps, world = [], set(), self.trainer.world
        by_gradient = self.trainer.config.build_objective().differentiates
        pushes = self.trainer.engine.differentiate(self.plan, self.rollout) if by_gradient else {}
        updates = range(self.plan.updates)
        for replay in dict.fromkeys(one for update in updates for one in self.plan.replays(world.rank, update)):
            group = self.plan.groups[replay.members[0].group]
            label = group.label(replay.step)
            if label in steps and world.size == 1:
                continue
            steps.add(label)
            ones = torch.ones(len(replay.members))
            items.append(
                TrainItem(
                    record=self.rollout.records[replay],
                    step=replay.step,
                    label=label,
                    advantage=torch.tensor([1.0 if member.index % 2 else -1.0 for member in replay.members]),
                    weight=ones / len(ones),
                    equalizer=self.plan.equalizer[label],
                    reward_gradient=pushes.get(replay.members),
                    length=group.length(replay.step) if pushes else 0.0,
                )
            )
        return items


@torch.no_grad()
def guidance(sample: Sample, items: Sequence[TrainItem]) -> Check:
    """Replays against the velocity at the configuration's guidance; `ratio` compares them with the rollout."""
    model, scale = sample.trainer.model, sample.trainer.config.model.training_guidance
    asked = model.guidance_scale if scale is None else scale
    gaps = []
    for item in (items[0], items[-1]):
        record = item.record
        x = record.x.to(model.device, torch.float32)
        sigma, _ = record.policy.schedule.pair(item.step)
        wanted = model.velocity(x, sigma, record.conditions, guidance=scale)
        gaps.append(relative(loss.replay(item, model.device).velocity, wanted))
    largest = max(gaps)
    status = graded(largest, warn=1e-4, fail=1e-2)
    value = f"scale {asked:g}; an update and a pass at that scale differ by {largest:.2g}"
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


def _modules(names: Mapping[str, object]) -> set[str]:
    """Modules of parameters: both halves of an adapter belong to the layer that they adapt."""
    return {re.sub(r"\.lora_[AB]\..*$|\.[^.]+$", "", name) for name in names}


def ratio(sample: Sample, items: Sequence[TrainItem]) -> Check:
    """The ratio before any update, at every trained step, by an update's replays; leaves its gradients in the parameters."""
    trainer, rows = sample.trainer, []
    trainer.state.optimizer.zero_grad()
    for item in trainer.updater.with_reference(items):
        sums = trainer.updater.accumulate([item], trainer.state.kl.value)
        rows.append((float(sums.largest_log_ratio), item.label))
    largest, label = max(rows)
    steps, at = len({row[1] for row in rows}), f", at step {label}" if largest else ""
    return Check(
        "ratio",
        graded(largest, warn=0.0, fail=trainer.clip_range / 10),
        f"largest |log ratio| before any update {largest:.2g} over {steps} steps{at} (clip range {trainer.clip_range:.2g})",
        largest,
    )


def gradients(trainer: Trainer, networks: Collection[int] = (0, 1)) -> Check:
    """Every trained module gets a gradient that is a number and that the optimizer's epsilon does not swallow. Of two trained experts,
    those of the sample's steps count (`networks`)."""
    params, eps = _run(trainer, networks), trainer.config.optimizer.eps
    if not params:
        return Check("gradients", "fail", "there are no trained parameters")
    alive = {name: p for name, p in params.items() if p.grad is not None and bool(local(p.grad).any())}
    silent = sorted(_modules(params) - _modules(alive))
    silent = [] if trainer.world.size > 1 else silent  # a shard of a small tensor may be empty
    total = sum(float(local(p.grad).double().square().sum()) for p in alive.values() if p.grad is not None)
    rms = math.sqrt(total / max(1, sum(local(p).numel() for p in params.values())))
    # The last block of some networks has unused parts.
    status, note = graded(len(silent) / max(1, len(_modules(params))), warn=0.1, fail=0.5), ""
    if not math.isfinite(rms) or not alive:
        status, note = "fail", ", not finite" if alive else ", none at all"
    elif rms < eps:
        status, note = max(status, "warn", key=("pass", "warn", "fail").index), f", below optimizer.eps {eps:g}"
    named = f"; none in {', '.join(silent[:3])}{' ...' if len(silent) > 3 else ''}" if silent else ""
    value = f"{len(_modules(alive))} of {len(_modules(params))} modules, root mean square {rms:.2g}{note}{named}"
    return Check("gradients", status, value, rms)


def _run(trainer: Trainer, networks: Collection[int]) -> dict[str, nn.Parameter]:
    """The parameters that a sample with steps of these networks trains."""
    params, experts = trainer.state.params, [trainer.model.network, *trainer.model.others]
    own = [{id(parameter) for parameter in expert.parameters()} for expert in experts]
    if sum(any(id(p) in ids for p in params.values()) for ids in own) < 2:
        return params
    ran = set().union(*(own[network] for network in networks))
    return {name: parameter for name, parameter in params.items() if id(parameter) in ran}


def update_moves(trainer: Trainer) -> Check:
    """One optimizer step, at the learning rate that the run has after its warm-up, changes the weights that have a gradient."""
    params, state = trainer.state.params, trainer.state
    state.updates = max(state.updates, trainer.config.optimizer.warmup_updates)
    before = {name: _watched(p).clone() for name, p in params.items()}
    pushed = {name: _pushed(p) for name, p in params.items()}
    lr = trainer.updater.apply({})["optimizer/lr"]
    moved = torch.cat([(_watched(p) != before[name])[pushed[name]] for name, p in params.items()])
    share = float(moved.double().mean()) if len(moved) else 0.0
    finite = all(bool(_watched(p).isfinite().all()) for p in params.values())
    kinds = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in params.values()}))
    value = f"one update at learning rate {lr:.2g} changed {share:.1%} of the {kinds} weights with a gradient"
    if not finite:
        return Check("update", "fail", f"{value}; some are not finite now", share)
    return Check("update", graded(1 - share, warn=0.05, fail=0.5), value, share)


@torch.no_grad()
def velocities(trainer: Trainer, items: Sequence[TrainItem]) -> list[Tensor]:
    ends = dict.fromkeys((0, len(items) - 1))
    return [loss.replay(items[place], trainer.model.device).velocity.detach().clone() for place in ends]


def step_size(trainer: Trainer, items: Sequence[TrainItem], before: Sequence[Tensor]) -> Check:
    pairs = zip(velocities(trainer, items), before, strict=True)
    gaps = [relative(now, then) for now, then in pairs]
    largest = max(gaps) if all(map(math.isfinite, gaps)) else math.inf
    status, held = graded(largest, warn=FAR, fail=TOO_FAR), trainer.config.optimizer.max_kl is not None
    if status == "fail" and held and math.isfinite(largest):
        status = "warn"
    value = f"one update at learning rate {trainer.config.optimizer.lr:.2g} moved the velocities by {largest:.2g} of their size"
    taken = ", which optimizer.max_kl takes back in part" if status != "pass" and held else ""
    return Check("step size", status, value + taken, largest)


def _watched(tensor: Tensor) -> Tensor:
    return local(tensor).detach().flatten()[:WATCHED]


def _pushed(p: nn.Parameter) -> Tensor:
    """Watched values whose gradient is not lost beside the others': AdamW moves them by the learning rate."""
    if p.grad is None:
        return torch.zeros_like(_watched(p), dtype=torch.bool)
    size = _watched(p.grad).abs()
    return size > 1e-2 * size.double().square().mean().sqrt()


def ranks(params: Mapping[str, Tensor], world: World) -> Check:
    if world.control is None and world.processes == 1:
        return Check("ranks", "skip", "one process")
    other = disagreeing(params, world)
    value = f"rank(s) {other} hold other weights than rank 0" if other else f"{world.processes} processes agree"
    return Check("ranks", "fail" if other else "pass", value, float(len(other)))


def trust_region(sample: Sample, items: Sequence[TrainItem]) -> Check:
    trainer, config = sample.trainer, sample.trainer.config
    region, anchor = config.trust_region, trainer.state.anchor
    if region.mode == "none":
        return Check("trust region", "skip", "trust_region.mode is none")
    is_live = config.update.updates_per_rollout == 1 and not config.build_objective().lags  # the rollout's policy
    if is_live and (anchor is None or anchor.every == 1):
        return Check(
            "trust region",
            "warn",
            f"{region.mode} with one update a rollout: the policy is its own reference, and the KL has no gradient",
            0.0,
            remedy="set update.updates_per_rollout 2, trust_region.mode fixed, or anchor.every above 1",
        )
    lambda_ = trainer.state.kl.value
    items = items if trainer.old is None else trainer.updater.with_old(items)
    tally = trainer.updater.accumulate(trainer.updater.with_reference(items), lambda_ or 1.0)
    trainer.state.optimizer.zero_grad()
    kl, policy, trust = (float(tally.sums[name]) for name in ("kl/total", "gradient/policy", "gradient/kl"))
    share = math.sqrt(trust) / max(1e-300, math.sqrt(trust) + math.sqrt(policy)) if lambda_ else 0.0
    small = " (next to nothing; kl.kind share sets it)" if 0 < share < 1e-3 else ""
    value = f"one update away the KL is {kl:.2g}, its share of the gradient {share:.2g} at lambda {lambda_:.2g}{small}"
    return Check("trust region", "pass" if 0 < trust < math.inf else "fail", value, share)
