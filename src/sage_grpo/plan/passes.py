"""Counts the network passes of every rank, phase by phase, on the plan that training executes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sage_grpo.data.groups import Member, MicroBatch, share_out
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.evaluate import members_of
from sage_grpo.training.lockstep import Lockstep
from sage_grpo.training.plan import Group, Plan, Replay
from sage_grpo.training.reference import ReferencePolicy
from sage_grpo.utils.text import fixed

PHASES = {
    "shared": "steps that clips of a group share",
    "sampling": "each clip's own steps",
    "idle": "padding that keeps ranks synchronized",
    "reference": "reference, old policy, pair's other clip",
    "replay": "forward and backward",
    "gauge": "the KL of the updates; again with max_kl",
}
"""Phases of an iteration, and their passes."""


@dataclass(frozen=True)
class PassCount:
    """Passes of one phase."""

    velocities: int = 0  # velocities of a micro-batch: steps of a sampler, or replays
    forwards: int = 0  # forward passes of the network for them: two per velocity if guidance runs its negative prompt
    clips: int = 0  # clips in all these forward passes together, to which time is proportional

    def __add__(self, other: PassCount) -> PassCount:
        return PassCount(self.velocities + other.velocities, self.forwards + other.forwards, self.clips + other.clips)

    def __mul__(self, times: int) -> PassCount:
        return PassCount(times * self.velocities, times * self.forwards, times * self.clips)


@dataclass(frozen=True)
class Guiding:
    """Forward passes per velocity."""

    branches: Callable[[float], int]  # by sigma: 2 if guidance runs the negative prompt too, else 1
    together: int = 0  # up to this many clips, both branches are one batch

    def one(self, rows: int, sigma: float) -> PassCount:
        branches = self.branches(sigma)
        return PassCount(1, 1 if rows <= self.together else branches, rows * branches)


@dataclass(frozen=True)
class PassKind:
    """A part of a plan, as a plan of its own, and its number of occurrences: thousands of clips consist of a few kinds of micro-batches and
    groups, so that a forecast of 4,096 clips is as fast as one of 64."""

    plan: Plan
    times: int


class Counts(NamedTuple):
    """Passes of an iteration: of every rank by phase, and the padding replays of all ranks together."""

    phases: list[dict[str, PassCount]]
    padding: int


def evaluations_of(config: TrainConfig, plan: Plan, branches: Callable[[float], int]) -> str:
    """Text on the network evaluations of an iteration: of all ranks together, and per clip; `branches` gives those of a velocity at a sigma."""
    needed = references(config, plan.iteration, plan.updates)
    ranks = count(plan, kinds(plan, branches), Guiding(branches), reference=needed).phases
    sums = {phase: number for phase in PHASES if (number := sum(rank[phase].clips for rank in ranks))}
    total, clips = sum(sums.values()), len(plan.groups) * plan.group_size
    parts = ", ".join(f"{number:,} {phase}" for phase, number in sums.items())
    return f"{total:,} evaluations per iteration ({parts}), {fixed(total / clips, 1)} per clip; a guided one counts two"


Work = Mapping[Hashable, PassCount]
"""A rank's own passes: of a phase, of ("rollout", network), of ("update", its number, network) and of ("gauge",
network)."""


def count(plan: Plan, kinds: Sequence[Sequence[PassKind]], guiding: Guiding, *, reference: Sequence[int]) -> Counts:
    """Every rank's passes of one iteration by phase, from the `kinds` of each rank and the `reference` passes of each update. Ranks with fewer
    passes than others repeat some to keep synchronized."""
    shared = {id(kind.plan): kind.plan for row in kinds for kind in row}  # ranks share kinds
    counted = {number: count_own(one, guiding) for number, one in shared.items()}
    works = []
    for parts in kinds:
        work: defaultdict[Hashable, PassCount] = defaultdict(PassCount)
        for kind in parts:
            for key, passes in counted[id(kind.plan)].items():
                work[key] += passes * kind.times
        works.append(work)
    most = {key: max(work[key].velocities for work in works) for key in set[Hashable]().union(*works)}
    phases, padding = [], 0
    for rank, work in enumerate(works):
        row = {phase: work[phase] for phase in PHASES}
        sigmas = plan.group_of(plan.batches(rank)[0]).schedule.sigmas.tolist()
        for network in plan.order:
            lacking = most.get(("rollout", network), 0) - work["rollout", network].velocities
            if lacking:
                sigma = next((s for s in sigmas if plan.network(s) == network), 1.0)
                row["idle"] += guiding.one(1, sigma) * lacking
            for update, referenced in enumerate(reference):
                replays = work["update", update, network]
                lacking = most.get(("update", update, network), 0) - replays.velocities
                if lacking:
                    replays += _padding(plan, rank, network, [update], guiding) * lacking
                row["replay"] += replays
                row["reference"] += replays * referenced
                padding += lacking
            lacking = most.get(("gauge", network), 0) - work["gauge", network].velocities
            if lacking:
                row["gauge"] += _padding(plan, rank, network, range(plan.updates), guiding) * lacking
        phases.append(row)
    return Counts(phases, padding)


def count_own(plan: Plan, guiding: Guiding, rank: int = 0) -> Work:
    work: defaultdict[Hashable, PassCount] = defaultdict(PassCount)
    for one in plan.sampled(rank):
        passes = guiding.one(one.rows, one.sigma)
        work["shared" if one.shared else "sampling"] += passes
        work["rollout", plan.network(one.sigma)] += passes
    for replay in plan.kl_replays(rank):
        passes = guiding.one(replay.rows, _sigma(plan, replay))
        work["gauge"] += passes
        work["gauge", plan.network_of(replay)] += passes
    for update in range(plan.updates):
        for replay in plan.replays(rank, update):
            work["update", update, plan.network_of(replay)] += guiding.one(replay.rows, _sigma(plan, replay))
    return work


def _sigma(plan: Plan, replay: Replay) -> float:
    return plan.groups[replay.members[0].group].sigma(replay.step)


def _padding(plan: Plan, rank: int, network: int, updates: Sequence[int], guiding: Guiding) -> PassCount:
    turn = Lockstep(plan).padding(rank, network, updates)
    return guiding.one(turn.states.rows, _sigma(plan, turn.replay))


def references(config: TrainConfig, iteration: int, updates: int) -> list[int]:
    """Passes without gradient in the updates of an iteration: of the reference, except right after its renewal, and of the old policy, if a loss
    at fresh noise levels needs it."""
    objective = config.build_objective()
    old = objective.old_passes(updates)
    if not config.trust_region.uses_anchor:
        return list(map(int, old))
    done, every = iteration * updates, config.anchor.every if config.trust_region.renews_anchor else None
    anchor = ReferencePolicy({}, every=every)
    anchor.renewed_at = done // every * every if every else 0
    return [need * (1 + objective.in_pairs) + first for need, first in zip(anchor.passes(done, updates), old)]


def evaluation(
    config: TrainConfig, prompts: int, ranks: int, sigmas: Sequence[float], guiding: Guiding
) -> list[PassCount]:
    spec = config.evaluate
    members = members_of(min(prompts, spec.prompts), spec.per_prompt)
    shares = share_out(members, config.batch.micro_batch, world_size=ranks)
    return [
        sum((guiding.one(len(batch.members), sigma) for batch in share for sigma in sigmas), PassCount())
        for share in shares
    ]


def kinds(plan: Plan, alike: Callable[[float], int]) -> list[list[PassKind]]:
    """Every rank's parts by kind. Groups at fresh noise levels are of one kind if `alike` is equal for their levels."""
    numbers: dict[Hashable, int] = {}

    def matters(sigma: float) -> tuple[int, int]:
        return alike(sigma), plan.network(sigma)

    keys = [numbers.setdefault(_key(group, matters), len(numbers)) for group in plan.groups]
    known: dict[Hashable, Plan] = {}
    ranks, chosen = [], plan.chosen or ()
    for rank in range(len(plan.shares)):
        often: Counter[Hashable] = Counter()
        for groups, batches in _parts(plan, rank):
            place = {group.index: number for number, group in enumerate(groups)}
            # A clip counts only by being its group's first, which measures the KL, and by the updates that train it.
            clips = tuple(
                tuple((place[one.group], one.index == 0, *(one in part for part in chosen)) for one in batch.members)
                for batch in batches
            )
            sign = tuple(keys[index] for index in place), clips
            often[sign] += 1
            if sign not in known:
                known[sign] = _alone(plan, groups, batches)
        ranks.append([PassKind(known[sign], times) for sign, times in often.items()])
    return ranks


def _parts(plan: Plan, rank: int) -> Iterator[tuple[list[Group], list[MicroBatch]]]:
    """Groups and micro-batches with independent passes: a micro-batch, or groups with a shared prefix that are batched."""
    own = plan.batches(rank)
    if not plan.groups[0].shared:
        for batch in own:
            yield [plan.groups[index] for index in dict.fromkeys(member.group for member in batch.members)], [batch]
        return
    part = {group.index: number for number, groups in enumerate(plan.prefixes(rank)) for group in groups}
    groups, batches = defaultdict[int, list[Group]](list), defaultdict[int, list[MicroBatch]](list)
    for index, number in part.items():
        groups[number].append(plan.groups[index])
    for batch in own:
        batches[part[batch.members[0].group]].append(batch)
    yield from ((groups[number], batches[number]) for number in groups)


def _key(group: Group, alike: Callable[[float], tuple[int, int]]) -> Hashable:
    """Equal for groups whose clips make the same passes and keep the same states; the order of fresh noise levels does
    not matter."""
    trained: Hashable = group.trained
    if group.levels is not None:
        rows = tuple(tuple(sorted(alike(group.sigma(level)) for level in part)) for part in group.trained)
        trained = rows, len({level for part in group.trained for level in part})
    return id(group.schedule), trained, None if group.kl_probe is None else group.kl_probe.step


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
