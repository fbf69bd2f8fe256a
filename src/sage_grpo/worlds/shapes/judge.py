"""A judge by analysis-by-synthesis: it scores a clip by the nearest clip that the renderer could have drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sage_grpo.types import PartScores, RewardFacts
from sage_grpo.worlds.judging import Judge, Reader, Smallest, Verdict, check_clips
from sage_grpo.worlds.shapes.fit import (
    MOTION_WIDTH,
    MOTIONS,
    SPEEDS,
    FrameFit,
    MotionFit,
    fit_frames,
    fit_motion,
    nearest_clip,
)
from sage_grpo.worlds.shapes.render import palette
from sage_grpo.worlds.shapes.scene import ATTRIBUTES, SceneBatch, from_text

WEIGHTS: dict[str, float] = {
    "shape": 0.20,
    "colour": 0.20,
    "motion": 0.20,
    "speed": 0.13,
    "size": 0.13,
    "background": 0.14,
}
"""Share of each attribute in TA; they sum to one."""

_SMALLEST = Smallest(frames=5, side=16, why="with fewer, slow and fast bounces look alike")
_read = Reader("shapes", tuple(ATTRIBUTES), from_text)


@dataclass(frozen=True, kw_only=True)
class ShapesJudge(Judge[SceneBatch]):
    """Reward for clips of the shapes world, by analysis-by-synthesis.

    The parts, besides ``Overall`` and ``drift`` (see `Judge`):

    - ``VQ`` in [0, 1]: every frame is compared with the nearest frame that has one object of the world on one of
      its backgrounds, wherever that object is. Needs exactly one object.
    - ``MQ`` in [0, 1]: how closely the object's centres follow the nearest path of any motion and speed, with one
      identity throughout. A still object follows none.
    - ``TA`` in [0, 1]: the agreement of the clip with the prompt; ``TA/shape`` and so on are its parts. Each
      counts in proportion to the frames (or, for motion and speed, to the likelihood), so it rises smoothly.

    All parts but drift are gated by "there is exactly one object", without which blank clips score well. fps is
    not used: in this world speed is the length of the path in one clip.
    """

    read, weights, smallest = _read, WEIGHTS, _SMALLEST
    facts: ClassVar = RewardFacts(
        what="the judge of the embedded shapes world",
        parts="VQ, MQ, TA, Overall, drift, and TA/NAME of every attribute",
    )

    visual_width: float = 0.09
    """R.m.s. pixel residual at which VQ has fallen to 1/e; 30 dB of noise leave 0.88."""
    motion_width: float = 0.08
    """R.m.s. distance from the path, in world units, at which MQ has fallen to 1/e; 0.0625 is a pixel of 32."""

    def differentiable(self, videos: Tensor, prompts: Sequence[str], fps: float) -> PartScores:
        """The same for float clips in [0, 255], with a graph. The nearest scene is found first and does not move with the pixels."""
        with torch.autocast(videos.device.type, enabled=False):
            return self.parts(self.look(videos / 255), prompts)

    def look(self, videos: Tensor) -> Verdict[SceneBatch]:
        videos = videos.float() / 255 if videos.dtype == torch.uint8 else videos.float()
        frames = fit_frames(videos)
        size = frames.size.mean(1).argmax(1)
        motions = fit_motion(frames.centres, size)
        nearest, drift = nearest_clip(videos, frames, motions)
        vq = (frames.gate * torch.exp(-(frames.residual / self.visual_width).square())).mean(1)
        follows = torch.exp(-motions.error.amin(1) / self.motion_width**2)
        always = (frames.gate.mean(1) + frames.gate.amin(1)) / 2  # one missing frame is a fault of motion
        return Verdict(
            vq=vq,
            mq=follows * always * _steady(frames),
            gate=frames.gate.mean(1),
            drift=drift,
            beliefs=_clip_beliefs(frames, motions),
            nearest=nearest,
        )


@dataclass(frozen=True, kw_only=True)
class NaiveProxy:
    """A deliberately hackable reward, for studying reward hacking; part ``proxy``, in about [0, 2].

    It adds three things that good clips have more of than bad ones: pixels near the colour that the prompt names,
    saturation, and change between frames. It needs no object, so it is hacked by flooding the frame with
    the prompt's colour and by flashing. Compare it with ShapesJudge's Overall and drift. NaN for a prompt that
    `from_text` does not understand.
    """

    facts: ClassVar = RewardFacts(what="a naive proxy in the shapes world that can be hacked", parts="proxy")

    colour_width: float = 0.1
    """Squared RGB distance at which a pixel's colour credit has fallen to 1/e."""
    change_weight: float = 2.0
    """Weight of the mean absolute difference between successive frames."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parts that a call returns."""
        return ("proxy",)

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> PartScores:
        """Score uint8 clips B x F x H x W x 3 against the colours that their prompts name."""
        check_clips(videos, prompts, _SMALLEST)
        return self.differentiable(videos, prompts, fps)

    def differentiable(self, videos: Tensor, prompts: Sequence[str], fps: float) -> PartScores:
        """The same with a graph, for float clips in [0, 255]."""
        pixels = videos.float() / 255
        wanted = _read(prompts, videos.device)
        target = palette(wanted.values["colour"])[:, None, None, None]
        near = torch.exp(-(pixels - target).square().sum(-1) / self.colour_width).mean((1, 2, 3))
        saturation = (pixels.amax(-1) - pixels.amin(-1)).mean((1, 2, 3))
        change = pixels.diff(dim=1).abs().mean((1, 2, 3, 4))
        score = near + 0.5 * saturation + self.change_weight * change
        return PartScores({"proxy": score.masked_fill(~wanted.understood, torch.nan)}, wanted.reasons)


def _clip_beliefs(frames: FrameFit, motions: MotionFit) -> dict[str, Tensor]:
    """Beliefs about a clip. Standing still competes with the motions, so that it takes their credit."""
    errors = torch.cat([motions.error, motions.still.unsqueeze(1)], dim=1)
    joint = torch.softmax(-errors / MOTION_WIDTH, dim=1)[:, :-1].unflatten(1, (MOTIONS, SPEEDS))
    return {
        "shape": frames.shape.mean(1),
        "colour": frames.colour.mean(1),
        "motion": joint.sum(2),
        "speed": joint.sum(1),
        "size": frames.size.mean(1),
        "background": frames.background.mean(1),
    }


def _steady(frames: FrameFit) -> Tensor:
    """Degree to which all frames show the same object on the same background, B."""
    looks = (frames.shape, frames.size, frames.colour, frames.background)
    return torch.stack([beliefs.mean(1).amax(1) for beliefs in looks]).mean(0)
