"""Updates: replay the trajectories of a rollout and train the policy."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sage_grpo.distributed.world import World
from sage_grpo.models.policy import Step
from sage_grpo.objectives.matching import ghuber_log_prob, nft_loss, optimality
from sage_grpo.objectives.objective import ObjectiveSpec
from sage_grpo.objectives.preference import dpo_lead, dpo_loss, excess_error, matching_loss
from sage_grpo.objectives.surrogate import (
    SurrogateTerms,
    centred_log_ratio,
    clip_range,
    clipped_surrogate,
    kl_masked_surrogate,
    scaled_surrogate,
)
from sage_grpo.objectives.trust_region import KlTerms, TrustRegion, closed_form_kl
from sage_grpo.samplers.gaussian import expanded
from sage_grpo.training.config import SurrogateConfig
from sage_grpo.training.offload import same_bits, settle, to_device, to_storage
from sage_grpo.training.plan import Plan
from sage_grpo.training.reference import Need, ReferencePolicy
from sage_grpo.training.rollout import Record, Rollout

KINDS = ("raw", "equalized", "sent")
"""Gradients whose norms are logged for every step."""


class Diverged(RuntimeError):
    """The loss or the gradient is not finite; the weights are unchanged."""


@dataclass(frozen=True)
class Objective:
    """The loss of one (micro-batch, step): surrogate + lambda KL, or DiffusionNFT's loss, a preference loss or flow
    matching in place of the surrogate.

    Advantage-weighted matching is a surrogate, too, on the distribution of the velocity at a fresh noise level
    (objectives/matching_law.py).
    """

    surrogate: SurrogateConfig
    trust_region: TrustRegion
    dims: int
    """Latent dimensions of a sample, which set the scale of the clip range."""
    spec: ObjectiveSpec = ObjectiveSpec()

    @property
    def scale(self) -> float:
        """sqrt(D), the factor on the loss.

        A log-probability that is a mean over D dimensions has a gradient that shrinks as 1 / sqrt(D). At full size
        AdamW's epsilon and the clipping norm would be of another order than in a small run; with this factor learning
        rate, epsilon and clipping mean the same at any resolution. A reward's own gradient has no such factor: a reward
        is of order 1 at any size.
        """
        return 1.0 if self.spec.by_gradient else math.sqrt(self.dims)

    @property
    def clip(self) -> float:
        """The clip range in use."""
        given = self.surrogate.clip_range
        return clip_range(self.dims, self.surrogate.clip_scale) if given is None else given

    @property
    def needs_v_old(self) -> bool:
        """True if the rollout must keep its velocities."""
        stepwise = self.trust_region.uses_stepwise and self.trust_region.estimator == "closed_form"
        return stepwise or bool(self.surrogate.centred) or self.surrogate.kind == "kl_mask"

    def log_prob(self, step: Step, x_next: Tensor, sigma: float) -> Tensor:
        """Log-probability of x_next for the ratio, one value per sample; with weight ghuber, that of another error
        weighting."""
        if self.spec.weight == "ghuber":
            return ghuber_log_prob(step.velocity, x_next, sigma=sigma)
        return step.gaussian.expand(len(x_next)).log_prob(x_next)

    def surrogate_terms(
        self, log_ratio: Tensor, advantage: Tensor, kl_old: Tensor | None, std: Tensor
    ) -> SurrogateTerms:
        """The policy loss per sample; `kl_old` is the exact KL to the rollout's policy if needed, `std` the step's."""
        if self.surrogate.centred == "scaled" and kl_old is not None:
            return scaled_surrogate(log_ratio, advantage, kl_old, std=std, clip=self.clip)
        if self.surrogate.centred and kl_old is not None:
            log_ratio = centred_log_ratio(log_ratio, kl_old)
        if self.surrogate.kind == "kl_mask" and kl_old is not None:
            tau = self.surrogate.kl_mask_scale / self.dims
            return kl_masked_surrogate(log_ratio, advantage, kl_old, tau=tau)
        return clipped_surrogate(log_ratio, advantage, clip=self.clip)

    def matching_terms(
        self, v: Tensor, v_old: Tensor, target: Tensor, advantage: Tensor, sigma: float
    ) -> SurrogateTerms:
        """DiffusionNFT's loss per sample."""
        beta, weight, saturation = self.spec.beta, self.spec.weight, self.spec.saturation
        r = optimality(advantage, saturation=saturation)
        return nft_loss(v, v_old, target, r, beta=beta, sigma=sigma, weight=weight, saturation=saturation)

    def excess(self, v: Tensor, v_ref: Tensor, target: Tensor, sigma: float) -> Tensor:
        """Excess of the policy's prediction error over the reference's for each clip, weighted by its noise level."""
        return self._weight(sigma) * excess_error(v, v_ref, target)

    def chosen_terms(self, v: Tensor, target: Tensor, sigma: float) -> SurrogateTerms:
        """Flow-matching loss of chosen clips."""
        return matching_loss(v, target, weight=self._weight(sigma))

    def _weight(self, sigma: float) -> float:
        return sigma if self.spec.weight == "sigma" else 1.0


class UpdateSums:
    """Sums over the items of one update, in float64 on the losses' device; read once, and summed over ranks
    together."""

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008 - a constant
        zero = partial(torch.zeros, (), dtype=torch.float64, device=device)
        self.sums: defaultdict[str, Tensor] = defaultdict(zero)
        """By metric. `gradient/KIND/STEP` are squared norms at the velocity: of the surrogate (raw), after equalising
        (equalized), and of the whole loss with the KL (sent); `bad/STEP` counts items whose loss is not finite."""
        self.largest_log_ratio = zero()


@dataclass
class RewardSignal:
    """The gradient of the reward at the states after a step, one row per member; it is propagated back from step to
    step."""

    gradient: Tensor

    def carry(self, more: Tensor) -> None:
        """Add the part of the gradient that reached the step's states through the network."""
        self.gradient = self.gradient + more


@dataclass(frozen=True)
class PreferencePair:
    """The preference pairs of an item's members, by member."""

    rows: Tensor
    """Indices of the members among all clips of the iteration."""
    rivals: Tensor
    """Index of the other clip of each pair; a clip without a pair has its own."""
    side: Tensor
    """1 for the better clip of a pair, -1 for the worse, 0 without a pair."""
    rival_excess: Tensor
    """Excess error over the reference of each rival."""


@dataclass(frozen=True)
class TrainItem:
    """One replay with the loss inputs besides its record. Values are by member."""

    record: Record
    step: int
    """Index in the record's schedule."""
    label: int
    """The step's index in the run's own grid, under which it is logged."""
    advantage: Tensor
    weight: Tensor
    """Share of each member in the update's mean; 0 for masked members and for padding passes that keep ranks
    synchronized."""
    equalizer: float
    network: int = 0
    """The network of the model that runs."""
    v_anchor: Tensor | None = None
    at_anchor: bool = False
    """True if the policy equals the reference, so that the KL and its gradient are 0."""
    push: RewardSignal | None = None
    """Gradient of a differentiated reward at the state after the step."""
    reach: float = 0.0
    """Length of the step: the state after it is x + reach v."""
    duel: PreferencePair | None = None
    """Preference pairs of its members."""


@dataclass(frozen=True)
class StatePart:
    """A part of a clip's state with a ratio of its own: it explores, or a reward judges it alone."""

    name: str
    place: slice
    column: int
    """Column in log-probabilities, and in advantages with one column per part."""
    share: float
    """Share in the loss: the losses of parts are averaged."""

    @property
    def dims(self) -> int:
        """Dimensions of the part in a sample."""
        return int(self.place.stop - self.place.start)

    def of(self, item: TrainItem, step: Step) -> tuple[TrainItem, Step]:
        """Restrict an item and its step to this part."""
        record = item.record

        def own(rows: Tensor | None) -> Tensor | None:
            return None if rows is None else rows[:, self.place]

        seen = dataclasses.replace(
            record,
            x=record.x[:, self.place],
            x_next=record.x_next[:, self.place],
            v_old=own(record.v_old),
            log_prob_old=None if record.log_prob_old is None else record.log_prob_old[:, self.column],
        )
        advantage = item.advantage if item.advantage.ndim == 1 else item.advantage[:, self.column]
        item = dataclasses.replace(
            item, record=seen, advantage=advantage, weight=self.share * item.weight, v_anchor=own(item.v_anchor)
        )
        v = step.velocity[:, self.place]
        x = to_device(seen.x, v.device, torch.float32)
        return item, Step(gaussian=record.policy.transition(item.step)(x, v), velocity=v)


def joined(gradients: Sequence[Tensor], parts: Sequence[StatePart], whole: Tensor) -> Tensor:
    """Combine the gradients at the parts into one at the whole velocity, 0 elsewhere."""
    if not parts:
        (gradient,) = gradients
        return gradient
    total = torch.zeros_like(whole)
    for gradient, part in zip(gradients, parts):
        total[:, part.place] = gradient
    return total


@dataclass(frozen=True)
class Loss:
    """The loss of one item with its gradient at the velocity, its only path to the network.

    `total` is propagated backward; the metrics are computed from all fields.
    """

    terms: SurrogateTerms
    kl: KlTerms
    log_ratio: Tensor
    value: Tensor
    """Weighted mean of the surrogate, before the equaliser; detached."""
    raw: Tensor
    """Gradient of the surrogate without the equaliser."""
    policy: Tensor
    """Gradient of the surrogate, equalised."""
    trust: Tensor
    """Gradient of lambda times the KL."""
    squares: tuple[Tensor, Tensor]
    """Squared norms of `policy` and `trust` with a row for every member: their ratio depends on neither sharing nor ranks."""
    matching: dict[str, Tensor]
    """Metrics at a fresh noise level: weighted means of the squared error of the velocity, of its squared distance from
    the old policy's, and of the lead of the better clips of pairs."""

    @property
    def total(self) -> Tensor:
        """The gradient that goes through the network."""
        return self.policy + self.trust


def loss_of(objective: Objective, item: TrainItem, step: Step, *, kl_lambda: float) -> Loss:
    """Surrogate + lambda KL of one item at the velocities of `step`, which have a graph, and its gradients there.

    They are taken at the velocity first: the shares of surrogate and KL and the norms per step then cost nothing, and
    the network's backward pass runs once. Members with a shared state share the velocity, too: its gradient is the sum
    over them, and one pass serves the whole group.
    """
    record, v = item.record, step.velocity
    x_next = to_device(record.x_next, v.device, torch.float32)
    sigma, transition = record.policy.sigma(item.step), record.policy.transition(item.step)
    sensitivity = transition.sensitivity.to(v.device, non_blocking=True)
    log_prob = objective.log_prob(step, x_next, sigma)
    log_prob_old = log_prob.detach() if record.log_prob_old is None else to_device(record.log_prob_old, v.device)
    v_old = v.detach() if record.v_old is None else to_device(record.v_old, v.device)
    kl_old = expanded(closed_form_kl(v, v_old, sensitivity), len(x_next)) if objective.needs_v_old else None
    v_anchor = v.detach() if item.at_anchor else item.v_anchor
    matching = {}
    if item.push is not None:
        terms = gradient_terms(v, item.push.gradient, item.reach)
    elif item.duel is not None:
        assert v_anchor is not None
        own, duel = objective.excess(v, v_anchor, x_next, sigma), item.duel
        lead = dpo_lead(own, duel.rival_excess.to(own), duel.side.to(own), beta=objective.spec.beta)
        terms = dpo_loss(lead)
        matching["preference/lead"] = (item.weight * lead.detach()).sum()
        matching["preference/accuracy"] = (item.weight * (lead.detach() > 0)).sum()
    elif objective.spec.kind == "sft":
        terms = objective.chosen_terms(v, x_next, sigma)
    elif objective.spec.kind == "nft":
        terms = objective.matching_terms(v, v_old, x_next, item.advantage, sigma)
    else:
        std = transition.std.to(v.device, non_blocking=True)
        terms = objective.surrogate_terms(log_prob - log_prob_old, item.advantage, kl_old, std)
    kl = objective.trust_region.penalty(
        v=v, v_old=v_old, v_anchor=v_anchor, sensitivity=sensitivity, log_prob=log_prob, log_prob_old=log_prob_old
    )
    log_ratio = (log_prob - log_prob_old).detach()
    value = (item.weight * terms.loss).sum()
    (raw,) = torch.autograd.grad(objective.scale * value, v, retain_graph=True)
    trust = torch.zeros_like(raw)
    if kl.total is not None:
        penalty = objective.scale * kl_lambda * (item.weight * kl.total).sum()
        (trust,) = torch.autograd.grad(penalty, v, retain_graph=True)
    policy = item.equalizer * raw
    squares = policy.square().sum(), trust.square().sum()
    if len(v) < len(x_next):
        (slope,) = torch.autograd.grad(objective.scale * item.equalizer * value, log_prob, retain_graph=True)
        moved = sensitivity * (v.detach() - v_old) if objective.surrogate.centred == "scaled" else None
        squares = _by_member(slope, step, x_next, sensitivity, moved), _shared_out(trust, item.weight)
    if objective.spec.fresh and item.push is None:
        for name, other in (("matching/error", x_next), ("matching/moved", v_old)):
            matching[name] = (item.weight * (v.detach() - other).square().flatten(1).mean(1)).sum()
    return Loss(terms, kl, log_ratio, value.detach(), raw, policy, trust, squares, matching)


def _by_member(slope: Tensor, step: Step, x_next: Tensor, sensitivity: Tensor, moved: Tensor | None) -> Tensor:
    """Sum of the squared norms of d loss_i / d v: slope_i times that of the log-probability, sensitivity (x_next -
    mean) / (std D).

    If the KL to the rollout's policy has a gradient too, sensitivity^2 (v - v_old) / D, `moved` is sensitivity (v -
    v_old).
    """
    law = step.gaussian.expand(len(x_next))
    noise = ((x_next - law.mean.detach()) / law.std.to(x_next.device)).flatten(1)
    if moved is not None:
        noise = noise - expanded(moved, len(x_next)).flatten(1)  # b is negative: the two have opposite signs
    return (slope * sensitivity / noise.shape[1]).square().dot(noise.square().sum(1))


def _shared_out(trust: Tensor, weight: Tensor) -> Tensor:
    """Sum of the squared norms of the members' parts of a gradient that is equal for all members of a row except for
    their weights."""
    own = weight.unflatten(0, (len(trust), -1))
    spread = own.square().sum(1) / own.sum(1).square().clamp(min=1e-30)
    return trust.square().flatten(1).sum(1).dot(spread)


def replay(item: TrainItem, device: torch.device, x: Tensor | None = None) -> Step:
    """Run an item's step again with the model's current weights; `x` is its state if the caller needs a gradient
    there."""
    record = item.record
    x = to_device(record.x, device, torch.float32) if x is None else x
    return record.policy.step(item.step, x, record.conditions)


def gradient_terms(v: Tensor, push: Tensor, reach: float) -> SurrogateTerms:
    """Minus the first-order reward of a step's velocity: -reach <dR/dx_next, v>."""
    loss = -reach * (push.to(v.device) * v).flatten(1).sum(1)
    return SurrogateTerms(loss=loss, ratio=None, inactive=torch.zeros_like(loss, dtype=torch.bool))


def _count(tally: UpdateSums, item: TrainItem, loss: Loss, kl_lambda: float) -> None:
    """Add one item to the tally, without waiting for the device."""
    w, kl, terms = item.weight, loss.kl, loss.terms
    value = loss.value.double()
    kl_total = torch.zeros_like(value) if kl.total is None else (w * kl.total.detach()).sum().double()
    sums = tally.sums
    sums["loss/policy"] += item.equalizer * value
    sums["loss/kl"] += kl_lambda * kl_total
    sums["kl/total"] += kl_total
    for name, term in (("kl/position", kl.position), ("kl/velocity", kl.velocity)):
        if term is not None:
            sums[name] += (w * term.detach()).sum()
    for name, term in loss.matching.items():
        sums[name] += term
    if terms.ratio is not None:
        # Ratios differ from 1 in the fifth digit and beyond: float32, and E[r^2] - E[r]^2, would lose their spread.
        excess, share = terms.ratio.double() - 1.0, w.double()
        sums["ratio/mean"] += (share * excess).sum()
        sums["ratio/square"] += (share * excess.square()).sum()
        sums["ratio/clip_fraction"] += (w * terms.inactive).sum()
    live = torch.where(w > 0, loss.log_ratio.abs(), 0.0)
    tally.largest_log_ratio = torch.maximum(tally.largest_log_ratio, live.max().double())
    sums["gradient/policy"] += loss.squares[0]
    sums["gradient/kl"] += loss.squares[1]
    for kind, gradient in zip(KINDS, (loss.raw, loss.policy, loss.total)):
        sums[f"gradient/{kind}/{item.label:03d}"] += gradient.square().sum()
    sums[f"bad/{item.label:03d}"] += ~torch.isfinite(value + kl_total + sums[f"gradient/sent/{item.label:03d}"])


def with_anchor(
    items: Sequence[TrainItem],
    need: Need,
    anchor: ReferencePolicy,
    device: torch.device,
    progress: Callable[[], None] = lambda: None,
) -> list[TrainItem]:
    """Run the reference pass: items with the reference's velocities, or marked `at_anchor` without a pass."""
    if need != "pass":
        return [dataclasses.replace(item, at_anchor=True) for item in items]
    result = []
    with torch.no_grad(), anchor.applied():
        for item in items:
            v_anchor = to_storage(replay(item, device).velocity, item.record.x.device)
            result.append(dataclasses.replace(item, v_anchor=v_anchor))
            progress()
        settle(device)
    return result


@torch.no_grad()
def with_rivals(
    objective: Objective,
    items: Sequence[TrainItem],
    need: Need,
    clips: int,
    world: World,
    device: torch.device,
    progress: Callable[[], None] = lambda: None,
) -> list[TrainItem]:
    """Add the excess error of each clip's rival, which may be in another item or on another rank, to items of pairs:
    one pass of each without gradient, and a table of all `clips` that ranks fill together. A policy at its reference
    has no excess and needs no pass."""
    if need != "pass":
        return list(items)
    table = torch.zeros((clips, objective.spec.levels), dtype=torch.float64)
    for item in items:
        assert item.duel is not None
        assert item.v_anchor is not None
        record, v = item.record, replay(item, device).velocity
        target, v_anchor = (to_device(x, device, torch.float32) for x in (record.x_next, item.v_anchor))
        excess = objective.excess(v, v_anchor, target, record.policy.sigma(item.step)).double().cpu()
        counts = item.weight > 0  # padding passes would count twice
        table[item.duel.rows[counts], item.step] = excess[counts]
        progress()
    table = world.sum(table)
    settle(device)
    return [
        dataclasses.replace(item, duel=dataclasses.replace(item.duel, rival_excess=table[item.duel.rivals, item.step]))
        for item in items
        if item.duel is not None
    ]


@torch.no_grad()
def with_old(
    objective: Objective,
    items: Sequence[TrainItem],
    device: torch.device,
    progress: Callable[[], None] = lambda: None,
    parts: Sequence[StatePart] = (),
) -> list[TrainItem]:
    """Add the old policy's velocities and log-probabilities to items at fresh noise levels; the model has the old
    weights.

    If the newest weights sampled, the ratio is to those, and the old policy's log-probability is not used.
    """
    result = []
    for item in items:
        record, step = item.record, replay(item, device)
        log_prob = _log_probs(objective, item, step, parts) if objective.spec.old_samples else record.log_prob_old
        v_old = to_storage(step.velocity, record.x.device)
        result.append(dataclasses.replace(item, record=dataclasses.replace(record, v_old=v_old, log_prob_old=log_prob)))
        progress()
    settle(device)
    return result


def _log_probs(objective: Objective, item: TrainItem, step: Step, parts: Sequence[StatePart]) -> Tensor:
    """Log-probabilities of a step's end by member, with one column per part."""
    columns = []
    for seen, law in [part.of(item, step) for part in parts] or [(item, step)]:
        x_next = to_device(seen.record.x_next, law.velocity.device, torch.float32)
        columns.append(objective.log_prob(law, x_next, seen.record.policy.sigma(seen.step)))
    return torch.stack(columns, dim=1) if parts else columns[0]


def accumulate(
    objective: Objective,
    items: Sequence[TrainItem],
    device: torch.device,
    *,
    kl_lambda: float,
    scale: float = 1.0,
    deterministic: bool = False,
    before_first: Callable[[], None] = lambda: None,
    before_last: Callable[[], None] = lambda: None,
    progress: Callable[[], None] = lambda: None,
    parts: Sequence[StatePart] = (),
) -> UpdateSums:
    """Replay the items of one optimizer update and add up their gradients; every part in `parts` has a loss of its own.

    `scale` compensates for an engine that averages gradients over ranks. `before_first` and `before_last` are called
    before the first and the last backward pass of every network: engines that synchronize gradients do so only at the
    last.
    """
    tally = UpdateSums(device)
    networks = [item.network for item in items]
    for number, item in enumerate(items):
        if item.network not in networks[:number]:
            before_first()
        if item.network not in networks[number + 1 :]:
            before_last()
        placed = dataclasses.replace(
            item,
            advantage=to_device(item.advantage, device),
            weight=to_device(item.weight, device),
            v_anchor=None if item.v_anchor is None else to_device(item.v_anchor, device),
        )
        exact = placed.push is not None and objective.spec.credit == "exact"
        x = to_device(placed.record.x, device, torch.float32).requires_grad_() if exact else None
        step = replay(placed, device, x)
        # Each part has its own dimensions, which set the scale of its loss and of its clip range.
        views = [(dataclasses.replace(objective, dims=part.dims), *part.of(placed, step)) for part in parts]
        views = views or [(objective, placed, step)]
        losses = [loss_of(its, seen, law, kl_lambda=kl_lambda) for its, seen, law in views]
        with same_bits(step.velocity.device, wanted=deterministic):
            step.velocity.backward(scale * joined([loss.total for loss in losses], parts, step.velocity))
        if x is not None and placed.push is not None:
            _carry(placed, x, scale)
        for (_, seen, _), loss in zip(views, losses):
            _count(tally, seen, loss, kl_lambda)
        progress()
    return tally


def _carry(item: TrainItem, x: Tensor, scale: float) -> None:
    """Propagate the reward's gradient back over the item's step: dR/dx = dR/dx_next + reach (dv/dx)^T dR/dx_next.

    The backward pass yields the second term times the factors on the loss; a KL would be included, and is refused with
    an exact gradient.
    """
    assert item.push is not None
    assert x.grad is not None
    factor = (-scale * item.weight).view(-1, *[1] * (x.ndim - 1))
    item.push.carry(torch.where(factor != 0, x.grad / torch.where(factor != 0, factor, 1.0), 0.0))


def summarize(tally: UpdateSums, world: World, steps: Sequence[int]) -> dict[str, float]:
    """Metrics of one update over all ranks; raises Diverged on every rank if a loss was not finite."""
    norms = [f"gradient/{kind}/{step:03d}" for kind in KINDS for step in steps]
    bad = [f"bad/{step:03d}" for step in steps]
    names = [*sorted({*tally.sums} - {*norms, *bad}), *norms, *bad]
    rows = [tally.sums[name] for name in names]
    read = torch.stack([*rows, tally.largest_log_ratio]).cpu()  # the only synchronization with the device
    metrics = dict(zip(names, world.sum(read[:-1]).tolist()))
    broken = [step for step, name in zip(steps, bad) if metrics.pop(name)]
    metrics |= {name: math.sqrt(metrics[name]) for name in norms}
    if broken:
        raise Diverged(
            f"The loss is not finite at denoising step(s) {broken}. The weights were not changed. Lower optimizer.lr or "
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
    """Mean over the updates that have a metric; ratio/first_log, the largest |log ratio| of the first update, is 0 if
    the replay repeats the rollout exactly."""
    names = sorted({name for log in logs for name in log})
    mean = {name: sum(log[name] for log in logs if name in log) / sum(name in log for log in logs) for name in names}
    if "ratio/largest_log" in mean:
        mean["ratio/first_log"] = logs[0]["ratio/largest_log"]
        mean["ratio/largest_log"] = max(log["ratio/largest_log"] for log in logs)
    return mean


@torch.no_grad()
def path_kl(
    plan: Plan, rollout: Rollout, world: World, device: torch.device, progress: Callable[[], None] = lambda: None
) -> float:
    """KL(policy of the rollout, current policy) of a whole path, per latent dimension, over all ranks: the same number
    on each.

    By the chain rule the KL of two distributions of paths is the sum of the KLs of their steps, at states of the first,
    which are those of the rollout. Each group measures it at the step of its gauge. One forward pass per group.
    """
    gauged = plan.gauged(world.rank)
    total = 0.0
    for turn in plan.gauge_turns(world.rank):
        record, replay = rollout.record(plan, turn), turn.replay
        rows = gauged[replay] if turn.counts else []
        x = record.x.to(device=device, dtype=torch.float32)
        v = record.policy.step(replay.step, x, record.conditions).velocity
        if rows and record.v_old is not None:
            sensitivity = record.policy.transition(replay.step).sensitivity.expand(len(v))
            v_old, places = record.v_old.to(v.device), record.policy.places
            if places:  # parts that do not explore have no distribution
                v, v_old = (torch.cat([rows[:, place] for place in places], dim=1) for rows in (v, v_old))
            kl = closed_form_kl(v, v_old, sensitivity)
            total += sum(weight * float(kl[row]) for row, weight in rows)
        progress()
    return float(world.sum(torch.tensor([total], dtype=torch.float64))) / len(plan.groups)
