"""Rollouts: sample the clips of a plan and record the states that its replays need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

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
    v_old: Tensor | None
    """Velocity of the rollout's policy, rows as in `x`; None when neither a loss term nor the measured KL needs it."""
    log_prob_old: Tensor | None
    """Log-probability of the step taken, one value per member. At a fresh noise level the rollout made no pass: None,
    as `v_old`, if the live policy is the rollout's."""


@dataclass(frozen=True)
class SavedRecord:
    """The parts of a record that cannot be recomputed, in CPU memory, for sending."""

    x: Tensor
    x_next: Tensor
    v_old: Tensor | None
    log_prob_old: Tensor | None

    @classmethod
    def of(cls, record: Record) -> SavedRecord:
        rows = (getattr(record, one.name) for one in fields(cls))
        return cls(*(None if own is None else to_storage(own, torch.device("cpu")) for own in rows))  # type: ignore[arg-type]

    def record(self, policy: Policy, conditions: tuple[Conditioning, ...]) -> Record:
        return Record(policy, conditions, self.x, self.x_next, self.v_old, self.log_prob_old)


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
    """Keep the rollout's velocities (step-wise KL, KL mask, centred ratio), not only those by which the updates are measured."""

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


class Sampler:
    """Executes one rank's part of a plan."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        policies: Callable[[Group], Policy],
        conditions: Mapping[int, Conditioning],
        *,
        keys: NoiseKeys,
        storage: Storage,
        solver: Rule = "euler",
        examples: Callable[[Member], Tensor] | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan, self.rank, self.policies, self.conditions = plan, rank, policies, conditions
        self.keys, self.storage, self.solver, self.progress = keys, storage, solver, progress
        self.wanted = {replay for update in range(plan.updates) for replay in plan.replayable(rank, update)}
        self.kl_replays = plan.kl_replays(rank)
        self.result = Rollout()
        self.examples = examples
        """Latents of given clips, in place of sampling."""
        self._forked: dict[Member, Tensor] = {}
        """States of members at their first own step."""

    @torch.no_grad()
    def run(self) -> Rollout:
        """Sample all clips from noise to latents, or take given ones; then record those that are learned at fresh levels."""
        paths = [_Members(self, batch) for batch in self.plan.batches(self.rank)]
        if self.examples is None:
            self._sample(paths)
        else:
            for path in paths:
                rows = torch.stack([self.examples(member) for member in path.batch.members])
                path.x = self.storage.rounded(to_device(rows, path.policy.model.device))
        self.result.latents.extend((path.batch, path.x) for path in paths)
        self._renoise(paths)
        settle(self.policies(self.plan.groups[0]).model.device)
        return self.result

    def _sample(self, paths: Sequence[_Members]) -> None:
        """Run all steps of all clips, first those of the network for high noise: a sharded network needs all ranks."""
        prefixes = [_SharedPrefix(self, groups) for groups in self.plan.prefixes(self.rank)]
        idle = Lockstep(self.plan).idle_passes(self.rank)
        walks: list[_SharedPrefix | _Members] = [*prefixes, *paths]
        for network in (0, 1):
            for walk in walks:
                while walk.ready() and self.plan.network(walk.sigma()) == network:
                    walk.step()
            if idle[network]:
                self._idle(network, idle[network])

    def _renoise(self, paths: Sequence[_Members]) -> None:
        """Record clean clips at fresh noise levels, if the plan learns there."""
        clean = {
            path.batch.members: path
            for path in paths
            if path.group.levels is not None and not path.group.levels.visited
        }
        for replay in sorted(self.wanted, key=lambda replay: replay.step) if clean else ():
            path = clean[replay.members]
            levels, x0 = path.group.levels, path.x
            assert levels is not None
            policy = replace(path.policy, kernel=levels.kernel, schedule=levels.schedule)
            eps = to_device(self.keys.fresh(replay.members, replay.step, tuple(x0.shape[1:])), x0.device)
            self.result.records[replay] = Record(
                policy=policy,
                conditions=path.conditions,
                x=self.storage.stored(interpolate(x0, eps, policy.sigma(replay.step))),
                x_next=self.storage.stored(velocity(x0, eps)),
                v_old=None,
                log_prob_old=None,
            )

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

    def visit(self, walk: _Members, step: Step) -> None:
        levels = walk.group.levels
        if levels is None or not levels.visited or walk.index not in levels.labels:
            return
        replay = Replay(levels.labels.index(walk.index), walk.batch.members, shared=False)
        if replay in self.wanted:
            policy = replace(walk.policy, kernel=levels.kernel, schedule=levels.schedule)
            law = policy.at(replay.step, walk.x, step.velocity).gaussian
            self.result.records[replay] = Record(
                policy=policy,
                conditions=walk.conditions,
                x=self.storage.stored(walk.x),
                x_next=self.storage.stored(step.velocity),
                v_old=None,
                log_prob_old=law.log_prob(self.storage.rounded(step.velocity)),
            )

    def explore(self, walk: _SharedPrefix | _Members, replay: Replay, step: Step) -> Tensor:
        policy, storage = walk.policy, self.storage
        law = step.gaussian.expand(len(replay.members))
        # Drawn on the CPU while the device still computes the velocity.
        noise = self.keys.step(replay.members, walk.group.label(replay.step), policy.model.latent_shape())
        x_next = storage.rounded(law.sample(to_device(noise, walk.x.device)))
        before, walk.stored = walk.stored, None
        if replay in self.wanted:
            walk.stored = storage.stored(x_next)
            self.result.records[replay] = Record(
                policy=policy,
                conditions=walk.conditions,
                x=storage.stored(walk.x) if before is None else before,
                x_next=walk.stored,
                v_old=to_storage(step.velocity, storage.device)
                if storage.velocities or replay in self.kl_replays
                else None,
                log_prob_old=law.log_prob(x_next),
            )
        return x_next


class _Walk:
    """Samples clips from noise to data, one step after another."""

    def __init__(self, sampler: Sampler, group: Group, conditions: Iterable[Conditioning], index: int) -> None:
        self.sampler, self.group, self.conditions, self.index = sampler, group, tuple(conditions), index
        self.policy, self.stepper = sampler.policies(group), Stepper(sampler.solver)
        self.x = torch.empty(0)
        """The states, created at the first step, so that noise is drawn while the device computes other clips."""
        self.stored: Tensor | None = None
        """`x` as stored by the step before, if it was."""

    def sigma(self) -> float:
        return self.policy.sigma(self.index)

    def law(self) -> Step:
        step = self.policy.step(self.index, self.x, self.conditions)
        self.sampler.progress()
        return step

    def drift(self, step: Step) -> Tensor:
        x_next = self.stepper(step.gaussian.mean, step.velocity, *self.policy.sigmas(self.index))
        return self.sampler.storage.rounded(x_next)


class _SharedPrefix(_Walk):
    """The shared prefix of batched groups: one row per group until its members branch at the first exploring step."""

    def __init__(self, sampler: Sampler, groups: tuple[Group, ...]) -> None:
        super().__init__(sampler, groups[0], (sampler.conditions[group.index] for group in groups), index=0)
        mine = sampler.plan.members(sampler.rank)
        self.members = tuple(member for group in groups for member in mine[group.index])
        self.first = [mine[group.index][0] for group in groups]

    def ready(self) -> bool:
        return self.index < self.group.branch

    def step(self) -> None:
        if not len(self.x):
            self.x = self.sampler.start(self.group, self.first)
        step = self.law()
        if self.policy.is_noisy(self.index):
            rows = self.sampler.explore(self, Replay(self.index, self.members, shared=True), step)
            self.sampler._forked |= dict(zip(self.members, rows))
        else:
            self.x = self.drift(step)
        self.index += 1


class _Members(_Walk):
    """The steps of a micro-batch's members after they branch."""

    def __init__(self, sampler: Sampler, batch: MicroBatch) -> None:
        group = sampler.plan.group_of(batch)
        super().__init__(sampler, group, (sampler.conditions[member.group] for member in batch.members), group.branch)
        self.batch = batch

    def ready(self) -> bool:
        parted = not self.group.shared or self.batch.members[0] in self.sampler._forked
        return parted and self.index < self.policy.schedule.num_steps

    def step(self) -> None:
        members, forked = self.batch.members, self.sampler._forked
        if not len(self.x):
            shared = self.group.shared
            self.x = torch.stack([forked[m] for m in members]) if shared else self.sampler.start(self.group, members)
        step = self.law()
        if self.policy.is_noisy(self.index):
            self.x = self.sampler.explore(self, Replay(self.index, members, shared=False), step)
            self.stepper = Stepper(self.sampler.solver)
        else:
            self.sampler.visit(self, step)
            self.x, self.stored = self.drift(step), None
        self.index += 1
