"""Evaluation on held-out prompts: the ODE, fixed seeds, all rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_grpo.data.groups import Member, share_out
from sage_grpo.data.prompts import Prompt
from sage_grpo.flow.noise import keyed_noise
from sage_grpo.models.base import VelocityModel
from sage_grpo.models.sampling import build_solver, solve
from sage_grpo.parallel.world import World
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.train.config import EvalConfig
from sage_grpo.types import Conditioning


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model on held-out prompts."""

    metrics: dict[str, float]
    """Mean of every part and of the total, the standard error of the total, and the number of failed clips."""
    clips: Tensor
    """The first few clips of this rank, for people."""
    captions: list[str]
    """Their prompts."""


def evaluate(
    model: VelocityModel,
    reward: CompositeReward,
    prompts: Sequence[Prompt],
    config: EvalConfig,
    *,
    micro_batch: int,
    shift: float | None = None,
    world: World | None = None,
    images: Callable[[Prompt], Tensor | None] = lambda prompt: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Sample `config.per_prompt` clips for every prompt and score them."""
    world = world or World()
    prompts = list(prompts)[: config.prompts]
    conditions = model.encode([p.text for p in prompts], [images(p) for p in prompts])
    model.unload_text()  # the network needs their memory; what is encoded stays
    members = [Member(group, index) for group in range(len(prompts)) for index in range(config.per_prompt)]
    # Equal text lengths side by side: a model runs prompts of one length in one pass.
    members.sort(key=lambda member: _lengths(conditions[member.group]))
    share = share_out(members, micro_batch, world_size=world.size)[world.rank]
    real = [number for number, batch in enumerate(share) if not batch.filler]
    scored = {real[place] for place in world.mine(len(real))}
    made: list[tuple[Member, Tensor]] = []
    for number, batch in enumerate(share):
        x = torch.stack([_start(model.latent_shape(), m, prompts[m.group].seed, config.seed) for m in batch.members])
        solver = build_solver(model, config.solver, config.steps, shift)
        latents = solve(model, solver, x.to(model.device), [conditions[m.group] for m in batch.members])
        if number in scored:
            made += zip(batch.members, model.decode(latents))
        progress(number + 1, len(share))
    made.sort(key=lambda one: (one[0].group, one[0].index))
    shown = [prompts[member.group] for member, _ in made]
    return _score(reward, [clip for _, clip in made], shown, model.video.fps, config.show, world)


def _start(shape: tuple[int, ...], member: Member, own: int | None, seed: int) -> Tensor:
    """Initial noise. A prompt's own seed gives the clip that `sage-grpo generate` makes of it, whatever stands around it."""
    if own is not None:
        return keyed_noise(shape, "generate", own + member.index, "start")
    return keyed_noise(shape, "eval", seed, member.group, member.index)


def _lengths(condition: Conditioning) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in condition.tensors.values())


def _score(
    reward: CompositeReward, clips: list[Tensor], prompts: Sequence[Prompt], fps: float, show: int, world: World
) -> Evaluation:
    captions = [prompt.text for prompt in prompts]
    names = [*reward.names, "total"]
    rows = torch.zeros(0, len(names), dtype=torch.float64)
    videos = torch.stack(clips) if clips else torch.zeros(0)
    if clips:
        scores, _ = reward.score(videos, captions, fps, metadata=[dict(prompt.metadata) for prompt in prompts])
        rows = torch.stack([*(scores.parts[name] for name in reward.names), scores.total], 1).double().cpu()
    rows = world.gather(rows)
    valid = torch.isfinite(rows[:, -1])
    metrics = {f"eval/{name}": float(torch.nanmean(rows[:, column])) for column, name in enumerate(names)}
    spread = rows[valid, -1].std(correction=0) if bool(valid.any()) else torch.tensor(float("nan"))
    metrics["eval/total_stderr"] = float(spread) / max(1.0, float(valid.sum())) ** 0.5
    metrics["eval/failed"] = float((~valid).sum())
    return Evaluation(metrics, videos[:show], captions[:show])
