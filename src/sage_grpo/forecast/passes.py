"""How often every rank runs the network, phase by phase, counted on the plan that training executes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sage_grpo.data.groups import share_out
from sage_grpo.forecast.kinds import Kind
from sage_grpo.training.anchor import Anchor
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.evaluate import members_of
from sage_grpo.training.plan import Plan, Replay
from sage_grpo.training.reference import Reference

PHASES = ("shared", "sampling", "idle", "reference", "replay", "gauge")
"""Of an iteration. shared: what members of a group have in common; sampling: what each runs for itself; idle: passes whose
result nobody reads, which keep sharded ranks in step; reference: velocities of the anchor or the old policy; replay: forward and backward; gauge: how far the updates moved the policy."""


@dataclass(frozen=True)
class Passes:
    """Passes of one phase."""

    velocities: int = 0
    """Velocities of a micro-batch: steps of a sampler, or replays."""
    forwards: int = 0
    """Forward passes of the network that they take: two a velocity where guidance runs its negative prompt."""
    clips: int = 0
    """Clips in all these forward passes together, which is what time goes by."""

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.velocities + other.velocities, self.forwards + other.forwards, self.clips + other.clips)

    def __mul__(self, times: int) -> Passes:
        return Passes(times * self.velocities, times * self.forwards, times * self.clips)


@dataclass(frozen=True)
class Guiding:
    """How a velocity becomes forward passes."""

    branches: Callable[[float], int]
    """At a sigma: 2 where guidance runs the negative prompt too, else 1."""
    together: int = 0
    """Up to so many clips, both branches go through the network as one batch."""

    def one(self, rows: int, sigma: float) -> Passes:
        """One velocity of so many clips."""
        branches = self.branches(sigma)
        return Passes(1, 1 if rows <= self.together else branches, rows * branches)


@dataclass(frozen=True)
class Own:
    """What a rank does for itself: nothing that only keeps others in step."""

    passes: dict[str, Passes]
    rollout: Counter[bool]
    """Passes of its rollout, by whether the trained network runs."""
    replays: tuple[int, ...]
    """How many of every update."""
    references: tuple[Passes, ...]
    """The passes of every update's replays, which a reference pass repeats."""
    gauges: int

    def __add__(self, other: Own) -> Own:
        return Own(
            {phase: self.passes[phase] + other.passes[phase] for phase in PHASES},
            self.rollout + other.rollout,
            tuple(a + b for a, b in zip(self.replays, other.replays, strict=True)),
            tuple(a + b for a, b in zip(self.references, other.references, strict=True)),
            self.gauges + other.gauges,
        )

    def __mul__(self, times: int) -> Own:
        return Own(
            {phase: passes * times for phase, passes in self.passes.items()},
            Counter({kind: times * number for kind, number in self.rollout.items()}),
            tuple(times * number for number in self.replays),
            tuple(passes * times for passes in self.references),
            times * self.gauges,
        )


@dataclass(frozen=True)
class Counts:
    """Passes of an iteration."""

    phases: list[dict[str, Passes]]
    """Of every rank, by phase."""
    padding: int
    """Replays of all ranks together that only keep others in step."""


def count(plan: Plan, parts: Sequence[Sequence[Kind]], guiding: Guiding, *, reference: Sequence[int]) -> Counts:
    """Every rank's passes of one iteration, by phase. `parts` are the ranks' parts by kind; `reference` says how many reference passes
    each update runs."""
    ranks = range(len(plan.shares))
    known = {id(kind.plan): kind.plan for row in parts for kind in row}  # ranks share kinds
    counted = {number: count_own(one, guiding) for number, one in known.items()}
    own = [sum((counted[id(kind.plan)] * kind.times for kind in row), _nothing(plan)) for row in parts]
    rollout = Counter({kind: max(one.rollout[kind] for one in own) for kind in (True, False)})
    rounds = [max(numbers) for numbers in zip(*(one.replays for one in own), strict=True)]
    gauges = max(one.gauges for one in own)
    phases, padding = [], 0
    for rank, one in zip(ranks, own):
        row = dict(one.passes)
        for trained, number in (rollout - one.rollout).items():
            schedule = plan.group_of(plan.batches(rank)[0]).schedule
            sigma = next((s for s in schedule.sigmas.tolist() if plan.trains(s) == trained), 1.0)
            row["idle"] += guiding.one(1, sigma) * number
        for update, referenced in enumerate(reference):
            missing = rounds[update] - one.replays[update]
            fill = guiding.one(*_first_replay(plan, rank, update)) * missing if missing else Passes()
            row["replay"] += one.references[update] + fill
            row["reference"] += (one.references[update] + fill) * referenced
            padding += missing
        if one.gauges < gauges:
            row["gauge"] += guiding.one(*_first_record(plan, rank)) * (gauges - one.gauges)
        phases.append(row)
    return Counts(phases, padding)


def count_own(plan: Plan, guiding: Guiding, rank: int = 0) -> Own:
    """What a rank runs for itself, pass by pass."""
    result = dict.fromkeys(PHASES, Passes())
    for one in plan.sampled(rank):
        result["shared" if one.shared else "sampling"] += guiding.one(one.rows, one.sigma)
    for replay in plan.gauged(rank):
        result["gauge"] += guiding.one(replay.rows, _sigma(plan, replay))
    replays = [plan.replays(rank, update) for update in range(plan.updates)]
    passes = [sum((guiding.one(one.rows, _sigma(plan, one)) for one in row), Passes()) for row in replays]
    gauges = len(plan.gauged(rank))
    return Own(result, plan.rollout_passes(rank), tuple(map(len, replays)), tuple(passes), gauges)


def _nothing(plan: Plan) -> Own:
    none = Passes()
    return Own(dict.fromkeys(PHASES, none), Counter(), (0,) * plan.updates, (none,) * plan.updates, 0)


def _sigma(plan: Plan, replay: Replay) -> float:
    return plan.groups[replay.members[0].group].sigma(replay.step)


def _first_replay(plan: Plan, rank: int, update: int) -> tuple[int, float]:
    """Rows and sigma of a rank's first replay, which it repeats where it has fewer than another."""
    if plan.chosen is not None:
        replay = (plan.replays(rank, update) or plan.replayable(rank, update))[0]
        return replay.rows, _sigma(plan, replay)
    first = plan.groups[next(iter(plan.members(rank)))]
    step = first.trained[update][0]
    for together in plan.trunks(rank):
        if step in together[0].trained[update] and step < together[0].branch:
            return len(together), together[0].sigma(step)
    for batch in plan.batches(rank):
        group = plan.group_of(batch)
        if step in group.trained[update] and step >= group.branch:
            return len(batch.members), group.sigma(step)
    raise AssertionError(f"step {step} is trained, but nobody replays it")


def _first_record(plan: Plan, rank: int) -> tuple[int, float]:
    """Rows and sigma of the record that a rank repeats where it measures less often than another."""
    batch = plan.batches(rank)[0]
    group = plan.group_of(batch)
    return 1 if group.shared else len(batch.members), group.sigma(group.trained[0][0])


def references(config: TrainConfig, iteration: int, updates: int) -> list[int]:
    """How many passes without gradient the updates of an iteration run: of the anchor where there is one, but not right after it was
    renewed, and of the old policy where a loss at fresh noise levels needs it.

    What `anchor.skip_below` leaves out besides depends on what the run measures, and is not foreseen.
    """
    old = config.objective.old_passes(updates)
    if not config.trust_region.uses_anchor:
        return list(map(int, old))
    done, every = iteration * updates, config.anchor.every if config.trust_region.renews_anchor else None
    anchor = Anchor({}, every=every)
    anchor.renewed_at = done // every * every if every else 0
    needs = Reference.of(config).needs(anchor, done, updates, 0.0)
    return [(need == "pass") + first for need, first in zip(needs, old)]


def evaluation(
    config: TrainConfig, prompts: int, ranks: int, sigmas: Sequence[float], guiding: Guiding
) -> list[Passes]:
    """Passes of one evaluation on every rank, at the sigmas where a solver starts its steps; guidance is the model's own there."""
    spec = config.evaluate
    members = members_of(min(prompts, spec.prompts), spec.per_prompt)
    result = []
    for share in share_out(members, config.batch.micro_batch, world_size=ranks):
        sizes = Counter(len(batch.members) for batch in share)
        passes = (guiding.one(size, sigma) * number for size, number in sizes.items() for sigma in sigmas)
        result.append(sum(passes, Passes()))
    return result


def evaluations(config: TrainConfig) -> int:
    """How many evaluations a run makes: before, after, and every so often."""
    return 0 if config.data.held_out is None else len(config.evaluate.points(config.iterations))
