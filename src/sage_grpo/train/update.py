"""Updates: replay the trajectories of a rollout and move the policy."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sage_grpo.models.policy import Step
from sage_grpo.parallel.world import World
from sage_grpo.rl.surrogate import (
    SurrogateTerms,
    centred_log_ratio,
    clip_range,
    clipped_surrogate,
    kl_masked_surrogate,
)
from sage_grpo.rl.trust_region import KlTerms, TrustRegion, closed_form_kl
from sage_grpo.train.config import SurrogateConfig
from sage_grpo.train.rollout import Record


class Diverged(RuntimeError):
    """The loss or the gradient is not finite; the weights were not touched."""


@dataclass(frozen=True)
class Objective:
    """The loss of one (micro-batch, step): surrogate + lambda KL."""

    surrogate: SurrogateConfig
    trust_region: TrustRegion
    dims: int
    """Latent dimensions of a sample, which set the scale of the clip range."""

    @property
    def scale(self) -> float:
        """sqrt(D), by which the loss is multiplied.

        A log-probability that is a mean over D dimensions has a gradient that shrinks as 1 / sqrt(D). At full size AdamW's
        epsilon and the clipping norm would be of another order than in a small run; with this factor learning rate, epsilon and
        clipping mean the same at any resolution.
        """
        return math.sqrt(self.dims)

    @property
    def clip(self) -> float:
        """The clip range in use."""
        given = self.surrogate.clip_range
        return clip_range(self.dims, self.surrogate.clip_scale) if given is None else given

    @property
    def needs_v_old(self) -> bool:
        """Whether the rollout must keep its velocities."""
        stepwise = self.trust_region.uses_stepwise and self.trust_region.estimator == "closed_form"
        return stepwise or self.surrogate.centred or self.surrogate.kind == "kl_mask"

    def surrogate_terms(self, log_ratio: Tensor, advantage: Tensor, kl_old: Tensor | None) -> SurrogateTerms:
        """The policy loss per sample; `kl_old` is the exact KL to the rollout's policy where it is needed."""
        if self.surrogate.centred and kl_old is not None:
            log_ratio = centred_log_ratio(log_ratio, kl_old)
        if self.surrogate.kind == "kl_mask" and kl_old is not None:
            tau = self.surrogate.kl_mask_scale / self.dims
            return kl_masked_surrogate(log_ratio, advantage, kl_old, tau=tau)
        return clipped_surrogate(log_ratio, advantage, clip=self.clip)


@dataclass
class Tally:
    """Sums over the items of one update; added up over ranks in one go."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    grad_raw: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Squared gradient norm of the surrogate at the velocity, per step, before equalising."""
    grad_weighted: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """The same after equalising."""
    grad_sent: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Of the whole gradient that went into the network: equalised surrogate plus KL."""
    bad_steps: set[int] = field(default_factory=set)
    """Steps with a loss that is not finite."""
    largest_log_ratio: float = 0.0


@dataclass(frozen=True)
class Item:
    """One replay with what the loss needs besides its record. Values go by member."""

    record: Record
    step: int
    """Index in the record's schedule."""
    label: int
    """The step's index in the run's own grid, by which it is logged."""
    advantage: Tensor
    weight: Tensor
    """Share of each member in the update's mean; 0 for masked members, and for passes that only keep ranks in step."""
    equalizer: float
    v_anchor: Tensor | None = None
    at_anchor: bool = False
    """The live velocities stand for the anchor's: the KL to it is 0 and has no gradient."""


@dataclass(frozen=True)
class Loss:
    """The loss of one item with its gradient at the velocity, the only way by which it reaches the network.

    `total` is what is sent backward, and what the metrics are made of.
    """

    terms: SurrogateTerms
    kl: KlTerms
    log_ratio: Tensor
    value: float
    """Weighted mean of the surrogate, before the equaliser."""
    raw: Tensor
    """Gradient of the surrogate without the equaliser."""
    policy: Tensor
    """Gradient of the surrogate, equalised."""
    trust: Tensor
    """Gradient of lambda times the KL."""

    @property
    def total(self) -> Tensor:
        """The gradient that goes through the network."""
        return self.policy + self.trust


def loss_of(objective: Objective, item: Item, step: Step, *, kl_lambda: float) -> Loss:
    """Surrogate + lambda KL of one item at the velocities of `step`, which have a graph, and its gradients there.

    They are taken at the velocity first: the shares of surrogate and KL and the norms per step then cost nothing, and the
    network's backward pass runs once. Members that share their state share the velocity, too: its gradient is then the sum over
    them, and one pass serves the whole group.
    """
    record, v = item.record, step.velocity
    x_next = record.x_next.to(device=v.device, dtype=torch.float32)
    sensitivity = record.policy.transition(item.step).sensitivity.to(v.device)
    log_prob, log_prob_old = step.gaussian.expand(len(x_next)).log_prob(x_next), record.log_prob_old
    v_old = v.detach() if record.v_old is None else record.v_old.to(v.device)
    kl_old = closed_form_kl(v, v_old, sensitivity) if objective.needs_v_old else None
    terms = objective.surrogate_terms(log_prob - log_prob_old, item.advantage, kl_old)
    v_anchor = v.detach() if item.at_anchor else item.v_anchor
    kl = objective.trust_region.penalty(
        v=v, v_old=v_old, v_anchor=v_anchor, sensitivity=sensitivity, log_prob=log_prob, log_prob_old=log_prob_old
    )
    value = (item.weight * terms.loss).sum()
    (raw,) = torch.autograd.grad(objective.scale * value, v, retain_graph=True)
    trust = torch.zeros_like(raw)
    if kl.total is not None:
        penalty = objective.scale * kl_lambda * (item.weight * kl.total).sum()
        (trust,) = torch.autograd.grad(penalty, v, retain_graph=True)
    log_ratio = (log_prob - log_prob_old).detach()
    return Loss(terms, kl, log_ratio, float(value.detach()), raw, item.equalizer * raw, trust)


def replay(item: Item, device: torch.device) -> Step:
    """Run an item's step again, with the weights that are in the model now."""
    record = item.record
    x = record.x.to(device=device, dtype=torch.float32)
    return record.policy.step(item.step, x, record.conditions)


def backward(objective: Objective, item: Item, *, kl_lambda: float, scale: float, tally: Tally) -> None:
    """Replay one step and add its gradient; `scale` makes up for an engine that averages gradients over ranks."""
    step = replay(item, item.advantage.device)
    loss = loss_of(objective, item, step, kl_lambda=kl_lambda)
    step.velocity.backward(scale * loss.total)
    _count(tally, item, loss, kl_lambda)


def _count(tally: Tally, item: Item, loss: Loss, kl_lambda: float) -> None:
    """Add one item to the tally."""
    w, kl, terms = item.weight, loss.kl, loss.terms
    kl_total = 0.0 if kl.total is None else float((w * kl.total.detach()).sum())
    sums = tally.sums
    sums["loss/policy"] += item.equalizer * loss.value
    sums["loss/kl"] += kl_lambda * kl_total
    sums["kl/total"] += kl_total
    for name, term in (("kl/position", kl.position), ("kl/velocity", kl.velocity)):
        if term is not None:
            sums[name] += float((w * term.detach()).sum())
    # Ratios differ from 1 in the fifth digit and beyond: their spread is lost in float32, and in E[r^2] - E[r]^2.
    excess, share = terms.ratio.double() - 1.0, w.double()
    sums["ratio/mean"] += float((share * excess).sum())
    sums["ratio/square"] += float((share * excess.square()).sum())
    sums["ratio/clip_fraction"] += float((w * terms.inactive).sum())
    live = loss.log_ratio[w > 0]
    if len(live):
        tally.largest_log_ratio = max(tally.largest_log_ratio, float(live.abs().max()))
    policy = _square(loss.policy)
    tally.grad_raw[item.label] += _square(loss.raw)
    tally.grad_weighted[item.label] += policy
    tally.grad_sent[item.label] += _square(loss.total)
    sums["gradient/policy"] += policy
    sums["gradient/kl"] += _square(loss.trust)
    if not math.isfinite(loss.value + kl_total + tally.grad_sent[item.label]):
        tally.bad_steps.add(item.label)


def _square(gradient: Tensor) -> float:
    return float(gradient.square().sum())


@torch.no_grad()
def with_anchor(items: Sequence[Item], device: torch.device, progress: Callable[[], None] = lambda: None) -> list[Item]:
    """The reference pass: items with the velocities of the weights that are in the model now."""
    result = []
    for item in items:
        v_anchor = replay(item, device).velocity.to(item.record.x.device)
        result.append(dataclasses.replace(item, v_anchor=v_anchor))
        progress()
    return result


def accumulate(
    objective: Objective,
    items: Sequence[Item],
    device: torch.device,
    *,
    kl_lambda: float,
    scale: float = 1.0,
    before_last: Callable[[], None] = lambda: None,
    progress: Callable[[], None] = lambda: None,
) -> Tally:
    """Gradients of one optimizer update.

    `before_last` is called before the last backward pass: engines that synchronise gradients do so only there.
    """
    tally = Tally()
    for number, item in enumerate(items):
        if number == len(items) - 1:
            before_last()
        placed = dataclasses.replace(
            item,
            advantage=item.advantage.to(device),
            weight=item.weight.to(device),
            v_anchor=None if item.v_anchor is None else item.v_anchor.to(device),
        )
        backward(objective, placed, kl_lambda=kl_lambda, scale=scale, tally=tally)
        progress()
    return tally


def summarize(tally: Tally, world: World, steps: Sequence[int]) -> dict[str, float]:
    """Metrics of one update over all ranks; raises Diverged, on every rank alike, when a loss was not finite."""
    names = sorted(tally.sums)
    squares = {"raw": tally.grad_raw, "equalized": tally.grad_weighted, "sent": tally.grad_sent}
    rows = [tally.sums[name] for name in names]
    rows += [square[step] for square in squares.values() for step in steps]
    rows += [float(step in tally.bad_steps) for step in steps]
    packed = iter(world.sum(torch.tensor(rows, dtype=torch.float64)).tolist())
    metrics = {name: next(packed) for name in names}
    for kind in squares:
        metrics |= {f"gradient/{kind}/{step:03d}": math.sqrt(next(packed)) for step in steps}
    broken = [step for step in steps if next(packed)]
    if broken:
        raise Diverged(
            f"The loss is not finite at denoising step(s) {broken}. The weights were not changed. Lower optimizer.lr or "
            "kernel.eta, or look at how gradient/norm and ratio/largest_log grew in metrics.jsonl."
        )
    policy, kl = math.sqrt(metrics.pop("gradient/policy")), math.sqrt(metrics.pop("gradient/kl"))
    metrics["gradient/kl_share"] = kl / (policy + kl) if policy + kl > 0 else 0.0
    metrics["ratio/std"] = math.sqrt(max(0.0, metrics.pop("ratio/square") - metrics["ratio/mean"] ** 2))
    metrics["ratio/mean"] += 1.0
    metrics["ratio/largest_log"] = float(
        world.gather(torch.tensor([tally.largest_log_ratio], dtype=torch.float64)).max()
    )
    return metrics
