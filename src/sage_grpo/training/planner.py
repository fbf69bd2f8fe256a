"""Makes the plan of every iteration from a run's configuration, and chooses the clips that updates train once their rewards are known."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from sage_grpo.data.groups import Member, MicroBatch, deal, share_out, split_updates
from sage_grpo.data.prompts import Prompt
from sage_grpo.objectives.base import Objective
from sage_grpo.objectives.policy_gradient import equalizing_weights
from sage_grpo.samplers.kernels import Kernel
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.samplers.sde_steps import explore, left_out
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.plan import Group, KlProbe, Plan

LOOK = "Look at `sage-grpo inspect`."
"""End of errors about steps that cannot be trained."""


@dataclass(frozen=True)
class Planner:
    """Turns configuration, grid, kernel and number of ranks into the plan of each iteration: equal on every rank and after a resume."""

    config: TrainConfig
    grid: Schedule
    kernel: Kernel
    trains: Callable[[float], bool]
    ranks: int = 1
    network: Callable[[float], int] = field(default=lambda sigma: 0)
    """The network that runs at sigma (models/base.py)."""
    _windows: dict[tuple[bool, ...], tuple[list[int], Schedule, int]] = field(
        default_factory=dict, init=False, repr=False
    )

    @cached_property
    def objective(self) -> Objective:
        return self.config.build_objective()

    def plan(self, iteration: int, prompts: Sequence[Prompt]) -> Plan:
        config, window, steps = self.config, self.config.rollout.window, self.config.rollout.steps
        if self.objective.samples == "ode":
            return self._without_noise(iteration, prompts)
        if window.kind == "drawn":
            every = {first: window.flags(first, steps) for first in self.candidates()}
            windows = [every[first] for first in window.draw([*every], len(prompts), iteration, config.seed)]
        else:
            every = {0: window.steps(steps, iteration, config.seed)}
            windows = [every[0]] * len(prompts)
        # On several ranks, prompts of different lengths would give one rank more passes than another.
        together = 1 if self.ranks > 1 else config.batch.micro_batch
        groups = tuple(
            self._group(index, prompt, flags, iteration)
            for index, (prompt, flags) in enumerate(zip(prompts, windows, strict=True))
        )
        return Plan(
            iteration=iteration,
            groups=groups,
            group_size=config.batch.group_size,
            equalizer=self._weights(sorted({step for flags in every.values() for step in self.trainable(flags)})),
            shares=self._filled_shares(groups) if together > 1 else self.shares,
            network=self.network,
            prefix_batch=together,
        )

    def _filled_shares(self, groups: Sequence[Group]) -> tuple[tuple[MicroBatch, ...], ...]:
        """The micro-batches of one rank, filled across groups with the same path."""
        if not self._keeps_prompts_apart:
            return self.shares
        alike: dict[Hashable, list[Member]] = {}
        for group in groups:
            own = [Member(group.index, index) for index in range(self.config.batch.group_size)]
            alike.setdefault(group.path_key, []).extend(own)
        pieces = [share_out(members, self.config.batch.micro_batch)[0] for members in alike.values()]
        return (tuple(batch for piece in pieces for batch in piece),)

    def _without_noise(self, iteration: int, prompts: Sequence[Prompt]) -> Plan:
        """The plan of an iteration without exploration: every prompt draws the noise levels at which its clips are learned."""
        config, grid = self.config, self.grid.exploring((False,) * self.grid.num_steps)
        groups = []
        for index, prompt in enumerate(prompts):
            draw = random.Random(f"levels/{config.seed}/{iteration}/{index}")
            levels = self.objective.targets(self.grid, self.trains, draw)
            order = self.objective.order(len(levels.labels))
            dealt = [order] if order is not None else self._deal(list(range(len(levels.labels))), draw)
            trained = tuple(map(tuple, dealt))
            groups.append(Group(index, prompt, levels.rollout or grid, 0, trained, shared=False, levels=levels))
        ones, given = dict.fromkeys(range(self.grid.num_steps), 1.0), config.data.clips is not None
        return Plan(iteration, tuple(groups), config.group_size, ones, self.shares, self.network, examples=given)

    @cached_property
    def shares(self) -> tuple[tuple[MicroBatch, ...], ...]:
        batch, apart = self.config.batch, self._keeps_prompts_apart
        return deal(batch.prompts, self.config.group_size, batch.micro_batch, world_size=self.ranks, apart=apart)

    @property
    def _keeps_prompts_apart(self) -> bool:
        rollout = self.config.rollout
        return rollout.window.kind == "drawn" or self._shares_start or self.objective.samples == "ode"

    def places(self, rank: int) -> list[int]:
        """Indices of the groups of which a rank has clips."""
        return sorted({member.group for batch in self.shares[rank] for member in batch.members})

    @property
    def _shares_start(self) -> bool:
        return self.config.rollout.same_noise and self.config.rollout.share

    def trainable(self, flags: Sequence[bool]) -> list[int]:
        """The steps with noise whose velocity depends on the trainable parameters, in the run's own grid."""
        return list(self._window(tuple(flags))[0])

    def _window(self, flags: tuple[bool, ...]) -> tuple[list[int], Schedule, int]:
        """Of a window its trainable steps, its schedule, and the offset of that in the run's own grid. A cache: all groups use a few windows."""
        if flags in self._windows:
            return self._windows[flags]
        rollout, offset = self.config.rollout, 0
        schedule = explore(self.grid, flags, self.kernel, rollout.deterministic_last)
        noisy = [
            step
            for step, flag in enumerate(schedule.stochastic)
            if flag and float(self.kernel(*schedule.pair(step)).std) > 0
        ]
        steps = [step for step in noisy if self.trains(float(schedule.sigmas[step]))]
        if steps:
            first, _ = schedule.exploring_range()
            schedule = schedule.around(rollout.before_steps, rollout.after_steps)
            offset = first - schedule.exploring_range()[0]
        self._windows[flags] = steps, schedule, offset
        return self._windows[flags]

    def candidates(self) -> list[int]:
        window, steps = self.config.rollout.window, self.config.rollout.steps
        allowed = [first for first in range(steps - window.size + 1) if self.trainable(window.flags(first, steps))]
        for first in window.at or ():
            if first not in allowed:
                raise ValueError(
                    f"rollout.window.at names step {first}, but with rollout.steps {steps} it may be {', '.join(map(str, allowed))}: at others no step "
                    f"can be trained. {self._why()}"
                )
        if not allowed:
            raise ValueError(f"window.kind is drawn, but no step can be trained. {LOOK}")
        return list(window.at or allowed)

    def check(self) -> None:
        """Fail before the first rollout if a window of any iteration cannot work, or, without exploration, the levels drawn for one prompt."""
        config, window, steps = self.config, self.config.rollout.window, self.config.rollout.steps
        if self.objective.samples == "ode":
            self._without_noise(0, [Prompt("")])
            return
        if window.kind == "drawn":
            windows = {window.flags(first, steps) for first in self.candidates()}
        else:
            windows = {window.steps(steps, number, config.seed) for number in range(config.iterations)}
        for flags in windows:
            self._group(0, Prompt(""), flags, 0)
        self.shares  # noqa: B018 - raises where ranks and rollouts do not go together

    def unexplored(self) -> str | None:
        """A sentence on steps that the run's windows cover and that do not explore because they would hold too much noise."""
        wanted = self.config.rollout.window.covered(self.config.rollout.steps)
        return left_out(self.grid, wanted, self.kernel, self.config.rollout.deterministic_last)

    def _group(self, index: int, prompt: Prompt, flags: Sequence[bool], iteration: int) -> Group:
        steps, schedule, offset = self._window(tuple(flags))
        if not steps:
            raise ValueError(
                "No step of the rollout can be trained: kernel.eta is 0, or the window only covers deterministic steps. "
                f"Set kernel.eta > 0 (0.3 to 0.7). {self._why()}"
            )
        own = f"/{index}" if self.config.rollout.window.kind == "drawn" else ""
        parts = self._choose(steps, random.Random(f"steps/{self.config.seed}/{iteration}{own}"))
        trained = tuple(tuple(step - offset for step in part) for part in parts)
        probe = self._kl_probe(index, offset, trained, iteration) if self.config.optimizer.measures_kl else None
        return Group(index, prompt, schedule, offset, trained, shared=self._shares_start, kl_probe=probe)

    def _why(self) -> str:
        left = self.unexplored()
        return f"{left[0].upper()}{left[1:]}. {LOOK}" if left else LOOK

    def _kl_probe(self, index: int, offset: int, trained: Sequence[Sequence[int]], iteration: int) -> KlProbe:
        """A trained step for measuring the KL, drawn in proportion to its squared sensitivity; the groups' draws are evenly spaced."""
        groups = self.config.batch.prompts
        steps = sorted({step for part in trained for step in part})
        squares = [float(self.kernel(*self.grid.pair(step + offset)).sensitivity) ** 2 for step in steps]
        edges = list(accumulate(squares))
        draw = random.Random(f"gauge/{self.config.seed}/{iteration}").random()
        place = min(bisect(edges, (draw + index) % groups / groups * edges[-1]), len(steps) - 1)
        return KlProbe(steps[place], edges[-1] / squares[place])

    def _choose(self, steps: list[int], draw: random.Random) -> list[list[int]]:
        config = self.config.update
        least = config.updates_per_rollout if config.deals_steps else 1
        count = max(least, round(config.step_fraction * len(steps)))
        return self._deal(sorted(draw.sample(steps, min(count, len(steps)))), draw)

    def _deal(self, chosen: list[int], draw: random.Random) -> list[list[int]]:
        config = self.config.update
        if config.permute_steps:
            draw.shuffle(chosen)
        if not config.deals_steps:
            return [chosen] * config.updates_per_rollout
        return split_updates(chosen, config.updates_per_rollout)

    def _weights(self, steps: list[int]) -> dict[int, float]:
        surrogate = self.config.surrogate
        if not surrogate.equalize:
            return dict.fromkeys(steps, 1.0)
        laws = [self.kernel(*self.grid.pair(step)) for step in steps]
        sizes = [law.sensitivity if surrogate.equalize_by == "sensitivity" else 1 / law.std for law in laws]
        return dict(zip(steps, equalizing_weights(torch.stack(sizes), cap=surrogate.equalize_cap).tolist()))

    def choose(self, plan: Plan, advantages: Tensor, valid: Tensor) -> Plan:
        """Add the clips that updates train to a plan; `advantages` and `valid` have a value for every clip, group by group."""
        config, objective = self.config, self.objective
        updates, deals = plan.updates, config.update.deal == "clips" and plan.updates > 1
        if config.batch.trained >= plan.group_size and not deals and not objective.chooses:
            return plan
        chosen: list[set[Member]] = [set() for _ in range(updates)]
        values, ok, dealt = advantages.tolist(), valid.tolist(), 0
        pairs: list[tuple[Member, Member]] = []
        for group in plan.groups:
            own = slice(group.index * plan.group_size, (group.index + 1) * plan.group_size)
            places = objective.choose(values[own], ok[own], config.batch)
            units = [tuple(Member(group.index, place) for place in unit) for unit in places]
            pairs += [(unit[0], unit[1]) for unit in units if objective.in_pairs]
            if not deals:
                for part in chosen:
                    part.update(member for unit in units for member in unit)
                continue
            random.Random(f"clips/{config.seed}/{plan.iteration}/{group.index}").shuffle(units)
            for unit in units:
                # Continue after the last group's position: every update gets clips, also where groups have fewer clips than
                # there are updates.
                chosen[dealt % updates].update(unit)
                dealt += 1
        return replace(plan, chosen=tuple(map(frozenset, chosen)), pairs=tuple(pairs))

    def foresee(self, plan: Plan) -> Plan:
        """`choose` with random advantages, for counting network passes before there are rewards."""
        draw = torch.Generator().manual_seed(plan.iteration)
        clips = len(plan.groups) * plan.group_size
        return self.choose(plan, torch.rand(clips, generator=draw), torch.ones(clips, dtype=torch.bool))
