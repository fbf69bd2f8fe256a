"""How often every rank runs the network, phase by phase, counted on the plan that training executes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sage_grpo.data.groups import share_out
from sage_grpo.train.anchor import Anchor
from sage_grpo.train.config import TrainConfig
from sage_grpo.train.evaluate import members_of
from sage_grpo.train.plan import Plan
from sage_grpo.train.reference import Reference

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


def count(plan: Plan, rank: int, guiding: Guiding, *, reference: Sequence[int]) -> dict[str, Passes]:
    """A rank's passes of one iteration, by phase; `reference` says how many reference passes each update runs."""
    result = dict.fromkeys(PHASES, Passes())
    for one in plan.sampled(rank):
        phase = "shared" if one.shared else "sampling"
        result[phase] += guiding.one(one.rows, one.sigma)
    for trained, number in plan.idle_passes(rank).items():
        schedule = plan.group_of(plan.batches(rank)[0]).schedule
        sigma = next((s for s in schedule.sigmas.tolist() if plan.trains(s) == trained), 1.0)
        for _ in range(number):
            result["idle"] += guiding.one(1, sigma)
    for update, referenced in enumerate(reference):
        own = sum((guiding.one(rows, sigma) for rows, sigma in _replayed(plan, rank, update)), Passes())
        result["replay"] += own
        result["reference"] += sum([own] * referenced, Passes())
    for rows, sigma in _gauged(plan, rank):
        result["gauge"] += guiding.one(rows, sigma)
    return result


def references(config: TrainConfig, iteration: int, updates: int) -> list[int]:
    """How many passes without gradient the updates of an iteration run: of the anchor where there is one, but not right after it was
    renewed, and of the old policy where a loss at fresh noise levels needs it.

    What `anchor.skip_below` leaves out besides depends on what the run measures, and is not foreseen.
    """
    old = config.objective.old_passes(updates)
    if not config.trust_region.uses_anchor:
        return list(map(int, old))
    done, every = iteration * updates, None if config.trust_region.mode == "fixed" else config.anchor.every
    anchor = Anchor({}, every=every)
    anchor.renewed_at = done // every * every if every else 0
    needs = Reference.of(config).needs(anchor, done, updates, 0.0)
    return [(need == "pass") + first for need, first in zip(needs, old)]


def _replayed(plan: Plan, rank: int, update: int) -> Iterator[tuple[int, float]]:
    """Rows and sigma of every replay; a rank that has fewer than another repeats its first."""
    own = [(one.rows, plan.groups[one.members[0].group].sigma(one.step)) for one in plan.replays(rank, update)]
    yield from own
    yield from [own[0]] * (plan.rounds[update] - len(own))


def _gauged(plan: Plan, rank: int) -> Iterator[tuple[int, float]]:
    """Rows and sigma of the passes that measure the step; a rank that has fewer than another repeats its first record."""
    own = [(one.rows, plan.groups[one.members[0].group].sigma(one.step)) for one in plan.gauged(rank)]
    yield from own
    if len(own) < plan.gauge_rounds:
        group = plan.group_of(plan.batches(rank)[0])
        rows = 1 if group.shared else len(plan.batches(rank)[0].members)
        yield from [(rows, group.sigma(group.trained[0][0]))] * (plan.gauge_rounds - len(own))


def evaluation(
    config: TrainConfig, prompts: int, ranks: int, sigmas: Sequence[float], guiding: Guiding
) -> list[Passes]:
    """Passes of one evaluation on every rank, at the sigmas where a solver starts its steps; guidance is the model's own there."""
    spec = config.evaluate
    members = members_of(min(prompts, spec.prompts), spec.per_prompt)
    result = []
    for share in share_out(members, config.batch.micro_batch, world_size=ranks):
        passes = (guiding.one(len(batch.members), sigma) for batch in share for sigma in sigmas)
        result.append(sum(passes, Passes()))
    return result


def evaluations(config: TrainConfig) -> int:
    """How many evaluations a run makes: before, after, and every so often."""
    return 0 if config.data.held_out is None else len(config.evaluate.points(config.iterations))
