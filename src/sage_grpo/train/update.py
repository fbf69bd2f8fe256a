"""Updates: replay the trajectories of a rollout and move the policy."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sage_grpo.models.policy import Policy
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
from sage_grpo.train.rollout import Trajectory


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
    bad_steps: set[int] = field(default_factory=set)
    """Steps with a loss that is not finite."""
    largest_log_ratio: float = 0.0


@dataclass(frozen=True)
class Item:
    """One replayed step of one micro-batch."""

    trajectory: Trajectory
    step: int
    advantage: Tensor
    weight: Tensor
    """Share of each sample in the update's mean; 0 for masked samples and fillers."""
    equalizer: float
    v_anchor: Tensor | None


def backward(policy: Policy, objective: Objective, item: Item, *, kl_lambda: float, scale: float, tally: Tally) -> None:
    """Replay one step and add its gradient.

    The loss reaches the network only through the velocity, so its gradient is taken there first: the shares of surrogate
    and KL and the norms per step then cost nothing, and the network's backward pass runs once. `scale` makes up for an
    engine that averages gradients over ranks.
    """
    trajectory, index = item.trajectory, item.step
    device = policy.model.device
    x = trajectory.x[index].to(device=device, dtype=torch.float32)
    x_next = trajectory.x[index + 1].to(device=device, dtype=torch.float32)
    step = policy.step(index, x, trajectory.conditions)
    v, sensitivity = step.velocity, policy.transition(index).sensitivity.to(device)
    log_prob, log_prob_old = step.gaussian.log_prob(x_next), trajectory.log_prob_old[index]
    log_ratio = log_prob - log_prob_old
    v_old = trajectory.v_old[index].to(device) if objective.needs_v_old else v.detach()
    kl_old = closed_form_kl(v, v_old, sensitivity) if objective.needs_v_old else None
    terms = objective.surrogate_terms(log_ratio, item.advantage, kl_old)
    kl = objective.trust_region.penalty(
        v=v, v_old=v_old, v_anchor=item.v_anchor, sensitivity=sensitivity, log_prob=log_prob, log_prob_old=log_prob_old
    )
    policy_loss = (item.weight * terms.loss).sum()
    (g_policy,) = torch.autograd.grad(policy_loss, v, retain_graph=True)
    g_kl = torch.zeros_like(g_policy)
    if kl.total is not None:
        (g_kl,) = torch.autograd.grad((item.weight * kl.total).sum(), v, retain_graph=True)
    v.backward(scale * (item.equalizer * g_policy + kl_lambda * g_kl))
    _count(tally, item, terms, kl, log_ratio.detach(), float(policy_loss.detach()), kl_lambda, (g_policy, g_kl))


def _count(
    tally: Tally,
    item: Item,
    terms: SurrogateTerms,
    kl: KlTerms,
    log_ratio: Tensor,
    policy_loss: float,
    kl_lambda: float,
    gradients: tuple[Tensor, Tensor],
) -> None:
    """Add one item to the tally."""
    w = item.weight
    kl_total = 0.0 if kl.total is None else float((w * kl.total.detach()).sum())
    sums = tally.sums
    sums["loss/policy"] += item.equalizer * policy_loss
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
    live = log_ratio[w > 0]
    if len(live):
        tally.largest_log_ratio = max(tally.largest_log_ratio, float(live.abs().max()))
    raw, from_kl = float(gradients[0].square().sum()), kl_lambda**2 * float(gradients[1].square().sum())
    tally.grad_raw[item.step] += raw
    tally.grad_weighted[item.step] += item.equalizer**2 * raw
    sums["gradient/policy"] += item.equalizer**2 * raw
    sums["gradient/kl"] += from_kl
    if not math.isfinite(policy_loss + kl_total + raw + from_kl):
        tally.bad_steps.add(item.step)


@torch.no_grad()
def anchor_velocities(
    policy: Policy,
    trajectories: Sequence[Trajectory],
    steps: Sequence[int],
    *,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[int, Tensor]]:
    """The reference pass: velocities of the weights that are in the model now, at the stored states."""
    device, result = policy.model.device, []
    for trajectory in trajectories:
        velocities = {}
        for step in steps:
            x = trajectory.x[step].to(device=device, dtype=torch.float32)
            velocities[step] = policy.step(step, x, trajectory.conditions).velocity.to(trajectory.x[step].device)
            progress()
        result.append(velocities)
    return result


def accumulate(
    policy: Policy,
    objective: Objective,
    trajectories: Sequence[Trajectory],
    advantages: Sequence[Tensor],
    weights: Sequence[Tensor],
    steps: Sequence[int],
    *,
    equalizer: dict[int, float],
    v_anchor: Sequence[dict[int, Tensor]] | None,
    kl_lambda: float,
    scale: float = 1.0,
    before_last: Callable[[], None] = lambda: None,
    progress: Callable[[], None] = lambda: None,
) -> Tally:
    """Gradients of one optimizer update: every micro-batch at every step of the update.

    `before_last` is called before the last backward pass: engines that synchronise gradients do so only there.
    """
    tally = Tally()
    items = [(step, place) for step in steps for place in range(len(trajectories))]
    device = policy.model.device
    for number, (step, place) in enumerate(items):
        if number == len(items) - 1:
            before_last()
        item = Item(
            trajectory=trajectories[place],
            step=step,
            advantage=advantages[place].to(device),
            weight=weights[place].to(device) / len(steps),
            equalizer=equalizer[step],
            v_anchor=None if v_anchor is None else v_anchor[place][step].to(device),
        )
        backward(policy, objective, item, kl_lambda=kl_lambda, scale=scale, tally=tally)
        progress()
    return tally


def summarize(tally: Tally, world: World, steps: Sequence[int]) -> dict[str, float]:
    """Metrics of one update over all ranks; raises Diverged, on every rank alike, when a loss was not finite."""
    names = sorted(tally.sums)
    rows = [tally.sums[name] for name in names]
    raw = [tally.grad_raw[step] for step in steps]
    weighted = [tally.grad_weighted[step] for step in steps]
    bad = [float(step in tally.bad_steps) for step in steps]
    packed = world.sum(torch.tensor([*rows, *raw, *weighted, *bad], dtype=torch.float64)).tolist()
    metrics = dict(zip(names, packed))
    rest, n = packed[len(names) :], len(steps)
    broken = [step for step, flag in zip(steps, rest[2 * n :]) if flag]
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
    for step, before, after in zip(steps, rest[:n], rest[n : 2 * n]):
        metrics[f"gradient/raw/{step:03d}"] = math.sqrt(before)
        metrics[f"gradient/equalized/{step:03d}"] = math.sqrt(after)
    return metrics
