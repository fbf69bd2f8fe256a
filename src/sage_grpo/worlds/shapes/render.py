"""Scenes to pixels: anti-aliased, vectorized, for any number of frames and any size.

World coordinates: x to the right, y down, the origin in the middle of the frame, and [-1, 1] across its
SHORTER side. One clip spans the time [0, 1] whatever its number of frames, so a motion does not depend on the
frame rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sage_grpo.worlds.shapes.scene import ATTRIBUTES, SceneBatch

COLOURS = (
    (0.90, 0.10, 0.12), (0.08, 0.62, 0.18), (0.10, 0.25, 0.95), (0.98, 0.88, 0.08), (0.88, 0.12, 0.82), (0.08, 0.82, 0.88),
)  # fmt: skip
"""RGB of each object color, in the order of ATTRIBUTES["colour"]."""
BACKGROUNDS = ((0.94, 0.94, 0.94), (0.50, 0.50, 0.50), (0.80, 0.68, 0.50), (0.12, 0.14, 0.34))
"""RGB of each background at mid-height, in the order of ATTRIBUTES["background"]."""
GRADIENT = 0.05
"""A background is this much brighter at the top and darker at the bottom: no frame is quite flat."""
RADII = (0.34, 0.50)
"""Half the extent of an object, in world units: 5.4 and 8 pixels in a frame of 32."""
MARGIN = 0.05
"""Least distance between an object and the border, in world units."""
# Motions during the clip, in world units; pairs are slow and fast.
TRAVEL = (0.4, 0.8)  # of a straight path
LOOP_RADIUS, LOOP_TURNS = 0.3, (0.5, 1.0)
BOUNCE_HEIGHT, BOUNCE_COUNT = 0.35, (1.0, 2.0)  # half the height

_DIRECTIONS = ((1.0, 0.0), (-1.0, 0.0), (0.0, -1.0), (0.0, 1.0), (0.0, 0.0), (0.0, 0.0))
_LOOP = ATTRIBUTES["motion"].index("loop")
_BOUNCE = ATTRIBUTES["motion"].index("bounce")


def render(batch: SceneBatch, frames: int, height: int, width: int, displacement: Tensor | None = None) -> Tensor:
    """Clips B x F x H x W x 3, float32 in [0, 1], on the batch's device.

    displacement: B x F x 2 world units added to the path, for clips whose motion is not quite right.
    """
    centres = trajectory(batch, frames)
    if displacement is not None:
        centres = centres + displacement
    shape, size = batch.shape.repeat_interleave(frames), batch.size.repeat_interleave(frames)
    mask = coverage(shape, size, centres.flatten(0, 1), height, width).unflatten(0, (-1, frames)).unsqueeze(-1)
    plate = backdrop(batch.background, height, width).unsqueeze(1)
    return torch.lerp(plate, palette(batch.colour)[:, None, None, None, :], mask)


def trajectory(batch: SceneBatch, frames: int) -> Tensor:
    """Center of the object in every frame, B x F x 2 world units (x, y)."""
    path = motion_path(batch.motion, batch.speed, batch.phase, frames)
    return path + (batch.offset * slack(batch.motion, batch.speed, batch.size)).unsqueeze(-2)


def motion_path(motion: Tensor, speed: Tensor, phase: Tensor, frames: int) -> Tensor:
    """Path around the origin, ... x F x 2, for index tensors and phases of one shape `...`."""
    time = torch.linspace(0, 1, frames, device=phase.device)
    direction = _take(_DIRECTIONS, motion) * _take(TRAVEL, speed).unsqueeze(-1)
    straight = direction.unsqueeze(-2) * (time - 0.5).unsqueeze(-1)

    turn = 2 * math.pi * (phase.unsqueeze(-1) + _take(LOOP_TURNS, speed).unsqueeze(-1) * time)
    loop = LOOP_RADIUS * torch.stack([turn.cos(), turn.sin()], dim=-1)

    beat = (phase.unsqueeze(-1) + _take(BOUNCE_COUNT, speed).unsqueeze(-1) * time) % 1.0
    fall = BOUNCE_HEIGHT * (2 * (2 * beat - 1).square() - 1)  # a parabola: the floor is at +BOUNCE_HEIGHT
    bounce = torch.stack([torch.zeros_like(fall), fall], dim=-1)

    motion = motion[..., None, None]
    return torch.where(motion == _LOOP, loop, torch.where(motion == _BOUNCE, bounce, straight))


def slack(motion: Tensor, speed: Tensor, size: Tensor) -> Tensor:
    """Largest offset (x, y) of a path from the middle with the object still inside the frame, ... x 2."""
    straight = _take(_DIRECTIONS, motion).abs() * _take(TRAVEL, speed).unsqueeze(-1) / 2
    loop, bounce = LOOP_RADIUS * (motion == _LOOP), BOUNCE_HEIGHT * (motion == _BOUNCE)
    extent = straight + torch.stack([loop, loop + bounce], dim=-1)
    return room(size).unsqueeze(-1) - extent


def room(size: Tensor) -> Tensor:
    """Largest distance of the center of an object of this size from the middle of the frame, along x or y."""
    return 1 - MARGIN - _take(RADII, size)


def backdrop(background: Tensor, height: int, width: int) -> Tensor:
    """Empty frames, ... x H x W x 3: the background's color with a faint vertical gradient."""
    _, y = pixel_centres(height, width, background.device)
    tone = _take(BACKGROUNDS, background)[..., None, None, :] - GRADIENT * y.clamp(-1, 1)[:, None, None]
    return tone.expand(*background.shape, height, width, 3)


def palette(colour: Tensor) -> Tensor:
    return _take(COLOURS, colour)


def coverage(shape: Tensor, size: Tensor, centres: Tensor, height: int, width: int) -> Tensor:
    """Share of each pixel that an object covers, N x H x W in [0, 1], from N shapes, sizes, centers (N x 2)."""
    x, y = pixel_centres(height, width, centres.device)
    radius = _take(RADII, size)[:, None, None]
    dx = (x - centres[:, :1]).abs().unsqueeze(1)
    dy = (y - centres[:, 1:]).unsqueeze(2)
    pixel = 2 / min(height, width)
    mask = torch.empty(len(shape), height, width, device=centres.device)
    # One pass a shape over its own clips, instead of five distance functions for every clip.
    for index, distance in enumerate(_DISTANCES):
        rows = (shape == index).nonzero().squeeze(1)
        inside = 0.5 - distance(dx[rows], dy[rows], radius[rows]) / pixel
        mask[rows] = inside.clamp_(0, 1)
    return mask


def to_uint8(videos: Tensor) -> Tensor:
    """Float clips in [0, 1] to bytes, rounded to nearest."""
    return (videos.clamp(0, 1) * 255).round().to(torch.uint8)


def _circle(dx: Tensor, dy: Tensor, r: Tensor) -> Tensor:
    return (dx.square() + dy.square()).sqrt() - r


def _square(dx: Tensor, dy: Tensor, r: Tensor) -> Tensor:
    return torch.maximum(dx, dy.abs()) - 0.86 * r


def _triangle(dx: Tensor, dy: Tensor, r: Tensor) -> Tensor:
    # Equilateral, upright, side 2r, centered on its bounding box: apex at -0.866 r, base at +0.866 r.
    half = math.sqrt(3) / 2
    return torch.maximum(half * dx - 0.5 * (dy + half * r), dy - half * r)


def _cross(dx: Tensor, dy: Tensor, r: Tensor) -> Tensor:
    ady = dy.abs()
    return torch.maximum(torch.maximum(dx, ady) - r, torch.minimum(dx, ady) - 0.32 * r)


def _ring(dx: Tensor, dy: Tensor, r: Tensor) -> Tensor:
    return ((dx.square() + dy.square()).sqrt() - 0.75 * r).abs() - 0.25 * r


# Signed distances (exact near the edge, where it matters) from |x|, y and the radius, by shape index.
_DISTANCES = (_circle, _square, _triangle, _cross, _ring)


def pixel_centres(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """World coordinates x (W) and y (H) of the pixels."""
    short = min(height, width)
    x = (2 * torch.arange(width, device=device) + 1 - width) / short
    y = (2 * torch.arange(height, device=device) + 1 - height) / short
    return x, y


def _take(table: Sequence[Any], index: Tensor) -> Tensor:
    return torch.tensor(table, device=index.device)[index]
