"""Rewards of a run on all ranks: each rank scores its clips, and all gather the same scores."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sage_grpo.data.groups import Member, MicroBatch
from sage_grpo.data.prompts import Prompt
from sage_grpo.distributed.cluster import Actors, connected, hired
from sage_grpo.distributed.world import World
from sage_grpo.health.statistics import agreements
from sage_grpo.rewards.base import AsyncScoring, CompositeReward
from sage_grpo.rewards.member import Failure, check_failures, describe_failures, merged
from sage_grpo.rewards.ray_reward import RewardActor, RewardActors
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.offload import get_ready
from sage_grpo.types import Reward, Sound, VideoSpec


def hire(config: TrainConfig, opened: ExitStack) -> dict[str, Actors]:
    """Start the Ray actors of rewards, by title."""
    away: dict[str, Actors] = {}
    for spec in config.rewards if config.rollout.on == "ray" else ():
        if spec.actors:
            ray = opened.enter_context(connected(config.rollout.ray.address, config.actor_cpus))
            paths, ready = (
                [os.path.abspath(path) for path in sys.path],
                partial(get_ready, wanted=config.model.deterministic),
            )
            judge = (spec, torch.get_num_threads(), paths, ready, "cuda" if spec.actor_gpus else "cpu")
            made = hired(ray, RewardActor, judge, copies=spec.actors, cpus=spec.actor_cpus, gpus=spec.actor_gpus)
            away[spec.title] = opened.enter_context(made)
    return away


def compose(
    config: TrainConfig,
    device: torch.device,
    objects: Mapping[str, Reward] | None = None,
    away: Mapping[str, RewardActors] | None = None,
    *,
    scores: bool = True,
) -> CompositeReward:
    """Build the rewards of a run; none unless it `scores`. `away` are those with Ray actors."""
    return CompositeReward(
        config.rewards if scores else (),
        max_failed_fraction=config.max_failed_fraction,
        device=device,
        offload_between=device.type != "cpu",
        objects=objects,
        away=away,
        optional=config.data.clips is not None or not scores,
    )


@dataclass(frozen=True)
class GroupScores:
    """Scores of all ranks' clips, in the order (group, member)."""

    groups: Tensor
    indices: Tensor
    """Group of every clip, and its index there."""
    total: Tensor
    """Weighted sums, NaN where one is not valid."""
    parts: dict[str, Tensor]
    failed: dict[str, int]
    """For every reward the number of clips that it could not score, also if it does not count in the total."""
    report: str
    """Failed rewards with their prompts and reasons, for the terminal; empty if none failed."""

    @property
    def valid(self) -> Tensor:
        return torch.isfinite(self.total)


def metadata_of(prompt: Prompt) -> dict[str, Any]:
    """Metadata of a prompt for rewards: the other columns of its row, and the paths of its images and its video."""
    return {**prompt.metadata, **prompt.columns()}


def preferred(groups: int, size: int) -> GroupScores:
    """Scores of given clips, in place of rewards: in every row the first clip is the better one."""
    places = torch.arange(groups * size)
    return GroupScores(places // size, places % size, 1.0 - 2.0 * (places % size), {}, {}, "")


def no_clips(video: VideoSpec) -> Tensor:
    """An empty batch of clips, for a process without clips."""
    return torch.zeros((0, video.frames, video.height, video.width, 3), dtype=torch.uint8)


def check_groups(
    reward: CompositeReward, shares: Sequence[Sequence[MicroBatch]], size: int, remedy: str, world: World
) -> None:
    """Refuse rewards that compare clips if one process would not score whole groups of `size` clips; `shares` are all ranks'
    micro-batches."""
    if size < 2:
        reward.refuse_comparing(f"there is one clip a prompt. {remedy}")
    if world.layout.sequence > 1:
        reward.refuse_comparing(
            f"{world.layout.sequence} sequence-parallel processes share a group's clips. Set parallel.sp 1."
        )
    for share in shares:
        counts = Counter(member.group for batch in share if not batch.filler for member in batch.members)
        if any(count < size for count in counts.values()):
            reward.refuse_comparing(f"{world.size} ranks share {size} clips of a prompt. {remedy}")


@dataclass(frozen=True)
class LocalScores:
    """Scores of one process or one worker."""

    rows: Tensor
    """For every clip its group, its index there, its total and its parts, float64."""
    failed: list[int]
    """For every reward the number of clips that it could not score."""
    failures: list[Failure]
    """Its failures, one for each reward and reason."""


@dataclass(frozen=True)
class ScoredClips:
    """The scored clips of one process or one worker."""

    videos: Tensor
    """Decoded, uint8; empty if a worker decoded them and no observer needs them."""
    sheet: LocalScores | None = None
    """None where clips are given."""
    thumbnails: Tensor | None = None
    """Input of the sentinel's statistics, if clips were decoded."""
    sound: Sound | None = None
    captions: list[str] = field(default_factory=list)
    """Prompts of the clips."""


def score_here(
    reward: CompositeReward,
    videos: Tensor,
    members: Sequence[Member],
    prompts: Sequence[Prompt],
    fps: float,
    early: AsyncScoring | None = None,
    latents: Tensor | None = None,
    sound: Sound | None = None,
) -> LocalScores:
    """Score clips. `members` and `prompts` have an entry for each clip; `latents` are those that were decoded."""
    texts, metadata = [prompt.text for prompt in prompts], [metadata_of(prompt) for prompt in prompts]
    groups = [member.group for member in members]
    scores, report = reward.score(videos, texts, fps, metadata, early, latents, groups, sound)
    places = torch.tensor([(m.group, m.index) for m in members], dtype=torch.float64).reshape(-1, 2)
    columns = torch.stack([scores.total, *(scores.parts[name] for name in reward.names)], 1)
    counts = report.counts()
    return LocalScores(
        rows=torch.cat([places, columns.double().cpu()], 1),
        failed=[counts.get(title, 0) for title in reward.titles],
        failures=merged(report.failures),
    )


def joined(sheets: Sequence[LocalScores]) -> LocalScores:
    counts = [sum(column) for column in zip(*(sheet.failed for sheet in sheets))]
    failures = merged(one for sheet in sheets for one in sheet.failures)
    return LocalScores(torch.cat([sheet.rows for sheet in sheets]), counts, failures)


def gathered(
    reward: CompositeReward, sheet: LocalScores, world: World, dtype: torch.dtype = torch.float64
) -> GroupScores:
    """Gather the scores of all ranks, in order; RewardFailure on all of them when too many clips have no total."""
    rows = world.gather(sheet.rows)
    counts = world.gather(torch.tensor([sheet.failed])).sum(0).tolist()
    failed = dict(zip(reward.titles, counts))
    text = ""
    if any(counts):
        texts = world.texts(json.dumps([asdict(one) for one in sheet.failures]))
        text = describe_failures(failed, len(rows), [Failure(**one) for part in texts for one in json.loads(part)])
    check_failures(int((~torch.isfinite(rows[:, 2])).sum()), len(rows), reward.max_failed_fraction, text)
    rows = rows[torch.argsort(rows[:, 0] * (rows[:, 1].max() + 1) + rows[:, 1])]
    total, *parts = (column.to(dtype) for column in rows[:, 2:].unbind(1))
    return GroupScores(rows[:, 0].long(), rows[:, 1].long(), total, dict(zip(reward.names, parts)), failed, text)


def describe(scored: GroupScores, advantages: Tensor, witnesses: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Metrics of the rewards; `witnesses` are the held-out rewards, with the weights of their parts."""
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
