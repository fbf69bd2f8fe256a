"""Ranks in lockstep: a sharded network needs all ranks in each of its passes, so a rank with fewer passes than another adds padding of weight 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
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

    def idle_passes(self, rank: int) -> Counter[int]:
        return _most(map(self.plan.rollout_passes, range(len(self.plan.shares)))) - self.plan.rollout_passes(rank)

    def replays(self, rank: int, update: int) -> list[ScheduledReplay]:
        return self._padded(rank, self.plan.replays(rank, update), self._most_replays[update], [update])

    def kl_probes(self, rank: int) -> list[ScheduledReplay]:
        updates = range(self.plan.updates)
        return self._padded(rank, list(self.plan.kl_replays(rank)), self._most_probes, updates)

    @property
    def rounds(self) -> list[int]:
        return [most.total() for most in self._most_replays]

    @property
    def probe_rounds(self) -> int:
        return self._most_probes.total()

    def padding(self, rank: int, network: int, updates: Sequence[int]) -> ScheduledReplay:
        """The padding pass of a rank: its first replay of this network, or another rank's step on its own states."""
        # A rank without trained clips still has states.
        states = [one for update in updates for one in self.plan.replayable(rank, update)]
        ranks = range(len(self.plan.shares))
        others = (one for other in ranks for update in updates for one in self.plan.replayable(other, update))
        replay = next(one for one in chain(states, others) if self.plan.network_of(one) == network)
        return ScheduledReplay(replay, replay if replay in states else states[0], network, counts=False)

    def _padded(
        self, rank: int, replays: Sequence[Replay], most: Counter[int], updates: Sequence[int]
    ) -> list[ScheduledReplay]:
        result: list[ScheduledReplay] = []
        for network in self.plan.order:
            some = [ScheduledReplay(one, one, network) for one in replays if self.plan.network_of(one) == network]
            lacking = most[network] - len(some)
            result += some + ([self.padding(rank, network, updates)] * lacking if lacking else [])
        return result

    @cached_property
    def _most_replays(self) -> list[Counter[int]]:
        plan, ranks, result = self.plan, range(len(self.plan.shares)), []
        for update in range(plan.updates):
            most = _most(Counter(map(plan.network_of, plan.replays(rank, update))) for rank in ranks)
            if not most.total():  # nothing was chosen (dpo with equal rewards): one pass of weight 0
                most[next(plan.network_of(one) for rank in ranks for one in plan.replayable(rank, update))] = 1
            result.append(most)
        return result

    @cached_property
    def _most_probes(self) -> Counter[int]:
        ranks = range(len(self.plan.shares))
        return _most(Counter(map(self.plan.network_of, self.plan.kl_replays(rank))) for rank in ranks)


def _most(counts: Iterable[Counter[int]]) -> Counter[int]:
    return reduce(or_, counts)
