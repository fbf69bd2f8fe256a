"""Scenes to pixels: anti-aliased, vectorized, for any number of frames and any size.

World coordinates: x to the right, y down, the origin in the middle of the frame, and [-1, 1] across its SHORTER
side. One clip spans the time [0, 1] whatever its number of frames. Objects stand in the place: when the camera
pans, they move through the frame with the ground, and what is farther away moves less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from research.scenes.scene import ATTRIBUTES, MEMBERS, ROLLS, SceneBatch
from sage_grpo.worlds.shapes.render import pixel_centres, to_uint8

__all__ = ["draw", "layout_of", "render", "scroll_of", "to_uint8"]

COLOURS: tuple[tuple[float, float, float], ...] = (
    (0.90, 0.12, 0.12),  # red
    (0.05, 0.60, 0.14),  # green
    (0.10, 0.25, 0.92),  # blue
    (1.00, 0.82, 0.02),  # yellow
    (0.84, 0.10, 0.74),  # magenta
    (0.02, 0.76, 0.84),  # cyan
)
"""RGB of each object color, in the order of ATTRIBUTES["colour"]."""
TINT = 0.88
"""The second tone of a texture is this far from the color to white."""

RADIUS = 0.23
"""No part of an object is farther from its center, in world units: 7.4 pixels in a frame of 64."""
MARGIN = 0.03
"""Least distance between an object and the border, in world units."""
FOOT: tuple[float, ...] = (1.0, 0.76, 0.84, 1.0, 0.63)
"""Distance from the center of each kind down to the ground it stands on, in radii."""

PAN = 0.30
"""Way of the camera during a clip."""
VIEW = 1.5
"""Half the stretch of a place that a still camera may look at."""
TRAVEL_ALONE, TRAVEL_MANY = 1.05, 0.50
"""Way of one object, and of several, that go right or left."""
BOUNCE_HEIGHT, BOUNCE_COUNT = 0.50, 2.0
"""Height and number of the bounces in a clip."""
SPIN_TURNS, SPIN_LIFT = 0.75, 0.10
"""Turns of a spin in a clip, and how far above the ground it happens, so that corners stay out of it."""
RISE = 0.60
"""Height to which something floats."""
CIRCLE_RADIUS, CIRCLE_LIFT = 0.19, 0.36
"""Radius of a circle, once round in a clip, and how far its middle is above the standing place."""

GROUND = 0.59
"""The standing place of objects, y; the ground begins at HORIZON."""
HORIZON = 0.08
DEPTH_SLACK = 0.09
"""Largest shift of the standing place up or down."""
LOOSE = 0.03
"""Largest distance of an object from its place in the group."""
GROUPS: tuple[tuple[tuple[float, float], ...], ...] = (
    ((0.0, 0.0), (0.0, 0.0), (0.0, 0.0)),
    ((-0.28, 0.06), (0.28, -0.06), (0.0, 0.0)),
    ((-0.28, 0.15), (0.28, 0.15), (0.0, -0.26)),
)
"""Places (x, y) of one, two, three objects, around the middle of the group."""
PASS_DEPTH = 0.15
"""An object that passes, and the one it passes, stand this far before and behind the standing place."""
APART = 0.34
"""Half the distance (x) between an object and the one at whose side it stays."""

_RIGHT, _LEFT, _BOUNCE, _SPIN, _RISE, _CIRCLE = range(len(ATTRIBUTES["verb"]))
_VERB_SIGN = (1.0, -1.0, 0.0, 0.0, 0.0, 0.0)
_CAMERA_SIGN = (0.0, -1.0, 1.0)
_ROLLS = tuple(kind in ROLLS for kind in ATTRIBUTES["kind"])
RELATION_PLACE = tuple(
    (APART * ((name == "right") - (name == "left")), PASS_DEPTH * ((name == "front") - (name == "behind")))
    for name in ATTRIBUTES["relation"]
)
"""Standing place of the moving object (x, y), seen from the middle between it and the other, by relation."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Positions of everything, object by object."""

    centres: Tensor
    """B x MEMBERS x F x 2, world units in the frame."""
    angles: Tensor
    """Clockwise turn in radians, B x MEMBERS x F."""
    ground: Tensor
    """Standing or landing place of each object, y, B x MEMBERS; the nearer ones are drawn over the farther."""
    present: Tensor
    """bool, B x MEMBERS."""
    kind: Tensor
    """int64, B x MEMBERS."""
    colour: Tensor
    """int64, B x MEMBERS."""
    texture: Tensor
    """int64, B x MEMBERS."""


def render(batch: SceneBatch, frames: int, height: int, width: int, displacement: Tensor | None = None) -> Tensor:
    """Clips B x F x H x W x 3, float32 in [0, 1], on the batch's device.

    displacement: B x F x 2 world units added to the path of what moves, for clips whose motion is not quite right.
    """
    layout = layout_of(batch, frames)
    if displacement is not None:
        layout.centres[:, :-1] += displacement.unsqueeze(1)
    return draw(layout, backdrop(batch.place, scroll_of(batch, frames), height, width))


def scroll_of(batch: SceneBatch, frames: int) -> Tensor:
    """Position of the camera in every frame, B x F world units of the ground."""
    return VIEW * batch.view.unsqueeze(1) + PAN * _take(_CAMERA_SIGN, batch.camera).unsqueeze(1) * _time(
        batch.view, frames
    )


def layout_of(batch: SceneBatch, frames: int) -> Layout:
    """Positions of every object of a batch in every frame."""
    way, turn = path_of(batch.verb, batch.count, batch.phase, frames)
    spot, other = standing(batch)
    spots = torch.cat([spot.unsqueeze(1) + _take(GROUPS, batch.count), other.unsqueeze(1)], 1) + LOOSE * batch.layout
    kind = torch.cat([batch.kind.unsqueeze(1).expand(-1, 3), (batch.other_kind - 1).clamp_min(0).unsqueeze(1)], 1)
    spots_above = spots - torch.stack([torch.zeros_like(spots[..., 0]), RADIUS * _take(FOOT, kind)], -1)
    pan = PAN * _take(_CAMERA_SIGN, batch.camera).unsqueeze(1) * _time(batch.view, frames)
    moves = torch.tensor([1.0, 1.0, 1.0, 0.0], device=way.device)
    centres = spots_above.unsqueeze(2) + way.unsqueeze(1) * moves[:, None, None]
    centres = centres - torch.stack([pan, torch.zeros_like(pan)], -1).unsqueeze(1)

    # What rolls turns by the way it goes on the ground; upright kinds start upright, others at any angle.
    rolled = (way[..., 0] - way[:, :1, 0]) / RADIUS
    angle = torch.where(rolls(batch.kind, batch.verb).unsqueeze(1), rolled, turn) + 2 * math.pi * (
        batch.angle * starts_turned(batch)
    ).unsqueeze(1)
    plain = torch.zeros_like(batch.texture)
    return Layout(
        centres=centres,
        angles=angle.unsqueeze(1) * moves[:, None],
        ground=spots[..., 1],
        present=torch.cat(
            [torch.arange(3, device=way.device) <= batch.count.unsqueeze(1), (batch.relation > 0).unsqueeze(1)], 1
        ),
        kind=kind,
        colour=torch.cat(
            [batch.colour.unsqueeze(1).expand(-1, 3), (batch.other_colour - 1).clamp_min(0).unsqueeze(1)], 1
        ),
        texture=torch.stack([batch.texture, batch.texture, batch.texture, plain], 1),
    )


def starts_turned(batch: SceneBatch) -> Tensor:
    """1.0 for clips whose objects start at any angle: those that roll or spin; the others stand upright."""
    return ((batch.verb == _SPIN) | rolls(batch.kind, batch.verb)).float()


def rolls(kind: Tensor, verb: Tensor) -> Tensor:
    """True where a kind turns as it goes, by index tensors of one shape."""
    return ((verb == _RIGHT) | (verb == _LEFT)) & _take(_ROLLS, kind)


def path_of(verb: Tensor, count: Tensor, phase: Tensor, frames: int) -> tuple[Tensor, Tensor]:
    """Way from the standing place (x, y), ... x F x 2, and turn in radians, ... x F, for tensors of one shape `...`."""
    time = _time(phase, frames)
    zero = torch.zeros(*phase.shape, frames, device=phase.device)
    travel = torch.where(count == 0, TRAVEL_ALONE, TRAVEL_MANY) * _take(_VERB_SIGN, verb)
    beat = (phase.unsqueeze(-1) + BOUNCE_COUNT * (time + 0.5)) % 1.0
    hop = -BOUNCE_HEIGHT * 4 * beat * (1 - beat)
    round_ = 2 * math.pi * (phase.unsqueeze(-1) + time)
    which = verb.unsqueeze(-1)
    x = torch.where(which == _CIRCLE, CIRCLE_RADIUS * round_.cos(), travel.unsqueeze(-1) * time)
    y = torch.where(which == _BOUNCE, hop, zero)
    y = torch.where(which == _SPIN, zero - SPIN_LIFT, y)
    y = torch.where(which == _RISE, zero - RISE * (time + 0.5), y)
    y = torch.where(which == _CIRCLE, CIRCLE_RADIUS * round_.sin() - CIRCLE_LIFT, y)
    turn = torch.where(which == _SPIN, 2 * math.pi * SPIN_TURNS * (time + 0.5), zero)
    return torch.stack([x, y], -1), turn


def standing(batch: SceneBatch) -> tuple[Tensor, Tensor]:
    """Standing places of the group and the other object (x, y), B x 2 each."""
    apart = _take(RELATION_PLACE, batch.relation)
    middle = torch.stack([batch.offset[:, 0] * slack(batch), GROUND + DEPTH_SLACK * batch.offset[:, 1]], -1)
    return middle + apart, middle - apart


def slack(batch: SceneBatch) -> Tensor:
    """Distance (x) by which a scene may be moved from the middle with everything still inside the frame, B."""
    camera = PAN * _take(_CAMERA_SIGN, batch.camera)
    travel = torch.where(batch.count == 0, TRAVEL_ALONE, TRAVEL_MANY) * _take(_VERB_SIGN, batch.verb)
    mover = (travel - camera).abs() / 2 + CIRCLE_RADIUS * (batch.verb == _CIRCLE)
    group = _take(GROUPS, batch.count)[..., 0].abs().amax(1)
    beside = _take(RELATION_PLACE, batch.relation)[:, 0].abs()
    return 1 - MARGIN - RADIUS - LOOSE - torch.maximum(mover, camera.abs() / 2) - group - beside


def draw(layout: Layout, plates: Tensor) -> Tensor:
    """Paint shadows, then objects from far to near, onto plates B x F x H x W x 3 (changed in place)."""
    frames, height, width = plates.shape[1:4]
    canvas = plates.flatten(0, 1)
    order = layout.ground.masked_fill(~layout.present, -torch.inf).argsort(1)
    for paint in (_shade, _paint):
        for place in range(MEMBERS):
            slot = order[:, place]
            clip = layout.present.gather(1, slot.unsqueeze(1)).squeeze(1).nonzero().squeeze(1)
            if not len(clip):
                continue
            slot = slot[clip]
            who = {
                name: getattr(layout, name)[clip, slot].repeat_interleave(frames)
                for name in ("ground", "kind", "colour", "texture")
            }
            frame = (clip.unsqueeze(1) * frames + torch.arange(frames, device=clip.device)).flatten()
            centres = layout.centres[clip, slot].flatten(0, 1)
            paint(canvas, frame, centres, layout.angles[clip, slot].flatten(), height, width, **who)
    return canvas.unflatten(0, (-1, frames))


def window(centres: Tensor, half_x: float, half_y: float, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels around each center: flat index N x P, and their distance from the center in world units, N x P each.

    A window has the same number of pixels for all and lies inside the frame, so that painting costs what an object is large.
    """
    short, device = min(height, width), centres.device
    index, away = [], []
    for axis, (half, limit) in enumerate(((half_x, width), (half_y, height))):
        size = min(limit, 2 * math.ceil(half * short / 2) + 1)
        middle = ((centres[:, axis] * short + limit - 1) / 2).round().long()
        first = (middle - size // 2).clamp(0, limit - size)
        pixel = first.unsqueeze(1) + torch.arange(size, device=device)
        index.append(pixel)
        away.append((2 * pixel + 1 - limit) / short - centres[:, axis : axis + 1])
    columns, rows = index
    flat = (rows.unsqueeze(2) * width + columns.unsqueeze(1)).flatten(1)
    dx = away[0].unsqueeze(1).expand(-1, rows.shape[1], -1).flatten(1)
    dy = away[1].unsqueeze(2).expand(-1, -1, columns.shape[1]).flatten(1)
    return flat, dx, dy


SHADOW = 0.42
"""Darkness of the ground under an object that stands on it."""


def _shade(
    canvas: Tensor,
    frame: Tensor,
    centres: Tensor,
    angles: Tensor,
    height: int,
    width: int,
    *,
    ground: Tensor,
    kind: Tensor,
    **_: Tensor,
) -> None:
    lift = (ground - RADIUS * _take(FOOT, kind) - centres[:, 1]).clamp_min(0)
    foot = torch.stack([centres[:, 0], ground], -1)
    flat, dx, dy = window(foot, 1.7 * RADIUS, 0.55 * RADIUS, height, width)
    wide = (RADIUS * (0.95 + 0.5 * lift)).unsqueeze(1)
    far = ((dx / wide).square() + (dy / (0.3 * wide)).square()).square()
    strength = SHADOW * torch.exp(-1.6 * lift).unsqueeze(1) * torch.exp(-far)
    rows = canvas.flatten(1, 2)
    rows[frame.unsqueeze(1), flat] = rows[frame.unsqueeze(1), flat] * (1 - strength).unsqueeze(-1)


def _paint(
    canvas: Tensor,
    frame: Tensor,
    centres: Tensor,
    angles: Tensor,
    height: int,
    width: int,
    *,
    kind: Tensor,
    colour: Tensor,
    texture: Tensor,
    **_: Tensor,
) -> None:
    flat, dx, dy = window(centres, RADIUS, RADIUS, height, width)
    cover, tone, shade = appearance(kind, texture, angles, dx, dy, 2 / min(height, width))
    paint = paint_of(colour, tone) * shade.unsqueeze(-1)
    rows = canvas.flatten(1, 2)
    rows[frame.unsqueeze(1), flat] = torch.lerp(rows[frame.unsqueeze(1), flat], paint, cover.unsqueeze(-1))


def paint_of(colour: Tensor, tone: Tensor) -> Tensor:
    """RGB, N x P x 3, of colors (N) where a texture has this much of its second tone (N x P)."""
    base = _take(COLOURS, colour).unsqueeze(1)
    return base + TINT * tone.unsqueeze(-1) * (1 - base)


def appearance(
    kind: Tensor, texture: Tensor, angles: Tensor, dx: Tensor, dy: Tensor, pixel: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Coverage, share of the second tone, and shading of N objects at N x P distances from their centers."""
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    u, v = (cos * dx + sin * dy) / RADIUS, (cos * dy - sin * dx) / RADIUS
    pixel = pixel / RADIUS
    cover, tone = torch.empty_like(u), torch.zeros_like(u)
    edge = torch.empty_like(u)
    # One pass a kind and a texture over its own objects, instead of all functions for every object.
    for index, distance in enumerate(_DISTANCES):
        own = (kind == index).nonzero().squeeze(1)
        edge[own] = distance(u[own], v[own])
    cover = (0.5 - edge / pixel).clamp(0, 1)
    for index, pattern in enumerate(_PATTERNS, start=1):
        own = (texture == index).nonzero().squeeze(1)
        tone[own] = (0.5 - pattern(u[own], v[own], kind[own]) / pixel).clamp(0, 1)
    rim = 1 - 0.30 * ((edge + 0.16) / 0.16).clamp(0, 1)
    return cover, tone, light_at(dx, dy) * rim


def light_at(dx: Tensor, dy: Tensor) -> Tensor:
    """Brightness of an object at a distance from its center: from above, a little from the left, whatever its turn."""
    return (1 - 0.07 * (dx + 1.6 * dy) / RADIUS).clamp_max(1)


def _ball(u: Tensor, v: Tensor) -> Tensor:
    return (u.square() + v.square()).sqrt() - 0.98


def _box(u: Tensor, v: Tensor) -> Tensor:
    # Rounded corners, so that a turning box stays within its radius.
    inner, round_ = 0.59, 0.16
    x, y = (u.abs() - inner).clamp_min(0), (v.abs() - inner).clamp_min(0)
    return (x.square() + y.square()).sqrt() + torch.maximum(u.abs(), v.abs()).clamp_max(inner) - inner - round_


def _star(u: Tensor, v: Tensor) -> Tensor:
    # Fold the plane into one tenth of the star, a tip upright; the edge is the line from the tip to the notch.
    fifth = 2 * math.pi / 5
    turn = torch.atan2(u, -v)
    turn = ((turn + fifth / 2) % fifth - fifth / 2).abs()
    radius = (u.square() + v.square()).sqrt()
    x, y = radius * turn.sin(), radius * turn.cos()
    tip, notch = 0.98, 0.62
    ax, ay = notch * math.sin(fifth / 2), notch * math.cos(fifth / 2) - tip
    length = math.hypot(ax, ay)
    return (x * -ay + (y - tip) * ax) / length


def _ring(u: Tensor, v: Tensor) -> Tensor:
    return ((u.square() + v.square()).sqrt() - 0.70).abs() - 0.28


def _cone(u: Tensor, v: Tensor) -> Tensor:
    # Apex above, a base that bulges a little: a cone seen from the side.
    tip, base, half = 0.98, 0.58, 0.72
    length = math.hypot(tip + base, half)
    side = ((tip + base) * u.abs() - half * (v + tip)) / length
    return torch.maximum(side, v - base - 0.10 * (1 - (u / half).square()))


def _stripes(u: Tensor, v: Tensor, kind: Tensor) -> Tensor:
    period = 0.84
    return ((u % period) - period / 2).abs() - 0.19  # the middle has the color


def _around(count: int, radius: float) -> tuple[tuple[float, float], ...]:
    """Places (u, v) on a circle, the first upright."""
    turns = [2 * math.pi * k / count for k in range(count)]
    return tuple((radius * math.sin(turn), -radius * math.cos(turn)) for turn in turns)


_ROUND_DOTS = ((0.0, 0.0), *_around(5, 0.62))
_NO_DOTS = ((9.0, 9.0),) * 6
# Where each kind has its dots: well inside it, so that its outline keeps the color.
_DOTS = tuple(
    (places + _NO_DOTS)[:6]
    for places in (
        _ROUND_DOTS,
        _ROUND_DOTS,
        _around(3, -0.33),
        _around(5, 0.70),
        ((0.0, -0.28), (0.29, 0.30), (-0.29, 0.30)),
    )
)


def _dots(u: Tensor, v: Tensor, kind: Tensor) -> Tensor:
    x, y = _take(_DOTS, kind).unbind(-1)  # N x 6
    away = [(u - x[:, k : k + 1]).square() + (v - y[:, k : k + 1]).square() for k in range(x.shape[1])]
    return torch.stack(away).amin(0).sqrt() - 0.20


def _checks(u: Tensor, v: Tensor, kind: Tensor) -> Tensor:
    cell = 0.56
    x = ((u + cell / 2) % (2 * cell) - cell).abs() - cell / 2
    y = ((v + cell / 2) % (2 * cell) - cell).abs() - cell / 2
    same = (x > 0) == (y > 0)
    return torch.where(same, 1.0, -1.0) * torch.minimum(x.abs(), y.abs())


# Signed distances to the edge in radii (negative inside), by kind, and to the second tone, by texture.
_DISTANCES = (_ball, _box, _star, _ring, _cone)
_PATTERNS = (_stripes, _dots, _checks)


def backdrop(place: Tensor, scroll: Tensor, height: int, width: int) -> Tensor:
    """Empty places B x F x H x W x 3, for places (B) seen by a camera at B x F."""
    x, y = pixel_centres(height, width, scroll.device)
    plates = torch.empty(*scroll.shape, height, width, 3, device=scroll.device)
    for index, paint in enumerate(_PLACES):
        own = (place == index).nonzero().squeeze(1)
        if len(own):
            seen = x + scroll[own].unsqueeze(-1)  # b x F x W: the place at the depth of the ground
            plates[own] = paint(seen, x, scroll[own].unsqueeze(-1), y, 2 / min(height, width))
    return plates


Rgb = tuple[float, float, float]


def _sky(top: Rgb, low: Rgb, seen: Tensor, y: Tensor) -> Tensor:
    """A vertical gradient down to the horizon, ... x H x W x 3."""
    share = ((y + 1) / (1 + HORIZON)).clamp(0, 1)[:, None, None]
    column = torch.lerp(torch.tensor(top, device=y.device), torch.tensor(low, device=y.device), share)
    return column.expand(*seen.shape[:-1], *column.shape[:1], seen.shape[-1], 3).clone()


def _layer(picture: Tensor, inside: Tensor, colour: Rgb | Tensor, pixel: float, strength: float = 1.0) -> Tensor:
    """Lay a color over a picture where `inside` (world units, ... x H x W) is positive."""
    cover = (0.5 + inside / pixel).clamp_(0, 1).mul_(strength).unsqueeze(-1)
    return picture.lerp_(torch.as_tensor(colour, device=picture.device).expand_as(picture), cover)


def _below(height_at: Tensor, y: Tensor) -> Tensor:
    """Distance of each row below a line ... x W, ... x H x W."""
    return y[:, None] - height_at.unsqueeze(-2)


def _disc(x: Tensor, y: Tensor, at: float, up: float, radius: float, flat: float = 1.0) -> Tensor:
    """Inside of an ellipse around (at, up); `flat` is how much wider it is than high."""
    dx, dy = (x - at) / flat, y - up
    return radius - (dx.square().unsqueeze(-2) + dy.square()[:, None]).sqrt()


def _ground(picture: Tensor, seen: Tensor, y: Tensor, far: Rgb, near: Rgb, pixel: float) -> Tensor:
    share = ((y - HORIZON) / (1 - HORIZON)).clamp(0, 1)[:, None, None]
    colour = torch.lerp(torch.tensor(far, device=y.device), torch.tensor(near, device=y.device), share)
    return _layer(picture, (y - HORIZON)[:, None].expand(picture.shape[:-1]), colour, pixel)


def _patches(seen: Tensor, y: Tensor, rows: Sequence[tuple[float, float, float, float, float]]) -> Tensor:
    """Flat soft spots on the ground: rows of (y, period, start, half width, half height); positive inside."""
    inside = torch.full((), -1.0, device=y.device)
    for up, period, start, wide, high in rows:
        dx = ((seen - start + period / 2) % period - period / 2) * (high / wide)
        inside = torch.maximum(inside, high - (dx.square().unsqueeze(-2) + (y - up).square()[:, None]).sqrt())
    return inside


_TUFTS = (
    (0.20, 0.83, 0.10, 0.16, 0.020),
    (0.33, 1.13, 0.55, 0.22, 0.028),
    (0.48, 0.97, 0.30, 0.20, 0.030),
    (0.66, 1.31, 0.80, 0.28, 0.040),
    (0.86, 1.07, 0.15, 0.26, 0.045),
)


def _meadow(seen: Tensor, x: Tensor, scroll: Tensor, y: Tensor, pixel: float) -> Tensor:
    picture = _sky((0.44, 0.60, 0.76), (0.64, 0.75, 0.82), seen, y)
    slow = x + 0.15 * scroll
    for at, up, size in (
        (-0.85, -0.66, 0.10),
        (-0.62, -0.60, 0.13),
        (0.45, -0.76, 0.12),
        (0.72, -0.72, 0.09),
        (1.5, -0.6, 0.12),
        (-1.6, -0.7, 0.1),
    ):
        _layer(picture, _disc(slow, y, at, up, size, 2.2), (0.90, 0.92, 0.92), 4 * pixel, 0.8)
    far = x + 0.35 * scroll
    _layer(
        picture,
        _below(-0.10 - 0.10 * torch.sin(2.3 * far + 0.6) - 0.06 * torch.sin(4.1 * far), y),
        (0.62, 0.72, 0.70),
        pixel,
    )
    mid = x + 0.6 * scroll
    _layer(
        picture,
        _below(0.02 - 0.08 * torch.sin(3.1 * mid + 2.0) - 0.03 * torch.sin(7.3 * mid + 1.0), y),
        (0.54, 0.65, 0.52),
        pixel,
    )
    picture = _ground(picture, seen, y, (0.60, 0.70, 0.50), (0.50, 0.60, 0.40), pixel)
    return _layer(picture, _patches(seen, y, _TUFTS), (0.70, 0.78, 0.56), 2 * pixel, 0.8)


def _desert(seen: Tensor, x: Tensor, scroll: Tensor, y: Tensor, pixel: float) -> Tensor:
    picture = _sky((0.62, 0.63, 0.69), (0.87, 0.77, 0.63), seen, y)
    _layer(picture, _disc(x + 0.08 * scroll, y, 0.5, -0.60, 0.15), (0.96, 0.91, 0.78), 2 * pixel)
    far = x + 0.35 * scroll
    mesa = 0.24 * ((far * 0.9 + 0.1).sin() * 5).tanh().clamp_min(-0.2)  # table mountains
    _layer(picture, _below(0.0 - mesa, y), (0.74, 0.62, 0.56), pixel)
    mid = x + 0.6 * scroll
    dune = ((mid * 0.8) % 1.0 - 0.62).abs()
    _layer(picture, _below(-0.10 + 0.30 * dune, y), (0.80, 0.70, 0.58), pixel)
    picture = _ground(picture, seen, y, (0.86, 0.77, 0.62), (0.76, 0.65, 0.50), pixel)
    return _layer(picture, _patches(seen, y, _TUFTS), (0.92, 0.84, 0.70), 2 * pixel, 0.8)


def _snow(seen: Tensor, x: Tensor, scroll: Tensor, y: Tensor, pixel: float) -> Tensor:
    picture = _sky((0.42, 0.48, 0.57), (0.64, 0.68, 0.74), seen, y)
    far = x + 0.35 * scroll
    peak = ((far * 1.1 + 0.2) % 1.0 - 0.5).abs() * 0.9
    low = ((far * 0.7 + 0.7) % 1.0 - 0.5).abs() * 0.8
    ridge = torch.minimum(-0.52 + peak, -0.34 + low)
    _layer(picture, _below(ridge, y), (0.53, 0.59, 0.68), pixel)
    cap = torch.minimum(_below(ridge, y), -0.34 + 0.05 * torch.sin(17 * far).unsqueeze(-2) - y[:, None])
    _layer(picture, cap, (0.80, 0.83, 0.87), pixel)
    mid = x + 0.6 * scroll
    tree = ((mid * 3.1) % 1.0 - 0.5).abs() * 0.75
    size = 0.10 * torch.sin(4.7 * mid)
    _layer(picture, torch.minimum(_below(-0.20 + tree + size, y), (0.2 - y)[:, None]), (0.36, 0.44, 0.47), pixel)
    picture = _ground(picture, seen, y, (0.68, 0.72, 0.77), (0.57, 0.62, 0.70), pixel)
    return _layer(picture, _patches(seen, y, _TUFTS), (0.76, 0.79, 0.83), 2 * pixel, 0.7)


def _city(seen: Tensor, x: Tensor, scroll: Tensor, y: Tensor, pixel: float) -> Tensor:
    picture = _sky((0.10, 0.11, 0.17), (0.30, 0.29, 0.36), seen, y)
    _layer(picture, _disc(x + 0.08 * scroll, y, -0.55, -0.68, 0.12), (0.88, 0.88, 0.82), 2 * pixel)
    for rate, width, low, high, wall, lit in (
        (0.35, 0.27, -0.12, 0.40, (0.22, 0.22, 0.29), (0.42, 0.41, 0.42)),
        (0.60, 0.36, 0.02, 0.36, (0.14, 0.14, 0.20), (0.72, 0.68, 0.54)),
    ):
        along = (x + rate * scroll) / width
        house = along.floor()
        roof = low - high * ((house * 0.754877 + rate) % 1.0)
        inside = torch.minimum(_below(roof, y), ((along - house - 0.5).abs() * -width + 0.47 * width).unsqueeze(-2))
        _layer(picture, inside, wall, pixel)
        column = ((along * 3) % 1.0 - 0.5).abs().mul(-width / 3).add(0.28 * width / 3).unsqueeze(-2)
        depth = _below(roof, y) - 0.05
        row = 0.030 - ((depth / 0.12) % 1.0 - 0.5).abs() * 0.12
        on = (
            (house * 0.3183 + (along * 3).floor() * 0.569).unsqueeze(-2) + (depth / 0.12).floor() * 0.7548
        ) % 1.0 < 0.5
        window = torch.minimum(torch.minimum(column, row), torch.minimum(depth, inside - 0.02))
        _layer(picture, torch.where(on, window, -1.0), lit, pixel, 0.9)
    picture = _ground(picture, seen, y, (0.33, 0.33, 0.37), (0.24, 0.24, 0.28), pixel)
    kerb = torch.minimum(y - HORIZON, HORIZON + 0.07 - y)[:, None].expand(picture.shape[:-1])
    _layer(picture, kerb, (0.44, 0.43, 0.45), pixel)
    dash = 0.17 - ((seen / 0.62) % 1.0 - 0.5).abs() * 0.62
    line = torch.minimum(dash.unsqueeze(-2), (0.025 - (y - 0.50).abs())[:, None])
    return _layer(picture, line, (0.58, 0.57, 0.54), pixel)


_PLACES = (_meadow, _desert, _snow, _city)


def _time(like: Tensor, frames: int) -> Tensor:
    return torch.linspace(-0.5, 0.5, frames, device=like.device)


def _take(table: Sequence[Any], index: Tensor) -> Tensor:
    return torch.tensor(table, device=index.device)[index]
