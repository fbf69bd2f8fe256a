"""Training-free statistics of clips: cheap rewards, and guards against reward hacking.

They are measurements, not judgements: give the bad ones (flicker, warp_error, midframe_error, duplicate_frames) a negative weight.
All are means over frames, vectorised, without weights, and do not look at the prompt. What compares frames cannot be measured
on a clip of too few: NaN with a reason, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_grpo.rewards.built_in.motion import FLOW_SIDE, midframe, speed
from sage_grpo.rewards.functions import RewardConfigError, nearest
from sage_grpo.types import PartScores, RewardFacts

LEVELS = 8
"""Levels a colour channel in the histogram of `colour_entropy`."""
BLOCK, RADIUS = 8, 4
"""Size of the blocks and reach of the search of `warp_error`, in pooled pixels."""
DUPLICATE = 0.5 / 255
"""Two frames whose mean absolute difference in luma is below this are the same frame."""


class Clip:
    """A batch of clips with everything that several statistics share, computed once."""

    def __init__(self, videos: Tensor, fps: float) -> None:
        self.videos, self.fps = videos, fps

    @cached_property
    def luma(self) -> Tensor:
        """B x F x H x W in [0, 1]."""
        # channel by channel: a float copy of the whole clip would take three times the memory
        red, green, blue = self.videos.unbind(dim=-1)
        return red * (0.299 / 255) + green * (0.587 / 255) + blue * (0.114 / 255)

    @cached_property
    def unmatched(self) -> Tensor:
        """What neighbouring frames differ by (mean absolute luma) after the best whole shift of every block, B."""
        small = self.luma
        while min(small.shape[-2:]) >= 2 * FLOW_SIDE:
            small = F.avg_pool2d(small, 2)
        residual = match_blocks(small[:, :-1].flatten(0, 1), small[:, 1:].flatten(0, 1))
        return residual.view(self.luma.shape[0], -1).mean(dim=1)


def match_blocks(before: Tensor, after: Tensor) -> Tensor:
    """Mean absolute difference that remains after the best shift, for every block of N x H x W."""
    height, width = before.shape[-2:]
    block = min(BLOCK, height, width)
    padded = F.pad(before.unsqueeze(1), (RADIUS,) * 4, mode="replicate").squeeze(1)
    best = torch.full((before.shape[0], height // block, width // block), torch.inf, device=before.device)
    residual = torch.zeros_like(best)
    shifts = [(dy, dx) for dy in range(-RADIUS, RADIUS + 1) for dx in range(-RADIUS, RADIUS + 1)]
    for dy, dx in sorted(shifts, key=lambda shift: shift[0] ** 2 + shift[1] ** 2):
        top, left = RADIUS + dy, RADIUS + dx
        moved = padded[:, top : top + height, left : left + width]
        error = F.avg_pool2d((moved - after).abs().unsqueeze(1), block).squeeze(1)
        norm = (dy**2 + dx**2) ** 0.5
        # a flat block fits everywhere: the small price of a shift lets it stay where it is
        cost = error + 1e-3 * norm
        better = cost < best
        best = torch.where(better, cost, best)
        residual = torch.where(better, error, residual)
    return residual


def sharpness(clip: Clip) -> Tensor:
    """Variance of the Laplacian of luma, x 1000."""
    kernel = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]], device=clip.luma.device).view(1, 1, 3, 3)
    if min(clip.luma.shape[-2:]) < 3:
        raise ValueError("sharpness needs frames of at least 3 x 3 pixels.")
    edges = F.conv2d(clip.luma.flatten(0, 1).unsqueeze(1), kernel).flatten(1)
    return 1000 * edges.var(dim=1, unbiased=False).view(clip.luma.shape[:2]).mean(dim=1)


def saturation(clip: Clip) -> Tensor:
    """Mean HSV saturation, (max - min) / max, in [0, 1]."""
    high = clip.videos.amax(dim=-1).float()
    low = clip.videos.amin(dim=-1).float()
    return ((high - low) / high.clamp(min=1)).flatten(1).mean(dim=1)


def brightness(clip: Clip) -> Tensor:
    """Mean luma in [0, 1]."""
    return clip.luma.flatten(1).mean(dim=1)


def colour_entropy(clip: Clip) -> Tensor:
    """Entropy of the clip's colours over 8 x 8 x 8 bins, as a fraction of the largest possible, in [0, 1]."""
    count, bins = clip.videos.shape[0], LEVELS**3
    red, green, blue = ((channel // (256 // LEVELS)).int() for channel in clip.videos.unbind(dim=-1))
    index = (red * LEVELS + green) * LEVELS + blue
    offset = torch.arange(count, device=index.device, dtype=torch.int32).view(-1, 1) * bins
    share = torch.bincount((index.flatten(1) + offset).flatten(), minlength=count * bins).view(count, bins).double()
    share = share / share.sum(dim=1, keepdim=True)
    entropy = -torch.special.xlogy(share, share).sum(dim=1)
    return (entropy / torch.log(torch.tensor(float(bins)))).float()


def motion(clip: Clip) -> Tensor:
    """Mean speed of the picture's blocks, in frame heights a second: independent of resolution and of fps."""
    return speed(clip.luma, clip.fps)


def warp_error(clip: Clip) -> Tensor:
    """What neighbouring frames still differ by (mean absolute luma) after the best motion of every block."""
    return clip.unmatched


def midframe_error(clip: Clip) -> Tensor:
    """What every second frame differs by (mean absolute luma) from the one half way between its neighbours: unsteady motion."""
    return midframe(clip.luma)


def flicker(clip: Clip) -> Tensor:
    """Mean absolute second difference of the frames' brightness: 0 for a constant light and for a steady fade."""
    level = clip.luma.mean(dim=(-1, -2))
    return (level[:, 2:] - 2 * level[:, 1:-1] + level[:, :-2]).abs().mean(dim=1)


def duplicate_frames(clip: Clip) -> Tensor:
    """Fraction of frames that repeat the one before."""
    difference = (clip.luma[:, 1:] - clip.luma[:, :-1]).abs().mean(dim=(-1, -2))
    return (difference < DUPLICATE).float().mean(dim=1)


STATISTICS: Mapping[str, Callable[[Clip], Tensor]] = {
    function.__name__: function
    for function in (
        sharpness,
        saturation,
        brightness,
        colour_entropy,
        motion,
        flicker,
        warp_error,
        midframe_error,
        duplicate_frames,
    )
}
NEEDED_FRAMES: Mapping[str, int] = {
    "motion": 2,
    "warp_error": 2,
    "duplicate_frames": 2,
    "flicker": 3,
    "midframe_error": 3,
}
"""Frames without which a statistic cannot be measured; the others need one."""


class VideoStats:
    """Chosen statistics as one reward; all of them by default."""

    facts = RewardFacts(
        what="measurements without weights, and guards against reward hacking", parts=", ".join(STATISTICS)
    )

    def __init__(self, *, parts: Sequence[str] = ()) -> None:
        for part in parts:
            if part not in STATISTICS:
                raise RewardConfigError(f"video_stats has no part {part!r}.{nearest(part, STATISTICS)}")
        self._parts = tuple(parts) or tuple(STATISTICS)

    @property
    def names(self) -> tuple[str, ...]:
        """The chosen statistics."""
        return self._parts

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        """Measure the clips; prompts do not matter."""
        clip, frames = Clip(videos, fps), videos.shape[1]
        short = [part for part in self._parts if frames < NEEDED_FRAMES.get(part, 1)]
        nothing = torch.full((videos.shape[0],), torch.nan, device=videos.device)
        values = {part: nothing if part in short else STATISTICS[part](clip) for part in self._parts}
        needs = ", ".join(f"{part} needs {NEEDED_FRAMES[part]}" for part in short)
        reasons = dict.fromkeys(range(videos.shape[0]), f"the clip has {frames} frame(s): {needs}") if short else {}
        return PartScores(values, reasons)
