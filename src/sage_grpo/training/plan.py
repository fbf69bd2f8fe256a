"""The plan of an iteration as pure data: which groups are sampled how, what their members share, and what every update replays.

Rollout and update execute it, the terminal prints it, tests count it. It holds no tensor but a schedule's and needs no weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from sage_grpo.data.groups import Member, MicroBatch
from sage_grpo.data.prompts import Prompt
from sage_grpo.models.cheap import Guide
from sage_grpo.samplers.kernels import Kernel
from sage_grpo.samplers.schedule import Schedule


@dataclass(frozen=True)
class Levels:
    """The noise levels of a group. Its members share them: what their errors have in common then cancels, as advantages do."""

    schedule: Schedule
    """The levels from high to low, each the start of a step."""
    labels: tuple[int, ...]
    """For every level the step of the run's grid in which it lies, by which it is logged."""
    kernel: Kernel
    """The law of the target at a level."""
    visited: bool = False
    """Clips were there on their way: their states of the rollout are learned, not clean clips that are noised again."""


@dataclass(frozen=True)
class Gauge:
    """One trained step of a group that stands for all of them."""

    step: int
    """Index in the group's schedule."""
    weight: float
    """Times the step's KL, gives an unbiased estimate of the sum over the group's trained steps."""


@dataclass(frozen=True)
class Group:
    """Clips that are compared with one another: one prompt, one schedule, and, where `shared`, one state to branch from."""

    index: int
    """Among the iteration's groups."""
    number: int
    """Of its prompt among the iteration's prompts; the start noise goes by it."""
    prompt: Prompt
    schedule: Schedule
    """Its grid, with the steps that explore."""
    offset: int
    """Added to an exploring step's index in `schedule`, gives its index in the run's own grid, by which it is keyed and logged."""
    trained: tuple[tuple[int, ...], ...]
    """The steps that every update replays, in order, as indices in `schedule` (or in `levels`)."""
    shared: bool
    """Members start from one noise: all before and at the first exploring step happens once."""
    gauge: Gauge | None = None
    """Where the KL of the iteration's updates is measured; None measures none."""
    levels: Levels | None = None
    """Fresh noise levels at which its clips are learned, to which `trained` then refers; None where steps of `schedule` are."""
    guides: tuple[Guide, ...] = ()
    """How every step of `schedule` runs, where those that do not explore are cheap; empty where all of them are exact."""

    @cached_property
    def branch(self) -> int:
        """The first step at which members are apart; 0 where they never were together."""
        return self.schedule.exploring_range()[0] + 1 if self.shared else 0

    def label(self, step: int) -> int:
        """A trained step's index in the run's own grid."""
        return step + self.offset if self.levels is None else self.levels.labels[step]

    @property
    def replayed(self) -> Schedule:
        """The schedule whose steps updates replay: its own, or that of fresh noise levels."""
        return self.schedule if self.levels is None else self.levels.schedule

    def sigma(self, step: int) -> float:
        """Where a trained step is replayed."""
        return float(self.replayed.sigmas[step])

    def reach(self, step: int) -> float:
        """How far a trained step of the ODE goes, in sigma: x_next = x + reach v."""
        at = self.label(step)
        return float(self.schedule.sigmas[at + 1] - self.schedule.sigmas[at])

    @cached_property
    def way(self) -> Hashable:
        """Equal for groups that can go through the network together from noise to their replays: same sigmas, exploring and trained steps."""
        schedule = self.schedule
        return tuple(schedule.sigmas.tolist()), schedule.stochastic, self.offset, self.trained, self.shared

    def guide(self, step: int) -> Guide:
        """How a step of `schedule` runs."""
        return self.guides[step] if self.guides else "exact"

    def noise(self) -> dict[str, Any]:
        """The noise levels that it visits and where it explores. Written to schedule.json, because readers of a run do not have the model."""
        schedule = self.schedule
        return {"sigmas": schedule.sigmas.tolist(), "stochastic": list(schedule.stochastic), "offset": self.offset}


class Reached(NamedTuple):
    """What identifies a pass of the network before members of a group part: groups that have the same make it once."""

    number: int
    """Of the prompt among the iteration's prompts."""
    sigmas: tuple[float, ...]
    """Noise levels up to here."""
    guide: Guide = "exact"


@dataclass(frozen=True)
class Pass:
    """One pass of a rollout through the network."""

    sigma: float
    rows: int
    """Clips that go through it together."""
    shared: bool
    """Members of a group that have not parted yet go through it as one."""
    guide: Guide = "exact"


@dataclass(frozen=True)
class Replay:
    """One pass forward and backward of an update."""

    step: int
    """Index in the schedule (or the levels) of its members' groups."""
    members: tuple[Member, ...]
    shared: bool
    """One state stands for all members of a group."""

    @property
    def rows(self) -> int:
        """States that go through the network together."""
        return len({member.group for member in self.members}) if self.shared else len(self.members)


@dataclass(frozen=True)
class Turn:
    """One of the passes that all ranks make at once, because sharded networks take all of them to run one."""

    replay: Replay
    """What is run: the rank's own replay, or another's."""
    states: Replay
    """The rank's own replay whose states go through the network."""
    network: int
    counts: bool = True
    """False only keeps ranks in step."""


@dataclass(frozen=True)
class Plan:
    """One iteration."""

    iteration: int
    groups: tuple[Group, ...]
    group_size: int
    equalizer: dict[int, float]
    """Weight of every trained step, by its label."""
    shares: tuple[tuple[MicroBatch, ...], ...]
    """Micro-batches of every data-parallel rank."""
    network: Callable[[float], int] = field(default=lambda sigma: 0, compare=False)
    """Which network runs at sigma: 0 the one for the highest noise, 1 the other expert of a model that has two."""
    abreast: int = 1
    """Up to so many groups that go the same way run what their members share in one pass."""
    chosen: tuple[frozenset[Member], ...] | None = None
    """The clips that every update trains, where these are not all: known once there are rewards (training/planner.py)."""
    pairs: tuple[tuple[Member, Member], ...] = ()
    """Clips of which one is preferred to the other, the better one first; known with `chosen`."""
    examples: bool = False
    """Its clips are given (data.clips): nothing is sampled, decoded or scored."""

    @property
    def prompts(self) -> list[Prompt]:
        """The prompt of every group."""
        return [group.prompt for group in self.groups]

    @property
    def updates(self) -> int:
        """Optimizer updates."""
        return len(self.groups[0].trained)

    def batches(self, rank: int) -> list[MicroBatch]:
        """The micro-batches that a rank samples."""
        return [batch for batch in self.shares[rank] if not batch.filler]

    def group_of(self, batch: MicroBatch) -> Group:
        """The group of a micro-batch, or one that stands for those in it: they have the same schedule."""
        return self.groups[batch.members[0].group]

    def members(self, rank: int) -> dict[int, tuple[Member, ...]]:
        """A rank's members of every group of which it has any."""
        return self._members[rank]

    @cached_property
    def _members(self) -> list[dict[int, tuple[Member, ...]]]:
        ranks: list[dict[int, tuple[Member, ...]]] = []
        for rank in range(len(self.shares)):
            own: dict[int, list[Member]] = {}
            for batch in self.batches(rank):
                for member in batch.members:
                    own.setdefault(member.group, []).append(member)
            ranks.append({group: tuple(members) for group, members in own.items()})
        return ranks

    def trunk(self, group: Group) -> list[Reached]:
        """What identifies the network's passes of a group before its members part: its prompt and the sigmas up to there.

        Groups of one prompt have the same passes until the first of them branches.
        """
        sigmas = group.schedule.sigmas.tolist()
        return [Reached(group.number, tuple(sigmas[: step + 1]), group.guide(step)) for step in range(group.branch)]

    def trunks(self, rank: int) -> list[tuple[Group, ...]]:
        """A rank's groups whose members share their beginning; those that walk it side by side are together."""
        ways: dict[Hashable, list[Group]] = {}
        for index in self.members(rank):
            if self.groups[index].shared:
                ways.setdefault(self.groups[index].way, []).append(self.groups[index])
        return [
            tuple(groups[start : start + self.abreast])
            for groups in ways.values()
            for start in range(0, len(groups), self.abreast)
        ]

    def tasks(self, rank: int = 0) -> list[Plan]:
        """A rank's rollout cut into parts that can be sampled apart, each as a plan for one rank: whole groups, in the micro-batches and with the
        shared passes that they have in the whole, so that the numbers are the same."""
        batches = self.batches(rank)
        together = [{member.group for member in batch.members} for batch in batches]
        together += [{group.index for group in groups} for groups in self.trunks(rank)]
        shared: dict[int, set[int]] = {}
        for index in self.members(rank):
            if self.groups[index].shared:
                shared.setdefault(self.groups[index].number, set()).add(index)
        parts: list[set[int]] = []
        for groups in [*together, *shared.values()]:
            touched = [part for part in parts if part & groups]
            parts = [part for part in parts if not part & groups] + [groups.union(*touched)]
        return [
            replace(self, shares=(tuple(batch for batch in batches if batch.members[0].group in part),))
            for part in sorted(parts, key=min)
        ]

    def sampled(self, rank: int) -> Iterator[Pass]:
        """The network's passes of a rank's rollout: what groups share, each once, and then what members run for themselves."""
        if self.examples:
            return
        keys = (key for groups in self.trunks(rank) for key in zip(*map(self.trunk, groups)))
        for key in dict.fromkeys(keys):
            yield Pass(key[0].sigmas[-1], rows=len(key), shared=True, guide=key[0].guide)
        for batch in self.batches(rank):
            group = self.group_of(batch)
            for step, sigma in enumerate(group.schedule.sigmas[group.branch : -1].tolist(), group.branch):
                yield Pass(sigma, rows=len(batch.members), shared=False, guide=group.guide(step))

    def rollout_passes(self, rank: int) -> Counter[int]:
        """Passes of a rank's rollout, by network."""
        return Counter(self.network(one.sigma) for one in self.sampled(rank))

    def idle_passes(self, rank: int) -> Counter[int]:
        """Passes that a rank makes for nothing, because sharded networks take all ranks to run one."""
        return self._most_passes - self.rollout_passes(rank)

    @cached_property
    def _most_passes(self) -> Counter[int]:
        return _most([self.rollout_passes(rank) for rank in range(len(self.shares))])

    @cached_property
    def rivals(self) -> dict[Member, tuple[int, Member]]:
        """Of every clip of a pair its side (1 the better, -1 the worse) and the other clip."""
        better = {best: (1, worst) for best, worst in self.pairs}
        return better | {worst: (-1, best) for best, worst in self.pairs}

    @property
    def skipped(self) -> int:
        """Groups of which no clip is trained."""
        trained = {member.group for part in self.chosen or () for member in part}
        return 0 if self.chosen is None else len(self.groups) - len(trained)

    def replays(self, rank: int, update: int) -> list[Replay]:
        """What a rank replays in an update, step by step. A pass of which one clip is trained is run whole, as in the rollout: its ratios
        are then exactly 1 before the first update."""
        every = self.replayable(rank, update)
        if self.chosen is None:
            return every
        return [replay for replay in every if not self.chosen[update].isdisjoint(replay.members)]

    def replayable(self, rank: int, update: int) -> list[Replay]:
        """What a rank would replay if every clip were trained; the rollout keeps records of all of these, because rewards come later."""
        own_members = self.members(rank)
        groups, trunks = [self.groups[index] for index in own_members], self.trunks(rank)
        steps = dict.fromkeys(step for group in groups for step in group.trained[update])
        result = []
        for step in steps:
            here = [group for group in groups if step in group.trained[update]]
            for together in trunks:
                if step in together[0].trained[update] and step < together[0].branch:
                    rows = tuple(member for group in together for member in own_members[group.index])
                    result.append(Replay(step, rows, shared=True))
            own = {group.index for group in here if step >= group.branch}
            apart = [batch for batch in self.batches(rank) if self.group_of(batch).index in own]
            result += [Replay(step, batch.members, shared=False) for batch in apart]
        return result

    def gauged(self, rank: int) -> dict[Replay, list[tuple[int, float]]]:
        """The replays in which a rank measures how far the updates moved the policy, with the rows that count and their weights.

        Only the first member of a group counts, so that the figure depends on neither ranks nor micro-batches.
        """
        found: dict[Replay, list[tuple[int, float]]] = {}
        for replay in dict.fromkeys(r for update in range(self.updates) for r in self.replayable(rank, update)):
            for place, member in enumerate(replay.members):
                gauge = self.groups[member.group].gauge
                if gauge is not None and member.index == 0 and gauge.step == replay.step:
                    row = place * replay.rows // len(replay.members)
                    found.setdefault(replay, []).append((row, gauge.weight))
        return found

    def turns(self, rank: int, update: int) -> list[Turn]:
        """What a rank runs in an update, in step with all others: one network after another, as often as the rank that has most of it."""
        return self._in_step(rank, self.replays(rank, update), self._most_replays[update], [update])

    def gauge_turns(self, rank: int) -> list[Turn]:
        """The same for measuring how far the updates moved the policy."""
        return self._in_step(rank, list(self.gauged(rank)), self._most_gauged, range(self.updates))

    def _in_step(self, rank: int, own: Sequence[Replay], most: Counter[int], updates: Sequence[int]) -> list[Turn]:
        result: list[Turn] = []
        for network in self.order:
            mine = [Turn(replay, replay, network) for replay in own if self.network_of(replay) == network]
            lacking = most[network] - len(mine)
            result += mine + ([self.spare(rank, network, updates)] * lacking if lacking else [])
        return result

    def spare(self, rank: int, network: int, updates: Sequence[int]) -> Turn:
        """What a rank runs to keep in step where it has fewer replays of a network than another: its first, or another rank's on own states."""
        # A rank none of whose clips are trained has states all the same.
        own = [one for update in updates for one in self.replayable(rank, update)]
        others = (one for other in range(len(self.shares)) for u in updates for one in self.replayable(other, u))
        replay = next(one for one in chain(own, others) if self.network_of(one) == network)
        return Turn(replay, replay if replay in own else own[0], network, counts=False)

    def network_of(self, replay: Replay) -> int:
        """The network that a replay runs."""
        return self.network(self.groups[replay.members[0].group].sigma(replay.step))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The networks as an update runs them; a gradient that is carried back from the clip comes to the one for low noise first."""
        backwards = any(group.levels is not None and group.levels.visited for group in self.groups)
        return (1, 0) if backwards else (0, 1)

    @cached_property
    def _most_replays(self) -> list[Counter[int]]:
        ranks, found = range(len(self.shares)), []
        for update in range(self.updates):
            most = _most([Counter(map(self.network_of, self.replays(rank, update))) for rank in ranks])
            if (
                not most.total()
            ):  # nothing was chosen (dpo, where no rewards differ): one pass of weight 0 keeps the line as it is
                most[next(self.network_of(one) for rank in ranks for one in self.replayable(rank, update))] = 1
            found.append(most)
        return found

    @cached_property
    def _most_gauged(self) -> Counter[int]:
        return _most([Counter(map(self.network_of, self.gauged(rank))) for rank in range(len(self.shares))])

    @property
    def gauge_rounds(self) -> int:
        """Passes that measuring takes on every rank."""
        return self._most_gauged.total()

    def labels(self, update: int) -> list[int]:
        """The steps that an update trains, over all groups, in order."""
        return list(dict.fromkeys(group.label(step) for group in self.groups for step in group.trained[update]))

    @property
    def rounds(self) -> list[int]:
        """Replays of every update on every rank; those that have fewer of their own fill up with passes of weight 0."""
        return [most.total() for most in self._most_replays]


def _most(counts: Sequence[Counter[int]]) -> Counter[int]:
    """Of every network as much as the rank with most of it has."""
    return Counter({network: max(count[network] for count in counts) for network in (0, 1)})
