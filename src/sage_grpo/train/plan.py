"""The plan of an iteration as pure data: which groups are sampled how, what their members share, and what every update replays.

Rollout and update execute it, the terminal prints it, tests count it. It holds no tensor but a schedule's and needs no weights.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from sage_grpo.data.groups import Member, MicroBatch, deal, split_updates
from sage_grpo.data.prompts import Prompt
from sage_grpo.flow.kernels import Kernel
from sage_grpo.flow.schedule import Schedule
from sage_grpo.rl.equalizer import equalizing_weights
from sage_grpo.train.config import TrainConfig
from sage_grpo.train.levels import Levels, draw_levels


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
    """Place among the iteration's groups."""
    place: int
    """Place of its prompt among the iteration's prompts; the start noise goes by it."""
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

    @property
    def branch(self) -> int:
        """The first step at which members are apart; 0 where they never were together."""
        return self.schedule.exploring_range()[0] + 1 if self.shared else 0

    def label(self, step: int) -> int:
        """A trained step's index in the run's own grid."""
        return step + self.offset if self.levels is None else self.levels.labels[step]

    def sigma(self, step: int) -> float:
        """Where a trained step is replayed."""
        return float((self.schedule if self.levels is None else self.levels.schedule).sigmas[step])

    def noise(self) -> dict[str, Any]:
        """The noise levels that it visits and where it explores, for readers of the run: only the model knows its grid."""
        schedule = self.schedule
        return {"sigmas": schedule.sigmas.tolist(), "stochastic": list(schedule.stochastic), "offset": self.offset}


@dataclass(frozen=True)
class Pass:
    """One pass of a rollout through the network."""

    sigma: float
    rows: int
    """Clips that go through it together."""
    shared: bool
    """Members of a group that have not parted yet go through it as one."""


@dataclass(frozen=True)
class Replay:
    """One pass forward and backward of an update."""

    step: int
    """Index in the schedule (or the levels) of its members' groups."""
    members: tuple[Member, ...]
    shared: bool
    """One state stands for all members."""

    @property
    def rows(self) -> int:
        """States that go through the network together."""
        return 1 if self.shared else len(self.members)


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
    trains: Callable[[float], bool] = field(default=lambda sigma: True, compare=False)
    """Whether the trained network runs at sigma; another expert may run elsewhere."""

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

    def trunk(self, group: Group) -> list[tuple[int, tuple[float, ...]]]:
        """What identifies the network's passes of a group before its members part: its prompt and the sigmas up to there.

        Groups of one prompt have the same passes until the first of them branches.
        """
        sigmas = group.schedule.sigmas.tolist()
        return [(group.place, tuple(sigmas[: step + 1])) for step in range(group.branch)]

    def sampled(self, rank: int) -> Iterator[Pass]:
        """The network's passes of a rank's rollout: what groups share, each once, and then what members run for themselves."""
        own = [self.groups[index] for index in self.members(rank)]
        for key in dict.fromkeys(key for group in own for key in self.trunk(group)):
            yield Pass(key[-1][-1], rows=1, shared=True)
        for batch in self.batches(rank):
            group = self.group_of(batch)
            for sigma in group.schedule.sigmas[group.branch : -1].tolist():
                yield Pass(sigma, rows=len(batch.members), shared=False)

    def rollout_passes(self, rank: int) -> Counter[bool]:
        """Passes of a rank's rollout, by whether the trained network runs."""
        return Counter(self.trains(one.sigma) for one in self.sampled(rank))

    def idle_passes(self, rank: int) -> Counter[bool]:
        """Passes that a rank makes for nothing, because sharded networks take all ranks to run one."""
        return self._most_passes - self.rollout_passes(rank)

    @cached_property
    def _most_passes(self) -> Counter[bool]:
        counts = [self.rollout_passes(rank) for rank in range(len(self.shares))]
        return Counter({kind: max(count[kind] for count in counts) for kind in (True, False)})

    def replays(self, rank: int, update: int) -> list[Replay]:
        """What a rank replays in an update, step by step."""
        groups = [self.groups[index] for index in self.members(rank)]
        steps = dict.fromkeys(step for group in groups for step in group.trained[update])
        result = []
        for step in steps:
            here = [group for group in groups if step in group.trained[update]]
            together = [group for group in here if step < group.branch]
            result += [Replay(step, self.members(rank)[group.index], shared=True) for group in together]
            own = {group.index for group in here if step >= group.branch}
            apart = [batch for batch in self.batches(rank) if self.group_of(batch).index in own]
            result += [Replay(step, batch.members, shared=False) for batch in apart]
        return result

    def gauged(self, rank: int) -> dict[Replay, list[tuple[int, float]]]:
        """The replays in which a rank measures how far the updates moved the policy, with the rows that count and their weights.

        Only the first member of a group counts, so that the figure depends on neither ranks nor micro-batches.
        """
        found: dict[Replay, list[tuple[int, float]]] = {}
        for replay in dict.fromkeys(r for update in range(self.updates) for r in self.replays(rank, update)):
            for place, member in enumerate(replay.members):
                gauge = self.groups[member.group].gauge
                if gauge is not None and member.index == 0 and gauge.step == replay.step:
                    found.setdefault(replay, []).append((0 if replay.shared else place, gauge.weight))
        return found

    @cached_property
    def gauge_rounds(self) -> int:
        """Passes that measuring takes on the rank that has most; the others fill up."""
        return max(len(self.gauged(rank)) for rank in range(len(self.shares)))

    def labels(self, update: int) -> list[int]:
        """The steps that an update trains, over all groups, in order."""
        return list(dict.fromkeys(group.label(step) for group in self.groups for step in group.trained[update]))

    @cached_property
    def rounds(self) -> list[int]:
        """Replays of every update on the rank that has most; the others fill up with passes of weight 0."""
        ranks = range(len(self.shares))
        return [max(len(self.replays(rank, update)) for rank in ranks) for update in range(self.updates)]


@dataclass(frozen=True)
class Planner:
    """Makes the plans of a run."""

    config: TrainConfig
    grid: Schedule
    """The run's own grid."""
    kernel: Kernel
    trains: Callable[[float], bool]
    ranks: int = 1
    """Data-parallel ranks."""

    def plan(self, iteration: int, prompts: Sequence[Prompt]) -> Plan:
        """The plan of an iteration over these prompts."""
        config, window = self.config, self.config.rollout.window
        if config.objective.fresh:
            return self._fresh(iteration, prompts)
        if window.kind == "drawn":
            allowed = self.candidates()
            rows = window.draw(allowed, len(prompts), iteration, config.seed)
            firsts = [(place, first) for place, row in enumerate(rows) for first in row]
            flags = [window.flags(first, config.rollout.steps) for _, first in firsts]
            weighted = [step for first in allowed for step in self.trainable(window.flags(first, config.rollout.steps))]
        else:
            same = window.steps(config.rollout.steps, iteration, config.seed)
            firsts, flags = [(place, 0) for place in range(len(prompts))], [same] * len(prompts)
            weighted = self.trainable(same)
        groups = tuple(
            self._group(index, place, prompts[place], flags[index], iteration)
            for index, (place, _) in enumerate(firsts)
        )
        return Plan(
            iteration=iteration,
            groups=groups,
            group_size=config.batch.group_size,
            equalizer=self._weights(sorted(set(weighted))),
            shares=self.shares,
            trains=self.trains,
        )

    def _fresh(self, iteration: int, prompts: Sequence[Prompt]) -> Plan:
        """The plan of an iteration without exploration: every prompt draws the noise levels at which its clips are learned."""
        config, schedule = self.config, self.grid.exploring((False,) * self.grid.num_steps)
        groups = []
        for place, prompt in enumerate(prompts):
            draw = random.Random(f"levels/{config.seed}/{iteration}/{place}")
            levels = draw_levels(config.objective, self.grid, self.trains, draw)
            trained = tuple(map(tuple, self._deal(list(range(config.objective.levels)), draw)))
            groups.append(Group(place, place, prompt, schedule, 0, trained, shared=False, levels=levels))
        ones = dict.fromkeys(range(self.grid.num_steps), 1.0)
        return Plan(iteration, tuple(groups), config.batch.group_size, ones, self.shares, self.trains)

    @cached_property
    def shares(self) -> tuple[tuple[MicroBatch, ...], ...]:
        """Micro-batches of every rank; prompts that explore at different steps do not share one."""
        batch, window = self.config.batch, self.config.rollout.window
        return deal(
            batch.prompts * window.branches,
            batch.group_size,
            batch.micro_batch,
            world_size=self.ranks,
            apart=window.kind == "drawn" or self._together or self.config.objective.fresh,
        )

    def places(self, rank: int) -> list[int]:
        """Which of an iteration's prompts a rank samples, in every iteration."""
        branches = self.config.rollout.window.branches
        return sorted({member.group // branches for batch in self.shares[rank] for member in batch.members})

    @property
    def _together(self) -> bool:
        return self.config.rollout.same_noise and self.config.rollout.share

    def trainable(self, flags: Sequence[bool]) -> list[int]:
        """The steps with noise whose velocity depends on the trainable parameters, in the run's own grid."""
        schedule = self._exploring(flags)
        return [
            step
            for step, flag in enumerate(schedule.stochastic)
            if flag and float(self.kernel(*schedule.pair(step)).std) > 0 and self.trains(float(schedule.sigmas[step]))
        ]

    def candidates(self) -> list[int]:
        """Where a drawn window may start."""
        window, steps = self.config.rollout.window, self.config.rollout.steps
        if window.at is not None:
            for first in window.at:
                if not self.trainable(window.flags(first, steps)):
                    raise ValueError(
                        f"window.at names step {first}, but no step of a window there can be trained: it is deterministic, "
                        f"or another expert's. {_look()}"
                    )
            return list(window.at)
        allowed = [first for first in range(steps - window.size + 1) if self.trainable(window.flags(first, steps))]
        if len(allowed) < window.branches:
            raise ValueError(
                f"window.branches is {window.branches}, but only steps {allowed} can be trained. {_look()}"
            )
        return allowed

    def check(self) -> None:
        """A plan that cannot work fails before the first rollout, also where the fault is in a window of a late iteration."""
        config, window = self.config, self.config.rollout.window
        if config.objective.fresh:
            self._fresh(0, [Prompt("")])
            return
        first_seen: dict[tuple[bool, ...], int] = {}
        if window.kind == "drawn":
            first_seen = {window.flags(first, config.rollout.steps): 0 for first in self.candidates()}
        for iteration in range(config.iterations) if window.kind != "drawn" else ():
            first_seen.setdefault(window.steps(config.rollout.steps, iteration, config.seed), iteration)
        for flags, iteration in first_seen.items():
            self._group(0, 0, Prompt(""), flags, iteration)
        self.shares  # noqa: B018 - raises where ranks and rollouts do not go together

    def _exploring(self, flags: Sequence[bool]) -> Schedule:
        asked = self.config.rollout.deterministic_last
        return self.grid.exploring(flags, deterministic_last=self.kernel.leaves_noise if asked is None else asked)

    def _group(self, index: int, place: int, prompt: Prompt, flags: Sequence[bool], iteration: int) -> Group:
        rollout, steps = self.config.rollout, self.trainable(flags)
        if not steps:
            raise ValueError(
                "No step of the rollout can be trained: kernel.eta is 0, or the window only covers deterministic steps. "
                f"Set kernel.eta > 0 (0.3 to 0.7). {_look()}"
            )
        schedule = self._exploring(flags)
        first = schedule.exploring_range()[0]
        schedule = schedule.around(rollout.before_steps, rollout.after_steps)
        offset = first - schedule.exploring_range()[0]
        own = f"/{index}" if rollout.window.kind == "drawn" else ""
        parts = self._choose(steps, random.Random(f"steps/{self.config.seed}/{iteration}{own}"))
        trained = tuple(tuple(step - offset for step in part) for part in parts)
        gauge = self._gauge(index, offset, trained, iteration) if self.config.optimizer.measures_kl else None
        return Group(index, place, prompt, schedule, offset, trained, shared=self._together, gauge=gauge)

    def _gauge(self, index: int, offset: int, trained: Sequence[Sequence[int]], iteration: int) -> Gauge:
        """One of the trained steps, drawn in proportion to its sensitivity squared, which is most of how the KLs of steps differ:
        what is left is the change of the velocity. The groups' draws are evenly spaced, so that together they cover the steps."""
        groups = self.config.batch.prompts * self.config.rollout.window.branches
        steps = sorted({step for part in trained for step in part})
        squares = [float(self.kernel(*self.grid.pair(step + offset)).sensitivity) ** 2 for step in steps]
        edges = list(accumulate(squares))
        draw = random.Random(f"gauge/{self.config.seed}/{iteration}").random()
        place = bisect(edges, (draw + index) % groups / groups * edges[-1])
        place = min(place, len(steps) - 1)  # rounding
        return Gauge(steps[place], edges[-1] / squares[place])

    def _choose(self, steps: list[int], draw: random.Random) -> list[list[int]]:
        """The trained steps of a group, one list per optimizer update."""
        config = self.config.update
        least = 1 if config.repeat else config.updates_per_rollout
        count = max(least, round(config.step_fraction * len(steps)))
        return self._deal(sorted(draw.sample(steps, min(count, len(steps)))), draw)

    def _deal(self, chosen: list[int], draw: random.Random) -> list[list[int]]:
        """What is trained, dealt out to the updates."""
        config = self.config.update
        if config.permute_steps:
            draw.shuffle(chosen)
        if config.repeat:
            return [chosen] * config.updates_per_rollout
        return split_updates(chosen, config.updates_per_rollout)

    def _weights(self, steps: list[int]) -> dict[int, float]:
        surrogate = self.config.surrogate
        if not surrogate.equalize:
            return dict.fromkeys(steps, 1.0)
        sensitivity = torch.stack([self.kernel(*self.grid.pair(step)).sensitivity for step in steps])
        return dict(zip(steps, equalizing_weights(sensitivity, cap=surrogate.equalize_cap).tolist()))


def _look() -> str:
    return "Look at `sage-grpo inspect`."
