"""A reward in processes of its own: one that loads it and scores there, and what stands for it where clips are scored."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.member import ClipBatch, Member, Outcome
from sage_grpo.rewards.spec import RewardSpec, load_reward
from sage_grpo.types import Placeable

CPU = torch.device("cpu")


class Asked(Protocol):
    """Judges in other processes."""

    def ask(self, method: str, *given: Any) -> Any:
        """What one of them answers."""
        ...


@dataclass(frozen=True)
class Traits:
    """All that is here of a reward that is elsewhere."""

    names: tuple[str, ...]
    reads: Literal["clips", "latents"]
    compares: bool
    hears: bool

    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        """Nobody calls it here."""
        raise NotImplementedError


class Judge:
    """Holds a reward, in a process of its own."""

    def __init__(
        self, spec: RewardSpec, threads: int, paths: Sequence[str], get_ready: Callable[[], None], device: str
    ) -> None:
        """threads: of PyTorch on the CPU. paths: where code of the user's own is found. get_ready: what comes before the first matrix product."""
        torch.set_num_threads(threads)
        sys.path += [path for path in paths if path not in sys.path]
        get_ready()
        self.member = Member(spec, load_reward(spec), require_weights=False, device=torch.device(device))
        if isinstance(self.member.reward, Placeable):
            self.member.reward.to(self.member.device)

    def traits(self) -> Traits:
        """What those who send clips need to know of it."""
        one = self.member
        return Traits(one.reward.names, "latents" if one.reads_latents else "clips", one.compares, one.hears)

    def frames_read(self, count: int, fps: float) -> set[int] | None:
        """As a member's."""
        return self.member.frames_read(count, fps)

    def score(self, clips: ClipBatch) -> Outcome:
        """As a member's."""
        return self.member.score(clips)


class Away(Member):
    """A reward of a composition that others score: in the batches, and with the search for what fails, that it would have here."""

    def __init__(self, spec: RewardSpec, judges: Asked, *, require_weights: bool) -> None:
        traits: Traits = judges.ask("traits")
        super().__init__(spec, traits, require_weights=require_weights, device=CPU)
        self.hears, self._judges = traits.hears, judges
        self._frames: dict[tuple[int, float], set[int] | None] = {}

    def frames_read(self, count: int, fps: float) -> set[int] | None:
        """Asked once: the judges may be busy."""
        if (count, fps) not in self._frames:
            self._frames[count, fps] = self._judges.ask("frames_read", count, fps)
        return self._frames[count, fps]

    def score(self, clips: ClipBatch) -> Outcome:
        """What a judge says of these clips; only what it reads travels."""
        latents = clips.latents.to(CPU) if self.reads_latents and clips.latents is not None else None
        videos = clips.videos[:, :0] if self.reads_latents else clips.videos
        sound = clips.sound if self.hears else None
        sent = replace(clips, videos=videos.to(CPU), latents=latents, sound=sound)
        found: Outcome = self._judges.ask("score", sent)
        return found

    def differentiable(
        self, videos: Tensor, prompts: Sequence[str], fps: float, metadata: Sequence[Mapping[str, Any]]
    ) -> Tensor:
        """Graphs do not travel."""
        raise RewardConfigError(f"Reward {self.spec.title!r} is differentiated, and has actors: leave them out.")
