"""Rollouts: sample the clips of a plan and record the states that its replays need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

import torch
from torch import Tensor

from sage_grpo.data.groups import Member, MicroBatch
from sage_grpo.models.policy import Policy, Step
from sage_grpo.samplers.noise import keyed_noise
from sage_grpo.samplers.path import interpolate, velocity
from sage_grpo.samplers.solvers import Rule, Stepper
from sage_grpo.training.lockstep import Lockstep, ScheduledReplay
from sage_grpo.training.offload import settle, to_device, to_storage
from sage_grpo.training.plan import Group, Plan, Replay
from sage_grpo.training.scoring import ScoredClips
from sage_grpo.types import Conditioning


@dataclass(frozen=True)
class Record:
    """Inputs of an update for one replay."""

    policy: Policy
    conditions: tuple[Conditioning, ...]
    x: Tensor
    """State before the step: one row per member, or one per group where its members share it."""
    x_next: Tensor
    """State after the step, one row per member; at a fresh noise level the target velocity."""
    v_old: Tensor | None = None
    """Velocity of the rollout's policy, rows as in `x`; None when neither a loss term nor the measured KL needs it."""
    log_prob_old: Tensor | None = None
    """Of the step taken, one value per member. None at a fresh noise level and in padding: the live policy's, detached, takes its place."""


@dataclass(frozen=True)
class Rollout:
    """The clips of one rank, and the records of its replays."""

    latents: list[tuple[MicroBatch, Tensor]] = field(default_factory=list)
    records: dict[Replay, Record] = field(default_factory=dict)
    judged: ScoredClips | None = None
    """Scored clips, if the workers that sampled them also scored them."""

    def record(self, plan: Plan, scheduled: ScheduledReplay) -> Record:
        record = self.records[scheduled.states]
        if scheduled.replay == scheduled.states:
            return record
        # Padding: another rank's step on own states has no old log-probability, so its ratio is 1.
        schedule = plan.groups[scheduled.replay.members[0].group].replayed
        return replace(record, policy=replace(record.policy, schedule=schedule), v_old=None, log_prob_old=None)


@dataclass(frozen=True)
class Storage:
    """Precision and device in which trajectories are kept between rollout and update."""

    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    velocities: bool = True
    """Keep the rollout's velocities (step-wise KL, KL mask, centered ratio), not only those by which the updates are measured."""

    def rounded(self, x: Tensor) -> Tensor:
        """x in stored precision: the state itself is rounded, which keeps rollout and replay on the same numbers."""
        return x if self.dtype == torch.float32 else x.to(self.dtype).to(torch.float32)

    def stored(self, x: Tensor) -> Tensor:
        return to_storage(x, self.device, self.dtype)


@dataclass(frozen=True)
class NoiseKeys:
    """Noise of a rollout, keyed by (seed, iteration, group, member): independent of ranks, batches and interruptions."""

    seed: int
    iteration: int
    same_start: bool = False
    """All members of a group start from the same noise."""
    same_fresh: bool = False
    """All members of a group are noised again with the same noise: the common part of a pair's errors then cancels."""

    def start(self, group: Group, member: Member, shape: tuple[int, ...]) -> Tensor:
        seed = group.prompt.seed
        key = (self.seed, self.iteration, group.index) if seed is None else ("prompt", seed)
        return keyed_noise(shape, "start", *key, 0 if self.same_start else member.index)

    def step(self, members: Sequence[Member], step: int, shape: tuple[int, ...], kind: str = "step") -> Tensor:
        rows = [keyed_noise(shape, kind, self.seed, self.iteration, m.group, m.index, step) for m in members]
        return torch.stack(rows)

    def fresh(self, members: Sequence[Member], level: int, shape: tuple[int, ...]) -> Tensor:
        keyed = [Member(member.group, 0) for member in members] if self.same_fresh else members
        return self.step(keyed, level, shape, "fresh")


def learned(policy: Policy, group: Group) -> Policy:
    """The policy that updates replay: at the fresh noise levels of a group that has some."""
    levels = group.levels
    return policy if levels is None else replace(policy, kernel=levels.kernel, schedule=levels.schedule)


@dataclass
class Sampler:
    """Executes one rank's part of a plan."""

    plan: Plan
    rank: int
    policies: Callable[[Group], Policy]
    conditions: Mapping[int, Conditioning]
    _: KW_ONLY
    keys: NoiseKeys
    storage: Storage
    solver: Rule = "euler"
    examples: Callable[[Member], Tensor] | None = None
    """Latents of given clips, in place of sampling."""
    progress: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        plan, rank = self.plan, self.rank
        self.wanted = {replay for update in range(plan.updates) for replay in plan.replayable(rank, update)}
        self.kl_replays = plan.kl_replays(rank)
        self.result = Rollout()
        self.forked: dict[Member, Tensor] = {}
        """States of members at their first own step."""

    @torch.no_grad()
    def run(self) -> Rollout:
        """Sample all clips from noise to latents, or take given ones; then record those that are learned at fresh levels."""
        batches = self.plan.batches(self.rank)
        walks = [
            _Walk(self, self.plan.group_of(batch), batch.members, batch.members, shared=False) for batch in batches
        ]
        if self.examples is None:
            self._sample(walks)
        else:
            for walk in walks:
                rows = torch.stack([self.examples(member) for member in walk.members])
                walk.x = self.storage.rounded(to_device(rows, walk.policy.model.device))
        self.result.latents.extend((batch, walk.x) for batch, walk in zip(batches, walks))
        self._renoise(walks)
        settle(self.policies(self.plan.groups[0]).model.device)
        return self.result

    def _sample(self, clips: Sequence[_Walk]) -> None:
        """Run all steps of all clips, first those of the network for high noise: a sharded network needs all ranks."""
        walks, own = [], self.plan.members(self.rank)
        for groups in self.plan.prefixes(self.rank):
            first = [own[group.index][0] for group in groups]
            members = tuple(member for group in groups for member in own[group.index])
            walks.append(_Walk(self, groups[0], first, members, shared=True))
        idle = Lockstep(self.plan).idle_passes(self.rank)
        for network in (0, 1):
            for walk in [*walks, *clips]:
                while walk.ready() and self.plan.network(walk.policy.sigma(walk.index)) == network:
                    walk.step()
            if idle[network]:
                self._idle(network, idle[network])

    def _renoise(self, walks: Sequence[_Walk]) -> None:
        """Record clean clips at fresh noise levels, if the plan learns there."""
        clean = {
            walk.members: walk for walk in walks if walk.group.levels is not None and not walk.group.levels.visited
        }
        for replay in sorted(self.wanted, key=lambda replay: replay.step) if clean else ():
            walk = clean[replay.members]
            x0, sigma = walk.x, walk.group.sigma(replay.step)
            eps = to_device(self.keys.fresh(replay.members, replay.step, tuple(x0.shape[1:])), x0.device)
            x, x_next = interpolate(x0, eps, sigma), velocity(x0, eps)
            states = self.storage.stored(x), self.storage.stored(x_next)
            self.result.records[replay] = Record(walk.learned, walk.conditions, *states)

    def _idle(self, network: int, passes: int) -> None:
        batch = self.plan.batches(self.rank)[0]
        group = self.plan.group_of(batch)
        policy = self.policies(group)
        steps = [s for s in range(policy.schedule.num_steps) if self.plan.network(policy.sigma(s)) == network]
        x = self.start(group, batch.members[:1])
        for _ in range(passes):
            policy.step(steps[0], x, (self.conditions[group.index],))
            self.progress()

    def start(self, group: Group, members: Sequence[Member]) -> Tensor:
        model = self.policies(group).model
        shape = model.latent_shape()
        rows = [self.keys.start(self.plan.groups[m.group], m, shape) for m in members]
        return self.storage.rounded(to_device(torch.stack(rows), model.device))

    def visit(self, walk: _Walk, step: Step) -> None:
        """Record a deterministic step that is learned."""
        levels = walk.group.levels
        if levels is None or not levels.visited or walk.index not in levels.labels:
            return
        replay = Replay(levels.labels.index(walk.index), walk.members, shared=False)
        if replay in self.wanted:
            law = walk.learned.at(replay.step, walk.x, step.velocity).gaussian
            states = self.storage.stored(walk.x), self.storage.stored(step.velocity)
            log_prob = law.log_prob(self.storage.rounded(step.velocity))
            self.result.records[replay] = Record(walk.learned, walk.conditions, *states, log_prob_old=log_prob)

    def explore(self, walk: _Walk, step: Step) -> Tensor:
        """Sample a step with noise, and record it."""
        storage, replay = self.storage, Replay(walk.index, walk.members, walk.shared)
        law = step.gaussian.expand(len(walk.members))
        # Drawn on the CPU while the device still computes the velocity.
        noise = self.keys.step(walk.members, walk.group.label(replay.step), walk.policy.model.latent_shape())
        x_next = storage.rounded(law.sample(to_device(noise, walk.x.device)))
        before, walk.stored = walk.stored, None
        if replay in self.wanted:
            walk.stored = storage.stored(x_next)
            x = storage.stored(walk.x) if before is None else before
            keeps = storage.velocities or replay in self.kl_replays
            v_old = to_storage(step.velocity, storage.device) if keeps else None
            record = Record(walk.learned, walk.conditions, x, walk.stored, v_old, law.log_prob(x_next))
            self.result.records[replay] = record
        return x_next


class _Walk:
    """Takes clips from noise to data: the prefix that groups share up to their first exploring step (one row per group), or a micro-batch after it."""

    def __init__(
        self, sampler: Sampler, group: Group, rows: Sequence[Member], members: tuple[Member, ...], *, shared: bool
    ) -> None:
        self.sampler, self.group, self.rows, self.members, self.shared = sampler, group, rows, members, shared
        self.conditions = tuple(sampler.conditions[member.group] for member in rows)
        self.policy, self.stepper = sampler.policies(group), Stepper(sampler.solver)
        self.learned = learned(self.policy, group)
        self.index = 0 if shared else group.shared_steps
        self.stop = group.shared_steps if shared else self.policy.schedule.num_steps
        self.forks = group.shared and not shared
        self.x = torch.empty(0)
        """The states, created at the first step, so that noise is drawn while the device computes other clips."""
        self.stored: Tensor | None = None
        """`x` as stored by the step before, if it was."""

    def ready(self) -> bool:
        return self.index < self.stop and (not self.forks or self.members[0] in self.sampler.forked)

    def step(self) -> None:
        sampler = self.sampler
        if not len(self.x):
            forked = [sampler.forked[member] for member in self.members] if self.forks else []
            self.x = torch.stack(forked) if forked else sampler.start(self.group, self.rows)
        step = self.policy.step(self.index, self.x, self.conditions)
        sampler.progress()
        if not self.policy.is_noisy(self.index):
            sampler.visit(self, step)
            x_next = self.stepper(step.gaussian.mean, step.velocity, *self.policy.sigmas(self.index))
            self.x, self.stored = sampler.storage.rounded(x_next), None
        elif self.shared:
            sampler.forked |= dict(zip(self.members, sampler.explore(self, step)))
        else:
            self.x, self.stepper = sampler.explore(self, step), Stepper(sampler.solver)
        self.index += 1
