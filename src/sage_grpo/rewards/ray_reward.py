"""A reward in Ray processes: the actor that loads and runs it, and its proxy where clips are scored."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.member import ClipBatch, Outcome, RewardMember
from sage_grpo.rewards.spec import RewardSpec, load_reward
from sage_grpo.types import Placeable

CPU = torch.device("cpu")


class RewardActors(Protocol):
    """Client of reward actors in other processes."""

    def ask(self, method: str, *arguments: Any) -> Any: ...


@dataclass(frozen=True)
class RewardTraits:
    """Proxy of a remote reward: its properties, without its weights."""

    names: tuple[str, ...]
    reads: Literal["clips", "latents"]
    compares: bool
    hears: bool

    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        raise NotImplementedError


class RewardActor:
    """An actor that holds one reward in a process of its own."""

    def __init__(
        self, spec: RewardSpec, threads: int, paths: Sequence[str], get_ready: Callable[[], None], device: str
    ) -> None:
        """threads: PyTorch's CPU threads. paths: folders of the user's own code. get_ready: called before the first matrix product."""
        torch.set_num_threads(threads)
        sys.path += [path for path in paths if path not in sys.path]
        get_ready()
        self.member = RewardMember(spec, load_reward(spec), require_weights=False, device=torch.device(device))
        if isinstance(self.member.reward, Placeable):
            self.member.reward.to(self.member.device)

    def traits(self) -> RewardTraits:
        one = self.member
        return RewardTraits(one.reward.names, "latents" if one.reads_latents else "clips", one.compares, one.hears)

    def frames_read(self, count: int, fps: float) -> set[int] | None:
        return self.member.frames_read(count, fps)

    def score(self, clips: ClipBatch) -> Outcome:
        return self.member.score(clips)


class ActorMember(RewardMember):
    """A reward of a composition that actors score, with the same batches and search for failures as a local one."""

    def __init__(self, spec: RewardSpec, actors: RewardActors, *, require_weights: bool) -> None:
        traits: RewardTraits = actors.ask("traits")
        super().__init__(spec, traits, require_weights=require_weights, device=CPU)
        self.hears, self._actors = traits.hears, actors
        self._frames: dict[tuple[int, float], set[int] | None] = {}

    def frames_read(self, count: int, fps: float) -> set[int] | None:
        if (count, fps) not in self._frames:
            self._frames[count, fps] = self._actors.ask("frames_read", count, fps)
        return self._frames[count, fps]

    def score(self, clips: ClipBatch) -> Outcome:
        latents = clips.latents.to(CPU) if self.reads_latents and clips.latents is not None else None
        videos = clips.videos[:, :0] if self.reads_latents else clips.videos
        sound = clips.sound if self.hears else None
        sent = replace(clips, videos=videos.to(CPU), latents=latents, sound=sound)
        outcome: Outcome = self._actors.ask("score", sent)
        return outcome

    def differentiable(
        self, videos: Tensor, prompts: Sequence[str], fps: float, metadata: Sequence[Mapping[str, Any]]
    ) -> Tensor:
        raise RewardConfigError(f"Reward {self.spec.title!r} is differentiated, and has actors: leave them out.")
