"""The parts of a plan that have nothing to do with one another, each kind once, with how many of it there are.

A plan of thousands of clips is a few kinds of micro-batches and groups, many times over. What a kind takes is found by the plan's own
rules, on a plan of that part alone, so that a forecast takes as long for 4,096 clips as for 64, and counts the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from sage_grpo.data.groups import Member, MicroBatch
from sage_grpo.training.plan import Group, Plan


@dataclass(frozen=True)
class Kind:
    """One part, as the plan of a run that consists of it, and how often it is there."""

    plan: Plan
    times: int


def kinds(plan: Plan, alike: Callable[[float], int]) -> list[list[Kind]]:
    """Every rank's parts by kind; a kind that several ranks have is one plan. `alike` says what of a fresh noise level matters: groups
    whose levels are alike in it are of one kind."""
    numbers: dict[Hashable, int] = {}
    ways = [numbers.setdefault(_way(group, alike), len(numbers)) for group in plan.groups]
    known: dict[Hashable, Plan] = {}
    ranks = []
    for rank in range(len(plan.shares)):
        often: Counter[Hashable] = Counter()
        for groups, batches in _parts(plan, rank):
            place = {group.index: number for number, group in enumerate(groups)}
            # Of a clip only matters whether it is its group's first, by which the step is measured, and which updates train it.
            clips = tuple(
                tuple((place[one.group], one.index == 0, _trained(plan, one)) for one in batch.members)
                for batch in batches
            )
            sign = tuple(ways[index] for index in place), clips
            often[sign] += 1
            if sign not in known:
                known[sign] = _alone(plan, groups, batches)
        ranks.append([Kind(known[sign], times) for sign, times in often.items()])
    return ranks


def _trained(plan: Plan, member: Member) -> tuple[bool, ...]:
    """Which updates train a clip; nothing where all do."""
    return () if plan.chosen is None else tuple(member in part for part in plan.chosen)


def _parts(plan: Plan, rank: int) -> Iterator[tuple[list[Group], list[MicroBatch]]]:
    """Groups and micro-batches whose passes depend on nobody else's: a micro-batch, or, where members of a group share their beginning,
    what walks it side by side or branches off one walk."""
    own = plan.batches(rank)
    if not plan.groups[0].shared:
        for batch in own:
            yield [plan.groups[index] for index in dict.fromkeys(member.group for member in batch.members)], [batch]
        return
    together: dict[int, list[Group]] = {}
    if plan.abreast > 1:
        together = dict(enumerate(map(list, plan.trunks(rank))))
    else:
        for index in plan.members(rank):
            together.setdefault(plan.groups[index].place, []).append(plan.groups[index])
    part = {group.index: number for number, groups in together.items() for group in groups}
    batches: dict[int, list[MicroBatch]] = {number: [] for number in together}
    for batch in own:
        batches[part[batch.members[0].group]].append(batch)
    yield from ((groups, batches[number]) for number, groups in together.items())


def _way(group: Group, alike: Callable[[float], int]) -> Hashable:
    """The same for groups of which equal clips take the same passes and keep the same states."""
    trained = group.trained if group.levels is None else _levels(group, alike)
    return id(group.schedule), trained, None if group.gauge is None else group.gauge.step


def _levels(group: Group, alike: Callable[[float], int]) -> Hashable:
    """What each update learns of a group at fresh noise levels, in whatever order, and how many levels that is in all."""
    rows = tuple(tuple(sorted(alike(group.sigma(level)) for level in part)) for part in group.trained)
    return rows, len({level for part in group.trained for level in part})


def _alone(plan: Plan, groups: Sequence[Group], batches: Sequence[MicroBatch]) -> Plan:
    place = {group.index: number for number, group in enumerate(groups)}
    moved = tuple(
        replace(batch, members=tuple(Member(place[one.group], one.index) for one in batch.members)) for batch in batches
    )
    own = tuple(replace(group, index=number) for number, group in enumerate(groups))
    chosen = plan.chosen
    if chosen is not None:
        chosen = tuple(
            frozenset(Member(place[one.group], one.index) for one in part if one.group in place) for part in chosen
        )
    return replace(plan, groups=own, shares=(moved,), chosen=chosen)
