"""The job that every framework is given, and parts of it that take less time."""

from __future__ import annotations

from dataclasses import dataclass, replace

PROMPT = "a red fox trots through fresh snow at dawn, breath steaming, the camera tracking low beside it"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One iteration of flow-GRPO with a LoRA: one prompt, one update, no KL."""

    frames: int = 81
    height: int = 480
    width: int = 832
    group: int = 4
    """Clips."""
    steps: int = 10
    first: int = 1
    """First step that explores and is trained."""
    trained: int = 4
    """Steps that explore and are trained."""
    rank: int = 32
    """Of the LoRA."""
    eta: float = 0.7
    guidance: float = 5.0

    @property
    def forwards(self) -> int:
        """Forward passes of the rollout, in samples: two for every guided step."""
        return 2 * self.group * self.steps

    @property
    def replays(self) -> int:
        """Guided training passes."""
        return self.group * self.trained

    def part(self, level: int) -> Job:
        """Level 0 is the job, 1 half of its clips, 2 also as few steps as there can be: every phase is linear in these."""
        most = ({}, {"group": 2}, {"group": 2, "steps": 3, "trained": 1})[level]
        return replace(self, **{name: min(getattr(self, name), value) for name, value in most.items()})

    def warmup(self) -> Job:
        """The same tensors and code, as few of them as there can be."""
        return replace(self, group=2, steps=3, first=1, trained=1)  # the last step is deterministic

    def whole(self, part: Job, seconds: dict[str, float]) -> dict[str, float]:
        """Seconds of the whole job by phase, from those of a part of it, and their sum."""
        clips = self.group / part.group
        factors = {"rollout": self.forwards / part.forwards, "update": self.replays / part.replays}
        phases = {name: value * factors.get(name, clips) for name, value in seconds.items()}
        return {**phases, "total": sum(phases.values())}


TINY = Job(frames=5, height=32, width=32, group=4, steps=4, trained=2, rank=4)
"""For plumbing on a CPU."""
FULL = Job()
HUNYUAN15_WIDTH = 848
"""HunyuanVideo-1.5's own 480p is a little wider."""


def choose_level(job: Job, warm: dict[str, float], spent: float, share: float) -> int:
    """The largest part of the job that ends within `share` seconds, by what the warm-up took."""
    pace = job.warmup()
    for level in (0, 1):
        part = job.part(level)
        clips = part.group / pace.group
        factors = {"rollout": part.forwards / pace.forwards, "update": part.replays / pace.replays}
        need = sum(value * factors.get(name, clips) for name, value in warm.items())
        if spent + need < share:
            return level
    return 2
