"""A judge that knows the scenes: it scores a clip by the nearest thing that the renderer could have drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from research.scenes.fit import (
    STRAY_FROM,
    STRAY_TO,
    MotionFit,
    Parts,
    PlaceFit,
    fit_motion,
    fit_place,
    nearest_clip,
    redraw,
    stray,
    tell_apart,
)
from research.scenes.judging import PIXELS_AT_ONCE as PIXELS_AT_ONCE
from research.scenes.judging import Judge, Reader, Smallest, Verdict, pick, ramp
from research.scenes.objects import SLOTS, ObjectFit, find_objects
from research.scenes.scene import ATTRIBUTES, SIDE, SceneBatch, from_text
from sage_grpo.types import RewardFacts

WEIGHTS: dict[str, float] = {
    "place": 0.10,
    "camera": 0.10,
    "count": 0.12,
    "kind": 0.13,
    "colour": 0.13,
    "texture": 0.12,
    "verb": 0.14,
    "relation": 0.08,
    "other_kind": 0.04,
    "other_colour": 0.04,
}
"""Share of each attribute in TA; they sum to one."""

_SMALLEST = Smallest(frames=9, side=32, why="with fewer, a bounce cannot be seen")
_read = Reader("scenes", tuple(ATTRIBUTES), from_text)


@dataclass(frozen=True, kw_only=True)
class ScenesJudge(Judge[SceneBatch]):
    """Reward for clips of the scenes world, by analysis-by-synthesis.

    The parts, besides ``Overall`` and ``drift`` (see `Judge`):

    - ``VQ`` in [0, 1]: every frame is compared with the nearest frame that has objects of the world in one of its
      places, wherever they are.
    - ``MQ`` in [0, 1]: how closely the objects follow the nearest path of any verb, turning as they should, with one
      identity throughout, before a camera that moves as one of the three does. What stands still follows none.
    - ``TA`` in [0, 1]: how far the clip shows what the prompt says; ``TA/kind`` and so on are its parts. Where the
      prompt names no second object, relation, other_kind and other_colour ask that there is none.

    All parts but drift are gated by "there is an object, and nothing unexplained of its size", without which blank
    clips score well. Clips with a shorter side above 64 are judged at 64. fps is not used: a verb takes one clip.
    """

    read, weights, smallest = _read, WEIGHTS, _SMALLEST
    facts: ClassVar = RewardFacts(
        what="the judge of the embedded scenes world",
        parts="VQ, MQ, TA, Overall, drift, and TA/NAME of every attribute",
    )

    visual_width: float = 0.09
    """R.m.s. pixel residual at which VQ has fallen to 1/e; 30 dB of noise leave 0.88."""
    motion_width: float = 0.08
    """R.m.s. distance from the path, in world units, at which MQ has fallen to 1/e; 0.03 is a pixel of 64."""
    turn_width: float = 0.12
    """Misfit of the turns, as a share of the object's area, at which MQ has fallen to 1/e."""
    shake_width: float = 0.05
    """R.m.s. distance of the camera from its way, in world units, at which MQ has fallen to 1/e."""

    def look(self, videos: Tensor) -> Verdict[SceneBatch]:
        videos = _at_size(videos.float() / 255 if videos.dtype == torch.uint8 else videos.float())
        place = fit_place(videos)
        objects = find_objects(videos, place.gain * place.plates)
        motions = fit_motion(objects, place.scroll)
        parts = tell_apart(objects, motions)
        nearest, drift = nearest_clip(videos, place, objects, motions, parts)

        rest = (videos - redraw(place, objects, motions, parts)).flatten(0, 1)
        there = pick(objects.present, parts.mover).amax(1)  # B x F
        gate = there * (1 - ramp(stray(rest), STRAY_FROM, STRAY_TO)).unflatten(0, there.shape)
        residual = rest.square().mean((1, 2, 3)).unflatten(0, there.shape)
        always = (gate.mean(1) + gate.amin(1)) / 2  # one missing frame is a fault of motion
        return Verdict(
            vq=(gate * torch.exp(-residual / self.visual_width**2)).mean(1),
            mq=self._follows(place, motions, parts) * always * _steady(place, objects, parts),
            gate=gate.mean(1),
            drift=drift,
            beliefs=_beliefs(place, objects, motions, parts),
            nearest=nearest,
        )

    def _follows(self, place: PlaceFit, motions: MotionFit, parts: Parts) -> Tensor:
        """Closeness of all motion to that of something in this world would, B."""
        fault = motions.error / self.motion_width**2 + motions.turn / self.turn_width
        idle = pick(motions.still, 1 - parts.mover) / self.motion_width**2 * parts.other
        shake = place.shake / self.shake_width**2
        return torch.exp(-pick(fault, parts.mover).amin(1) - idle - shake)


def _at_size(videos: Tensor) -> Tensor:
    """Clips at most SIDE high or wide, whichever is shorter."""
    height, width = videos.shape[2:4]
    short = min(height, width)
    if short <= SIDE:
        return videos
    size = (round(height * SIDE / short), round(width * SIDE / short))
    small = F.adaptive_avg_pool2d(videos.flatten(0, 1).movedim(-1, 1), size).movedim(1, -1)
    return small.unflatten(0, videos.shape[:2])


def _beliefs(place: PlaceFit, objects: ObjectFit, motions: MotionFit, parts: Parts) -> dict[str, Tensor]:
    """Beliefs about a clip. Doing nothing competes with the verbs, so that it takes their credit."""
    costs = torch.cat([motions.cost, motions.idle.unsqueeze(2)], 2)
    number = pick(objects.present, parts.mover).sum(1).unsqueeze(-1)  # B x F x 1
    counts = torch.arange(1, SLOTS + 1, device=number.device)
    rest = 1 - parts.mover
    second = parts.other.unsqueeze(1)
    return {
        "place": place.place.mean(1),
        "camera": place.camera,
        "count": (1 - (number - counts).abs()).clamp_min(0).mean(1),
        "kind": pick(objects.kind, parts.mover).mean(1),
        "colour": pick(objects.colour, parts.mover).mean(1),
        "texture": pick(objects.texture, parts.mover).mean(1),
        "verb": torch.softmax(-pick(costs, parts.mover), 1)[:, :-1],
        "relation": parts.relation,
        "other_kind": torch.cat([1 - second, second * pick(objects.kind, rest).mean(1)], 1),
        "other_colour": torch.cat([1 - second, second * pick(objects.colour, rest).mean(1)], 1),
    }


def _steady(place: PlaceFit, objects: ObjectFit, parts: Parts) -> Tensor:
    """Degree to which all frames show the same objects in the same place, B."""
    looks = [pick(beliefs, parts.mover) for beliefs in (objects.kind, objects.colour, objects.texture)]
    return torch.stack([beliefs.mean(1).amax(1) for beliefs in (*looks, place.place)]).mean(0)
