"""The plan of an iteration as pure data: schedules of the groups, passes that members share, and replays of every update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from sage_grpo.data.groups import Member, MicroBatch
from sage_grpo.data.prompts import Prompt
from sage_grpo.objectives.base import NoiseLevels
from sage_grpo.samplers.schedule import Schedule


@dataclass(frozen=True)
class KlProbe:
    """One trained step of a group at which the KL of the updates is measured."""

    step: int
    weight: float
    """Factor on the step's KL that makes it an unbiased estimate of the sum over the group's trained steps."""


@dataclass(frozen=True)
class Group:
    """Clips that are compared with one another: one prompt, one schedule, and, if `shared`, one state to branch from."""

    index: int
    """Index among the iteration's groups, and so of its prompt; key of the start noise."""
    prompt: Prompt
    schedule: Schedule
    """Its grid, with the steps that explore."""
    offset: int
    """An exploring step's index in the run's own grid, under which it is keyed and logged, minus that in `schedule`."""
    trained: tuple[tuple[int, ...], ...]
    """The steps that every update replays, in order, as indices in `schedule` (or in `levels`)."""
    shared: bool
    kl_probe: KlProbe | None = None
    """Step at which the KL of the iteration's updates is measured; None measures none."""
    levels: NoiseLevels | None = None
    """Fresh noise levels at which its clips are learned: `trained` are indices of these. None trains steps of `schedule`."""

    @cached_property
    def shared_steps(self) -> int:
        """The number of steps whose network pass members share: to the first exploring one, whose noise sets them apart; 0 without a common start."""
        return self.schedule.exploring_range()[0] + 1 if self.shared else 0

    def label(self, step: int) -> int:
        return step + self.offset if self.levels is None else self.levels.labels[step]

    @property
    def replayed(self) -> Schedule:
        return self.schedule if self.levels is None else self.levels.schedule

    def sigma(self, step: int) -> float:
        return float(self.replayed.sigmas[step])

    def length(self, step: int) -> float:
        """Length of a trained ODE step in sigma: x_next = x + length v."""
        at = self.label(step)
        return float(self.schedule.sigmas[at + 1] - self.schedule.sigmas[at])

    @cached_property
    def path_key(self) -> Hashable:
        """Key that is equal for groups whose passes can be batched from noise to their replays."""
        schedule = self.schedule
        return tuple(schedule.sigmas.tolist()), schedule.stochastic, self.offset, self.trained, self.shared

    def noise(self) -> dict[str, Any]:
        """Its noise levels and exploring steps, for schedule.json: readers of a run do not have the model."""
        schedule = self.schedule
        return {"sigmas": schedule.sigmas.tolist(), "stochastic": list(schedule.stochastic), "offset": self.offset}


@dataclass(frozen=True)
class Pass:
    """One pass of a rollout through the network."""

    sigma: float
    rows: int
    shared: bool
    """One row per group, because its members have not branched yet."""


@dataclass(frozen=True)
class Replay:
    """One pass forward and backward of an update."""

    step: int
    """Index in the schedule (or the levels) of its members' groups."""
    members: tuple[Member, ...]
    shared: bool

    @property
    def rows(self) -> int:
        return len({member.group for member in self.members}) if self.shared else len(self.members)


@dataclass(frozen=True)
class Plan:
    """The plan of one iteration."""

    iteration: int
    groups: tuple[Group, ...]
    group_size: int
    equalizer: dict[int, float]
    """Weight of every trained step, by its label."""
    shares: tuple[tuple[MicroBatch, ...], ...]
    network: Callable[[float], int] = field(default=lambda sigma: 0, compare=False)
    """The network that runs at sigma: 0 for high noise, 1 for the other expert of a model with two."""
    prefix_batch: int = 1
    """Most groups with the same path that run their shared steps in one pass."""
    chosen: tuple[frozenset[Member], ...] | None = None
    """The clips that every update trains, None if all; known once there are rewards (training/planner.py)."""
    pairs: tuple[tuple[Member, Member], ...] = ()
    """Preference pairs of clips, the better one first; known with `chosen`."""
    examples: bool = False
    """Clips are given (data.clips): nothing is sampled, decoded or scored."""

    @property
    def prompts(self) -> list[Prompt]:
        return [group.prompt for group in self.groups]

    @property
    def updates(self) -> int:
        return len(self.groups[0].trained)

    def batches(self, rank: int) -> list[MicroBatch]:
        return [batch for batch in self.shares[rank] if not batch.filler]

    def group_of(self, batch: MicroBatch) -> Group:
        """The group of a micro-batch; if it has several, the first, because they have the same schedule."""
        return self.groups[batch.members[0].group]

    def members(self, rank: int) -> dict[int, tuple[Member, ...]]:
        """A rank's members of every group of which it has any."""
        own: dict[int, tuple[Member, ...]] = {}
        for member in (member for batch in self.batches(rank) for member in batch.members):
            own[member.group] = (*own.get(member.group, ()), member)
        return own

    def prefixes(self, rank: int) -> list[tuple[Group, ...]]:
        """A rank's groups with a shared prefix; groups that are batched are in one tuple."""
        alike: dict[Hashable, list[Group]] = {}
        for index in self.members(rank):
            if self.groups[index].shared:
                alike.setdefault(self.groups[index].path_key, []).append(self.groups[index])
        return [
            tuple(groups[start : start + self.prefix_batch])
            for groups in alike.values()
            for start in range(0, len(groups), self.prefix_batch)
        ]

    def tasks(self, rank: int = 0) -> list[Plan]:
        """A rank's rollout in independent parts of whole groups, each as a plan for one rank, with the batches of the whole."""
        batches = self.batches(rank)
        together = [{member.group for member in batch.members} for batch in batches]
        together += [{group.index for group in groups} for groups in self.prefixes(rank)]
        parts: list[set[int]] = []
        for groups in together:
            touched = [part for part in parts if part & groups]
            parts = [part for part in parts if not part & groups] + [groups.union(*touched)]
        return [
            replace(self, shares=(tuple(batch for batch in batches if batch.members[0].group in part),))
            for part in sorted(parts, key=min)
        ]

    def sampled(self, rank: int) -> Iterator[Pass]:
        """The network passes of a rank's rollout: shared passes of groups, each once, then those of the members."""
        if self.examples:
            return
        for groups in self.prefixes(rank):
            for sigma in groups[0].schedule.sigmas[: groups[0].shared_steps].tolist():
                yield Pass(sigma, rows=len(groups), shared=True)
        for batch in self.batches(rank):
            group = self.group_of(batch)
            for sigma in group.schedule.sigmas[group.shared_steps : -1].tolist():
                yield Pass(sigma, rows=len(batch.members), shared=False)

    def rollout_passes(self, rank: int) -> Counter[int]:
        return Counter(self.network(one.sigma) for one in self.sampled(rank))

    @cached_property
    def partners(self) -> dict[Member, tuple[int, Member]]:
        """For every clip of a pair, its side (1 the better, -1 the worse) and the other clip."""
        better = {best: (1, worst) for best, worst in self.pairs}
        return better | {worst: (-1, best) for best, worst in self.pairs}

    @property
    def skipped(self) -> int:
        trained = {member.group for part in self.chosen or () for member in part}
        return 0 if self.chosen is None else len(self.groups) - len(trained)

    @property
    def selection(self) -> str:
        """The numbers of clips that the updates train, as the end of a sentence; empty if each trains all."""
        if all(len(part) == len(self.groups) * self.group_size for part in self.chosen or ()):
            return ""
        return f"; {' + '.join(str(len(part)) for part in self.chosen or ())} of them are trained"

    def row(self, member: Member) -> int:
        """Place of a clip among all of the iteration."""
        return member.group * self.group_size + member.index

    def replays(self, rank: int, update: int) -> list[Replay]:
        """A rank's replays in an update. A pass with one trained clip is run whole, so that its ratios are exactly 1 before the first update."""
        every = self.replayable(rank, update)
        if self.chosen is None:
            return every
        return [replay for replay in every if not self.chosen[update].isdisjoint(replay.members)]

    def replayable(self, rank: int, update: int) -> list[Replay]:
        """A rank's replays if every clip were trained; the rollout records all of these, because rewards come later."""
        own_members, prefixes, result = self.members(rank), self.prefixes(rank), []
        groups = [self.groups[index] for index in own_members]
        for step in dict.fromkeys(step for group in groups for step in group.trained[update]):
            for together in prefixes:
                if step in together[0].trained[update] and step < together[0].shared_steps:
                    rows = tuple(member for group in together for member in own_members[group.index])
                    result.append(Replay(step, rows, shared=True))
            own = {one.index for one in groups if step in one.trained[update] and step >= one.shared_steps}
            apart = (batch for batch in self.batches(rank) if self.group_of(batch).index in own)
            result += [Replay(step, batch.members, shared=False) for batch in apart]
        return result

    def kl_replays(self, rank: int) -> dict[Replay, list[tuple[int, float]]]:
        """The replays in which a rank measures the KL of the updates, with the rows that count (the first member of a group) and their weights."""
        found: dict[Replay, list[tuple[int, float]]] = {}
        for replay in dict.fromkeys(r for update in range(self.updates) for r in self.replayable(rank, update)):
            for place, member in enumerate(replay.members):
                probe = self.groups[member.group].kl_probe
                if probe is not None and member.index == 0 and probe.step == replay.step:
                    row = place * replay.rows // len(replay.members)
                    found.setdefault(replay, []).append((row, probe.weight))
        return found

    def network_of(self, replay: Replay) -> int:
        return self.network(self.groups[replay.members[0].group].sigma(replay.step))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The networks in the order of an update; a gradient that comes back from the clip reaches the one for low noise first."""
        backwards = any(group.levels is not None and group.levels.visited for group in self.groups)
        return (1, 0) if backwards else (0, 1)

    def labels(self, update: int) -> list[int]:
        return list(dict.fromkeys(group.label(step) for group in self.groups for step in group.trained[update]))
