"""Options of `sage-grpo probe`, its clips, sampled by the planner and the sampler of training without any gradient, their scores, and the advice
that follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

import torch
import yaml
from torch import Tensor

from sage_grpo.config.ranges import Folder, Natural, Positive, Range, checked
from sage_grpo.data.groups import Member, share_out
from sage_grpo.data.prompts import Prompt
from sage_grpo.distributed.world import World
from sage_grpo.models.base import VelocityModel, network_of
from sage_grpo.models.devices import choose_device
from sage_grpo.models.policy import Policy, conditions_of
from sage_grpo.objectives.build import find_objective
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.run.saved import Choice
from sage_grpo.samplers.kernels import LARGE_ETA, unfit_eta
from sage_grpo.samplers.noise import keyed_noise
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.samplers.windows import Window
from sage_grpo.tools.probe.estimate import CORRELATION, QUADRUPLE, Advice, Effect, advise, best_step, effect, spread
from sage_grpo.training.config import BatchConfig, TrainConfig, UpdateConfig
from sage_grpo.training.inputs import load_rewards, training_prompts, try_rewards
from sage_grpo.training.plan import Group, Plan
from sage_grpo.training.planner import Planner
from sage_grpo.training.rollout import NoiseKeys, Sampler, Storage
from sage_grpo.training.scoring import score_here
from sage_grpo.types import Conditioning


@checked
class ProbeSpec:
    """Size of the probe."""

    prompts: Annotated[int, Range(2)] = 8
    """Number of training prompts; confidence intervals are over prompts."""
    starts: Annotated[int, Range(2)] = 2
    """Initial noises per prompt."""
    members: Annotated[int, Range(8)] = 8
    """Clips per branch: 8, 12, 16, ..."""
    steps: list[Natural] | None = None
    """Steps to branch at; None is every trainable step."""
    etas: list[Positive] | None = None
    """Further values of kernel.eta to compare at the best step; None is 0.5 and 1.5 times the configured one."""
    out: Folder = "probe"
    """Folder for probe.json and snippet.yaml."""
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
class ProbeScores:
    """Scores of clips, of shape (prompts, starts, members)."""

    reward: Tensor
    drift: Tensor | None
    """The reward part named drift, if there is one."""


@dataclass(frozen=True)
class ProbeKeys(NoiseKeys):
    """A group is a start noise here. All settings have the same noises, members in the quadruples of `tools/probe/estimate.py`."""

    prompt: int = 0

    def start(self, group: Group, member: Member, shape: tuple[int, ...]) -> Tensor:
        own = group.prompt.seed
        key = ("probe", self.seed, self.prompt) if own is None else ("prompt", own)
        return keyed_noise(shape, "start", *key, group.index)

    def step(self, members: Sequence[Member], step: int, shape: tuple[int, ...], kind: str = "probe") -> Tensor:
        rows = []
        for member in members:
            quadruple, place = divmod(member.index, QUADRUPLE)
            key = (kind, self.seed, self.prompt, member.group, quadruple, step)
            noise = keyed_noise(shape, *key, "first")
            if place >= 2:
                other = keyed_noise(shape, *key, "second")
                noise = CORRELATION * noise + math.sqrt(1 - CORRELATION**2) * other
            rows.append(-noise if place % 2 else noise)
        return torch.stack(rows)


@dataclass(frozen=True)
class Prober:
    """Plans and samples settings: no exploration, exploration at one step, exploration at all steps."""

    config: TrainConfig
    spec: ProbeSpec
    model: VelocityModel
    reward: CompositeReward
    prompts: list[Prompt]
    conditions: Sequence[Conditioning]
    progress: Callable[[], None] = lambda: None
    failures: list[str] = field(default_factory=list)
    """Reports of rewards about clips that they could not score."""

    @property
    def grid(self) -> Schedule:
        return Schedule(self.model.sigmas(self.config.rollout.steps, self.config.rollout.shift))

    def steps(self) -> list[int]:
        """The steps to branch at; ValueError for one that cannot be trained."""
        window = Window(kind="drawn", at=self.spec.steps)
        return self.planner(window, self.config.kernel.eta).candidates()

    def still(self) -> list[Plan]:
        schedule = self.grid.exploring([False] * self.config.rollout.steps)
        members = [Member(start, 0) for start in range(self.spec.starts)]
        shares = share_out(members, self.config.batch.micro_batch)
        return [
            Plan(
                iteration=number,
                groups=tuple(Group(m.group, prompt, schedule, 0, ((),), shared=False) for m in members),
                group_size=1,
                equalizer={},
                shares=shares,
                network=network_of(self.model),
            )
            for number, prompt in enumerate(self.prompts)
        ]

    def exploring(self, eta: float, step: int | None) -> list[Plan]:
        """Plans, one per prompt, of branches at a step from every start noise; None explores at all steps."""
        planner = self.planner(Window() if step is None else Window(kind="drawn", at=[step]), eta)
        plans = [planner.plan(number, [prompt] * self.spec.starts) for number, prompt in enumerate(self.prompts)]
        # Nothing is replayed, so no record is needed.
        return [replace(plan, groups=tuple(replace(group, trained=((),)) for group in plan.groups)) for plan in plans]

    def planner(self, window: Window, eta: float) -> Planner:
        config, rollout = self.config, self.config.rollout
        rollout = replace(rollout, same_noise=True, share=True)
        if window.kind == "all":
            rollout = replace(rollout, before_steps=None, after_steps=None)
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
        law, trains = kernel.build(self.grid), self.model.trains
        return Planner(config=config, grid=self.grid, kernel=law, trains=trains, network=network_of(self.model))

    def run(self, plans: Sequence[Plan], eta: float) -> ProbeScores:
        rows = [self._clips(plan, eta) for plan in plans]
        drifts = [drift for _, drift in rows if drift is not None]
        return ProbeScores(torch.stack([reward for reward, _ in rows]), torch.stack(drifts) if drifts else None)

    def _clips(self, plan: Plan, eta: float) -> tuple[Tensor, Tensor | None]:
        """Reward and drift of one prompt's clips, of shape (starts, members)."""
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
        latents = torch.cat([rows for _, rows in rollout.latents])
        videos = torch.cat([self.model.decode(rows) for _, rows in rollout.latents])
        members = [Member(0, index) for index in range(len(videos))]
        shown = [plan.prompts[0]] * len(videos)
        table = score_here(self.reward, videos, members, shown, self.model.video.fps, latents=latents)
        table = table.gathered(World(), self.reward.max_failed_fraction)
        if table.report:
            self.failures.append(table.report)
        shape = (self.spec.starts, plan.group_size)
        drift = next((values for name, values in table.parts.items() if name.rsplit("/", 1)[-1] == "drift"), None)
        return table.total.view(shape), None if drift is None else drift.view(shape)


def passes(plans: Sequence[Plan]) -> int:
    return sum(plan.rollout_passes(0).total() for plan in plans)


@dataclass(frozen=True)
class ProbeResult:
    """All results of a probe."""

    eta: float
    steps: list[tuple[int, Effect]]
    every: Effect
    best: int
    """The step at which etas were compared."""
    etas: list[tuple[float, Effect]]
    still: ProbeScores
    advice: Advice
    passes: int


TOLERANCE = 0.1
"""Changes of reward and drift below this part of their standard deviation over start noises do not count against an eta."""
Counting = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""Starts to show so many passes under a name; its value is called after each."""


def prepare(config: TrainConfig, spec: ProbeSpec, choice: Choice) -> Prober:
    """Load the inputs of the probe; every refusal without a model comes before loading one."""
    known = training_prompts(config.data)
    if len(known) < spec.prompts:
        raise ValueError(f"probe.prompts is {spec.prompts}, but data.prompts has only {len(known)} prompts.")
    prompts = known[: spec.prompts]
    for eta in chosen_etas(config, spec):
        replace(config.kernel, eta=eta).build()  # an eta outside the kernel's range fails here
    found = choice.find(config.model)
    reward = load_rewards(config, choose_device(config.model.device))
    try_rewards(reward, prompts, config.model, gradient=find_objective(config.objective.kind).differentiates)
    reward.refuse_comparing("its scores of clips of different settings cannot be compared. Probe with another reward.")
    model = found.load()  # last: it takes minutes, and a mistake above is found in seconds
    Prober(config, spec, model, reward, prompts, []).steps()
    conditions = conditions_of(model, prompts)
    model.unload_text()  # the network needs their memory
    return Prober(config, spec, model, reward, prompts, conditions)


def chosen_etas(config: TrainConfig, spec: ProbeSpec) -> list[float]:
    """Values of eta besides the configuration's; by default none that the kernel refuses or warns of."""
    eta, given = config.kernel.eta, spec.etas
    if given is None:
        more = 1.5 * eta
        given = [eta / 2, *([more] if more <= LARGE_ETA and not unfit_eta(config.kernel.name, more) else [])]
    return [value for value in sorted(given) if value != eta]


def probe(prober: Prober, say: Callable[[str], None], counting: Counting) -> ProbeResult:
    """Sample every setting, estimate and advise. `say` gets the forecast; `counting` shows the progress in passes."""
    eta, others = prober.config.kernel.eta, chosen_etas(prober.config, prober.spec)
    steps = prober.steps()
    still, every = prober.still(), prober.exploring(eta, None)
    branches = {step: prober.exploring(eta, step) for step in steps}
    first = passes(still) + passes(every) + sum(map(passes, branches.values()))
    later = [len(others) * passes(plans) for plans in branches.values()]
    say(_forecast(prober, len(steps), first, later))
    with counting("steps", first) as advance:
        prober = replace(prober, progress=advance)
        base = prober.run(still, eta)
        whole = _effect(prober.run(every, eta), base)
        rows = [(step, _effect(prober.run(plans, eta), base)) for step, plans in branches.items()]
    best = best_step(rows)
    second = len(others) * passes(branches[best])
    with counting(f"eta at step {best}", second) as advance:
        prober = replace(prober, progress=advance)
        etas = [(value, _effect(prober.run(prober.exploring(value, best), value), base)) for value in others]
    etas = sorted([*etas, (eta, dict(rows)[best])], key=lambda row: row[0])
    drift = 0.0 if base.drift is None else TOLERANCE * spread(base.drift[..., 0])
    advice = advise(rows, etas, loss=TOLERANCE * spread(base.reward[..., 0]), drift=drift)
    return ProbeResult(eta, rows, whole, best, etas, base, advice, first + second)


def _forecast(prober: Prober, steps: int, first: int, later: Sequence[int]) -> str:
    spec, least, most = prober.spec, min(later), max(later)
    span = f"{most}" if least == most else f"{least} to {most}"
    return (
        f"{spec.prompts} prompts x {spec.starts} start noises x {spec.members} clips, for each of {steps} steps and for all at once, in "
        f"micro-batches of {prober.config.batch.micro_batch}: {first} passes of the network, then {span} to compare eta at the best step."
    )


def _effect(clips: ProbeScores, still: ProbeScores) -> Effect:
    drift = None if still.drift is None else still.drift[..., 0]
    return effect(clips.reward, still.reward[..., 0], clips.drift, drift)


def snippet(finding: ProbeResult, config: TrainConfig) -> str | None:
    """The recommendation as YAML for `sage-grpo train --config`; None without a step to recommend."""
    advice = finding.advice
    if not advice.steps:
        return None
    window = {"kind": "drawn", "length": 1, "at": advice.steps, "weights": advice.weights, "branches": 1}
    document = {
        "kernel": {"name": config.kernel.name, "eta": advice.eta},
        "rollout": {"steps": config.rollout.steps, "same_noise": True, "share": True, "window": window},
        "update": {"updates_per_rollout": 1, "step_fraction": 1.0},
        "objective": {"kind": "surrogate", "weight": "uniform"},  # others do not explore
    }
    return "# What `sage-grpo probe` recommends.\n" + yaml.safe_dump(document, sort_keys=False)


def document(prober: Prober, finding: ProbeResult) -> dict[str, Any]:
    spec, grid, kernel = prober.spec, prober.grid, prober.config.kernel.build(prober.grid)
    steps = [
        {
            "step": step,
            "sigma": float(grid.sigmas[step]),
            "sigma_next": float(grid.sigmas[step + 1]),
            "sensitivity": float(kernel(*grid.pair(step)).sensitivity),
            **asdict(row),
        }
        for step, row in finding.steps
    ]
    still = finding.still
    return {
        "kernel": {"name": prober.config.kernel.name, "eta": finding.eta},
        "sampled": {"prompts": spec.prompts, "starts": spec.starts, "members": spec.members, "passes": finding.passes},
        "deterministic": {
            "reward": float(still.reward.nanmean()),
            "start_std": spread(still.reward[..., 0]),
            "drift": None if still.drift is None else float(still.drift.nanmean()),
        },
        "steps": steps,
        "all_steps": asdict(finding.every),
        "eta_step": finding.best,
        "etas": [{"eta": eta, **asdict(row)} for eta, row in finding.etas],
        "recommended": asdict(finding.advice),
    }
