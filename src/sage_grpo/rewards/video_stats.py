"""Training-free statistics of clips: cheap rewards, and guards against reward hacking.

They are measurements, not judgements: give the bad ones (flicker, warp_error, duplicate_frames) a negative weight.
All are means over frames, vectorised, without weights, and do not look at the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_grpo.rewards.functions import RewardConfigError, nearest

LEVELS = 8
"""Levels a colour channel in the histogram of `colour_entropy`."""
FLOW_SIDE = 96
"""Frames are pooled until their short side is below twice this before motion is searched."""
BLOCK, RADIUS = 8, 4
"""Size of the blocks and reach of the search, in pooled pixels."""
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
    def matched(self) -> tuple[Tensor, Tensor]:
        """Speed in frame heights a second and residual in luma, B each: block matching between neighbours."""
        if self.luma.shape[1] < 2:
            zero = torch.zeros(self.luma.shape[0], device=self.luma.device)
            return zero, zero
        small = self.luma
        while min(small.shape[-2:]) >= 2 * FLOW_SIDE:
            small = F.avg_pool2d(small, 2)
        shift, residual = match_blocks(small[:, :-1].flatten(0, 1), small[:, 1:].flatten(0, 1))
        count = self.luma.shape[0]
        speed = shift.view(count, -1).mean(dim=1) / small.shape[-2] * self.fps
        return speed, residual.view(count, -1).mean(dim=1)


def match_blocks(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Length of the best shift in pixels and remaining mean absolute difference, for every block of N x H x W."""
    height, width = before.shape[-2:]
    block = min(BLOCK, height, width)
    padded = F.pad(before.unsqueeze(1), (RADIUS,) * 4, mode="replicate").squeeze(1)
    best = torch.full((before.shape[0], height // block, width // block), torch.inf, device=before.device)
    length, residual = torch.zeros_like(best), torch.zeros_like(best)
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
        length = torch.where(better, torch.full_like(length, norm), length)
    return length, residual


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
    """Mean speed of 8 x 8 blocks, in frame heights a second: independent of resolution and of fps."""
    return clip.matched[0]


def warp_error(clip: Clip) -> Tensor:
    """What neighbouring frames still differ by (mean absolute luma) after the best motion of every block."""
    return clip.matched[1]


def flicker(clip: Clip) -> Tensor:
    """Mean absolute second difference of the frames' brightness: 0 for a constant light and for a steady fade."""
    level = clip.luma.mean(dim=(-1, -2))
    if level.shape[1] < 3:
        return torch.zeros(level.shape[0], device=level.device)
    return (level[:, 2:] - 2 * level[:, 1:-1] + level[:, :-2]).abs().mean(dim=1)


def duplicate_frames(clip: Clip) -> Tensor:
    """Fraction of frames that repeat the one before."""
    if clip.luma.shape[1] < 2:
        return torch.zeros(clip.luma.shape[0], device=clip.luma.device)
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
        duplicate_frames,
    )
}


class VideoStats:
    """Chosen statistics as one reward; all of them by default."""

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
        clip = Clip(videos, fps)
        return {part: STATISTICS[part](clip) for part in self._parts}
