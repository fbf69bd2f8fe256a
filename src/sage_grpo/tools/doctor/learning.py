"""Checks of learning: trainable weights, the first ratio, gradients, one update, ranks, the trust region."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from sage_grpo.distributed.fsdp import disagreeing, local
from sage_grpo.distributed.world import World
from sage_grpo.models.base import VelocityModel
from sage_grpo.tools.doctor.check import Check, graded, relative
from sage_grpo.tools.doctor.sampling import Sample
from sage_grpo.training.loss import TrainItem, accumulate, replay
from sage_grpo.training.trainer import Trainer
from sage_grpo.training.update import with_old, with_reference

WATCHED = 4096
"""Values of every parameter that are watched during the update."""
FAR, TOO_FAR = 0.4, 1.0
"""Limits of the relative change of a velocity by one update: the recipes' is 0.001 (a LoRA) to 0.12 (all weights)."""


def trainable(model: VelocityModel) -> Check:
    """Trained weights are there, in float32."""
    params = model.trainable()
    count, lora = sum(p.numel() for p in params.values()), model.spec.lora
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in params.values()})
    what = "a LoRA" if lora else "all weights"
    value = f"{what}: {count:,} parameters in {len(_modules(params))} modules, {', '.join(kinds) or 'none'}"
    return Check("trainable", "fail" if not count else "pass", value, float(count))


def _modules(names: Mapping[str, object]) -> set[str]:
    """Modules of parameters: both halves of an adapter belong to the layer that they adapt."""
    return {re.sub(r"\.lora_[AB]\..*$|\.[^.]+$", "", name) for name in names}


def ratio(sample: Sample, items: Sequence[TrainItem]) -> Check:
    """The ratio before any update, at every trained step, by an update's replays; leaves its gradients in the parameters."""
    trainer, objective = sample.trainer, sample.trainer.objective
    lambda_, rows = trainer.state.kl.value, []
    trainer.state.optimizer.zero_grad()
    if trainer.state.anchor is not None:
        items = with_reference(items, trainer.state.anchor, trainer.model.device)
    trainer.sharding.begin()
    for number, item in enumerate(items):
        more = any(later.network == item.network for later in items[number + 1 :])
        last = (lambda: None) if more else trainer.sharding.synchronize
        tally = accumulate(
            objective,
            trainer.config.trust_region,
            [item],
            trainer.model.device,
            kl_lambda=lambda_,
            scale=trainer.sharding.scale,
            before_last=last,
        )
        rows.append((float(tally.largest_log_ratio), item.label))
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
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in params.values()})
    value = (
        f"one update at learning rate {lr:.2g} changed {share:.1%} of the {', '.join(kinds)} weights with a gradient"
    )
    if not finite:
        return Check("update", "fail", f"{value}; some are not finite now", share)
    return Check("update", graded(1 - share, warn=0.05, fail=0.5), value, share)


@torch.no_grad()
def velocities(trainer: Trainer, items: Sequence[TrainItem]) -> list[Tensor]:
    """Velocities of the first and the last replay, with the present weights."""
    ends = dict.fromkeys((0, len(items) - 1))
    return [replay(items[place], trainer.model.device).velocity.detach().clone() for place in ends]


def step_size(trainer: Trainer, items: Sequence[TrainItem], before: Sequence[Tensor]) -> Check:
    """Relative change of the velocities by that step."""
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
    """After an update all processes hold the same weights."""
    if world.control is None and world.processes == 1:
        return Check("ranks", "skip", "one process")
    other = disagreeing(params, world)
    value = f"rank(s) {other} hold other weights than rank 0" if other else f"{world.processes} processes agree"
    return Check("ranks", "fail" if other else "pass", value, float(len(other)))


def trust_region(sample: Sample, items: Sequence[TrainItem]) -> Check:
    """The KL after an update has a gradient."""
    trainer, config = sample.trainer, sample.trainer.config
    region, anchor = config.trust_region, trainer.state.anchor
    if region.mode == "none":
        return Check("trust region", "skip", "trust_region.mode is none")
    own = (
        config.update.updates_per_rollout == 1 and not config.build_objective().lags
    )  # the rollout's policy is the live one
    inert = own and (anchor is None or anchor.every == 1)
    if inert:
        return Check(
            "trust region",
            "warn",
            f"{region.mode} with one update a rollout: the policy is its own reference, and the KL has no gradient",
            0.0,
            remedy="set update.updates_per_rollout 2, trust_region.mode fixed, or anchor.every above 1",
        )
    if trainer.old is not None:
        with trainer.old.applied():
            items = with_old(trainer.objective, items, trainer.model.device)
    if anchor is not None:
        items = with_reference(items, anchor, trainer.model.device)
    trainer.sharding.begin()
    lambda_ = trainer.state.kl.value
    tally = accumulate(
        trainer.objective,
        trainer.config.trust_region,
        items,
        trainer.model.device,
        kl_lambda=lambda_ or 1.0,
        scale=trainer.sharding.scale,
    )
    trainer.state.optimizer.zero_grad()
    kl, policy, trust = (float(tally.sums[name]) for name in ("kl/total", "gradient/policy", "gradient/kl"))
    share = math.sqrt(trust) / max(1e-300, math.sqrt(trust) + math.sqrt(policy)) if lambda_ else 0.0
    small = " (next to nothing; kl.kind share sets it)" if 0 < share < 1e-3 else ""
    value = f"one update away the KL is {kl:.2g}, its share of the gradient {share:.2g} at lambda {lambda_:.2g}{small}"
    return Check("trust region", "pass" if 0 < trust < math.inf else "fail", value, share)
