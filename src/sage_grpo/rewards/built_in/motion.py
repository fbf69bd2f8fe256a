"""How fast a picture moves: block matching from coarse to fine, then a gradient step below a pixel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SPAN = 1 / 8
"""Frames are compared at most this many seconds apart, whatever the frame rate: a slow pan moves too little between neighbours."""
FLOW_SIDE = 96
"""Frames are pooled until their short side is below twice this."""
COARSEST = 12
"""No level of the search has a short side below this."""
BLOCK, RADIUS = 8, 2
"""Size of the blocks, and reach of the search at every level, in pixels of that level."""
EXPLAINED = 0.5
"""A block moves only if its best match leaves less than this share of its contrast: new noise matches nothing."""
FLAT = 2 / 255
"""Blocks with less contrast (mean absolute deviation) show no motion."""


def speed(luma: Tensor, fps: float) -> Tensor:
    """Mean speed of the blocks of B x F x H x W luma in [0, 1], in frame heights a second, B."""
    count, frames = luma.shape[:2]
    stride = min(max(1, int(fps * SPAN + 1e-6)), frames - 1)
    small = _pooled(luma[:, ::stride])
    before, after = small[:, :-1].flatten(0, 1), small[:, 1:].flatten(0, 1)
    flow, moves = track(before.unsqueeze(1), after.unsqueeze(1))
    length = torch.where(moves, flow.norm(dim=1), 0.0)
    heights = inner(length).flatten(1).mean(dim=1) / small.shape[-2]
    return heights.view(count, -1).mean(dim=1) * (fps / stride)


def midframe(luma: Tensor) -> Tensor:
    """What every second frame of B x F x H x W luma differs by from the one half way between its neighbours, B.

    The neighbours are moved towards each other by half of the motion of every block, and averaged: steady motion leaves little,
    stutter and jitter leave what they misplace.
    """
    small = _pooled(luma)
    before, middle, after = (small[:, start:stop:2] for start, stop in ((0, -2), (1, -1), (2, None)))
    before, middle, after = (part.flatten(0, 1).unsqueeze(1) for part in (before, middle, after))
    flow, moves = track(before, after)
    half = _dense(torch.where(moves.unsqueeze(1), flow, 0.0), after) / 2
    guess = (_warp(before, half) + _warp(after, -half)) / 2
    return inner(_blocks((guess - middle).abs())).reshape(luma.shape[0], -1).mean(dim=1)


def _pooled(luma: Tensor) -> Tensor:
    while min(luma.shape[-2:]) >= 2 * FLOW_SIDE:
        luma = F.avg_pool2d(luma, 2)
    return luma


def inner(blocks: Tensor) -> Tensor:
    """Without the outermost blocks, whose content comes from outside the picture, where there are enough others."""
    rows, columns = blocks.shape[-2:]
    if rows >= 5:
        blocks = blocks[..., 1:-1, :]
    return blocks[..., 1:-1] if columns >= 5 else blocks


def track(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Where the blocks of `after` come from in `before` (both N x 1 x H x W): shifts N x 2 x rows x columns in pixels (y, x), and
    which blocks are explained by their shift."""
    side = min(after.shape[-2:])
    levels = [1]
    while side / (2 * levels[-1]) >= COARSEST:
        levels.append(2 * levels[-1])
    flow = torch.zeros(after.shape[0], 2, 1, 1, device=after.device)
    for pool in reversed(levels):
        old, new = (F.avg_pool2d(image, pool) if pool > 1 else image for image in (before, after))
        flow = _match(old, new, _dense(flow, new) / pool) * pool
    dense = _dense(flow, after)
    for _ in range(2):
        dense = dense + _dense(_refine(_warp(before, dense), after), after)
    flow, residual = _blocks(dense), _blocks((_warp(before, dense) - after).abs())
    contrast = _blocks((after - _dense(_blocks(after), after)).abs())
    return flow, ((contrast > FLAT) & (residual < EXPLAINED * contrast)).squeeze(1)


def _match(old: Tensor, new: Tensor, guess: Tensor) -> Tensor:
    """The guess with the best whole shift of every block added, N x 2 x rows x columns."""
    best, chosen = None, None
    steps = range(-RADIUS, RADIUS + 1)
    shifts = sorted(((y, x) for y in steps for x in steps), key=lambda shift: shift[0] ** 2 + shift[1] ** 2)
    warped = F.pad(_warp(old, guess), (RADIUS,) * 4, mode="replicate")
    height, width = new.shape[-2:]
    for y, x in shifts:
        moved = warped[..., RADIUS + y : RADIUS + y + height, RADIUS + x : RADIUS + x + width]
        # a flat block fits everywhere: the small price of a shift lets it stay where it is
        cost = _blocks((moved - new).abs()) + 1e-3 * (y * y + x * x) ** 0.5
        shift = (
            torch.tensor([y, x], device=new.device, dtype=new.dtype).view(1, 2, 1, 1).expand(-1, -1, *cost.shape[-2:])
        )
        if best is None or chosen is None:
            best, chosen = cost, shift.expand(cost.shape[0], -1, -1, -1)
        else:
            chosen = torch.where(cost < best, shift, chosen)
            best = torch.minimum(cost, best)
    assert chosen is not None
    return _blocks(guess) + chosen


def _refine(warped: Tensor, new: Tensor) -> Tensor:
    """The shift below a pixel that explains what is left, by least squares over each block (Lucas and Kanade); at most one pixel."""
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
    """Means over blocks."""
    return F.avg_pool2d(values, (min(BLOCK, values.shape[-2]), min(BLOCK, values.shape[-1])))


def _dense(blocks: Tensor, like: Tensor) -> Tensor:
    """A value of every block for every pixel of a picture."""
    return F.interpolate(blocks, like.shape[-2:], mode="nearest")
