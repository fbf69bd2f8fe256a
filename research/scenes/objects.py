"""From pixels to objects: where they are in every frame, and what they look like.

The foreground falls into two groups by color (what moves has one, what stands another). In each group a matched
filter finds up to three objects a frame, a least-way assignment makes tracks of them, and templates tell the kind,
the texture and the turn.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from research.scenes.judging import pick, ramp
from research.scenes.render import (
    COLOURS,
    RADIUS,
    SHADOW,
    TINT,
    appearance,
    light_at,
    paint_of,
    window,
)
from research.scenes.scene import ATTRIBUTES

GROUPS_SEEN, SLOTS = 2, 3
"""Groups of objects of one color, and objects in a group, that are looked for."""
ANGLES = 64
"""Turns at which an object is compared with its templates."""
KINDS, TEXTURES = len(ATTRIBUTES["kind"]), len(ATTRIBUTES["texture"])
SYMMETRY = (ANGLES, 4, 5, ANGLES, 1)
"""Into how many equal parts a turn falls for the outline of each kind."""

# Misfits (shares of an object's area, or squared RGB) at which a belief falls to 1/e: as wide as clean clips allow, so
# that a half-right clip gets part of the credit and learning has a slope.
COLOUR_WIDTH = 0.04
OUTLINE_WIDTH = 0.025
TEXTURE_WIDTH = 0.025

FRONT_FROM, FRONT_TO = 0.005, 0.02
"""Squared RGB distance from the place, without noise: below the first a pixel is the place, above an object."""
PRESENT_FROM, PRESENT_TO = 0.20, 0.60
"""Share of what is seen of an outline that is filled, less the share that is empty: below the first there is no object, above one."""
SHOWN_FROM, SHOWN_TO = 0.08, 0.24
"""Share of an outline that is filled and not hidden: below the first there is no object, above one."""
APART = 1.55 * RADIUS
"""Objects of one group are at least this far apart."""
CANDIDATE = 0.08
"""The same share, of the whole outline, from which a place is looked at: something may hide the rest."""


@dataclass(frozen=True, kw_only=True)
class ObjectFit:
    """Objects in two groups of one color each, the larger first, with one track a slot."""

    centres: Tensor
    """B x G x S x F x 2, world units in the frame."""
    angles: Tensor
    """Turn in radians, B x G x S x F."""
    present: Tensor
    """Degree to which there is an object, B x G x S x F in [0, 1]."""
    group_colour: Tensor
    """The color by which a group was found, int64, B x G."""
    kind: Tensor
    """Beliefs, B x G x F x kinds."""
    texture: Tensor
    """Beliefs, B x G x F x textures."""
    colour: Tensor
    """Beliefs, B x G x F x colors."""
    misfit: Tensor
    """Misfit beyond the best of each turn of the group's kind and texture fits, B x G x S x F x ANGLES."""


def find_objects(videos: Tensor, plates: Tensor) -> ObjectFit:
    """Find what is not the place in float clips B x F x H x W x 3, given the empty place."""
    frames, height, width = videos.shape[1:4]
    front, share, shaded = _foreground(videos, plates)
    area = (front.unsqueeze(-1) * share).sum((2, 3)).mean(1)  # B x colors
    group_colour = area.topk(GROUPS_SEEN, dim=1).indices
    own_share = share.gather(-1, group_colour[:, None, None, None].expand(-1, frames, height, width, -1))
    own = (front.unsqueeze(-1) * own_share).movedim(-1, 1)  # B x G x F x H x W
    seen = 1 - (front.unsqueeze(1) - own)  # another group's pixels may hide something: they say nothing

    centres, present = _track(*_match(own, seen))
    clip, group, slot, frame = (present > 0).nonzero().unbind(1)
    where = (clip, group, slot, frame)
    others = centres.transpose(2, 3)[clip, group, frame]  # N x S x 2: all objects of the same group and frame
    others = torch.where((present.transpose(2, 3)[clip, group, frame] > 0.5).unsqueeze(-1), others, torch.inf)
    colour = group_colour[clip, group]

    def look(at: Tensor) -> _Looks:
        patch = _patches(videos, own, seen, (clip, group, frame), at, others)
        return _looks(patch, colour, present, where, min(height, width))

    # A turn is told by an object in the middle of its patch, and the middle by an object that is turned right.
    at = _centre_of_mass(own, seen, (clip, group, frame), others, centres[where])
    first = look(at)
    scene = _Picture(pixels=videos, under=shaded, seen=seen, where=(clip, group, frame))
    at, angles = _refine(scene, first, colour, others, at)
    looks = look(at)
    return ObjectFit(
        centres=centres.index_put(where, at),
        angles=_spread(angles, where, present),
        present=_spread(looks.filled, where, present),
        group_colour=group_colour,
        kind=looks.kind,
        texture=looks.texture,
        colour=looks.colour,
        misfit=_spread(looks.misfit, where, present),
    )


@dataclass(frozen=True, kw_only=True)
class _Looks:
    """Looks of N objects and of their groups."""

    kind: Tensor
    """Beliefs, B x G x F x kinds."""
    texture: Tensor
    """Beliefs, B x G x F x textures."""
    colour: Tensor
    """Beliefs, B x G x F x colors."""
    filled: Tensor
    """Degree to which there is an object, N."""
    misfit: Tensor
    """Misfit beyond the best of each turn, N x ANGLES."""
    best_kind: Tensor
    """The most believed kind of its group, int64, N."""
    best_texture: Tensor
    """The most believed texture of its group, int64, N."""


Where = tuple[Tensor, Tensor, Tensor, Tensor]
"""Clip, group, slot and frame of N objects."""


def _spread(values: Tensor, where: Where, like: Tensor) -> Tensor:
    """Rows of the objects found to B x G x S x F x ..., zeros elsewhere."""
    full = torch.zeros(*like.shape, *values.shape[1:], device=values.device)
    return full.index_put(where, values)


def _looks(patch: _Patch, group_colour: Tensor, present: Tensor, where: Where, short: int) -> _Looks:
    """Compare N patches with all templates; a group has one kind and one texture, the most believed over its clip."""
    clip, group, _, _ = where
    templates = _templates((math.isqrt(patch.own.shape[1]) - 1) // 2, short, patch.own.device)

    disc = templates.cover[0, 0]
    open_ = (disc * patch.seen).sum(1) / disc.sum()  # how far nothing hides it
    there = present[where]
    sure = there * (0.05 + 0.95 * ramp(open_, 0.4, 0.8))

    def blend(beliefs: Tensor) -> Tensor:
        """Mean over the slots, B x G x F x values; what is half hidden has the look of its group in other frames."""
        known = _spread(sure.unsqueeze(1) * beliefs, where, present).sum(2)
        share = _spread(sure, where, present).sum(2).unsqueeze(-1)
        usual = known.sum(2, keepdim=True) / share.sum(2, keepdim=True).clamp_min(1e-6)
        whole = present.sum(2).unsqueeze(-1)
        return (known + (whole - share) * usual) / whole.clamp_min(1e-6)

    outline = _outline_misfit(patch, templates)
    kind = blend(torch.softmax(-outline.amin(2) / OUTLINE_WIDTH, 1))
    best_kind = kind.mean(2).argmax(2)[clip, group]
    pattern = _pattern_misfit(patch, templates, group_colour, best_kind)
    joint = pick(outline, best_kind).unsqueeze(1) + pattern  # N x textures x ANGLES
    texture = blend(torch.softmax(-joint.amin(2) / TEXTURE_WIDTH, 1))
    best_texture = texture.mean(2).argmax(2)[clip, group]
    misfit = pick(joint, best_texture)
    turn = misfit.argmin(1)
    cover, tone = templates.cover[best_kind, turn], templates.tone[best_kind, best_texture, turn]
    filled = (cover * (2 * patch.own - patch.seen)).sum(1) / (cover * patch.seen).sum(1).clamp_min(1)
    shown = (cover * patch.own).sum(1) / cover.sum(1)
    return _Looks(
        kind=kind,
        texture=texture,
        colour=blend(_colour_beliefs(patch, cover, tone)),
        # A few pixels at the edge of another group are no object that it hides.
        filled=ramp(filled, PRESENT_FROM, PRESENT_TO) * ramp(shown, SHOWN_FROM, SHOWN_TO),
        misfit=misfit - misfit.amin(1, keepdim=True),
        best_kind=best_kind,
        best_texture=best_texture,
    )


def _foreground(videos: Tensor, plates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Degree to which each pixel is not the place (B x F x H x W), whose color it has (... x colors), and the place with shadows."""
    lit = (videos * plates).sum(-1, keepdim=True) / plates.square().sum(-1, keepdim=True).clamp_min(1e-3)
    shaded = lit.clamp(1 - SHADOW, 1) * plates
    gap = (videos - shaded).square().sum(-1)
    # Most pixels are the place: what they differ by is noise, and an object stands out from it.
    noise = gap[:, :, ::2, ::2].flatten(2).median(2).values[..., None, None]
    front = ramp((gap - FRONT_FROM - 1.5 * noise) / (FRONT_TO - FRONT_FROM + 2 * noise), 0, 1)
    near = torch.exp(-_colour_gap(videos, torch.tensor(COLOURS, device=videos.device)) / 0.03) * front.unsqueeze(-1)
    # The pale tone of a texture has the color of what is around it, about 7 pixels wide.
    around = F.avg_pool2d(near.flatten(0, 1).movedim(-1, 1).contiguous(), 2, ceil_mode=True)
    around = F.avg_pool2d(around, 3, stride=1, padding=1)
    share = (around / (around.sum(1, keepdim=True) + 1e-3)).repeat_interleave(2, 2).repeat_interleave(2, 3)
    share = share[:, :, : gap.shape[2], : gap.shape[3]].movedim(1, -1)
    return front, share.unflatten(0, videos.shape[:2]), shaded


def _colour_gap(pixels: Tensor, paints: Tensor) -> Tensor:
    """Squared distance of pixels ... x 3 to each paint under the light that suits it best, ... x paints."""
    power, along = paints.square().sum(1), pixels @ paints.T
    light = (along / power).clamp(0.65, 1.05)
    return pixels.square().sum(-1, keepdim=True) - light * (2 * along - light * power)


@lru_cache(maxsize=4)
def _turns(device: torch.device) -> tuple[Tensor, Tensor]:
    """Kind and turn of the outlines that are looked for: as many turns of each kind as tell it apart."""
    parts = (1, 3, 3, 1, 12)
    table = [
        (kind, 2 * math.pi * part / (many * SYMMETRY[kind])) for kind, many in enumerate(parts) for part in range(many)
    ]
    kinds, angles = zip(*table)
    return torch.tensor(kinds, device=device), torch.tensor(angles, device=device)


@lru_cache(maxsize=4)
def _outlines(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Conjugate spectra of these outlines, K x rows x columns', and their areas in cells, K."""
    kind, angle = _turns(device)
    count = len(kind)
    pixel = 2 / min(rows, columns)
    x = (torch.arange(columns, device=device) - columns // 2) * pixel
    y = (torch.arange(rows, device=device) - rows // 2) * pixel
    dx, dy = x.expand(count, rows, -1).flatten(1), y.unsqueeze(1).expand(count, -1, columns).flatten(1)
    cover = appearance(kind, kind * 0, angle, dx, dy, pixel)[0].unflatten(1, (rows, columns))
    return torch.fft.rfft2(cover.roll((-(rows // 2), -(columns // 2)), (1, 2))).conj(), cover.sum((1, 2))


def _match(own: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """The best places of a frame for an object, B x G x S x F x 2, and how far there is one, B x G x S x F.

    A place counts by the pixels of its own color in the outline, less the empty ones, at half the resolution.
    """
    height, width = own.shape[3:]
    evidence = (2 * own - seen).flatten(0, 2).unsqueeze(1)
    small = F.avg_pool2d(evidence, 2, ceil_mode=True).squeeze(1)
    rows, columns = small.shape[1:]
    spectra, areas = _outlines(rows, columns, own.device)
    match = torch.fft.irfft2(torch.fft.rfft2(small).unsqueeze(1) * spectra, s=(rows, columns))  # N x K x rows x columns
    score, which = match.max(1)
    short = min(height, width)
    x = (4 * torch.arange(columns, device=own.device) + 2 - width) / short
    y = (4 * torch.arange(rows, device=own.device) + 2 - height) / short
    inside = (x.abs() <= width / short - 0.7 * RADIUS) & (y.abs() <= height / short - 0.7 * RADIUS)[:, None]
    left = score.masked_fill(~inside, -torch.inf)
    found: list[tuple[Tensor, Tensor]] = []
    for _ in range(SLOTS):
        peak, at = left.flatten(1).max(1)
        place = torch.stack(_vertex(score, at // columns, at % columns), -1)
        centre = (4 * place + 2 - torch.tensor([width, height], device=own.device)) / short
        found.append((centre, ramp(peak / areas[pick(which.flatten(1), at)], CANDIDATE, PRESENT_TO)))
        away = (x - centre[:, :1]).square().unsqueeze(1) + (y - centre[:, 1:]).square().unsqueeze(2)
        left = left.masked_fill(away < APART**2, -torch.inf)
    centres, present = (torch.stack(part, 1).unflatten(0, own.shape[:3]).movedim(3, 2) for part in zip(*found))
    return centres, present


def _vertex(score: Tensor, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """Column and row of a peak of N x rows x columns between the pixels: the vertex of a parabola along each."""
    n = torch.arange(len(row), device=row.device)
    peak = score[n, row, column]
    found = []
    for place, down, right, limit in ((column, 0, 1, score.shape[2]), (row, 1, 0, score.shape[1])):
        back, on = (place > 0).long(), (place < limit - 1).long()
        before = score[n, row - down * back, column - right * back]
        after = score[n, row + down * on, column + right * on]
        bend = (2 * peak - before - after).clamp_min(1e-6)
        found.append(place + (0.5 * (after - before) / bend).clamp(-0.5, 0.5))
    return found[0], found[1]


def _track(centres: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Order the slots of every frame so that each follows one object, by the least way from the frame before."""
    orders = torch.tensor(list(itertools.permutations(range(SLOTS))), device=centres.device)
    last, seen = centres[:, :, :, 0], present[:, :, :, 0]
    chosen = [orders[0].expand(seen.shape)]
    for frame in range(1, centres.shape[3]):
        now, here = centres[:, :, :, frame], present[:, :, :, frame]
        way = (now[:, :, orders] - last.unsqueeze(2)).square().sum(-1).clamp_max(0.25)  # B x G x orders x S
        there, before = here[:, :, orders], seen.unsqueeze(2)
        order = orders[(way * there * before + 0.25 * (there - before).abs()).sum(-1).argmin(2)]
        now, here = now.gather(2, order.unsqueeze(-1).expand_as(now)), here.gather(2, order)
        # What is not seen for a while is expected where it was last.
        last = torch.where((here > 0.1).unsqueeze(-1), now, last)
        seen = torch.maximum(here, 0.8 * seen)
        chosen.append(order)
    order = torch.stack(chosen, 3)
    return centres.gather(2, order.unsqueeze(-1).expand_as(centres)), present.gather(2, order)


@dataclass(frozen=True, kw_only=True)
class _Templates:
    """Objects of every look and turn, in the middle of a patch of P pixels."""

    cover: Tensor
    """kinds x ANGLES x P."""
    tone: Tensor
    """kinds x textures x ANGLES x P."""


def _half(height: int, width: int) -> int:
    """Pixels from the middle of a patch to its border."""
    return math.ceil(RADIUS * min(height, width) / 2) + 1


@lru_cache(maxsize=4)
def _templates(half: int, short: int, device: torch.device) -> _Templates:
    steps = torch.arange(-half, half + 1, device=device) * (2 / short)
    side = len(steps)
    angle = torch.arange(ANGLES, device=device) * (2 * math.pi / ANGLES)

    def look(kind: Tensor, texture: Tensor) -> tuple[Tensor, ...]:
        n = len(kind) * ANGLES
        dx, dy = steps.expand(n, side, -1).flatten(1), steps.unsqueeze(1).expand(n, -1, side).flatten(1)
        kind, texture = kind.repeat_interleave(ANGLES), texture.repeat_interleave(ANGLES)
        found = appearance(kind, texture, angle.repeat(n // ANGLES), dx, dy, 2 / short)
        return tuple(part.unflatten(0, (-1, ANGLES)) for part in found)

    kinds, textures = torch.arange(KINDS, device=device), torch.arange(TEXTURES, device=device)
    tone = look(kinds.repeat_interleave(TEXTURES), textures.repeat(KINDS))[1]
    return _Templates(cover=look(kinds, kinds * 0)[0], tone=tone.unflatten(0, (KINDS, TEXTURES)))


@dataclass(frozen=True, kw_only=True)
class _Patch:
    """Pixels around the centers of N objects, under an even light."""

    colours: Tensor
    """N x P x 3."""
    own: Tensor
    """Degree to which a pixel has the group's color, N x P."""
    seen: Tensor
    """Weight of a pixel as evidence, N x P."""


def _nearest_to(at: Tensor, others: Tensor, dx: Tensor, dy: Tensor) -> Tensor:
    """1.0 for pixels (N x P from the centers `at`) that no other object of the group (N x S x 2) is nearer to."""
    gap = others - at.unsqueeze(1)
    own = dx.square() + dy.square()
    far = [(dx - gap[:, k, :1]).square() + (dy - gap[:, k, 1:]).square() for k in range(SLOTS)]
    return (own <= torch.stack(far).amin(0) + 1e-4).float()


def _centre_of_mass(
    own: Tensor, seen: Tensor, where: tuple[Tensor, Tensor, Tensor], others: Tensor, at: Tensor
) -> Tensor:
    """Centers N x 2 nearer to the middle of what is there: that of every kind is at its center, or half a pixel from it."""
    clip, group, frame = where
    _, groups, frames, height, width = own.shape
    flat, dx, dy = window(at, 1.2 * RADIUS, 1.2 * RADIUS, height, width)
    pixels = ((clip * groups + group) * frames + frame).unsqueeze(1) * (height * width) + flat
    weight = own.flatten()[pixels] * _nearest_to(at, others, dx, dy)
    shift = torch.stack([weight * dx, weight * dy]).sum(2).T / weight.sum(1, keepdim=True).clamp_min(1)
    near = (dx.square() + dy.square() < RADIUS**2).float()
    hidden = (near * (1 - seen.flatten()[pixels])).sum(1) / near.sum(1)  # what is half hidden has its middle elsewhere
    return at + shift * (1 - ramp(hidden, 0.02, 0.15)).unsqueeze(1)


def _patches(
    videos: Tensor, own: Tensor, seen: Tensor, where: tuple[Tensor, Tensor, Tensor], at: Tensor, others: Tensor
) -> _Patch:
    """Look at the frame between its pixels, so that every object is in the middle of its patch."""
    height, width = videos.shape[2:4]
    short, half = min(height, width), _half(height, width)
    steps = torch.arange(-half, half + 1, device=videos.device)
    middle = (at * short + torch.tensor([width, height], device=at.device) - 1) / 2
    low = middle.floor()
    part = middle - low
    columns, rows = (low[:, :1].long() + steps).unsqueeze(1), (low[:, 1:].long() + steps).unsqueeze(2)
    clip, group, frame = (index[:, None, None] for index in where)
    total = torch.zeros(len(at), len(steps), len(steps), 5, device=videos.device)
    for down, right in itertools.product((0, 1), (0, 1)):
        share = (part[:, 0] if right else 1 - part[:, 0]) * (part[:, 1] if down else 1 - part[:, 1])
        row, column = (rows + down).clamp(0, height - 1), (columns + right).clamp(0, width - 1)
        masks = [mask[clip, group, frame, row, column].unsqueeze(-1) for mask in (own, seen)]
        total += share[:, None, None, None] * torch.cat([videos[clip, frame, row, column], *masks], -1)
    world = steps * (2 / short)
    total[..., :3] /= light_at(world, world.unsqueeze(1)).unsqueeze(-1)
    side = len(steps)
    alone = _nearest_to(at, others, world.repeat(side).unsqueeze(0), world.repeat_interleave(side).unsqueeze(0))
    colours, own, seen = total.flatten(1, 2).split((3, 1, 1), -1)
    return _Patch(colours=colours, own=own.squeeze(-1) * alone, seen=seen.squeeze(-1) * alone)


def _outline_misfit(patch: _Patch, templates: _Templates) -> Tensor:
    """Squared misfit to every outline as a share of the object, N x kinds x ANGLES."""
    return _misfit(patch.seen, patch.own, templates.cover) / patch.own.sum(1).clamp_min(1)[:, None, None]


def _pattern_misfit(patch: _Patch, templates: _Templates, colour: Tensor, kind: Tensor) -> Tensor:
    """The same to every texture of these colors and kinds (N), N x textures x ANGLES."""
    base = torch.tensor(COLOURS, device=colour.device)[colour].unsqueeze(1)
    axis = TINT * (1 - base)
    pale = (((patch.colours - base) * axis).sum(-1) / axis.square().sum(-1)).clamp(-0.2, 1.2)
    found = torch.empty(len(kind), TEXTURES, ANGLES, device=kind.device)
    for index, known in enumerate(templates.tone):
        own = (kind == index).nonzero().squeeze(1)
        found[own] = _misfit(patch.own[own], pale[own], known)
    return found / patch.own.sum(1).clamp_min(1)[:, None, None]


def _misfit(weight: Tensor, value: Tensor, known: Tensor) -> Tensor:
    """Weighted squared distance of N x P values to ... x P known ones, N x ..."""
    flat = known.flatten(0, -2)
    square = weight @ flat.square().T - 2 * (weight * value) @ flat.T + (weight * value.square()).sum(1, keepdim=True)
    return square.unflatten(1, known.shape[:-1])


def _colour_beliefs(patch: _Patch, cover: Tensor, tone: Tensor) -> Tensor:
    """Beliefs about the color under the texture, N x colors: least squares over the pixels of the object."""
    weight, pale = (cover * patch.own).square().unsqueeze(-1), TINT * tone.unsqueeze(-1)
    own = (weight * (1 - pale) * (patch.colours - pale)).sum(1) / (weight * (1 - pale).square()).sum(1).clamp_min(1e-6)
    return torch.softmax(-_colour_gap(own, torch.tensor(COLOURS, device=own.device)) / COLOUR_WIDTH, 1)


@dataclass(frozen=True, kw_only=True)
class _Picture:
    """The canvas of N objects."""

    pixels: Tensor
    """B x F x H x W x 3."""
    under: Tensor
    """The same without objects."""
    seen: Tensor
    """Weight of a pixel, B x G x F x H x W."""
    where: tuple[Tensor, Tensor, Tensor]
    """Clip, group and frame of N objects."""


def _refine(
    picture: _Picture, looks: _Looks, colour: Tensor, others: Tensor, at: Tensor, rounds: int = 2
) -> tuple[Tensor, Tensor]:
    """Gauss-Newton on the pixels for the centers (N x 2), from `at`, and the turns (N), from the best ones."""
    _, groups, frames, height, width = picture.seen.shape
    pixel = 2 / min(height, width)
    clip, group, frame = picture.where
    picture_row = (clip * frames + frame).unsqueeze(1) * (height * width)
    seen_row = ((clip * groups + group) * frames + frame).unsqueeze(1) * (height * width)
    step = torch.tensor([pixel / 2, pixel / 2, 0.1], device=at.device)
    angles = looks.misfit.argmin(1) * (2 * math.pi / ANGLES)

    def drawn(dx: Tensor, dy: Tensor, turn: Tensor, under: Tensor) -> Tensor:
        cover, tone, shade = appearance(looks.best_kind, looks.best_texture, turn, dx, dy, pixel)
        return torch.lerp(under, paint_of(colour, tone) * shade.unsqueeze(-1), cover.unsqueeze(-1))

    for _ in range(rounds):
        flat, dx, dy = window(at, RADIUS + pixel, RADIUS + pixel, height, width)
        target = picture.pixels.flatten(0, 3)[picture_row + flat]
        under = picture.under.flatten(0, 3)[picture_row + flat]
        weight = (picture.seen.flatten()[seen_row + flat] * _nearest_to(at, others, dx, dy)).unsqueeze(-1)
        now = drawn(dx, dy, angles, under)
        moved = (
            drawn(dx - step[0], dy, angles, under),
            drawn(dx, dy - step[1], angles, under),
            drawn(dx, dy, angles + step[2], under),
        )
        slopes = torch.stack([(other - now) * weight for other in moved], 1).flatten(2)
        pull = slopes @ ((target - now) * weight).flatten(1).unsqueeze(-1)
        normal = slopes @ slopes.transpose(1, 2) + 0.02 * torch.eye(3, device=at.device)
        move = torch.linalg.solve_ex(normal, pull)[0].squeeze(-1).clamp(-2, 2) * step
        at, angles = at + move[:, :2], angles + move[:, 2]
    return at, angles
