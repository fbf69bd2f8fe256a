"""Rewards of a run on all ranks: each rank scores its clips, and all gather the same scores."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sage_grpo.data.groups import Member, MicroBatch
from sage_grpo.data.prompts import Prompt
from sage_grpo.distributed.world import World
from sage_grpo.health.statistics import agreements
from sage_grpo.objectives.advantage import AdvantageConfig, decoupled_advantage, group_advantage
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.member import Failure, check_failures, describe_failures, merged
from sage_grpo.types import Sound, VideoSpec


@dataclass(frozen=True)
class Scores:
    """Scores of clips: those of one process or worker in its order, or those of all ranks in the order (group, member)."""

    groups: Tensor
    indices: Tensor
    """Group of every clip, and its index there."""
    total: Tensor
    parts: dict[str, Tensor]
    failed: dict[str, int]
    """For every reward the number of clips that it could not score, also if it does not count in the total."""
    failures: list[Failure] = field(default_factory=list)
    """One for every reward and reason."""

    @property
    def valid(self) -> Tensor:
        return torch.isfinite(self.total)

    def of(self, rows: Tensor) -> Scores:
        """The scores of some clips."""
        parts = {name: values[rows] for name, values in self.parts.items()}
        return Scores(self.groups[rows], self.indices[rows], self.total[rows], parts, self.failed, self.failures)

    @property
    def report(self) -> str:
        return describe_failures(self.failed, len(self.total), self.failures)

    @classmethod
    def joined(cls, pieces: Sequence[Scores]) -> Scores:
        first, columns = pieces[0], ("groups", "indices", "total")
        return cls(
            **{name: torch.cat([getattr(one, name) for one in pieces]) for name in columns},
            parts={name: torch.cat([one.parts[name] for one in pieces]) for name in first.parts},
            failed={title: sum(one.failed[title] for one in pieces) for title in first.failed},
            failures=merged(failure for one in pieces for failure in one.failures),
        )

    def gathered(self, world: World, max_failed: float, dtype: torch.dtype = torch.float64) -> Scores:
        """The scores of all ranks; RewardFailure on all of them when more than `max_failed` of the clips have no total."""
        columns = [self.groups, self.indices, self.total, *self.parts.values()]
        rows = world.gather(torch.stack([column.double() for column in columns], 1))
        rows = rows[torch.argsort(rows[:, 0] * (rows[:, 1].max() + 1) + rows[:, 1])]
        groups, indices, *values = rows.unbind(1)
        total, *parts = (column.to(dtype) for column in values)
        counts = world.gather(torch.tensor([list(self.failed.values())])).sum(0).tolist()
        failures = self.failures
        if any(counts):
            texts = world.texts(json.dumps([asdict(one) for one in failures]))
            failures = [Failure(**one) for text in texts for one in json.loads(text)]
        found = Scores(
            groups.long(), indices.long(), total, dict(zip(self.parts, parts)), dict(zip(self.failed, counts)), failures
        )
        check_failures(int((~found.valid).sum()), len(rows), max_failed, found.report)
        return found


def metadata_of(prompt: Prompt) -> dict[str, Any]:
    return {**prompt.metadata, **prompt.columns()}


def preferred(groups: int, size: int) -> Scores:
    """Scores of given clips, in place of rewards: in every row the first clip is the better one."""
    places = torch.arange(groups * size)
    return Scores(places // size, places % size, 1.0 - 2.0 * (places % size), {}, {})


def black_clips(video: VideoSpec, count: int = 0) -> Tensor:
    """Clips to write into. Those that are never written take no memory: NumPy allocates zeros lazily, PyTorch would write them."""
    return torch.from_numpy(np.zeros((count, video.frames, video.height, video.width, 3), dtype=np.uint8))


def check_groups(
    reward: CompositeReward, shares: Sequence[Sequence[MicroBatch]], size: int, remedy: str, world: World
) -> None:
    """Refuse rewards that compare clips if one process would not score whole groups of `size` clips."""
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
class ScoredClips:
    """The scored clips of one process or one worker."""

    videos: Tensor
    """Decoded, uint8; empty if a worker decoded them and no observer needs them."""
    scores: Scores | None = None
    """None where clips are given."""
    thumbnails: Tensor | None = None
    """Input of the sentinel's statistics, if clips were decoded."""
    sound: Sound | None = None
    captions: list[str] = field(default_factory=list)


def score_here(
    reward: CompositeReward,
    videos: Tensor,
    members: Sequence[Member],
    prompts: Sequence[Prompt],
    fps: float,
    latents: Tensor | None = None,
    sound: Sound | None = None,
    iteration: int | None = None,
) -> Scores:
    """Score clips. `members` and `prompts` have an entry for each clip; `latents` are those that were decoded; `iteration` is None in evaluations."""
    texts, metadata = [prompt.text for prompt in prompts], [metadata_of(prompt) for prompt in prompts]
    groups, routes = [member.group for member in members], [prompt.rewards for prompt in prompts]
    scores, report = reward.score(videos, texts, fps, metadata, latents, groups, sound, routes, iteration)
    counts = report.counts()
    return Scores(
        groups=torch.tensor(groups, dtype=torch.long),
        indices=torch.tensor([member.index for member in members], dtype=torch.long),
        total=scores.total.double().cpu(),
        parts={name: scores.parts[name].double().cpu() for name in reward.names},
        failed={title: counts.get(title, 0) for title in reward.titles},
        failures=merged(report.failures),
    )


def summary(scored: Scores, advantages: Tensor, witnesses: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    ok = scored.valid
    totals = [scored.total[ok & (scored.groups == g)] for g in scored.groups[ok].unique()]
    spread = [one.std(correction=0) for one in totals]
    metrics = {
        "reward/total": float(scored.total[ok].mean()),
        "reward/std": float(scored.total[ok].std(correction=0)),
        "reward/group_std": float(torch.stack(spread).nanmean()),
        "reward/failed": float((~ok).sum()),
        "zero_std_ratio": sum(bool(one.min() == one.max()) for one in totals) / len(totals),
        "advantage/std": float(advantages.std(correction=0)),
        "advantage/largest": float(advantages.abs().max()),
    }
    metrics |= {f"reward/{name}": float(values.nanmean()) for name, values in scored.parts.items()}
    metrics |= agreements(scored.total, scored.parts, scored.groups, witnesses)
    metrics |= {f"reward/failed/{title}": float(count) for title, count in scored.failed.items()}
    return metrics


def advantages_of(
    config: AdvantageConfig,
    reward: CompositeReward,
    parts: Sequence[str],
    scores: Scores,
    routes: Sequence[tuple[str, ...]] = (),
    iteration: int | None = None,
) -> Tensor:
    """Group-relative advantages of all clips; one column per part (`parts` are their names) if rewards judge parts.

    routes: the rewards that every group's prompt names. Groups with the same ones are a task: statistics over groups stay within it.
    """
    if not any(routes):
        return _of_task(config, reward, parts, scores, (), iteration)
    columns = len(parts) if reward.judges_parts else None
    advantages = torch.zeros(len(scores.total) if columns is None else (len(scores.total), columns))
    for route in dict.fromkeys(routes):
        own = torch.tensor([routes[group] == route for group in scores.groups.tolist()])
        if bool(scores.valid[own].any()):  # else all clips of the task failed, which the others outweigh
            advantages[own] = _of_task(config, reward, parts, scores.of(own), route, iteration)
    return advantages


def _of_task(
    config: AdvantageConfig,
    reward: CompositeReward,
    parts: Sequence[str],
    scores: Scores,
    route: tuple[str, ...],
    iteration: int | None,
) -> Tensor:
    scores = replace(scores, parts=reward.gated(scores.parts))
    if not reward.judges_parts:
        return _normalized(config, scores, reward.counting(iteration, route), scores.total)
    columns = []
    for part in parts:
        weights = reward.counting(iteration, route, part)
        total = torch.stack([weight * scores.parts[name] for name, weight in weights.items()] or [scores.total * 0])
        columns.append(_normalized(config, scores, weights, total.sum(0)))
    return torch.stack(columns, dim=1)


def _normalized(config: AdvantageConfig, scores: Scores, weights: Mapping[str, float], total: Tensor) -> Tensor:
    options: dict[str, Any] = {"valid": scores.valid, "scale": config.scale, "clip": config.clip}
    if config.decoupled and weights:
        return decoupled_advantage(scores.parts, weights, scores.groups, **options)
    return group_advantage(total, scores.groups, **options)
