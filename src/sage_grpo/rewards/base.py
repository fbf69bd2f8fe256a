"""Composition of rewards: a list of specs becomes one weighted, masked score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from sage_grpo.rewards.frames import check_clips
from sage_grpo.rewards.functions import RewardConfigError, check_known
from sage_grpo.rewards.member import ClipBatch, FailureReport, Outcome, RewardMember, without_latents
from sage_grpo.rewards.spec import Gate, RewardSpec, load_reward
from sage_grpo.types import BatchScores, Placeable, Reward, Sound, VideoSpec

SMALL = VideoSpec(frames=17, height=64, width=64, fps=8.0)
"""Format of the clip on which rewards are tried out; every built-in reward can score it."""
TRIED = 8
"""Largest number of prompts that a reward is tried with while it gives NaN."""


@dataclass(eq=False)
class CompositeReward:
    """Several rewards as one: weighted sum, masks, batches by memory, placement.

    A part that a reward cannot score (it raises, returns NaN, a wrong shape or too few values) is counted, never 0; if it has a weight, its clip is masked.
    """

    specs: Sequence[RewardSpec]
    _: KW_ONLY
    max_failed_fraction: float = 0.25
    device: str | torch.device = "cpu"
    offload_between: bool = False
    require_weights: bool = True
    objects: Mapping[str, Reward] | None = None
    """Rewards already loaded, by spec name; all others are loaded."""
    optional: bool = False
    """Allow an empty list."""

    def __post_init__(self) -> None:
        if not self.specs and not self.optional:
            raise RewardConfigError("A run needs at least one reward.")
        self._placed: set[str] = set()
        device, given = torch.device(self.device), self.objects or {}
        loaded = [(one, given[one.name] if one.name in given else load_reward(one)) for one in self.specs]
        self._members = members = [
            RewardMember(spec, one, require_weights=self.require_weights, device=device) for spec, one in loaded
        ]
        self.titles = tuple(member.spec.title for member in members)
        for title, count in Counter(self.titles).items():
            if count > 1:
                raise RewardConfigError(f"{count} rewards are called {title!r}: give each its own label.")
        self.names = tuple(self._public(member, part) for member in members for part in member.reward.names)
        """Names of all parts: the part alone where it is unique, else reward/part."""
        self.weights = {self._public(one, part): weight for one in members for part, weight in one.weights.items()}
        """Weight in the total of every part that counts, before schedules."""
        self._gates = dict(chain.from_iterable(map(self._gated_by, members)))
        """Gate of every part that has one."""
        self.hears = any(member.hears for member in members)
        self.compares = any(member.compares for member in members)
        self.judges_parts = any(spec.judges for spec in self.specs)
        self.reads_clips = not all(member.reads_latents for member in members)
        """True if any reward, metric-only ones included, needs more than latents."""
        self.learns_from_clips = any(member.weights and not member.reads_latents for member in members)
        """True if any reward in the total needs more than latents."""

    def _public(self, member: RewardMember, part: str) -> str:
        shared = sum(part in other.reward.names for other in self._members) > 1
        return f"{member.spec.title}/{part}" if shared else part

    def _gated_by(self, member: RewardMember) -> Iterator[tuple[str, Gate]]:
        gate, what = member.spec.gate, f"gate: {member.spec.title!r}"
        if gate is None:
            return
        check_known([gate.part], self.names, f"{what} compares a part that no reward has,")
        check_known(gate.only, member.weights, f"{what} has no weight for the part")
        owner = next(
            one for one in self._members if gate.part in [self._public(one, part) for part in one.reward.names]
        )
        owner.decides.add(member.spec.title)
        for part in gate.only or member.weights:
            name = self._public(member, part)
            if name != gate.part:
                yield name, gate

    def counting(
        self, iteration: int | None = None, route: Sequence[str] = (), part: str | None = None
    ) -> dict[str, float]:
        """Weights in the total at an iteration (None: at the end of the schedules) of clips whose prompts name these rewards; with `part`,
        of the rewards that judge this part of a clip."""
        weights: dict[str, float] = {}
        for member in self._members:
            if member.counts(route) and (part is None or member.spec.judges in ("", part)):
                factor = member.spec.factor(iteration)
                weights |= {self._public(member, name): factor * weight for name, weight in member.weights.items()}
        return {name: weight for name, weight in weights.items() if weight}

    def gated(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parts as they count: where a gate's part is below its floor, `below`; where that part is missing, NaN."""
        counted = dict(parts)
        for name, gate in self._gates.items():
            decides = parts[gate.part].to(parts[name].device)
            passed = torch.where(decides >= gate.floor, parts[name], gate.below)
            counted[name] = torch.where(decides.isfinite(), passed, torch.nan)
        return counted

    @property
    def watching(self) -> dict[str, dict[str, float]]:
        """Metric-only rewards by title, with the weights of their parts: the spec's, or 1 for an only part."""
        metrics = {}
        for member in self._members:
            names, spec = member.reward.names, member.spec
            if spec.metric_only:
                weights = spec.weights or ({names[0]: 1.0} if len(names) == 1 else {})
                metrics[spec.title] = {self._public(member, part): weight for part, weight in weights.items()}
        return metrics

    def refuse_comparing(self, why: str) -> None:
        for member in self._members:
            if member.compares:
                raise RewardConfigError(
                    f"Reward {member.spec.title!r} compares clips of a group with one another: {why}"
                )

    def frames_read(self, count: int, fps: float) -> list[int] | None:
        """Frames of a clip that the rewards in the total read. None means all frames."""
        read = [member.frames_read(count, fps) for member in self._members if member.weights]
        known = [frames for frames in read if frames is not None]
        return sorted(set().union(*known)) if len(known) == len(read) else None

    def onload(self) -> None:
        for member in self._members:
            if isinstance(member.reward, Placeable) and member.spec.title not in self._placed:
                member.reward.to(member.device)
                self._placed.add(member.spec.title)

    def offload(self) -> None:
        """Move the rewards' weights to the CPU to free memory for the policy; rewards with a device of their own stay."""
        for member in self._members:
            if isinstance(member.reward, Placeable) and not member.spec.device:
                member.reward.to(torch.device("cpu"))
                self._placed.discard(member.spec.title)

    @torch.no_grad()
    def score(
        self,
        videos: Tensor,
        prompts: Sequence[str],
        fps: float,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        latents: Tensor | None = None,
        groups: Sequence[int] = (),
        sound: Sound | None = None,
        routes: Sequence[Sequence[str]] = (),
        iteration: int | None = None,
    ) -> tuple[BatchScores, FailureReport]:
        """Score uint8 clips B x F x H x W x 3. Failures are listed in the report; only errors of a reward's configuration are raised.

        metadata: that of each clip's prompt. latents: those that the clips were decoded from. groups: the number of each clip's group; without it,
        clips of one prompt form a group. routes: the rewards that each clip's prompt names; the others leave the clip out. iteration: the one
        whose weights make the total; None is the end of the schedules.
        """
        check_clips(videos, prompts, fps)
        rows = [{} for _ in prompts] if metadata is None else list(metadata)
        if len(rows) != len(prompts):
            raise ValueError(f"One row of metadata a clip is needed: got {len(rows)} for {len(prompts)} clips.")
        self.onload()
        count, routes = videos.shape[0], routes if any(routes) else ()
        outcomes = self._run(ClipBatch(videos, prompts, fps, rows, latents, groups, sound, routes))
        parts = {
            self._public(member, part): value
            for member, outcome in zip(self._members, outcomes)
            for part, value in outcome.values.items()
        }
        total, valid, counted = torch.zeros(count), torch.ones(count, dtype=torch.bool), self.gated(parts)
        named = [tuple(route) for route in routes] or [()] * count
        for route in dict.fromkeys(named):
            weights, own = self.counting(iteration, route), torch.tensor([one == route for one in named])
            for part in (name for name in parts if name in weights):
                total = torch.where(own, total + weights[part] * counted[part], total)
                valid &= ~own | counted[part].isfinite()
        parts = {name: value.to(videos.device) for name, value in parts.items()}
        total[~valid] = torch.nan
        if self.offload_between:
            self.offload()
        report = FailureReport(
            tuple(failure for outcome in outcomes for failure in outcome.failures),
            tuple(remark for outcome in outcomes for remark in outcome.remarks),
        )
        return BatchScores(parts=parts, total=total.to(videos.device), valid=valid.to(videos.device)), report

    def gradient(
        self,
        latents: Tensor,
        pixels: Callable[[Tensor], Tensor],
        prompt: str,
        fps: float,
        metadata: Mapping[str, Any] | None = None,
        route: Sequence[str] = (),
        iteration: int | None = None,
    ) -> Tensor:
        """Gradient of each clip's total by its latents, for clips of one prompt; zeros where it is not finite.

        pixels: decodes latents to float clips B x F x H x W x 3 in [0, 255], with a graph; called once, or never if only latents are read.
        route: the rewards that the prompt names. iteration: the one whose weights make the total.
        """
        self.onload()
        latents, count = latents.detach().requires_grad_(), len(latents)
        total = torch.zeros(count, device=latents.device)
        counting = [member for member in self._members if member.weights and member.counts(route)]
        clips = pixels(latents) if self.learns_from_clips else latents
        for member in counting:
            read = latents if member.reads_latents else clips
            rows = [dict(metadata or {}) for _ in range(count)]
            part = member.differentiable(read, [prompt] * count, fps, rows).to(latents.device)
            total = total + member.spec.factor(iteration) * part
        (slope,) = torch.autograd.grad(total.sum(), latents)
        finite = total.isfinite() & slope.flatten(1).isfinite().all(1)
        return torch.where(finite.view(-1, *[1] * (slope.ndim - 1)), slope, 0.0)

    def _run(self, clips: ClipBatch) -> list[Outcome]:
        """Outcomes in the order of the rewards; rewards that may overlap run in threads while the others run in this one."""
        apart = [member for member in self._members if member.spec.overlap]
        executor = ThreadPoolExecutor(max_workers=len(apart) or 1, thread_name_prefix="reward")
        try:
            coming = {member.spec.title: executor.submit(member.score, clips) for member in apart}
            outcomes = {m.spec.title: m.score(clips) for m in self._members if not m.spec.overlap}
            outcomes |= {title: future.result() for title, future in coming.items()}
            return [outcomes[title] for title in self.titles]
        finally:
            executor.shutdown(wait=False, cancel_futures=True)  # an error here does not wait for a slow server

    def try_out(
        self,
        prompt: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        others: Sequence[tuple[str, Mapping[str, Any]]] = (),
        video: VideoSpec | None = None,
        gradient: bool = False,
        sampled: bool = False,
        routes: Sequence[Sequence[str]] = (),
    ) -> str:
        """Call every reward of clips (without `try_out: false`) with a small one, and differentiate those in the total if `gradient`; returns the problems.

        A NaN with a reason (no text to read, no face) is accepted; NaN without one for this prompt and all `others` (each with its metadata) is a
        problem. A failure on the small clip is tried again in the run's own format, if known. Rewards of latents are not tried, because the latents'
        format depends on the model. sampled: whether the run will have latents. routes: the rewards that each of the prompts names.
        """
        problems = []
        self.onload()
        for member in self._members:
            if member.reads_latents and not sampled:
                raise RewardConfigError(without_latents(member.spec))
            prompts = [(prompt, metadata or {}), *others]
            prompts = [one for one, route in zip(prompts, routes or [()] * len(prompts)) if member.judges(route)]
            if member.spec.try_out and prompts and not member.reads_latents:
                problem = member.try_out(SMALL if video is None else replace(SMALL, fps=video.fps), prompts, gradient)
                if problem and video is not None:
                    problem = member.try_out(video, prompts, gradient)
                if problem:
                    problems.append(f"Reward {member.spec.title!r} failed when it was tried out: {problem}")
        self.offload()
        if problems:
            problems.append("Repair it, or set try_out: false for a reward that cannot score such a clip.")
        return "\n".join(problems)
