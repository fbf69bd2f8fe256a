"""Samples and scores the clips of `sage-grpo probe`: the planner and the sampler of training, without any gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from torch import Tensor

from sage_grpo.data.groups import Member, share_out
from sage_grpo.data.prompts import Prompt
from sage_grpo.flow.noise import keyed_noise
from sage_grpo.flow.schedule import Schedule
from sage_grpo.flow.windows import Window
from sage_grpo.models.base import VelocityModel
from sage_grpo.models.policy import Policy
from sage_grpo.parallel.world import World
from sage_grpo.probe.estimate import CORRELATION, QUADRUPLE, Advice, Effect
from sage_grpo.ranges import Folder, Natural, Positive, Range, checked
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.training.config import BatchConfig, TrainConfig, UpdateConfig
from sage_grpo.training.planning.plan import Group, Plan
from sage_grpo.training.planning.planner import Planner
from sage_grpo.training.rollout import NoiseKeys, Sampler, Storage
from sage_grpo.training.scoring import score_everywhere
from sage_grpo.types import Conditioning


@checked
class ProbeSpec:
    """How much to sample."""

    prompts: Annotated[int, Range(2)] = 8
    """The first so many training prompts; intervals are over prompts."""
    starts: Annotated[int, Range(2)] = 2
    """Start noises per prompt."""
    members: Annotated[int, Range(8)] = 8
    """Clips per branch: 8, 12, 16, ..."""
    steps: list[Natural] | None = None
    """Steps to branch at; None is every step that can be trained."""
    etas: list[Positive] | None = None
    """Values of kernel.eta to compare at the best step, besides the configuration's; None is half and one and a half of it."""
    out: Folder = "probe"
    """Folder for probe.json, probe.png and snippet.yaml."""
    json: bool = False
    """Print JSON only."""

    def __post_init__(self) -> None:
        if self.members % QUADRUPLE:
            raise ValueError(
                f"probe.members must be 8, 12, 16, ..., got {self.members}: clips of a branch come in quadruples of noises, and a "
                "variance needs two of them."
            )
        for name in ("steps", "etas"):
            values = getattr(self, name)
            if values is not None and (len(set(values)) < len(values) or (name == "steps" and not values)):
                raise ValueError(f"probe.{name} must name different values, got {values}.")


@dataclass(frozen=True)
class Clips:
    """Scores of clips, of shape (prompts, starts, members)."""

    reward: Tensor
    drift: Tensor | None
    """The reward part named drift, where there is one."""


@dataclass(frozen=True)
class ProbeKeys(NoiseKeys):
    """A group is a start noise here. All settings see the same noises, members in the quadruples of `probe/estimate.py`."""

    prompt: int = 0
    """Number of the prompt."""

    def start(self, group: Group, member: Member, shape: tuple[int, ...]) -> Tensor:
        """Start noise of a group, the same for all its members."""
        own = group.prompt.seed
        key = ("probe", self.seed, self.prompt) if own is None else ("prompt", own)
        return keyed_noise(shape, "start", *key, group.place)

    def step(self, members: Sequence[Member], step: int, shape: tuple[int, ...]) -> Tensor:
        """Exploration noise of a step: e, -e, f, -f."""
        return torch.stack([self._row(member, step, shape) for member in members])

    def _row(self, member: Member, step: int, shape: tuple[int, ...]) -> Tensor:
        quadruple, place = divmod(member.index, QUADRUPLE)
        key = ("probe", self.seed, self.prompt, member.group, quadruple, step)
        noise = keyed_noise(shape, *key, "first")
        if place >= 2:
            other = keyed_noise(shape, *key, "second")
            noise = CORRELATION * noise + math.sqrt(1 - CORRELATION**2) * other
        return -noise if place % 2 else noise


@dataclass(frozen=True)
class Prober:
    """Plans and samples settings: no exploration, exploration at one step, exploration at all steps."""

    config: TrainConfig
    spec: ProbeSpec
    model: VelocityModel
    reward: CompositeReward
    prompts: list[Prompt]
    conditions: Sequence[Conditioning]
    """One per prompt."""
    progress: Callable[[], None] = lambda: None
    failures: list[str] = field(default_factory=list)
    """What rewards said about clips that they could not score."""

    @property
    def grid(self) -> Schedule:
        """The run's own grid."""
        return Schedule(self.model.sigmas(self.config.rollout.steps, self.config.rollout.shift))

    def steps(self) -> list[int]:
        """The steps to branch at; ValueError for one that cannot be trained."""
        window = Window(kind="drawn", at=self.spec.steps)
        return self._planner(window, self.config.kernel.eta).candidates()

    def still(self) -> list[Plan]:
        """Plans, one per prompt, of deterministic clips from every start noise."""
        schedule = self.grid.exploring([False] * self.config.rollout.steps)
        members = [Member(start, 0) for start in range(self.spec.starts)]
        shares = share_out(members, self.config.batch.micro_batch)
        return [
            Plan(
                iteration=number,
                groups=tuple(Group(m.group, m.group, prompt, schedule, 0, ((),), shared=False) for m in members),
                group_size=1,
                equalizer={},
                shares=shares,
                trains=self.model.trains,
            )
            for number, prompt in enumerate(self.prompts)
        ]

    def exploring(self, eta: float, step: int | None) -> list[Plan]:
        """Plans, one per prompt, of branches at a step from every start noise; None explores at all steps."""
        window = Window() if step is None else Window(kind="drawn", at=[step])
        planner = self._planner(window, eta)
        plans = [planner.plan(number, [prompt] * self.spec.starts) for number, prompt in enumerate(self.prompts)]
        # Nothing is replayed, so nothing needs to be kept.
        return [replace(plan, groups=tuple(replace(group, trained=((),)) for group in plan.groups)) for plan in plans]

    def _planner(self, window: Window, eta: float) -> Planner:
        config, rollout = self.config, self.config.rollout
        rollout = replace(rollout, same_noise=True, share=True)
        if window.kind == "all":
            rollout = replace(rollout, before_steps=None, after_steps=None, after_fraction=1.0)
        batch = BatchConfig(
            prompts=self.spec.starts, group_size=self.spec.members, micro_batch=config.batch.micro_batch
        )
        kernel = replace(config.kernel, eta=eta)
        config = replace(
            config,
            batch=batch,
            kernel=kernel,
            rollout=replace(rollout, window=window),
            update=UpdateConfig(updates_per_rollout=1),
        )
        return Planner(config=config, grid=self.grid, kernel=kernel.build(self.grid), trains=self.model.trains)

    def run(self, plans: Sequence[Plan], eta: float) -> Clips:
        """Sample, decode and score, prompt by prompt."""
        rows = [self._prompt(plan, eta) for plan in plans]
        drifts = [drift for _, drift in rows if drift is not None]
        return Clips(torch.stack([reward for reward, _ in rows]), torch.stack(drifts) if drifts else None)

    def _prompt(self, plan: Plan, eta: float) -> tuple[Tensor, Tensor | None]:
        kernel = replace(self.config.kernel, eta=eta).build(self.grid)
        guidance = self.config.model.training_guidance
        condition = self.conditions[plan.iteration]
        rollout = Sampler(
            plan,
            0,
            lambda group: Policy(self.model, kernel, group.schedule, guidance),
            {group.index: condition for group in plan.groups},
            keys=ProbeKeys(self.config.seed, 0, same_start=True, prompt=plan.iteration),
            storage=Storage(dtype=getattr(torch, self.config.rollout.storage)),
            solver=self.config.rollout.solver,
            progress=self.progress,
        ).run()
        videos = torch.cat([self.model.decode(latents) for _, latents in rollout.latents])
        places = torch.arange(len(videos))[:, None]
        shown = [plan.prompts[0]] * len(videos)
        table = score_everywhere(self.reward, videos, shown, self.model.video.fps, places, World())
        if table.report:
            self.failures.append(table.report)
        shape = (self.spec.starts, plan.group_size)
        drift = next((values for name, values in table.parts.items() if name.rsplit("/", 1)[-1] == "drift"), None)
        return table.total.view(shape), None if drift is None else drift.view(shape)


def passes(plans: Sequence[Plan]) -> int:
    """Passes of the network that plans take."""
    return sum(plan.rollout_passes(0).total() for plan in plans)


@dataclass(frozen=True)
class Finding:
    """Everything that a probe found out."""

    eta: float
    """At which steps were compared."""
    steps: list[tuple[int, Effect]]
    every: Effect
    """Exploration at all steps."""
    best: int
    """The step at which etas were compared."""
    etas: list[tuple[float, Effect]]
    still: Clips
    advice: Advice
    passes: int
