"""How often every rank runs the network, phase by phase, counted on the plan that training executes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sage_grpo.data.groups import share_out
from sage_grpo.train.config import TrainConfig
from sage_grpo.train.evaluate import members_of
from sage_grpo.train.plan import Plan

PHASES = ("shared", "sampling", "idle", "reference", "replay")
"""Of an iteration. shared: what members of a group have in common; sampling: what each runs for itself; idle: passes whose
result nobody reads, which keep sharded ranks in step; reference: the anchor's velocities; replay: forward and backward."""


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

    @classmethod
    def one(cls, rows: int, branches: int) -> Passes:
        """One velocity of so many clips."""
        return cls(1, branches, rows * branches)


Branches = Callable[[float], int]
"""Forward passes of one velocity at a sigma."""


def count(plan: Plan, rank: int, branches: Branches, *, reference: bool) -> dict[str, Passes]:
    """A rank's passes of one iteration, by phase."""
    result = dict.fromkeys(PHASES, Passes())
    for one in plan.sampled(rank):
        phase = "shared" if one.shared else "sampling"
        result[phase] += Passes.one(one.rows, branches(one.sigma))
    for trained, number in plan.idle_passes(rank).items():
        schedule = plan.group_of(plan.batches(rank)[0]).schedule
        sigma = next((s for s in schedule.sigmas.tolist() if plan.trains(s) == trained), 1.0)
        for _ in range(number):
            result["idle"] += Passes.one(1, branches(sigma))
    for rows, sigma in _replayed(plan, rank):
        result["replay"] += Passes.one(rows, branches(sigma))
    if reference:
        result["reference"] = result["replay"]
    return result


def _replayed(plan: Plan, rank: int) -> Iterator[tuple[int, float]]:
    """Rows and sigma of every replay; a rank that has fewer than another repeats its first."""
    for update, rounds in enumerate(plan.rounds):
        own = [
            (one.rows, float(plan.groups[one.members[0].group].schedule.sigmas[one.step]))
            for one in plan.replays(rank, update)
        ]
        yield from own
        yield from [own[0]] * (rounds - len(own))


def evaluation(
    config: TrainConfig, prompts: int, ranks: int, sigmas: Sequence[float], branches: Branches
) -> list[Passes]:
    """Passes of one evaluation on every rank, at the sigmas where a solver starts its steps; guidance is the model's own there."""
    spec = config.evaluate
    members = members_of(min(prompts, spec.prompts), spec.per_prompt)
    result = []
    for share in share_out(members, config.batch.micro_batch, world_size=ranks):
        one = sum((Passes.one(len(batch.members), 1) for batch in share), Passes())
        whole = Passes()
        for times in map(branches, sigmas):
            whole += Passes(one.velocities, one.velocities * times, one.clips * times)
        result.append(whole)
    return result


def evaluations(config: TrainConfig) -> int:
    """How many evaluations a run makes: before, after, and every so often."""
    if config.data.held_out is None:
        return 0
    every = config.evaluate.every
    between = (config.iterations - 1) // every if every else 0
    return 2 + between
