"""Evaluation on held-out prompts: the ODE, fixed seeds, all rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sage_grpo.config.metadata import Record
from sage_grpo.config.ranges import Count, Natural, Seed, checked
from sage_grpo.data.groups import Member, share_out
from sage_grpo.data.prompts import Prompt
from sage_grpo.distributed.world import World
from sage_grpo.models.base import VelocityModel, sound_of
from sage_grpo.models.distilled import USUAL, steps_of
from sage_grpo.models.policy import build_solver, conditions_of, solve
from sage_grpo.models.spec import ModelSpec
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.samplers.noise import keyed_noise
from sage_grpo.samplers.solvers import SolverName
from sage_grpo.training.scoring import Scores, black_clips, check_groups, score_here
from sage_grpo.types import Conditioning, Sound


@checked
class EvalConfig:
    """Evaluation on held-out prompts with the ODE and fixed seeds."""

    every: Record[Natural] = 20
    """Iterations between evaluations; 0 evaluates only before and after training."""
    early: Record[list[Count]] = field(default_factory=list)
    """Further iterations to evaluate, such as [2, 4, 6, 8], where reward hacking often starts."""
    prompts: Count = 64
    """Number of held-out prompts."""
    per_prompt: Count = 1
    """Clips per prompt."""
    steps: Count | None = None
    """ODE steps. None is the checkpoint's number if it is distilled to few steps, else 40."""
    solver: SolverName = "euler"
    """ODE solver: euler, ab2 (second order at the same cost), or checkpoint (its own scheduler)."""
    seed: Seed = 1234
    """Seed of the initial noise, the same in every evaluation."""
    show: Record[Natural] = 8
    """Clips saved as videos per evaluation."""

    def steps_for(self, model: ModelSpec) -> int:
        return steps_of(model) if self.steps is None else self.steps

    def points(self, iterations: int) -> list[int]:
        """Iterations after which a run of this length is evaluated."""
        regular = range(0, iterations, self.every) if self.every else ()
        return sorted({0, *regular, *(number for number in self.early if number < iterations), iterations})


@dataclass
class Evaluation:
    """Scores of a model on held-out prompts."""

    metrics: dict[str, float]
    """Mean of every part and of the total, the standard error of the total, and the number of failed clips: without a total,
    and for every reward."""
    clips: Tensor
    """The first few clips of this rank, which are saved as videos."""
    captions: list[str]
    report: str = ""
    """Failed rewards with their prompts and reasons, for the terminal; empty if none failed."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Every clip of all ranks: `prompt`, `noise` (equal text is equal initial noise), `scores` by part (None where a reward
    failed), and `clip`, its place in `clips` (None where it is not among them)."""
    sound: Sound | None = None
    """Sound of `clips`, if they have any."""
    extra: dict[str, float] = field(default_factory=dict)
    """The sentinel's metrics, and the duration in seconds."""
    best: bool = False
    """True if its weights are the best so far: set by the observer that keeps the best."""


def evaluate(
    model: VelocityModel,
    reward: CompositeReward,
    prompts: Sequence[Prompt],
    config: EvalConfig,
    *,
    micro_batch: int,
    world: World | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Sample `config.per_prompt` clips for every prompt and score them; RewardFailure when too many cannot be scored."""
    world = world or World()
    prompts = list(prompts)[: config.prompts]
    check_evaluation(reward, len(prompts), config, micro_batch, world)
    conditions = conditions_of(model, prompts)
    model.unload_text()  # the network needs the memory of the text encoders; encodings stay
    members = members_of(len(prompts), config.per_prompt)
    # A model runs prompts of one text length in one pass.
    members.sort(key=lambda member: _lengths(conditions[member.group]))
    share = share_out(members, micro_batch, world_size=world.size)[world.rank]
    real = [number for number, batch in enumerate(share) if not batch.filler]
    decoded = {real[place] for place in world.mine(len(real))}
    made: list[tuple[Member, Tensor, Tensor]] = []
    steps = config.steps or USUAL
    for number, batch in enumerate(share):
        noise = torch.stack([_start(model.latent_shape(), m, prompts[m.group], config.seed) for m in batch.members])
        own = [conditions[member.group] for member in batch.members]
        latents = solve(model, build_solver(model, config.solver, steps), noise.to(model.device), own)
        if number in decoded:
            made += zip(batch.members, model.decode(latents), latents)
        progress(number + 1, len(share))
    made.sort(key=lambda one: (one[0].group, one[0].index))
    shown = [prompts[member.group] for member, _, _ in made]
    videos = torch.stack([clip for _, clip, _ in made]) if made else black_clips(model.video)
    mine = [member for member, _, _ in made]
    sampled = torch.stack([latents for _, _, latents in made]) if made else None
    sound = None if sampled is None else sound_of(model, sampled)
    scored = score_here(reward, videos, mine, shown, model.video.fps, latents=sampled, sound=sound)
    scored = scored.gathered(world, reward.max_failed_fraction)
    rows = _rows(scored, prompts, config.seed, mine[: config.show])
    captions = [prompt.text for prompt in shown[: config.show]]
    heard = None if sound is None else sound[: config.show]
    return Evaluation(_means(scored), videos[: config.show], captions, scored.report, rows, heard)


def check_evaluation(reward: CompositeReward, prompts: int, config: EvalConfig, micro_batch: int, world: World) -> None:
    """Refuse rewards that compare clips where an evaluation of so many prompts would not give them whole groups."""
    count = min(prompts, config.prompts)
    shares = share_out(members_of(count, config.per_prompt), micro_batch, world_size=world.size)
    remedy = (
        f"An evaluation compares the evaluate.per_prompt ({config.per_prompt}) clips of a prompt: set it to 2 or more, and evaluate.prompts "
        f"({count}) to a multiple of the {world.size} data-parallel ranks."
    )
    check_groups(reward, shares, config.per_prompt, remedy, world)


def _rows(scored: Scores, prompts: Sequence[Prompt], seed: int, clips: list[Member]) -> list[dict[str, Any]]:
    columns = {"total": scored.total.tolist(), **{name: values.tolist() for name, values in scored.parts.items()}}
    rows = []
    for number, member in enumerate(map(Member, scored.groups.tolist(), scored.indices.tolist())):
        prompt = prompts[member.group]
        scores = {name: values[number] for name, values in columns.items()}
        rows.append(
            {
                "prompt": prompt.text,
                "noise": f"{seed}/{member.group}/{member.index}"
                if prompt.seed is None
                else f"{prompt.seed + member.index}",
                "scores": {name: value if math.isfinite(value) else None for name, value in scores.items()},
                "clip": clips.index(member) if member in clips else None,
            }
        )
    return rows


def members_of(prompts: int, per_prompt: int) -> list[Member]:
    return [Member(group, index) for group in range(prompts) for index in range(per_prompt)]


def _start(shape: tuple[int, ...], member: Member, prompt: Prompt, seed: int) -> Tensor:
    """Initial noise. A prompt with a seed gets the noise of `sage-grpo generate`, independent of its position."""
    if prompt.seed is not None:
        return keyed_noise(shape, "generate", prompt.seed + member.index, "start")
    return keyed_noise(shape, "eval", seed, member.group, member.index)


def _lengths(condition: Conditioning) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in condition.tensors.values())


def _means(scored: Scores) -> dict[str, float]:
    columns = {**scored.parts, "total": scored.total}
    metrics = {f"eval/{name}": float(torch.nanmean(values)) for name, values in columns.items()}
    valid = scored.total[scored.valid]
    spread = float(valid.std(correction=0)) if len(valid) else math.nan
    metrics["eval/total_stderr"] = spread / max(1.0, float(len(valid))) ** 0.5
    metrics["eval/failed"] = float(len(scored.total) - len(valid))
    return metrics | {f"eval/failed/{title}": float(count) for title, count in scored.failed.items()}
