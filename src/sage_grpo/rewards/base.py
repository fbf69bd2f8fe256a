"""Composition of rewards: a list of specs becomes one weighted, masked, timed score."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from sage_grpo.rewards.frames import check_clips
from sage_grpo.rewards.functions import (
    BadReturn,
    PartScores,
    RewardConfigError,
    check_return,
    nearest,
    takes_metadata,
)
from sage_grpo.rewards.spec import RewardSpec, load_reward
from sage_grpo.types import Reward, Scores

DEFAULT_BATCH = 8
"""Clips a call where the spec says nothing."""


@runtime_checkable
class Placeable(Protocol):
    """A reward with weights that can be moved to a device."""

    def to(self, device: torch.device) -> object:
        """Move the weights."""
        ...


@dataclass(frozen=True)
class Failure:
    """One clip that one reward could not score."""

    reward: str
    """Title of the reward."""
    index: int
    """Index of the clip in the scored batch."""
    prompt: str
    """The clip's prompt."""
    reason: str
    """What happened."""


class RewardFailure(RuntimeError):
    """More clips than allowed could not be scored."""


@dataclass(frozen=True)
class FailureReport:
    """What went wrong in one call of `CompositeReward.score`."""

    failures: tuple[Failure, ...]
    """Every failure; a clip may fail in several rewards, and in rewards that do not count in the total."""
    failed: int
    """Clips without a valid total."""
    total: int
    """Clips scored."""

    def counts(self) -> dict[str, int]:
        """Failures a reward."""
        result: dict[str, int] = {}
        for failure in self.failures:
            result[failure.reward] = result.get(failure.reward, 0) + 1
        return result

    def describe(self, limit: int = 5) -> str:
        """Which rewards, which prompts and why, for people."""
        lines = [f"{reward}: {count} of {self.total} clips" for reward, count in self.counts().items()]
        lines += [f"  {one.reward} on {one.prompt[:120]!r}: {one.reason}" for one in self.failures[:limit]]
        if len(self.failures) > limit:
            lines.append(f"  and {len(self.failures) - limit} more")
        return "\n".join(lines)


def check_failures(failed: int, total: int, limit: float, report: str = "") -> None:
    """Raise RewardFailure when more than the fraction `limit` of the clips has no valid score.

    Pure, and apart from scoring: on several ranks the counts are summed first, so all ranks decide alike.
    """
    if total > 0 and failed > limit * total:
        raise RewardFailure(
            f"{failed} of {total} clips could not be scored, more than the allowed fraction {limit:g}.\n"
            f"{report}\n"
            "Repair the reward, or raise the allowed fraction of failures."
        )


class _Member:
    """A loaded reward with its spec and the names of its parts in the total."""

    def __init__(self, spec: RewardSpec, reward: Reward, *, require_weights: bool) -> None:
        self.spec, self.reward = spec, reward
        self.takes_metadata = takes_metadata(type(reward).__call__)
        self.weights = _member_weights(spec, reward, require_weights=require_weights)
        if spec.batch_size is not None and spec.batch_size < 0:
            raise RewardConfigError(f"batch_size of {spec.title!r} must be 0 or more, got {spec.batch_size}.")
        for part, pair in spec.standardize.items():
            if part not in reward.names:
                raise RewardConfigError(
                    f"standardize: {spec.title!r} has no part {part!r}.{nearest(part, reward.names)}"
                )
            if len(pair) != 2 or not pair[1] > 0:
                raise RewardConfigError(f"standardize of {spec.title}/{part} must be [mean, std > 0], got {pair}.")

    def batch(self, count: int) -> int:
        """Clips a call when there are `count`."""
        default = 0 if self.spec.name == "remote" else DEFAULT_BATCH
        size = default if self.spec.batch_size is None else self.spec.batch_size
        return size or count


def _member_weights(spec: RewardSpec, reward: Reward, *, require_weights: bool) -> dict[str, float]:
    for part, weight in spec.weights.items():
        if part not in reward.names:
            raise RewardConfigError(f"weights: {spec.title!r} has no part {part!r}.{nearest(part, reward.names)}")
        if not math.isfinite(weight):
            raise RewardConfigError(f"The weight of {spec.title}/{part} is {weight}; it must be a finite number.")
    if spec.metric_only:
        return {}
    if spec.weights:
        return {part: weight for part, weight in spec.weights.items() if weight != 0}
    if len(reward.names) == 1:
        return {reward.names[0]: 1.0}
    if require_weights:
        raise RewardConfigError(
            f"Reward {spec.title!r} has the parts {', '.join(reward.names)}: "
            "give the weights of those that count, or set metric_only."
        )
    return {}


class CompositeReward:
    """Several rewards as one: weighted sum, masks, batches by memory, placement and timing.

    A clip that a reward cannot score (it raises, returns NaN, a wrong shape or too few values) is masked
    and counted, never scored 0. KeyboardInterrupt and SystemExit always pass.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        *,
        max_failed_fraction: float = 0.1,
        device: str | torch.device = "cpu",
        offload_between: bool = False,
        require_weights: bool = True,
    ) -> None:
        if not specs:
            raise RewardConfigError("A run needs at least one reward.")
        if not 0 <= max_failed_fraction <= 1:
            raise RewardConfigError(f"max_failed_fraction must be within 0 and 1, got {max_failed_fraction}.")
        self.max_failed_fraction = max_failed_fraction
        self.device = torch.device(device)
        self.offload_between = offload_between
        self.seconds: dict[str, float] = {}
        self._placed = False
        self._members = [_Member(spec, load_reward(spec), require_weights=require_weights) for spec in specs]
        titles = [spec.title for spec in specs]
        for title in titles:
            if titles.count(title) > 1:
                raise RewardConfigError(f"{titles.count(title)} rewards are called {title!r}: give each its own label.")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parts: the part alone where it is unique, else reward/part."""
        return tuple(self._public(member, part) for member in self._members for part in member.reward.names)

    @property
    def weights(self) -> dict[str, float]:
        """Weight in the total of every part that counts."""
        return {
            self._public(member, part): weight for member in self._members for part, weight in member.weights.items()
        }

    def _public(self, member: _Member, part: str) -> str:
        shared = sum(part in other.reward.names for other in self._members) > 1
        return f"{member.spec.title}/{part}" if shared else part

    def onload(self) -> None:
        """Move the rewards' weights to their devices."""
        for member in self._members:
            if isinstance(member.reward, Placeable):
                member.reward.to(self._device_of(member))
        self._placed = True

    def offload(self) -> None:
        """Move the rewards' weights to the CPU, to leave the memory to the policy."""
        for member in self._members:
            if isinstance(member.reward, Placeable):
                member.reward.to(torch.device("cpu"))
        self._placed = False

    def _device_of(self, member: _Member) -> torch.device:
        return torch.device(member.spec.device) if member.spec.device else self.device

    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Scores:
        """Score the clips; RewardFailure when too many fail. For one process; several ranks use `score`."""
        scores, report = self.score(videos, prompts, fps)
        check_failures(report.failed, report.total, self.max_failed_fraction, report.describe())
        return scores

    @torch.no_grad()
    def score(
        self,
        videos: Tensor,
        prompts: Sequence[str],
        fps: float,
        metadata: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[Scores, FailureReport]:
        """Score uint8 clips B x F x H x W x 3; a failing reward never raises, the report tells.

        `metadata`, one mapping a clip, goes to the rewards that have a parameter of this name.
        """
        check_clips(videos, prompts, fps)
        if metadata is not None and len(metadata) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(metadata)} rows of metadata: give one a clip.")
        known = [{} for _ in prompts] if metadata is None else metadata
        if not self._placed:
            self.onload()
        count = videos.shape[0]
        parts: dict[str, Tensor] = {}
        failures: list[Failure] = []
        total, valid = torch.zeros(count), torch.ones(count, dtype=torch.bool)
        for member in self._members:
            start = time.perf_counter()
            values = self._score_member(member, videos, prompts, fps, known, failures)
            self.seconds[member.spec.title] = time.perf_counter() - start
            for part, value in values.items():
                parts[self._public(member, part)] = value.to(videos.device)
                if part in member.weights:
                    total += member.weights[part] * value
                    valid &= value.isfinite()
        total[~valid] = torch.nan
        if self.offload_between:
            self.offload()
        report = FailureReport(tuple(failures), failed=int((~valid).sum()), total=count)
        return Scores(parts=parts, total=total.to(videos.device), valid=valid.to(videos.device)), report

    def _score_member(
        self,
        member: _Member,
        videos: Tensor,
        prompts: Sequence[str],
        fps: float,
        metadata: Sequence[Mapping[str, Any]],
        failures: list[Failure],
    ) -> dict[str, Tensor]:
        count, size = videos.shape[0], max(1, member.batch(videos.shape[0]))
        values = {part: torch.full((count,), torch.nan) for part in member.reward.names}
        start, singly_until = 0, 0
        while start < count:
            width = 1 if start < singly_until else size
            chunk = list(range(start, min(start + width, count)))
            outcome = self._call(member, videos, prompts, fps, metadata, chunk)
            if isinstance(outcome, torch.OutOfMemoryError) and len(chunk) > 1:
                size = max(1, len(chunk) // 2)
                torch.cuda.empty_cache()
                continue
            if isinstance(outcome, BaseException) and not isinstance(outcome, BadReturn) and len(chunk) > 1:
                # one bad prompt must not cost its neighbours their scores: find it clip by clip
                singly_until = chunk[-1] + 1
                continue
            _collect(member, outcome, chunk, prompts, values, failures)
            start = chunk[-1] + 1
        return values

    def _call(
        self,
        member: _Member,
        videos: Tensor,
        prompts: Sequence[str],
        fps: float,
        metadata: Sequence[Mapping[str, Any]],
        chunk: list[int],
    ) -> PartScores | Exception:
        try:
            clips = videos[chunk[0] : chunk[-1] + 1].to(self._device_of(member))
            version = clips._version
            extra = {"metadata": [dict(metadata[index]) for index in chunk]} if member.takes_metadata else {}
            result = member.reward(clips, [prompts[index] for index in chunk], fps, **extra)
            if clips._version != version:  # it would falsify what the next reward sees
                raise RewardConfigError(f"Reward {member.spec.title!r} changed the clips in place: copy them first.")
            return check_return(result, member.reward.names, len(chunk))
        except RewardConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - users' code may raise anything; it is masked and reported
            return error


def _collect(
    member: _Member,
    outcome: PartScores | Exception,
    chunk: list[int],
    prompts: Sequence[str],
    values: dict[str, Tensor],
    failures: list[Failure],
) -> None:
    """Write one call's scores into `values`, and a Failure for every clip that has none."""
    title = member.spec.title
    if isinstance(outcome, Exception):
        reason = str(outcome) if isinstance(outcome, BadReturn) else f"{type(outcome).__name__}: {outcome}"
        failures.extend(Failure(title, index, prompts[index], reason) for index in chunk)
        return
    chosen = slice(chunk[0], chunk[-1] + 1)
    for part, value in outcome.items():
        mean, std = member.spec.standardize.get(part, (0.0, 1.0))
        values[part][chosen] = torch.where(value.isfinite(), (value - mean) / std, torch.nan)
    for offset, index in enumerate(chunk):
        bad = [part for part in outcome if not outcome[part][offset].isfinite()]
        if bad:
            shown = ", ".join(f"{part} = {outcome[part][offset].item()}" for part in bad)
            failures.append(Failure(title, index, prompts[index], outcome.reasons.get(offset, f"returned {shown}")))
