"""A judge by analysis-by-synthesis: it scores a clip by the nearest clip that the renderer could have drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from sage_grpo.rewards.frames import check_clips
from sage_grpo.types import PartScores, RewardFacts
from sage_grpo.worlds.shapes.fit import MOTION_WIDTH, MOTIONS, SPEEDS, fit_frames, fit_motion, nearest_clip
from sage_grpo.worlds.shapes.render import palette
from sage_grpo.worlds.shapes.scene import ATTRIBUTES, SceneBatch, from_text

WEIGHTS = {"shape": 0.20, "colour": 0.20, "motion": 0.20, "speed": 0.13, "size": 0.13, "background": 0.14}
"""Share of each attribute in TA; they sum to one."""
LEAST_FRAMES, LEAST_SIDE = 5, 16
"""The shortest and smallest clips that can be judged."""
PIXELS_AT_ONCE = {"cpu": 2**21, "cuda": 2**24}
"""By device: clips are judged in portions of about this many pixels, to bound memory. A portion is thousands of small operations, each of which takes a GPU
as long for one clip as for many."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Everything that the judge sees in a batch of clips before it reads a prompt."""

    vq: Tensor  # visual quality, B
    mq: Tensor  # motion quality, B
    gate: Tensor  # mean over the frames of "there is exactly one object", B
    drift: Tensor  # r.m.s. distance to the nearest renderable clip, B
    beliefs: dict[str, Tensor]  # for every attribute B x (its values): how far the clip shows each
    nearest: SceneBatch


@dataclass(frozen=True, kw_only=True)
class ShapesJudge:
    """Reward for clips of the shapes world, by analysis-by-synthesis, in portions that fit into memory.

    - ``VQ`` in [0, 1]: every frame is compared with the nearest frame that has one object of the world on one of its backgrounds, wherever that object is.
    - ``MQ`` in [0, 1]: how closely the object's centers follow the nearest path of any motion and speed, with one identity throughout.
    - ``TA`` in [0, 1]: the agreement of the clip with the prompt; ``TA/shape`` and so on are its parts. Each counts in proportion to the frames (or, for
      motion and speed, to the likelihood), so it rises smoothly. NaN for a prompt that `from_text` does not understand.
    - ``Overall`` = TA + MQ / 2 + VQ / 2.
    - ``drift``, of which LOWER is better: the r.m.s. distance (pixels in [0, 1]) to the nearest renderable clip, so how far a policy has left the data
      manifold. Give it weight 0, or a negative one.

    All parts but drift are gated by "there is exactly one object", without which blank clips score well. fps is not used: in this world speed is the
    length of the path in one clip.
    """

    weights: ClassVar = WEIGHTS
    names: ClassVar = ("VQ", "MQ", "TA", "Overall", "drift", *(f"TA/{name}" for name in WEIGHTS))
    facts: ClassVar = RewardFacts(
        what="the judge of the embedded shapes world",
        parts="VQ, MQ, TA, Overall, drift, and TA/NAME of every attribute",
    )

    visual_width: float = 0.09
    """R.m.s. pixel residual at which VQ has fallen to 1/e; 30 dB of noise leave 0.88."""
    motion_width: float = 0.08
    """R.m.s. distance from the path, in world units, at which MQ has fallen to 1/e; 0.0625 is a pixel of 32."""

    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> PartScores:
        _check_clips(videos, prompts, fps)
        if not len(videos):
            return PartScores({name: torch.zeros(0, device=videos.device) for name in self.names})
        return self.parts(self.examine(videos), prompts)

    def differentiable(self, videos: Tensor, prompts: Sequence[str], fps: float) -> PartScores:
        """The same for float clips in [0, 255], with a graph. The nearest scene is found first and does not move with the pixels."""
        with torch.autocast(videos.device.type, enabled=False):
            return self.parts(self._look(videos / 255), prompts)

    def parts(self, verdict: Verdict, prompts: Sequence[str]) -> PartScores:
        wanted, understood, reasons = _read(prompts, verdict.vq.device)
        parts = {"VQ": verdict.vq, "MQ": verdict.mq, "drift": verdict.drift, "TA": torch.zeros_like(verdict.gate)}
        for name, weight in WEIGHTS.items():
            match = verdict.beliefs[name].gather(1, wanted[name].unsqueeze(1)).squeeze(1)
            parts[f"TA/{name}"] = match.masked_fill(~understood, torch.nan) * verdict.gate
            parts["TA"] = parts["TA"] + weight * parts[f"TA/{name}"]
        parts["Overall"] = parts["TA"] + 0.5 * verdict.mq + 0.5 * verdict.vq
        return PartScores({name: parts[name].float() for name in self.names}, reasons)

    @torch.no_grad()
    def examine(self, videos: Tensor) -> Verdict:
        """Content of the clips, without their prompts: uint8 or float in [0, 1], B x F x H x W x 3."""
        most = PIXELS_AT_ONCE.get(videos.device.type, PIXELS_AT_ONCE["cpu"])
        portion = max(1, most // videos[0, ..., 0].numel())
        with torch.autocast(videos.device.type, enabled=False):  # a caller's half precision would blunt the fit
            verdicts = [self._look(part) for part in videos.split(portion)]
        nearest = [vars(one.nearest) for one in verdicts]
        return Verdict(
            **{name: torch.cat([getattr(one, name) for one in verdicts]) for name in ("vq", "mq", "gate", "drift")},
            beliefs={name: torch.cat([one.beliefs[name] for one in verdicts]) for name in WEIGHTS},
            nearest=SceneBatch(**{name: torch.cat([one[name] for one in nearest]) for name in nearest[0]}),
        )

    def _look(self, videos: Tensor) -> Verdict:
        videos = videos.float() / 255 if videos.dtype == torch.uint8 else videos.float()
        frames = fit_frames(videos)
        size = frames.size.mean(1).argmax(1)
        motions = fit_motion(frames.centres, size)
        nearest, drift = nearest_clip(videos, frames, motions)
        vq = (frames.gate * torch.exp(-(frames.residual / self.visual_width).square())).mean(1)
        follows = torch.exp(-motions.error.amin(1) / self.motion_width**2)
        always = (frames.gate.mean(1) + frames.gate.amin(1)) / 2  # one missing frame is a fault of motion
        # the degree to which all frames show the same object on the same background
        alike = [getattr(frames, name).mean(1).amax(1) for name in ("shape", "size", "colour", "background")]
        steady = torch.stack(alike).mean(0)
        # standing still competes with the motions, so that it takes their credit
        errors = torch.cat([motions.error, motions.still.unsqueeze(1)], dim=1)
        joint = torch.softmax(-errors / MOTION_WIDTH, dim=1)[:, :-1].unflatten(1, (MOTIONS, SPEEDS))
        # means of their own, not those above: gradients add up in this order
        looks = {name: getattr(frames, name).mean(1) for name in ("shape", "colour", "size", "background")}
        return Verdict(
            vq=vq,
            mq=follows * always * steady,
            gate=frames.gate.mean(1),
            drift=drift,
            beliefs={**looks, "motion": joint.sum(2), "speed": joint.sum(1)},
            nearest=nearest,
        )


@dataclass(frozen=True, kw_only=True)
class NaiveProxy:
    """A deliberately hackable reward, for studying reward hacking; part ``proxy``, in about [0, 2].

    It adds three things that good clips have more of than bad ones: pixels near the color that the prompt names, saturation, and change between frames.
    It needs no object, so it is hacked by flooding the frame with the prompt's color and by flashing. Compare it with ShapesJudge's Overall and
    drift. NaN for a prompt that `from_text` does not understand.
    """

    names: ClassVar = ("proxy",)
    facts: ClassVar = RewardFacts(what="a naive proxy in the shapes world that can be hacked", parts="proxy")

    colour_width: float = 0.1
    """Squared RGB distance at which a pixel's color credit has fallen to 1/e."""
    change_weight: float = 2.0
    """Weight of the mean absolute difference between successive frames."""

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> PartScores:
        _check_clips(videos, prompts, fps)
        return self.differentiable(videos, prompts, fps)

    def differentiable(self, videos: Tensor, prompts: Sequence[str], fps: float) -> PartScores:
        pixels = videos.float() / 255
        wanted, understood, reasons = _read(prompts, videos.device)
        target = palette(wanted["colour"])[:, None, None, None]
        near = torch.exp(-(pixels - target).square().sum(-1) / self.colour_width).mean((1, 2, 3))
        saturation = (pixels.amax(-1) - pixels.amin(-1)).mean((1, 2, 3))
        change = pixels.diff(dim=1).abs().mean((1, 2, 3, 4))
        score = near + 0.5 * saturation + self.change_weight * change
        return PartScores({"proxy": score.masked_fill(~understood, torch.nan)}, reasons)


def _read(prompts: Sequence[str], device: torch.device) -> tuple[dict[str, Tensor], Tensor, dict[int, str]]:
    """By attribute the indices of the values that prompts ask for (0 where one is not understood), a mask of the understood ones, reasons for the others."""
    rows = [_indices(prompt) for prompt in prompts]
    reasons = {place: row for place, row in enumerate(rows) if isinstance(row, str)}
    blank = (0,) * len(ATTRIBUTES)
    table = torch.tensor([blank if isinstance(row, str) else row for row in rows], dtype=torch.int64)
    columns = table.reshape(-1, len(ATTRIBUTES)).to(device).unbind(1)
    understood = torch.tensor([place not in reasons for place in range(len(rows))], dtype=torch.bool).to(device)
    return dict(zip(ATTRIBUTES, columns)), understood, reasons


@lru_cache(maxsize=65536)
def _indices(prompt: str) -> tuple[int, ...] | str:
    """The indices of the values that a prompt names, or the reason why it is not understood."""
    try:
        return from_text(prompt).indices
    except ValueError as error:
        return f"the prompt is outside the grammar of the shapes world: {error}"


def _check_clips(videos: Tensor, prompts: Sequence[str], fps: float) -> None:
    check_clips(videos, prompts, fps)
    _, length, height, width, _ = videos.shape
    if length < LEAST_FRAMES or min(height, width) < LEAST_SIDE:
        raise ValueError(
            f"Clips of {length} frames at {height}x{width} are too small to judge; use at least {LEAST_FRAMES} frames "
            f"(with fewer, slow and fast bounces look alike) and {LEAST_SIDE} pixels a side."
        )
