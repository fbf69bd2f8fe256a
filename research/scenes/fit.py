"""Analysis by synthesis: from pixels to the place, the paths, the relation, and the nearest renderable clip.

`fit_place` tells which place it is and where the camera is, `objects.find_objects` finds what stands before it,
`fit_motion` explains the tracks by each verb, `tell_apart` says which group moves and which stands, `redraw` paints
what was found frame by frame, and `nearest_clip` renders the scene that it describes. Everything is batched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from research.scenes.judging import pick, ramp
from research.scenes.objects import ANGLES, SLOTS, ObjectFit
from research.scenes.render import (
    DEPTH_SLACK,
    FOOT,
    GROUND,
    GROUPS,
    LOOSE,
    PAN,
    RADIUS,
    RELATION_PLACE,
    VIEW,
    Layout,
    backdrop,
    draw,
    layout_of,
    path_of,
    rolls,
    scroll_of,
    slack,
)
from research.scenes.scene import ATTRIBUTES, MEMBERS, SceneBatch

PLACES, VERBS = len(ATTRIBUTES["place"]), len(ATTRIBUTES["verb"])
SPIN = ATTRIBUTES["verb"].index("spin")

# Squared RGB, squared world units, or shares of an object's area at which a belief falls to 1/e.
PLACE_WIDTH = 0.006
CAMERA_WIDTH = 0.0012
MOTION_WIDTH = 0.003
TURN_WIDTH = 0.03
RELATION_WIDTH = 0.006

STRAY_FROM, STRAY_TO = 0.010, 0.030
"""Energy (squared RGB x world area) of the worst blob that nothing explains; the faintest object has about 0.03."""


@dataclass(frozen=True, kw_only=True)
class PlaceFit:
    """The place behind the objects."""

    place: Tensor
    """Beliefs, B x F x places."""
    scroll: Tensor
    """Position of the camera, B x F world units of the ground."""
    plates: Tensor
    """The empty place as that camera sees it, B x F x H x W x 3."""
    gain: Tensor
    """Brightness of each frame over it, B x F x 1 x 1 x 1."""
    camera: Tensor
    """Beliefs about how the camera moves, B x cameras."""
    shake: Tensor
    """Mean squared distance of the camera from the nearest way, B."""


@dataclass(frozen=True, kw_only=True)
class MotionFit:
    """The tracks of every group explained by each verb."""

    error: Tensor
    """Mean squared distance to the best path, B x G x verbs, world units."""
    still: Tensor
    """The same for objects that do not move, B x G."""
    turn: Tensor
    """Misfit of the turns that go with each verb, B x G x verbs."""
    no_turn: Tensor
    """The same for objects that do not turn, B x G."""
    phase: Tensor
    """Best phase, B x G x verbs."""
    angle: Tensor
    """Best turn at the start, B x G x verbs, in [0, 1)."""
    spot: Tensor
    """Standing place of each object then (x in the place, y of its center), B x G x verbs x S x 2."""
    mean: Tensor
    """The mean place of each object in the same terms, B x G x S x 2."""

    @property
    def cost(self) -> Tensor:
        """Both misfits in units of their widths, B x G x verbs."""
        return self.error / MOTION_WIDTH + self.turn / TURN_WIDTH

    @property
    def idle(self) -> Tensor:
        """The cost of neither moving nor turning, B x G."""
        return self.still / MOTION_WIDTH + self.no_turn / TURN_WIDTH

    def spot_of(self, group: Tensor) -> Tensor:
        """Standing places of the objects of a group (B) by what explains them best, doing nothing included, B x S x 2."""
        costs = torch.cat([self.cost, self.idle.unsqueeze(2)], 2)
        spots = torch.cat([self.spot, self.mean.unsqueeze(2)], 2)
        return pick(pick(spots, group), pick(costs, group).argmin(1))


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Which group moves, and how it stands to the other."""

    mover: Tensor
    """The group that moves, int64, B."""
    other: Tensor
    """Degree to which there is another object, B."""
    slot: Tensor
    """Its slot, int64, B."""
    relation: Tensor
    """Beliefs, B x relations; alone is first."""


@lru_cache(maxsize=4)
def _panorama(height: int, width: int, device: torch.device) -> tuple[Tensor, float, float]:
    """Every place from every camera, places x S x H x W x 3, with the first position and the step (half a pixel)."""
    reach, step = VIEW + PAN / 2 + 0.1, 1 / min(height, width)
    scrolls = torch.arange(-reach, reach + step, step, device=device)
    plates = backdrop(torch.arange(PLACES, device=device), scrolls.expand(PLACES, -1), height, width)
    return plates, -reach, step


@lru_cache(maxsize=4)
def _coarse_panorama(height: int, width: int, device: torch.device) -> Tensor:
    """Every second position of the panorama in cells, places x S x (3 cells)."""
    few = _panorama(height, width, device)[0][:, ::2]
    return _cells(few.flatten(0, 1)).flatten(1).unflatten(0, few.shape[:2])


def _cells(pixels: Tensor) -> Tensor:
    """N x H x W x C to N x C x (16 x 16)."""
    return F.adaptive_avg_pool2d(pixels.movedim(-1, 1), 16).flatten(2)


def fit_place(videos: Tensor) -> PlaceFit:
    """Match float clips B x F x H x W x 3 with the panorama. Places are pale, so what is colorful does not count."""
    count, frames, height, width, _ = videos.shape
    pixels = videos.flatten(0, 1)
    smooth = F.avg_pool2d(pixels.movedim(-1, 1).contiguous(), 3, stride=1, padding=1, count_include_pad=False)
    vivid = ramp(smooth.amax(1) - smooth.amin(1), 0.28, 0.42)  # smooth, for noise is colorful too
    around = F.max_pool2d(F.max_pool2d(vivid.unsqueeze(1), (1, 5), 1, (0, 2)), (5, 1), 1, (2, 0))
    weight = 1.001 - around.movedim(1, -1)

    known = _coarse_panorama(height, width, videos.device)
    flat = known.flatten(0, 1)
    heavy, seen, power = _cells(weight), _cells(weight * pixels), _cells(weight * pixels.square()).sum((1, 2))
    cost = heavy.expand_as(seen).flatten(1) @ flat.square().T - 2 * seen.flatten(1) @ flat.T + power.unsqueeze(1)
    cost = (cost / heavy.sum((1, 2)).unsqueeze(1)).unflatten(1, known.shape[:2])  # N x places x S
    least, at = cost.min(2)
    place = least.unflatten(0, (count, frames)).mean(1).argmin(1).repeat_interleave(frames)
    position = 2.0 * pick(at, place)

    table, first, step = _panorama(height, width, videos.device)
    last = table.shape[1] - 1
    rows = slice(None, None, 2)  # every second row is enough to tell where the camera is
    thin, weight = pixels[:, rows], weight[:, rows]
    for _ in range(4):  # Gauss-Newton on the pixels; the slope is the step to the next picture
        low = position.floor().clamp(0, last - 1).long()
        before = table[:, :, rows][place, low]
        slope = table[:, :, rows][place, low + 1] - before
        plate = before + slope * (position - low)[:, None, None, None]
        # A flicker of the whole frame is a fault of the picture, but not a move of the camera.
        gain = (weight * thin * plate).sum((1, 2, 3)) / (weight * plate.square()).sum((1, 2, 3))
        gain = gain.clamp(0.5, 1.5)[:, None, None, None]
        rest = thin - gain * plate
        trust = weight / (
            1 + rest.square().sum(-1, keepdim=True) / 0.002
        )  # shadows and pale textures are not the place
        pull = (trust * rest * slope).sum((1, 2, 3))
        stiff = (trust * slope.square()).sum((1, 2, 3)).clamp_min(1e-6)
        position = (position + (pull / stiff).clamp(-1, 1)).clamp(0, last)
    scroll = (first + step * position).unflatten(0, (count, frames))

    time = torch.linspace(-0.5, 0.5, frames, device=videos.device)
    ways = torch.tensor([0.0, -PAN, PAN], device=videos.device).unsqueeze(1) * time
    errors = ((scroll - scroll.mean(1, keepdim=True)).unsqueeze(1) - ways).square().mean(2)
    return PlaceFit(
        place=torch.softmax(-least / PLACE_WIDTH, 1).unflatten(0, (count, frames)),
        scroll=scroll,
        plates=plates_at(place[::frames], scroll, height, width),
        gain=gain.unflatten(0, (count, frames)),
        camera=torch.softmax(-errors / CAMERA_WIDTH, 1),
        shake=errors.amin(1),
    )


def plates_at(place: Tensor, scroll: Tensor, height: int, width: int) -> Tensor:
    """Empty places B x F x H x W x 3 from places (B) and cameras (B x F): as `backdrop`, but looked up between half pixels."""
    table, first, step = _panorama(height, width, scroll.device)
    position = ((scroll - first) / step).clamp(0, table.shape[1] - 1)
    low = position.floor().clamp_max(table.shape[1] - 2).long()
    where = place.unsqueeze(1).expand_as(low)
    return torch.lerp(table[where, low], table[where, low + 1], (position - low)[..., None, None, None])


def fit_motion(objects: ObjectFit, scroll: Tensor, grid: int = 24, rounds: int = 3) -> MotionFit:
    """Explain the tracks, seen from the ground, by every verb; all objects of a group share one phase."""
    frames, device = scroll.shape[1], scroll.device
    ground = objects.centres.clone()
    ground[..., 0] += scroll[:, None, None]
    weight = objects.present.unsqueeze(-1)  # B x G x S x F x 1
    total = weight.sum((2, 3, 4)).clamp_min(1e-6)
    several = (objects.present.sum(2).mean(2) > 1.5).long()  # B x G: how many it is decides how far they go

    def errors(phase: Tensor) -> tuple[Tensor, Tensor]:
        """Error and spot for phases B x G x verbs x P; the best spot given a phase is a mean."""
        verb = torch.arange(VERBS, device=device)[:, None].expand(phase.shape)
        way, _ = path_of(verb, several[:, :, None, None].expand(phase.shape), phase, frames)
        gap = ground[:, :, None, None] - way.unsqueeze(4)  # B x G x verbs x P x S x F x 2
        heavy = weight[:, :, None, None]
        spot = (heavy * gap).sum(5) / heavy.sum(5).clamp_min(1e-6)
        error = (heavy * (gap - spot.unsqueeze(5)).square()).sum((4, 5, 6)) / total[:, :, None, None]
        return error, spot

    step = 1.0 / grid
    phase = torch.arange(grid, device=device).mul(step).expand(*several.shape, VERBS, grid)
    for _ in range(rounds):
        error, spot = errors(phase)
        at = error.argmin(-1, keepdim=True)
        best = phase.gather(-1, at)
        phase, step = best + step * torch.linspace(-1, 1, 5, device=device), step / 2
    spot = spot.gather(3, at[..., None, None].expand(*at.shape, SLOTS, 2)).squeeze(3)
    mean = (weight * ground).sum(3, keepdim=True) / weight.sum(3, keepdim=True).clamp_min(1e-6)
    still = (weight * (ground - mean).square()).sum((2, 3, 4)) / total
    turn, no_turn, angle = _fit_turns(objects, several)
    return MotionFit(
        error=error.gather(-1, at).squeeze(-1),
        still=still,
        turn=turn,
        no_turn=no_turn,
        phase=best.squeeze(-1) % 1.0,
        angle=angle,
        spot=spot,
        mean=mean.squeeze(3),
    )


def _fit_turns(objects: ObjectFit, several: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Misfit of the turns of each verb (B x G x verbs), those of no verb (B x G), and the best start (B x G x verbs)."""
    frames, device = objects.present.shape[3], several.device
    kind = objects.kind.mean(2).argmax(2)  # B x G
    verb = torch.arange(VERBS, device=device).expand(*several.shape, VERBS)
    way, turn = path_of(verb, several.unsqueeze(2).expand_as(verb), torch.zeros(verb.shape, device=device), frames)
    rolled = (way[..., 0] - way[..., :1, 0]) / RADIUS
    turn = torch.where(rolls(kind.unsqueeze(2).expand_as(verb), verb).unsqueeze(-1), rolled, turn)

    # Look the misfit of every start up along the turns, between the angles of the table.
    start = torch.arange(ANGLES, device=device)
    position = (turn * (ANGLES / (2 * math.pi))).unsqueeze(-1) + start  # B x G x verbs x F x starts
    low = position.floor()
    weight = objects.present / objects.present.sum((2, 3), keepdim=True).clamp_min(1e-6)
    table = (objects.misfit * weight.unsqueeze(-1)).sum(2).unsqueeze(2).expand(*verb.shape, frames, ANGLES)
    before, after = table.gather(4, low.long() % ANGLES), table.gather(4, (low.long() + 1) % ANGLES)
    misfit, at = torch.lerp(before, after, position - low).sum(3).min(-1)
    # A spin that nobody could see is none.
    visible = table[:, :, 0].sum(2).amax(-1)
    hidden = (torch.arange(VERBS, device=device) == SPIN) * (1 - ramp(visible, 0.03, 0.10)).unsqueeze(-1)
    return misfit + hidden, table[:, :, 0].sum(2).amin(-1), at / ANGLES


def tell_apart(objects: ObjectFit, motions: MotionFit) -> Parts:
    """The group that moves is the one that stands less well; where none does anything, the one with a texture."""
    there = objects.present.amax(2).mean(2)  # B x G
    textured = 1 - objects.texture[..., 0].mean(2)
    # What is half there is more likely some pixels at the edge of the other group than what the clip is about.
    mover = (there.pow(4) * (10 + 5 * textured + motions.idle.clamp_max(40))).argmax(1)
    slot = pick(objects.present.mean(3), 1 - mover).argmax(1)
    other = pick(there, 1 - mover)
    kinds = objects.kind.mean(2).argmax(2)
    foot = RADIUS * torch.tensor(FOOT, device=other.device)[kinds]  # B x G
    own_slot = pick(objects.present.mean(3), mover).argmax(1)
    here = pick(motions.spot_of(mover), own_slot)
    stands = pick(pick(motions.mean, 1 - mover), slot)
    apart = here - stands
    apart[:, 1] += pick(foot, mover) - pick(foot, 1 - mover)
    known = torch.tensor(RELATION_PLACE[1:], device=other.device)
    beliefs = torch.softmax(-(apart.unsqueeze(1) / 2 - known).square().sum(-1) / RELATION_WIDTH, 1)
    relation = torch.cat([1 - other.unsqueeze(1), other.unsqueeze(1) * beliefs], 1)
    return Parts(mover=mover, other=other, slot=slot, relation=relation)


def redraw(place: PlaceFit, objects: ObjectFit, motions: MotionFit, parts: Parts) -> Tensor:
    """The nearest drawable frames, B x F x H x W x 3: every object where and how it was found, whatever its path."""
    count, frames = place.scroll.shape
    device = place.scroll.device
    mover, rest = parts.mover, 1 - parts.mover
    kind, texture = objects.kind.mean(2).argmax(2), objects.texture.mean(2).argmax(2)
    foot = RADIUS * torch.tensor(FOOT, device=device)[kind]

    def members(values: Tensor) -> Tensor:
        """The slots of the group that moves, then the one that stands: B x MEMBERS x ..."""
        return torch.cat([pick(values, mover), pick(pick(values, rest), parts.slot).unsqueeze(1)], 1)

    def looks(values: Tensor) -> Tensor:
        """B x G to (B F) x MEMBERS."""
        both = torch.cat([pick(values, mover).unsqueeze(1).expand(-1, SLOTS), pick(values, rest).unsqueeze(1)], 1)
        return both.repeat_interleave(frames, 0)

    stands = pick(pick(motions.mean, rest), parts.slot).unsqueeze(1)
    ground = torch.cat([motions.spot_of(mover), stands], 1)
    plain = torch.zeros_like(texture[:, :1]).expand(-1, MEMBERS - SLOTS)
    layout = Layout(
        centres=members(objects.centres).transpose(1, 2).flatten(0, 1).unsqueeze(2),
        angles=members(objects.angles).transpose(1, 2).flatten(0, 1).unsqueeze(2),
        ground=ground[..., 1].repeat_interleave(frames, 0) + looks(foot),
        present=members(objects.present).transpose(1, 2).flatten(0, 1) > 0.5,
        kind=looks(kind),
        colour=looks(objects.group_colour),
        texture=torch.cat([pick(texture, mover).unsqueeze(1).expand(-1, SLOTS), plain], 1).repeat_interleave(frames, 0),
    )
    return draw(layout, place.plates.flatten(0, 1).unsqueeze(1).clone()).squeeze(1).unflatten(0, (count, frames))


def stray(rest: Tensor) -> Tensor:
    """Energy of the strongest blob, of the size of an object, in N x H x W x 3 that nothing explains, N."""
    short = min(rest.shape[1:3])
    smooth = F.avg_pool2d(rest.movedim(-1, 1), 3, stride=1, padding=1)  # white noise all but vanishes
    size = 2 * round(RADIUS * short / 2) + 1
    energy = smooth.square().sum(1, keepdim=True)
    for kernel in ((1, size), (size, 1)):
        energy = F.avg_pool2d(energy, kernel, stride=1, padding=(kernel[0] // 2, kernel[1] // 2))
    return energy.amax((1, 2, 3)) * (2 * size / short) ** 2


def nearest_clip(
    videos: Tensor, place: PlaceFit, objects: ObjectFit, motions: MotionFit, parts: Parts
) -> tuple[SceneBatch, Tensor]:
    """The nearest renderable clip found, and its r.m.s. distance (B).

    Attributes are the most believed ones that can be shown together. For a clip far from every scene this is an
    upper bound of the distance, not the exact minimum.
    """
    frames, height, width = videos.shape[1:4]
    device = videos.device
    mover, rest = parts.mover, 1 - parts.mover
    pair = parts.other > 0.5
    relation = torch.where(pair, 1 + parts.relation[:, 1:].argmax(1), 0)
    count = pick(objects.present, mover).sum(1).mean(1).round().clamp(1, SLOTS).long() - 1
    count = torch.where(pair, 0, count)
    kinds = objects.kind.mean(2).argmax(2)
    foot = RADIUS * torch.tensor(FOOT, device=device)[kinds]
    view = (place.scroll.mean(1) / VIEW).clamp(-1, 1)

    travels = torch.arange(VERBS, device=device) < 2
    wrong = pair.unsqueeze(1) & (travels != (relation <= 2).unsqueeze(1))  # who passes travels, who stays does not
    verb = pick(motions.cost, mover).masked_fill(wrong, torch.inf).argmin(1)

    spots = pick(pick(motions.spot, mover), verb) - (VIEW * view)[:, None, None] * torch.tensor(
        [1.0, 0.0], device=device
    )
    spots[..., 1] += pick(foot, mover).unsqueeze(1)
    stands = pick(pick(motions.mean, rest), parts.slot) - (VIEW * view)[:, None] * torch.tensor(
        [1.0, 0.0], device=device
    )
    stands[:, 1] += pick(foot, rest)

    # The surest objects from left to right; the middle one of three is the last of its group.
    rank = pick(objects.present, mover).mean(2).argsort(1, descending=True).argsort(1)
    order = spots[..., 0].masked_fill(rank > count.unsqueeze(1), torch.inf).argsort(1)
    order = torch.where((count == 2).unsqueeze(1), order[:, [0, 2, 1]], order)
    spots = spots.gather(1, order.unsqueeze(-1).expand(-1, -1, 2))
    blank = SceneBatch(
        place=place.place.mean(1).argmax(1),
        camera=place.camera.argmax(1),
        count=count,
        kind=pick(kinds, mover),
        colour=pick(objects.group_colour, mover),
        texture=pick(objects.texture, mover).mean(1).argmax(1),
        verb=verb,
        relation=relation,
        other_kind=torch.where(pair, pick(kinds, rest) + 1, 0),
        other_colour=torch.where(pair, pick(objects.group_colour, rest) + 1, 0),
        offset=torch.zeros(len(videos), 2, device=device),
        layout=torch.zeros(len(videos), MEMBERS, 2, device=device),
        phase=pick(pick(motions.phase, mover), verb),
        angle=pick(pick(motions.angle, mover), verb),
        view=view,
    )
    apart = torch.tensor(RELATION_PLACE, device=device)[relation]
    places = torch.cat([torch.tensor(GROUPS, device=device)[count] + apart.unsqueeze(1), -apart.unsqueeze(1)], 1)
    found = torch.cat([spots, stands.unsqueeze(1)], 1)
    there = torch.cat([torch.arange(SLOTS, device=device) <= count.unsqueeze(1), pair.unsqueeze(1)], 1).unsqueeze(-1)
    middle = ((found - places) * there).sum(1) / there.sum(1)
    room = torch.stack([slack(blank).clamp_min(1e-6), torch.full_like(view, DEPTH_SLACK)], -1)
    home = torch.tensor([0.0, GROUND], device=device)
    offset = ((middle - home) / room).clamp(-1, 1)
    expected = (home + offset * room).unsqueeze(1) + places
    layout = ((found - expected) / LOOSE).clamp(-1, 1) * there
    scene = SceneBatch(**{**vars(blank), "offset": offset, "layout": layout})
    drawn = draw(layout_of(scene, frames), plates_at(scene.place, scroll_of(scene, frames), height, width))
    return scene, (drawn - videos).square().mean((1, 2, 3, 4)).sqrt()
