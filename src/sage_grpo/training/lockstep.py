"""Ranks in lockstep: a sharded network needs all ranks in each of its passes, so a rank with fewer passes than another adds padding of weight 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import or_

from sage_grpo.training.plan import Plan, Replay


@dataclass(frozen=True)
class ScheduledReplay:
    """A pass that all ranks make at the same time."""

    replay: Replay
    """The replay whose step is run: the rank's own, or another rank's."""
    states: Replay
    """The rank's own replay whose states go through the network."""
    network: int
    counts: bool = True


@dataclass(frozen=True)
class Lockstep:
    """The passes of every rank, padded network by network to those of the rank with most."""

    plan: Plan

    @property
    def ranks(self) -> range:
        return range(len(self.plan.shares))

    def idle_passes(self, rank: int) -> Counter[int]:
        return _most(map(self.plan.rollout_passes, self.ranks)) - self.plan.rollout_passes(rank)

    def replays(self, rank: int, update: int) -> list[ScheduledReplay]:
        """Equally many on every rank, at least one: nothing may be chosen (dpo with equal rewards)."""
        return self._padded(rank, [self.plan.replays(one, update) for one in self.ranks], [update], least=1)

    def kl_probes(self, rank: int) -> list[ScheduledReplay]:
        every = [[*self.plan.kl_replays(one)] for one in self.ranks]
        return self._padded(rank, every, range(self.plan.updates), least=0)

    def padding(self, rank: int, network: int, updates: Sequence[int]) -> ScheduledReplay:
        """The padding pass of a rank: its first replay of this network, or another rank's step on its own states."""
        # A rank without trained clips still has states.
        states = [one for update in updates for one in self.plan.replayable(rank, update)]
        replay = next(one for one in chain(states, self._replayable(updates)) if self.plan.network_of(one) == network)
        return ScheduledReplay(replay, replay if replay in states else states[0], network, counts=False)

    def _replayable(self, updates: Sequence[int]) -> Iterator[Replay]:
        return (one for rank in self.ranks for update in updates for one in self.plan.replayable(rank, update))

    def _padded(
        self, rank: int, replays: Sequence[Sequence[Replay]], updates: Sequence[int], *, least: int
    ) -> list[ScheduledReplay]:
        most = _most(Counter(map(self.plan.network_of, some)) for some in replays)
        if most.total() < least:
            most[self.plan.network_of(next(self._replayable(updates)))] = least
        result: list[ScheduledReplay] = []
        for network in self.plan.order:
            some = [ScheduledReplay(one, one, network) for one in replays[rank] if self.plan.network_of(one) == network]
            lacking = most[network] - len(some)
            result += some + ([self.padding(rank, network, updates)] * lacking if lacking else [])
        return result


def _most(counts: Iterable[Counter[int]]) -> Counter[int]:
    return reduce(or_, counts)
