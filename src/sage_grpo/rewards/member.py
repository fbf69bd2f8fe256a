"""One reward of a composition: calls in batches by memory, a search for failing clips, and a record of the failures."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from sage_grpo.rewards.functions import (
    BadReturn,
    FunctionReward,
    RewardConfigError,
    check_known,
    check_return,
    finish,
    where_raised,
)
from sage_grpo.rewards.spec import RewardSpec, facts_of
from sage_grpo.types import DifferentiableReward, PartScores, ReadsFrames, Reward, Sound, VideoSpec

SHOWN = 5
"""Largest number of reasons that are printed per iteration."""


@dataclass(frozen=True)
class Failure:
    """One clip that one reward could not score (or, among the remarks, its comment on one that it scored)."""

    reward: str
    index: int  # index of the clip in the scored batch
    prompt: str
    reason: str
    raised: bool = False  # the call itself failed (an exception, a wrong return)
    silent: bool = False  # the reward gave up on this clip without a reason
    clips: int = 1

    def describe(self) -> str:
        prompt, reason = " ".join(self.prompt.split())[:120], " ".join(self.reason.split())[:500]
        return f"{self.reward}{f' x{self.clips}, first' if self.clips > 1 else ''} on {prompt!r}: {reason}"


class RewardFailure(RuntimeError):
    """More clips than allowed could not be scored."""


@dataclass(frozen=True)
class FailureReport:
    """Failures of one call of `CompositeReward.score`."""

    failures: tuple[Failure, ...]
    """In the order of the rewards and then of the clips; a clip may fail in several rewards, also in those that do not count."""
    remarks: tuple[Failure, ...] = ()  # reasons that rewards gave for clips that they did score

    def counts(self) -> dict[str, int]:
        return dict(Counter(failure.reward for failure in self.failures))


def merged(failures: Iterable[Failure]) -> list[Failure]:
    alike: dict[tuple[str, str], Failure] = {}
    for one in failures:
        first = alike.get((one.reward, one.reason))
        alike[one.reward, one.reason] = replace(first, clips=first.clips + one.clips) if first else one
    return list(alike.values())


def describe_failures(counts: dict[str, int], total: int, failures: Iterable[Failure]) -> str:
    """A line for every reward that failed on some of the clips, then the first reasons; empty when there is none."""
    text = [f"{reward} could not score {count} of {total} clips" for reward, count in counts.items() if count]
    shown = merged(failures)[:SHOWN]
    text += [f"  {one.describe()}" for one in shown]
    more = sum(counts.values()) - sum(one.clips for one in shown)
    return "\n".join([*text, *([f"  and {more} more"] if more > 0 else [])])


def check_failures(failed: int, total: int, limit: float, report: str = "") -> None:
    """Raise RewardFailure when more than the fraction `limit` of the clips has no valid score, and always when none has one.

    Apart from scoring: on several ranks the counts are summed first, so all ranks decide alike.
    """
    if total > 0 and failed == total:  # there is nothing to learn from or to compare, however much failure is allowed
        raise RewardFailure(f"None of {total} clips could be scored.\n{report}\nRepair the reward.")
    if total > 0 and failed > limit * total:
        raise RewardFailure(
            f"{failed} of {total} clips could not be scored, more than the allowed fraction {limit:g}.\n{report}\n"
            "Repair the reward, or raise the allowed fraction of failures (max_failed_fraction)."
        )


ALONE = BadReturn("a reward that compares needs at least two clips of a prompt, and there is one")
DEFAULT_BATCH = 8


@dataclass(frozen=True)
class ClipBatch:
    """Clips to score, with all inputs of rewards."""

    videos: Tensor  # uint8 B x F x H x W x 3; black if no reward reads clips
    prompts: Sequence[str]
    fps: float
    metadata: Sequence[Mapping[str, Any]]
    latents: Tensor | None = None  # latents that the clips were decoded from, if known
    groups: Sequence[int] = ()
    """Group of each clip; rewards that compare clips compare those of one group. Empty: clips of one prompt are a group."""
    sound: Sound | None = None
    routes: Sequence[Sequence[str]] = ()
    """Titles of the rewards that each clip's prompt names; none is all rewards, and so is an empty list."""

    def take(self, places: Sequence[int]) -> ClipBatch:
        rows = list(places)
        return ClipBatch(
            self.videos[rows],
            [self.prompts[place] for place in rows],
            self.fps,
            [self.metadata[place] for place in rows],
            None if self.latents is None else self.latents[rows],
            [self.groups[place] for place in rows] if self.groups else (),
            None if self.sound is None else self.sound[rows],
        )

    def grouped(self) -> list[list[int]]:
        groups: dict[object, list[int]] = {}
        for place, group in enumerate(self.groups or self.prompts):
            groups.setdefault(group, []).append(place)
        return list(groups.values())


@dataclass
class Outcome:
    """Scores of one reward."""

    values: dict[str, Tensor]  # every part, NaN where it could not be scored
    failures: list[Failure] = field(default_factory=list)  # for every clip that lacks a part
    remarks: list[Failure] = field(default_factory=list)  # reasons that the reward gave for clips that it scored

    def is_silent(self, counting: Collection[str]) -> bool:
        """True if no clip has a score and none a reason; where parts are `counting` in the total, a clip needs all of these."""
        finite = [values.isfinite() for part, values in self.values.items() if part in counting or not counting]
        scored = torch.stack(finite).all(0) if counting else torch.stack(finite).any(0)
        return not scored.any() and all(failure.silent for failure in self.failures)


class RewardMember:
    """A loaded reward with its spec and the weights of its parts in the total."""

    def __init__(self, spec: RewardSpec, reward: Reward, *, require_weights: bool, device: torch.device) -> None:
        self.spec, self.reward = spec, reward
        self.weights = _weights(spec, reward, require_weights=require_weights)
        self.device = check_device(spec) or device
        self.reads_latents = getattr(reward, "reads", "clips") == "latents"
        function = reward.function if isinstance(reward, FunctionReward) else type(reward).__call__
        code = getattr(inspect.unwrap(function), "__code__", None)
        self._defined = "" if code is None else f" ({code.co_filename}, line {code.co_firstlineno})"
        parameters = inspect.signature(reward.__call__).parameters
        self._takes_metadata = "metadata" in parameters
        self.hears = reward.hears if isinstance(reward, FunctionReward) else "sound" in parameters
        self._is_users = ":" in spec.name
        facts = facts_of(spec.name)
        self.asks_others = facts is not None and bool(facts.network)
        # of the others every call may cost money
        self._isolates = not (self.asks_others or inspect.iscoroutinefunction(function))
        self.compares = bool(getattr(reward, "compares", False))
        self.decides = {spec.title}
        """Titles of the rewards whose totals need this one: itself, and those that its parts gate."""
        if self.compares and spec.batch_size is not None:
            raise RewardConfigError(
                f"Reward {spec.title!r} compares clips, a whole group in each call: leave batch_size out."
            )

    def counts(self, route: Sequence[str]) -> bool:
        """True if the reward counts in the total of clips whose prompts name these rewards."""
        return not route or self.spec.title in route

    def judges(self, route: Sequence[str]) -> bool:
        """True if the reward scores them: those in the total, their gates, and those that are logged only."""
        return not route or not self.weights or not self.decides.isdisjoint(route)

    def batch(self, count: int) -> int:
        size = (0 if self.asks_others else DEFAULT_BATCH) if self.spec.batch_size is None else self.spec.batch_size
        return max(1, size or count)

    def frames_read(self, count: int, fps: float) -> set[int] | None:
        """Frames of a clip that the reward reads; None is all, also if this fails: the scoring call then reports the error."""
        if self.reads_latents:
            return set()
        frames = None
        with suppress(ValueError):
            frames = self.reward.frames_read(count, fps) if isinstance(self.reward, ReadsFrames) else None
        if frames is None:
            return None
        wrong = [index for index in frames if not 0 <= index < count]
        if wrong:
            raise RewardConfigError(
                f"Reward {self.spec.title!r}: frames_read names frame {wrong[0]} of a clip of {count} frames, which count from 0 to {count - 1}."
            )
        return set(frames)

    def try_out(self, video: VideoSpec, prompts: Sequence[tuple[str, Mapping[str, Any]]], gradient: bool) -> str:
        """The fault in a reward's scores of a clip with the first prompt, or an empty string; without a score and a reason, the others are tried."""
        # a coarse random picture that moves sideways: a blank clip would have zero contrast
        generator = torch.Generator().manual_seed(0)
        coarse = torch.randint(0, 256, (8, 8, 3), generator=generator, dtype=torch.uint8)
        rows, columns = (torch.arange(size) * 8 // size for size in (video.height, video.width))
        picture = coarse[rows][:, columns]
        videos = torch.stack([picture.roll(frame, dims=1) for frame in range(video.frames)]).unsqueeze(0)
        if self.compares:
            videos = torch.cat([videos, videos.flip(3)])
        count, rate = len(videos), 16_000
        waves = torch.rand(count, 2, int(rate * video.frames / video.fps), generator=generator) - 0.5
        clips, *others = (
            ClipBatch(videos, [text] * count, video.fps, [metadata] * count, sound=Sound(waves, rate))
            for text, metadata in prompts
        )
        try:
            outcome = self.score(clips)
            if gradient and self.weights and not outcome.failures:
                floats = clips.videos.float().requires_grad_()
                self.differentiable(floats, clips.prompts, clips.fps, clips.metadata).sum().backward()
            raised = [failure.reason for failure in outcome.failures if failure.raised or self.asks_others]
            if not raised and all(one.is_silent(self.weights) for one in chain([outcome], map(self.score, others))):
                raised = [f"{outcome.failures[0].reason} without a reason, and so for each of {len(prompts)} prompts"]
        except RewardConfigError as error:
            return str(error)
        size = f"{video.frames} frames of {video.height} x {video.width} at {video.fps:g} fps"
        return f"{raised[0]} (a clip of {size}, prompt {prompts[0][0][:120]!r})" if raised else ""

    @torch.no_grad()
    def score(self, clips: ClipBatch) -> Outcome:
        """Score all clips that the reward judges; exceptions of the reward become failures, errors of its configuration are raised."""
        count = len(clips.prompts)
        outcome = Outcome({part: torch.full((count,), torch.nan) for part in self.reward.names})
        judged = [place for place, route in enumerate(clips.routes) if self.judges(route)]
        if clips.routes and len(judged) < count:
            some = self.score(clips.take(judged)) if judged else outcome
            for part in some.values if judged else ():
                outcome.values[part][judged] = some.values[part]
            outcome.failures = [replace(one, index=judged[one.index]) for one in some.failures]
            outcome.remarks = [replace(one, index=judged[one.index]) for one in some.remarks]
            return outcome
        size, at = self.batch(count), 0
        # a thread has its own current device
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            for group in clips.grouped() if self.compares else ():
                self._write(outcome, clips, group, self.call(clips, group) if len(group) > 1 else ALONE)
            while at < count and not self.compares:
                chunk = range(at, min(at + size, count))
                result = self.call(clips, chunk)
                if isinstance(result, torch.OutOfMemoryError) and len(chunk) > 1:
                    size = max(1, len(chunk) // 2)
                    torch.cuda.empty_cache()
                    continue
                raised = isinstance(result, Exception) and not isinstance(result, BadReturn)
                if self._isolates and raised and len(chunk) > 1:
                    for one in chunk:  # one bad prompt does not cost its neighbors their scores
                        self._write(outcome, clips, [one], self.call(clips, range(one, one + 1)))
                else:
                    self._write(outcome, clips, chunk, result)
                at = chunk.stop
        outcome.failures.sort(key=lambda one: one.index)
        return outcome

    def differentiable(
        self, videos: Tensor, prompts: Sequence[str], fps: float, metadata: Sequence[Mapping[str, Any]]
    ) -> Tensor:
        """This reward's part in the total of float clips (or of latents, where it reads these), with a graph."""
        reward = self.reward
        if not isinstance(reward, DifferentiableReward) or self.compares:
            raise RewardConfigError(without_gradient(self.spec))
        extra = {"metadata": metadata} if self._takes_metadata and isinstance(reward, FunctionReward) else {}
        parts = reward.differentiable(videos.to(self.device), prompts, fps, **extra)
        check_known(self.weights, parts, f"{self.spec.title!r} returned no gradient of the part")
        total = torch.zeros(len(prompts), device=videos.device)
        for part, weight in self.weights.items():
            if not parts[part].requires_grad:
                raise RewardConfigError(
                    f"Reward {self.spec.title!r}: its part {part!r} does not depend on what was read, as far as PyTorch saw. Compute it in "
                    "torch from the float values, without no_grad, detach, item, numpy or whole numbers."
                )
            total = total + weight * parts[part].to(videos.device)
        return total

    def call(self, clips: ClipBatch, chunk: Sequence[int]) -> PartScores | Exception:
        """One call of the reward, on memory that no other reward reads."""
        try:
            if self.reads_latents and clips.latents is None:
                raise RewardConfigError(without_latents(self.spec))
            chosen = clips.latents if self.reads_latents and clips.latents is not None else clips.videos
            # a range is a view, any other choice of clips a copy
            chosen = chosen[chunk.start : chunk.stop] if isinstance(chunk, range) else chosen[list(chunk)]
            inputs = chosen.to(self.device)
            if self._is_users and inputs.device == chosen.device:
                inputs = inputs.clone()  # user code may write through numpy, which torch does not notice
            version = inputs._version
            extra: dict[str, Any] = {}
            if self._takes_metadata:
                extra["metadata"] = copy.deepcopy([dict(clips.metadata[i]) for i in chunk])
            if self.hears:
                if clips.sound is None:
                    raise RewardConfigError(
                        f"Reward {self.spec.title!r} listens to clips (it has a parameter `sound`), and these are silent. Use it with a model that "
                        "makes sound, as LTX-2 does."
                    )
                extra["sound"] = clips.sound[list(chunk)]
            result = finish(self.reward(inputs, [clips.prompts[index] for index in chunk], clips.fps, **extra))
            if inputs._version != version:
                raise RewardConfigError(f"Reward {self.spec.title!r} changed the clips in place: copy them first.")
            return check_return(result, self.reward.names, len(chunk))
        except RewardConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - users' code may raise anything; it is masked and reported
            return error

    def _write(self, outcome: Outcome, clips: ClipBatch, chunk: Sequence[int], result: PartScores | Exception) -> None:
        """Store one call's scores, and a Failure for every clip that has none."""
        about = partial(Failure, self.spec.title)
        if isinstance(result, Exception):
            reason = str(result) if isinstance(result, BadReturn) else f"{type(result).__name__}: {str(result)[:300]}"
            if self._is_users:
                reason += self._defined if isinstance(result, BadReturn) else where_raised(result)
            reason += f" (in a call of {len(chunk)} clips)" if len(chunk) > 1 else ""
            outcome.failures += [about(index, clips.prompts[index], reason, raised=True) for index in chunk]
            return
        for part, value in result.items():
            outcome.values[part][list(chunk)] = torch.where(value.isfinite(), value, torch.nan)
        for offset, index in enumerate(chunk):
            bad = {part: float(value[offset]) for part, value in result.items() if not value[offset].isfinite()}
            shown = ", ".join(f"{part} = {number}" for part, number in bad.items())
            if bad:
                reason = result.reasons.get(offset, f"returned {shown}")
                silent = offset not in result.reasons
                outcome.failures.append(about(index, clips.prompts[index], reason, silent=silent))
            elif offset in result.reasons:
                outcome.remarks.append(about(index, clips.prompts[index], result.reasons[offset]))


def without_gradient(spec: RewardSpec) -> str:
    return (
        f"objective.kind gradient differentiates every reward that counts, and {spec.title!r} cannot be: it has no method "
        "`differentiable(videos, prompts, fps)`, or is a function without options: {differentiable: true} (docs/rewards.md). Give it "
        "metric_only, or use a policy gradient (branch, sage), which needs no gradient."
    )


def without_latents(spec: RewardSpec) -> str:
    return (
        f"Reward {spec.title!r} reads latents, which only a run has that samples clips: files and requests to a reward server have none. "
        "Leave it out here."
    )


def check_device(spec: RewardSpec) -> torch.device | None:
    """A spec's own device, or None; RewardConfigError when it does not exist."""
    if not spec.device:
        return None
    why = f"Reward {spec.title!r}: {spec.device!r} is not a device"
    try:
        device = torch.device(spec.device)
    except RuntimeError as error:
        raise RewardConfigError(f"{why}; use cpu, cuda or cuda:1.") from error
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise RewardConfigError(f"{why} of this machine: it has {count} CUDA devices.")
    return device


def _weights(spec: RewardSpec, reward: Reward, *, require_weights: bool) -> dict[str, float]:
    check_known(spec.weights, reward.names, f"weights: {spec.title!r} has no part")
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
