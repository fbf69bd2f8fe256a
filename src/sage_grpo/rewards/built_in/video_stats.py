"""Training-free statistics of clips: cheap rewards, and guards against reward hacking.

They are measurements, not judgments: give the bad ones (flicker, warp_error, midframe_error, duplicate_frames) a negative weight. All are means over
frames, vectorized, without weights, and ignore the prompt. Statistics that compare frames are NaN with a reason on a clip of too few frames, never 0.
Motion is measured by block matching from coarse to fine, then a gradient step below a pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_grpo.rewards.functions import RewardConfigError, check_known
from sage_grpo.types import PartScores, RewardFacts

SPAN = 1 / 8
"""Frames are compared at most this many seconds apart, whatever the frame rate: a slow pan moves too little between neighbors."""
FLOW_SIDE = 96
"""Frames are pooled until their short side is below twice this."""
COARSEST = 12
"""No level of the search has a short side below this."""
BLOCK, REACH = 8, 2
"""Size of the blocks, and reach of the search at every level, in pixels of that level."""
EXPLAINED = 0.5
"""A block moves only if its best match leaves less than this share of its contrast: new noise matches nothing."""
FLAT = 2 / 255
"""Blocks with less contrast (mean absolute deviation) show no motion."""
LEVELS = 8
"""Levels a color channel in the histogram of `colour_entropy`."""
RADIUS = 4
"""Reach of the search of `warp_error`, in pooled pixels."""
DUPLICATE = 0.5 / 255
"""Two frames whose mean absolute difference in luma is below this are the same frame."""


class StatisticsBatch:
    """A batch of clips with everything that several statistics share, computed once."""

    def __init__(self, videos: Tensor, fps: float) -> None:
        self.videos, self.fps = videos, fps

    @cached_property
    def luma(self) -> Tensor:
        """B x F x H x W in [0, 1]."""
        # channel by channel: a float copy of the whole clip would take three times the memory
        red, green, blue = self.videos.unbind(dim=-1)
        return red * (0.299 / 255) + green * (0.587 / 255) + blue * (0.114 / 255)


def sharpness(clip: StatisticsBatch) -> Tensor:
    """Variance of the Laplacian of luma, x 1000."""
    kernel = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]], device=clip.luma.device).view(1, 1, 3, 3)
    if min(clip.luma.shape[-2:]) < 3:
        raise ValueError("sharpness needs frames of at least 3 x 3 pixels.")
    edges = F.conv2d(clip.luma.flatten(0, 1).unsqueeze(1), kernel).flatten(1)
    return 1000 * edges.var(dim=1, unbiased=False).view(clip.luma.shape[:2]).mean(dim=1)


def saturation(clip: StatisticsBatch) -> Tensor:
    """Mean HSV saturation, (max - min) / max, in [0, 1]."""
    high = clip.videos.amax(dim=-1).float()
    low = clip.videos.amin(dim=-1).float()
    return ((high - low) / high.clamp(min=1)).flatten(1).mean(dim=1)


def brightness(clip: StatisticsBatch) -> Tensor:
    return clip.luma.flatten(1).mean(dim=1)


def colour_entropy(clip: StatisticsBatch) -> Tensor:
    """Entropy of the clip's colors over 8 x 8 x 8 bins, as a fraction of the largest possible, in [0, 1]."""
    count, bins = clip.videos.shape[0], LEVELS**3
    red, green, blue = ((channel // (256 // LEVELS)).int() for channel in clip.videos.unbind(dim=-1))
    index = (red * LEVELS + green) * LEVELS + blue
    offset = torch.arange(count, device=index.device, dtype=torch.int32).view(-1, 1) * bins
    share = torch.bincount((index.flatten(1) + offset).flatten(), minlength=count * bins).view(count, bins).double()
    share = share / share.sum(dim=1, keepdim=True)
    entropy = -torch.special.xlogy(share, share).sum(dim=1)
    return (entropy / torch.log(torch.tensor(float(bins)))).float()


def motion(clip: StatisticsBatch) -> Tensor:
    """Mean speed of the picture's blocks, in frame heights a second: independent of resolution and of fps."""
    count, frames = clip.luma.shape[:2]
    stride = min(max(1, int(clip.fps * SPAN + 1e-6)), frames - 1)
    small = _pooled(clip.luma[:, ::stride])
    before, after = small[:, :-1].flatten(0, 1), small[:, 1:].flatten(0, 1)
    flow, moves = track(before.unsqueeze(1), after.unsqueeze(1))
    length = torch.where(moves, flow.norm(dim=1), 0.0)
    heights = inner(length).flatten(1).mean(dim=1) / small.shape[-2]
    return heights.view(count, -1).mean(dim=1) * (clip.fps / stride)


def warp_error(clip: StatisticsBatch) -> Tensor:
    """Mean absolute luma difference of neighboring frames that remains after the best whole shift of every block."""
    small = _pooled(clip.luma)
    before, after = (part.flatten(0, 1).unsqueeze(1) for part in (small[:, :-1], small[:, 1:]))
    _, residual = _best_shift(before, after, RADIUS)
    return residual.view(len(small), -1).mean(dim=1)


def midframe_error(clip: StatisticsBatch) -> Tensor:
    """Mean absolute luma difference of every second frame from the one half way between its neighbors (moved toward each other by half of the motion
    of every block, and averaged): small for steady motion, large for stutter and jitter.
    """
    small = _pooled(clip.luma)
    before, middle, after = (small[:, start:stop:2] for start, stop in ((0, -2), (1, -1), (2, None)))
    before, middle, after = (part.flatten(0, 1).unsqueeze(1) for part in (before, middle, after))
    flow, moves = track(before, after)
    half = _dense(torch.where(moves.unsqueeze(1), flow, 0.0), after) / 2
    guess = (_warp(before, half) + _warp(after, -half)) / 2
    return inner(_blocks((guess - middle).abs())).reshape(len(small), -1).mean(dim=1)


def flicker(clip: StatisticsBatch) -> Tensor:
    """Mean absolute second difference of the frames' brightness: 0 for a constant light and for a steady fade."""
    level = clip.luma.mean(dim=(-1, -2))
    return (level[:, 2:] - 2 * level[:, 1:-1] + level[:, :-2]).abs().mean(dim=1)


def duplicate_frames(clip: StatisticsBatch) -> Tensor:
    difference = (clip.luma[:, 1:] - clip.luma[:, :-1]).abs().mean(dim=(-1, -2))
    return (difference < DUPLICATE).float().mean(dim=1)


def _pooled(luma: Tensor) -> Tensor:
    while min(luma.shape[-2:]) >= 2 * FLOW_SIDE:
        luma = F.avg_pool2d(luma, 2)
    return luma


def inner(blocks: Tensor) -> Tensor:
    """The blocks without the outermost ones, whose content comes from outside the picture; all blocks where there are too few."""
    rows, columns = blocks.shape[-2:]
    if rows >= 5:
        blocks = blocks[..., 1:-1, :]
    return blocks[..., 1:-1] if columns >= 5 else blocks


def track(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Shifts from the blocks of `after` to their origin in `before` (both N x 1 x H x W), N x 2 x rows x columns in pixels (y, x), and a mask of the
    blocks that their shift explains."""
    side = min(after.shape[-2:])
    levels = [1]
    while side / (2 * levels[-1]) >= COARSEST:
        levels.append(2 * levels[-1])
    flow = torch.zeros(after.shape[0], 2, 1, 1, device=after.device)
    for pool in reversed(levels):
        old, new = (F.avg_pool2d(image, pool) if pool > 1 else image for image in (before, after))
        guess = _dense(flow, new) / pool
        flow = (_blocks(guess) + _best_shift(_warp(old, guess), new, REACH)[0]) * pool
    dense = _dense(flow, after)
    for _ in range(2):
        dense = dense + _dense(_refine(_warp(before, dense), after), after)
    flow, residual = _blocks(dense), _blocks((_warp(before, dense) - after).abs())
    contrast = _blocks((after - _dense(_blocks(after), after)).abs())
    return flow, ((contrast > FLAT) & (residual < EXPLAINED * contrast)).squeeze(1)


def _best_shift(before: Tensor, after: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """The whole shift of every block that fits best, N x 2 x rows x columns in pixels (y, x), and the mean absolute difference that remains."""
    height, width = after.shape[-2:]
    padded = F.pad(before, (reach,) * 4, mode="replicate")
    shift, residual = (torch.zeros_like(_blocks(after).expand(-1, size, -1, -1)) for size in (2, 1))
    best = torch.full_like(residual, torch.inf)
    steps = range(-reach, reach + 1)
    for y, x in sorted(((y, x) for y in steps for x in steps), key=lambda step: step[0] ** 2 + step[1] ** 2):
        moved = padded[..., reach + y : reach + y + height, reach + x : reach + x + width]
        error = _blocks((moved - after).abs())
        # a flat block fits everywhere: the small price of a shift lets it stay where it is
        cost = error + 1e-3 * (y * y + x * x) ** 0.5
        better = cost < best
        best, residual = torch.where(better, cost, best), torch.where(better, error, residual)
        step = torch.tensor([y, x], device=shift.device, dtype=shift.dtype).view(1, 2, 1, 1)
        shift = torch.where(better, step, shift)
    return shift, residual


def _refine(warped: Tensor, new: Tensor) -> Tensor:
    """The shift below a pixel that explains the remaining difference, by least squares over each block (Lucas and Kanade); at most one pixel."""
    padded = F.pad(warped, (1, 1, 1, 1), mode="replicate")
    dy = (padded[..., 2:, 1:-1] - padded[..., :-2, 1:-1]) / 2
    dx = (padded[..., 1:-1, 2:] - padded[..., 1:-1, :-2]) / 2
    left = new - warped
    yy, yx, xx = _blocks(dy * dy) + 1e-6, _blocks(dy * dx), _blocks(dx * dx) + 1e-6
    by, bx = _blocks(dy * left), _blocks(dx * left)
    # 1e-6 keeps the determinant positive where a block has edges of one direction only
    determinant = yy * xx - yx * yx
    step = torch.cat([(xx * by - yx * bx) / determinant, (yy * bx - yx * by) / determinant], dim=1)
    return step.clamp(-1, 1)


def _warp(image: Tensor, flow: Tensor) -> Tensor:
    """image at (place + flow), bilinear, the border repeated; flow is N x 2 x H x W in pixels (y, x)."""
    height, width = image.shape[-2:]
    y = torch.arange(height, device=image.device, dtype=image.dtype).view(-1, 1) + flow[:, 0]
    x = torch.arange(width, device=image.device, dtype=image.dtype).view(1, -1) + flow[:, 1]
    grid = torch.stack([(2 * x + 1) / width - 1, (2 * y + 1) / height - 1], dim=-1)
    return F.grid_sample(image, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _blocks(values: Tensor) -> Tensor:
    return F.avg_pool2d(values, (min(BLOCK, values.shape[-2]), min(BLOCK, values.shape[-1])))


def _dense(blocks: Tensor, like: Tensor) -> Tensor:
    """A value of every block for every pixel of a picture."""
    return F.interpolate(blocks, like.shape[-2:], mode="nearest")


STATISTICS: Mapping[str, Callable[[StatisticsBatch], Tensor]] = {
    "sharpness": sharpness,
    "saturation": saturation,
    "brightness": brightness,
    "colour_entropy": colour_entropy,
    "motion": motion,
    "flicker": flicker,
    "warp_error": warp_error,
    "midframe_error": midframe_error,
    "duplicate_frames": duplicate_frames,
}
NEEDED_FRAMES = {"motion": 2, "warp_error": 2, "duplicate_frames": 2, "flicker": 3, "midframe_error": 3}
"""Least number of frames for a statistic; the others need one."""


SMOOTH = frozenset({"brightness", "saturation", "sharpness", "flicker"})
"""Statistics that have a gradient by the pixels."""


class VideoStats:
    """Chosen statistics as one reward; all of them by default."""

    facts = RewardFacts(what="measurements without weights, guards against reward hacking", parts=", ".join(STATISTICS))

    def __init__(self, *, parts: Sequence[str] = ()) -> None:
        check_known(parts, STATISTICS, "video_stats has no part")
        self.names = tuple(parts) or tuple(STATISTICS)

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        clip, frames = StatisticsBatch(videos, fps), videos.shape[1]
        short = [part for part in self.names if frames < NEEDED_FRAMES.get(part, 1)]
        nothing = torch.full((videos.shape[0],), torch.nan, device=videos.device)
        values = {part: nothing if part in short else STATISTICS[part](clip) for part in self.names}
        needs = ", ".join(f"{part} needs {NEEDED_FRAMES[part]}" for part in short)
        reasons = dict.fromkeys(range(videos.shape[0]), f"the clip has {frames} frame(s): {needs}") if short else {}
        return PartScores(values, reasons)

    def differentiable(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        """The parts that have a gradient, of float clips in [0, 255]."""
        rough = [part for part in self.names if part not in SMOOTH]
        if rough:
            raise RewardConfigError(
                f"video_stats: {', '.join(rough)} has no gradient; choose among {', '.join(sorted(SMOOTH))}."
            )
        clip = StatisticsBatch(videos, fps)
        return {part: STATISTICS[part](clip) for part in self.names}
