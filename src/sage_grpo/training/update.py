"""The optimizer updates of one rollout: replay, loss, backward, optimizer step, EMA, KL coefficient, reference."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sage_grpo.data.groups import Member
from sage_grpo.distributed.fsdp import Engine
from sage_grpo.distributed.world import World
from sage_grpo.models.base import VelocityModel
from sage_grpo.models.policy import Step
from sage_grpo.objectives.base import Objective, PreferencePair
from sage_grpo.objectives.trust_region import TrustRegion, closed_form_kl
from sage_grpo.training.lockstep import Lockstep
from sage_grpo.training.loss import Diverged, TrainItem, UpdateSums, backpropagate, loss_of, mean_of, replay, summarize
from sage_grpo.training.offload import same_bits, settle, to_device, to_storage
from sage_grpo.training.optim import OptimizerConfig, share_kept
from sage_grpo.training.parts import StatePart, joined, log_probs
from sage_grpo.training.plan import Plan
from sage_grpo.training.reference import OldPolicy, Snapshot
from sage_grpo.training.rollout import Rollout
from sage_grpo.training.scoring import Scores
from sage_grpo.training.state import TrainState
from sage_grpo.utils.clock import Clock

Progress = Callable[[], None]
Signals = Mapping[tuple[Member, ...], Tensor]
"""The reward's gradient at the latents, by the members of a micro-batch. With objective.credit exact each replay carries it back a step, in place."""


@dataclass
class Updater:
    """Trains the policy on rollouts."""

    config: OptimizerConfig
    region: TrustRegion
    model: VelocityModel
    state: TrainState
    sharding: Engine
    objective: Objective
    parts: Sequence[StatePart]
    old: OldPolicy | None
    """The old policy of a loss at fresh noise levels, which is run again for its velocities."""
    world: World
    clock: Clock

    def __post_init__(self) -> None:
        self.dims = sum(part.dims for part in self.parts) or math.prod(self.model.latent_shape())
        self.before = None if self.config.max_kl is None else Snapshot(self.state.params)
        """The weights that made the rollout, if its updates may be scaled back."""

    def run(
        self, plan: Plan, rollout: Rollout, scored: Scores, advantages: Tensor, signals: Signals
    ) -> dict[str, float]:
        state, logs = self.state, []
        lockstep, anchor = Lockstep(plan), state.anchor
        reference = [False] * plan.updates if anchor is None else anchor.passes(state.updates, plan.updates)
        old_passes = self.objective.old_passes(plan.updates)
        passes = len(lockstep.kl_probes(self.world.rank))
        for update, (needed, old) in enumerate(zip(reference, old_passes)):
            extra = needed * (1 + self.objective.in_pairs) + old
            passes += len(lockstep.replays(self.world.rank, update)) * (1 + extra)
        tick = self.clock.ticker(passes)
        if self.before is not None:
            self.before.renew()
        if self.old is not None:
            self.old.begin()
        for update in range(plan.updates):
            items = self.items(lockstep, rollout, scored, advantages, update, signals)
            if old_passes[update]:
                items = self.with_old(items, tick)
            items = self.with_reference(items, tick, needed=reference[update])
            if plan.pairs and reference[update]:
                items = self.with_partners(items, len(plan.groups) * plan.group_size, tick)
            sums = self.accumulate(items, state.kl.value, tick)
            logs.append(self.apply(summarize(sums, self.world, plan.labels(update))))
            if update == plan.updates - 1 and self.config.measures_kl:
                logs[-1] |= self._measure_kl(lockstep, rollout, tick)
            self.advance(logs[-1])
        if self.old is not None and self.old.lags:
            self.old.follow(self.objective.decay(plan.iteration + 1))
        metrics = mean_of(logs)
        lagging = self.old is not None and self.old.lags and self.old.samples
        if state.past is not None or lagging:  # other weights than the newest sampled, so it is not 0
            metrics.pop("ratio/first_log", None)
        return {**metrics, "preference/skipped": float(plan.skipped)} if self.objective.chooses else metrics

    def items(
        self,
        lockstep: Lockstep,
        rollout: Rollout,
        scored: Scores,
        advantages: Tensor,
        update: int,
        signals: Signals | None = None,
    ) -> list[TrainItem]:
        plan, counts = lockstep.plan, scored.valid.clone()
        if plan.chosen is not None:
            counts &= torch.tensor(
                [Member(*divmod(row, plan.group_size)) in plan.chosen[update] for row in range(len(counts))]
            )
        share = counts.float() / counts.sum().clamp(min=1)
        items = []
        for one in lockstep.replays(self.world.rank, update):
            step, members = one.replay.step, one.states.members
            group = plan.groups[one.replay.members[0].group]
            rows = torch.tensor([*map(plan.row, members)])
            label = group.label(step)
            items.append(
                TrainItem(
                    record=rollout.record(plan, one),
                    step=step,
                    label=label,
                    advantage=advantages[rows],
                    # Losses of steps are averaged; parts of one gradient are summed.
                    weight=share[rows] / (1 if signals else len(group.trained[update])) * one.counts,
                    equalizer=plan.equalizer[label],
                    network=one.network,
                    reward_gradient=signals[members] if signals else None,
                    length=group.length(step) if signals else 0.0,
                    pair=_pair(plan, members, rows) if self.objective.in_pairs else None,
                )
            )
        return items

    def _replayed(self, items: Sequence[TrainItem], tick: Progress) -> Iterator[tuple[TrainItem, Step]]:
        for item in items:
            yield item, replay(item, self.model.device)
            tick()
        settle(self.model.device)

    @torch.no_grad()
    def with_old(self, items: Sequence[TrainItem], tick: Progress = lambda: None) -> list[TrainItem]:
        """Add the old policy's velocities and log-probabilities. Where the newest weights sampled, the ratio is to those."""
        assert self.old is not None
        result = []
        with self.old.applied():
            for item, step in self._replayed(items, tick):
                record, samples = item.record, self.objective.spec.old_samples
                log_prob = log_probs(self.objective, item, step, self.parts) if samples else record.log_prob_old
                v_old = to_storage(step.velocity, record.x.device)
                result.append(replace(item, record=replace(record, v_old=v_old, log_prob_old=log_prob)))
        return result

    @torch.no_grad()
    def with_reference(
        self, items: Sequence[TrainItem], tick: Progress = lambda: None, *, needed: bool = True
    ) -> list[TrainItem]:
        """Add the reference's velocities, if there is one. Where it is not needed the policy equals the reference."""
        if self.state.anchor is None or not needed:
            return list(items)
        with self.state.anchor.applied():
            return [
                replace(item, v_reference=to_storage(step.velocity, item.record.x.device))
                for item, step in self._replayed(items, tick)
            ]

    @torch.no_grad()
    def with_partners(self, items: Sequence[TrainItem], clips: int, tick: Progress = lambda: None) -> list[TrainItem]:
        """Add the excess error of each clip's partner, which may be on another rank: one pass of each item, and a table that ranks fill together."""
        table = torch.zeros((clips, self.objective.spec.levels), dtype=torch.float64)
        for item, step in self._replayed(items, tick):
            assert item.pair is not None
            assert item.v_reference is not None
            device = self.model.device
            target, v_reference = (to_device(x, device, torch.float32) for x in (item.record.x_next, item.v_reference))
            excess = self.objective.partner_excess(step.velocity, v_reference, target).double().cpu()
            counts = item.weight > 0  # padding passes would count twice
            table[item.pair.rows[counts], item.step] = excess[counts]
        table = self.world.sum(table)
        return [
            replace(item, pair=replace(item.pair, partner_excess=table[item.pair.partners, item.step]))
            for item in items
            if item.pair is not None
        ]

    def accumulate(self, items: Sequence[TrainItem], kl_lambda: float, tick: Progress = lambda: None) -> UpdateSums:
        """Replay the items of an update and add up their gradients; ranks exchange them in the last backward pass of each network."""
        device, scale, sums = self.model.device, self.sharding.scale, UpdateSums(self.model.device)
        networks = [item.network for item in items]
        for number, item in enumerate(items):
            if item.network not in networks[:number]:
                self.sharding.begin()
            if item.network not in networks[number + 1 :]:
                self.sharding.synchronize()
            item = item.on(device)
            exact = item.reward_gradient is not None and self.objective.spec.credit == "exact"
            x = to_device(item.record.x, device, torch.float32).requires_grad_() if exact else None
            step = replay(item, device, x)
            seen = [part.view(item, step) for part in self.parts] or [(item, step)]
            losses = [loss_of(self.objective, self.region, view, law, kl_lambda=kl_lambda) for view, law in seen]
            gradients = [loss.total for loss in losses]
            gradient = joined(gradients, self.parts, step.velocity) if self.parts else gradients[0]
            with same_bits(device, wanted=self.model.spec.deterministic):
                step.velocity.backward(scale * gradient)
            if x is not None:
                backpropagate(item, x, scale)
            for (view, _), loss in zip(seen, losses):
                sums.add(view, loss, kl_lambda)
            tick()
        return sums

    def apply(self, metrics: dict[str, float]) -> dict[str, float]:
        state = self.state
        norm = self.sharding.clip_gradients(state.params.values(), self.config.max_grad_norm)
        if not math.isfinite(norm):
            state.optimizer.zero_grad()
            raise Diverged(
                f"The gradient norm of optimizer update {state.updates} is {norm}. The weights were not changed. "
                "Lower optimizer.lr or kernel.eta, or set surrogate.equalize_cap."
            )
        metrics["gradient/norm"] = norm
        # AdamW divides by (root mean square + eps): near 1 or below, eps shortens every step.
        metrics["gradient/rms_over_eps"] = norm / math.sqrt(state.size) / self.config.eps
        metrics["kl/lambda"] = state.kl.value
        metrics["optimizer/lr"] = state.optimizer.step(state.updates)
        state.optimizer.zero_grad()
        state.updates += 1
        return metrics

    def advance(self, metrics: dict[str, float]) -> None:
        state = self.state
        if state.ema is not None and self.config.ema is not None:
            state.ema.follow(self.config.ema)
        state.kl.observe(metrics["kl/total"], metrics["gradient/kl_share"])
        if state.anchor is not None:
            metrics["anchor/renewed"] = float(state.anchor.advance(state.updates))

    def _measure_kl(self, lockstep: Lockstep, rollout: Rollout, progress: Progress) -> dict[str, float]:
        pace = self.state.optimizer.pace

        def measure(tick: Progress = lambda: None) -> float:
            kl = self.dims * path_kl(lockstep, rollout, self.world, self.model.device, tick)
            if not math.isfinite(kl):
                raise Diverged(
                    f"After optimizer update {self.state.updates} the policy is at a KL of {kl} from that of its rollout: its "
                    "velocities are not finite. Continue from the last checkpoint with a lower optimizer.lr."
                )
            return kl

        kl = measure(progress)
        kept = 1.0 if self.before is None else self._scale_back(self.before, kl, measure)
        metrics = {"optimizer/kl": kl, "optimizer/kept": kept, "optimizer/lr_factor": pace.factor}
        pace.observe(kl)
        return metrics

    def _scale_back(self, before: Snapshot, kl: float, measure: Callable[[], float]) -> float:
        """Scale the updates back to `optimizer.max_kl` if they exceed it; returns the share that is kept, the same on all ranks."""
        most, kept = self.config.max_kl, 1.0
        assert most is not None

        def kl_at(share: float) -> float:
            nonlocal kept
            before.take_back(share / kept)
            kept = share
            return measure()

        share = share_kept(kl, most, kl_at)
        if share != kept:  # no share that was tried is near the limit
            before.take_back(share / kept)
            if self.world.is_main:
                warnings.warn(
                    f"optimizer.max_kl {most:g}: no share of a rollout's updates that was tried has a KL near it, so less is kept (optimizer/kept). "
                    "In bfloat16 rounding alone has a KL: set optimizer.max_kl above it.",
                    stacklevel=2,
                )
        return share


def _pair(plan: Plan, members: Sequence[Member], rows: Tensor) -> PreferencePair:
    pairs = [plan.partners.get(member, (0, member)) for member in members]
    partners = torch.tensor([plan.row(partner) for _, partner in pairs])
    sides = torch.tensor([float(side) for side, _ in pairs])
    return PreferencePair(rows, partners, sides, torch.zeros(len(members)))


@torch.no_grad()
def path_kl(
    lockstep: Lockstep, rollout: Rollout, world: World, device: torch.device, progress: Progress = lambda: None
) -> float:
    """Estimate of KL(policy of the rollout, current policy) over the trained steps of a path, per latent dimension, over all ranks: by the chain rule
    the sum of their KLs at the rollout's states. Each group measures one, at the step of its probe, with one forward pass."""
    plan = lockstep.plan
    probes = plan.kl_replays(world.rank)
    total = 0.0
    for one in lockstep.kl_probes(world.rank):
        record, step = rollout.record(plan, one), one.replay.step
        rows = probes[one.replay] if one.counts else []
        x = record.x.to(device=device, dtype=torch.float32)
        v = record.policy.step(step, x, record.conditions).velocity
        if rows and record.v_old is not None:
            sensitivity = record.policy.transition(step).sensitivity.expand(len(v))
            v_old, places = record.v_old.to(v.device), record.policy.places
            if places:  # parts that do not explore have no distribution
                v, v_old = (torch.cat([x[:, place] for place in places], dim=1) for x in (v, v_old))
            kl = closed_form_kl(v, v_old, sensitivity)
            total += sum(weight * float(kl[row]) for row, weight in rows)
        progress()
    return float(world.sum(torch.tensor([total], dtype=torch.float64))) / len(plan.groups)
