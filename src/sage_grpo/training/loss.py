"""The loss of a replayed step, its gradient through the network, and the sums that metrics are made of."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from sage_grpo.distributed.world import World
from sage_grpo.models.policy import Step
from sage_grpo.objectives.base import LossTerms, Objective, PreferencePair, ReplayedStep
from sage_grpo.objectives.trust_region import KlTerms, TrustRegion, closed_form_kl
from sage_grpo.samplers.transition import expanded
from sage_grpo.training.offload import to_device
from sage_grpo.training.rollout import Record

KINDS = ("raw", "equalized", "sent")
"""Gradients whose norms are logged for every step."""


class Diverged(RuntimeError):
    """Not finite: a loss or a gradient, whose update is not made, or the measured KL of updates that are."""


@dataclass(frozen=True)
class TrainItem:
    """One replay with the loss inputs besides its record. Values are by clip."""

    record: Record
    step: int
    label: int
    """The step's index in the run's own grid, under which it is logged."""
    advantage: Tensor
    weight: Tensor
    """Share of each clip in the update's mean; 0 for masked clips and for padding that keeps ranks in lockstep."""
    equalizer: float
    network: int = 0
    v_reference: Tensor | None = None
    """None where the policy equals the reference, so that the KL and its gradient are 0, or where there is no reference."""
    reward_gradient: Tensor | None = None
    """Gradient of the reward at the states after the step, one row per clip; `backpropagate` makes it that at the states before."""
    length: float = 0.0
    """Length of the step: the state after it is x + length v."""
    pair: PreferencePair | None = None

    def on(self, device: torch.device) -> TrainItem:
        reference = None if self.v_reference is None else to_device(self.v_reference, device)
        advantage, weight = to_device(self.advantage, device), to_device(self.weight, device)
        return replace(self, advantage=advantage, weight=weight, v_reference=reference)


def replay(item: TrainItem, device: torch.device, x: Tensor | None = None) -> Step:
    """Run an item's step again with the model's current weights; `x` is its state if the caller needs a gradient there."""
    record = item.record
    x = to_device(record.x, device, torch.float32) if x is None else x
    return record.policy.step(item.step, x, record.conditions)


@dataclass(frozen=True)
class Loss:
    """The loss of one item with its gradient at the velocity, its only path to the network."""

    terms: LossTerms
    kl: KlTerms
    log_ratio: Tensor
    value: Tensor
    """Weighted mean of the objective's loss, before the equalizer; detached."""
    raw: Tensor
    policy: Tensor
    trust: Tensor
    squares: tuple[Tensor, Tensor]
    """Squared norms of `policy` and `trust` with a row for every clip: their ratio depends on neither sharing nor ranks."""
    metrics: dict[str, Tensor]

    @property
    def total(self) -> Tensor:
        return self.policy + self.trust


def needs_velocity_old(objective: Objective, region: TrustRegion) -> bool:
    return region.uses_stepwise or objective.needs_velocity_old


def loss_of(objective: Objective, region: TrustRegion, item: TrainItem, step: Step, *, kl_lambda: float) -> Loss:
    """Objective + lambda KL of one item, and its gradients at the velocities of `step`: the shares of objective and KL and the norms per step then
    cost nothing, the network's backward pass runs once, and one pass serves all clips that share a state."""
    record, v = item.record, step.velocity
    x_next = to_device(record.x_next, v.device, torch.float32)
    sigma, transition = record.policy.sigma(item.step), record.policy.transition(item.step)
    sensitivity = transition.sensitivity.to(v.device, non_blocking=True)
    log_prob = objective.log_prob(step.gaussian, v, x_next, sigma)
    log_prob_old = log_prob.detach() if record.log_prob_old is None else to_device(record.log_prob_old, v.device)
    v_old = v.detach() if record.v_old is None else to_device(record.v_old, v.device)
    v_reference = v.detach() if item.v_reference is None else item.v_reference
    needed = needs_velocity_old(objective, region)
    replayed = ReplayedStep(
        velocity=v,
        velocity_old=v_old,
        velocity_reference=v_reference,
        x_next=x_next,
        log_prob=log_prob,
        log_prob_old=log_prob_old,
        advantage=item.advantage,
        sigma=sigma,
        std=transition.std.to(v.device, non_blocking=True),
        kl_old=expanded(closed_form_kl(v, v_old, sensitivity), len(x_next)) if needed else None,
        reward_gradient=item.reward_gradient,
        length=item.length,
        pair=item.pair,
    )
    terms, scale = objective.loss(replayed), objective.scale(replayed.dims)
    kl = region.penalty(v=v, v_old=v_old, v_reference=v_reference, sensitivity=sensitivity, clips=len(x_next))
    value = (item.weight * terms.loss).sum()
    (raw,) = torch.autograd.grad(scale * value, v, retain_graph=True)
    trust = torch.zeros_like(raw)
    if kl.total is not None:
        penalty = scale * kl_lambda * (item.weight * kl.total).sum()
        (trust,) = torch.autograd.grad(penalty, v, retain_graph=True)
    policy = item.equalizer * raw
    squares = policy.square().sum(), trust.square().sum()
    if len(v) < len(x_next):
        (slope,) = torch.autograd.grad(
            scale * item.equalizer * value, log_prob, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        moved = sensitivity * (v.detach() - v_old) if objective.surrogate.centred == "scaled" else None
        squares = _by_member(slope, step, x_next, sensitivity, moved), _shared_out(trust, item.weight)
    diagnostics = {**terms.metrics, **objective.metrics(replayed)}
    metrics = {name: (item.weight * values).sum() for name, values in diagnostics.items()}
    log_ratio = (log_prob - log_prob_old).detach()
    return Loss(terms, kl, log_ratio, value.detach(), raw, policy, trust, squares, metrics)


def _by_member(slope: Tensor, step: Step, x_next: Tensor, sensitivity: Tensor, moved: Tensor | None) -> Tensor:
    """Sum of the squared norms of d loss_i / d v: slope_i times that of the log-probability, sensitivity (x_next - mean) / (std D). Where the KL to
    the rollout's policy has a gradient too, sensitivity^2 (v - v_old) / D, `moved` is sensitivity (v - v_old)."""
    law = step.gaussian.expand(len(x_next))
    noise = ((x_next - law.mean.detach()) / law.std.to(x_next.device)).flatten(1)
    if moved is not None:
        noise = noise - expanded(moved, len(x_next)).flatten(1)  # b is negative: the two have opposite signs
    return (slope * sensitivity / noise.shape[1]).square().dot(noise.square().sum(1))


def _shared_out(trust: Tensor, weight: Tensor) -> Tensor:
    """Sum of the squared norms of the members' parts of a gradient that is equal for a row's members except for their weights."""
    shares = weight.unflatten(0, (len(trust), -1))
    spread = shares.square().sum(1) / shares.sum(1).square().clamp(min=1e-30)
    return trust.square().flatten(1).sum(1).dot(spread)


class UpdateSums:
    """Sums over the items of one update, in float64 on the losses' device; read once, and summed over ranks together."""

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008 - a constant
        zero = partial(torch.zeros, (), dtype=torch.float64, device=device)
        self.sums: defaultdict[str, Tensor] = defaultdict(zero)
        """By metric. `gradient/KIND/STEP` are squared norms of the objective (raw), equalized, and of the whole loss with the KL (sent)."""
        self.largest_log_ratio = zero()

    def add(self, item: TrainItem, loss: Loss, kl_lambda: float) -> None:
        """Add one item, without waiting for the device."""
        w, kl, terms = item.weight, loss.kl, loss.terms
        value = loss.value.double()
        kl_total = torch.zeros_like(value) if kl.total is None else (w * kl.total.detach()).sum().double()
        sums = self.sums
        sums["loss/policy"] += item.equalizer * value
        sums["loss/kl"] += kl_lambda * kl_total
        sums["kl/total"] += kl_total
        for name, term in (("kl/position", kl.position), ("kl/velocity", kl.velocity)):
            if term is not None:
                sums[name] += (w * term.detach()).sum()
        for name, term in loss.metrics.items():
            sums[name] += term
        if terms.ratio is not None and terms.inactive is not None:
            # Ratios differ from 1 in the fifth digit and beyond: float32, and E[r^2] - E[r]^2, would lose their spread.
            excess, share = terms.ratio.double() - 1.0, w.double()
            sums["ratio/mean"] += (share * excess).sum()
            sums["ratio/square"] += (share * excess.square()).sum()
            sums["ratio/clip_fraction"] += (w * terms.inactive).sum()
        live = torch.where(w > 0, loss.log_ratio.abs(), 0.0)
        self.largest_log_ratio = torch.maximum(self.largest_log_ratio, live.max().double())
        sums["gradient/policy"] += loss.squares[0]
        sums["gradient/kl"] += loss.squares[1]
        for kind, gradient in zip(KINDS, (loss.raw, loss.policy, loss.total)):
            sums[f"gradient/{kind}/{item.label:03d}"] += gradient.square().sum()


def backpropagate(item: TrainItem, x: Tensor, scale: float) -> None:
    """Carry the reward's gradient over a step: dR/dx = dR/dx_next + length (dv/dx)^T dR/dx_next, the latter x.grad over the factors on the loss."""
    assert item.reward_gradient is not None
    assert x.grad is not None
    factor = (-scale * item.weight).view(-1, *[1] * (x.ndim - 1))
    through = torch.where(factor != 0, x.grad / torch.where(factor != 0, factor, 1.0), 0.0)
    item.reward_gradient.add_(through)


def summarize(sums: UpdateSums, world: World, steps: Sequence[int]) -> dict[str, float]:
    """Metrics of one update over all ranks; raises Diverged on every rank if a loss was not finite."""
    norms = [f"gradient/{kind}/{step:03d}" for kind in KINDS for step in steps]
    names = [*sorted({*sums.sums} - {*norms}), *norms]
    rows = [sums.sums[name] for name in names]
    read = torch.stack([*rows, sums.largest_log_ratio]).cpu()  # the only wait for the device here
    metrics = dict(zip(names, world.sum(read[:-1]).tolist()))
    metrics |= {name: math.sqrt(metrics[name]) for name in norms}
    diverged = [step for step in steps if not math.isfinite(metrics[f"gradient/sent/{step:03d}"])]
    if diverged or not math.isfinite(metrics["loss/policy"] + metrics["loss/kl"]):
        raise Diverged(
            f"The loss is not finite at denoising step(s) {diverged or steps}. The weights were not changed. Lower optimizer.lr or "
            "kernel.eta, or look at how gradient/norm and ratio/largest_log grew in metrics.jsonl."
        )
    policy, kl = math.sqrt(metrics.pop("gradient/policy")), math.sqrt(metrics.pop("gradient/kl"))
    metrics["gradient/kl_share"] = kl / (policy + kl) if policy + kl > 0 else 0.0
    if "ratio/mean" in metrics:  # a loss may have no ratio
        metrics["ratio/std"] = math.sqrt(max(0.0, metrics.pop("ratio/square") - metrics["ratio/mean"] ** 2))
        metrics["ratio/mean"] += 1.0
        metrics["ratio/largest_log"] = float(world.gather(read[-1:]).max())
    return metrics


def mean_of(logs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the updates that have a metric, and the largest ratio/largest_log; ratio/first_log is the first one: 0 if the replay repeats the rollout exactly."""
    names = sorted({name for log in logs for name in log})
    mean = {name: sum(log[name] for log in logs if name in log) / sum(name in log for log in logs) for name in names}
    if "ratio/largest_log" in mean:
        mean["ratio/first_log"] = logs[0]["ratio/largest_log"]
        mean["ratio/largest_log"] = max(log["ratio/largest_log"] for log in logs)
    return mean
