"""Rewards on all ranks: loaded and tried out before the model, then scored, gathered and limited so that all ranks decide alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sage_grpo.data.groups import Member
from sage_grpo.data.prompts import Prompt
from sage_grpo.models.spec import ModelSpec
from sage_grpo.parallel.world import World
from sage_grpo.rewards.base import SMALL, CompositeReward, Early
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.member import check_failures, describe_failures
from sage_grpo.sentinel.agreement import agreements
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.own import Own
from sage_grpo.types import VideoSpec


@dataclass(frozen=True)
class ScoreTable:
    """Scores of all ranks' clips, in the order of the ranks."""

    places: Tensor
    """Which clip a row is, as the caller numbers them; float64."""
    total: Tensor
    """Weighted sums, float64, NaN where one is not valid."""
    parts: dict[str, Tensor]
    """Every part, float64."""
    failed: dict[str, int]
    """For every reward the number of clips that it could not score."""
    report: str
    """Failures with reward, prompt and reason, for people; empty when there is none."""


@dataclass(frozen=True)
class Scored:
    """Rewards of all ranks' rollouts, in the order (group, member)."""

    groups: Tensor
    total: Tensor
    valid: Tensor
    parts: dict[str, Tensor]
    failed: dict[str, int]
    """For every reward the number of clips that it could not score, whether it counts in the total or not."""
    report: str
    """Which rewards failed on which prompts and why, for people; empty when none did."""


def load_rewards(config: TrainConfig, prompt: Prompt, world: World, own: Own | None = None) -> CompositeReward:
    """The rewards of a run, tried out. They leave the accelerator to the policy between their calls."""
    own = own or Own()
    device = reward_device(config.model, world) if own.model is None else own.model.device
    reward = CompositeReward(
        config.rewards,
        max_failed_fraction=config.max_failed_fraction,
        device=device,
        offload_between=device.type != "cpu",
        objects=own.rewards,
    )
    try_rewards(reward, prompt, config.model, world)
    return reward


def reward_device(model: ModelSpec, world: World | None = None) -> torch.device:
    """The device that a model will be on, before it is loaded."""
    from sage_grpo.models.devices import choose_device

    own = None if world is None else world.device
    return choose_device(model.device) if own is None else own


def try_rewards(reward: CompositeReward, prompt: Prompt, model: ModelSpec, world: World | None = None) -> None:
    """Call every reward once, before anything expensive; RewardConfigError on all ranks when one fails on any."""
    given = {name: getattr(model, name) for name in ("frames", "height", "width", "fps")}
    given = {name: value for name, value in given.items() if value is not None}
    video: VideoSpec | None = replace(SMALL, **given) if given else None
    problem = reward.try_out(prompt.text, metadata=metadata_of(prompt), video=video)
    problems = [text for text in (world or World()).texts(problem) if text]
    if problems:
        raise RewardConfigError("\n".join(dict.fromkeys(problems)))


def metadata_of(prompt: Prompt) -> dict[str, Any]:
    """What rewards learn about a prompt besides its text: the other columns of its row, and where its first frame is."""
    return {**prompt.metadata, **({} if prompt.image is None else {"image": str(prompt.image)})}


def no_clips(video: VideoSpec) -> Tensor:
    """The clips of a process that has none: more processes share them than there are."""
    return torch.zeros((0, video.frames, video.height, video.width, 3), dtype=torch.uint8)


def places_of(members: Sequence[Member]) -> Tensor:
    """Group and index of clips, as rows that ranks can exchange."""
    return torch.tensor([(m.group, m.index) for m in members], dtype=torch.float64).reshape(-1, 2)


def score_everywhere(
    reward: CompositeReward,
    videos: Tensor,
    prompts: Sequence[Prompt],
    fps: float,
    places: Tensor,
    world: World,
    early: Early | None = None,
) -> ScoreTable:
    """Score this rank's clips and gather all ranks'; RewardFailure on all of them when too many clips have no total."""
    texts, metadata = [prompt.text for prompt in prompts], [metadata_of(prompt) for prompt in prompts]
    scores, report = reward.score(videos, texts, fps, metadata, early)
    columns = torch.stack([scores.total, *(scores.parts[name] for name in reward.names)], 1)
    rows = world.gather(torch.cat([places.double(), columns.double().cpu()], 1))
    width = places.shape[1]
    own = report.counts()
    counts = world.gather(torch.tensor([[own.get(title, 0) for title in reward.titles]])).sum(0).tolist()
    failed = dict(zip(reward.titles, counts))
    text = ""
    if any(counts):
        lines = world.texts("\n".join(one.describe() for one in report.failures[:5]))
        text = describe_failures(failed, len(rows), [line for part in lines for line in part.splitlines()])
    total = rows[:, width]
    valid = torch.isfinite(total)
    check_failures(int((~valid).sum()), len(valid), reward.max_failed_fraction, text)
    parts = {name: rows[:, width + 1 + column] for column, name in enumerate(reward.names)}
    return ScoreTable(rows[:, :width], total, parts, failed, text)


def describe(scored: Scored, advantages: Tensor, witnesses: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Metrics of the rewards; `witnesses` are those that nothing is trained on, with the weights of their parts."""
    ok = scored.valid
    spread = [scored.total[ok & (scored.groups == g)].std(correction=0) for g in scored.groups[ok].unique()]
    metrics = {
        "reward/total": float(scored.total[ok].mean()),
        "reward/std": float(scored.total[ok].std(correction=0)),
        "reward/group_std": float(torch.stack(spread).nanmean()),
        "reward/failed": float((~ok).sum()),
        "advantage/std": float(advantages.std(correction=0)),
        "advantage/largest": float(advantages.abs().max()),
    }
    metrics |= {f"reward/{name}": float(values.nanmean()) for name, values in scored.parts.items()}
    metrics |= agreements(scored.total, scored.parts, scored.groups, witnesses)
    metrics |= {f"reward/failed/{title}": float(count) for title, count in scored.failed.items()}
    return metrics
