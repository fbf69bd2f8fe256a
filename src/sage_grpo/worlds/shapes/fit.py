"""Analysis by synthesis: from pixels to the nearest drawable frames and the nearest renderable clip.

First every frame is explained alone (`fit_frames`): which background, which object, where. Then the centers of a
clip are explained together by one motion (`fit_motion`), and the clip that this describes is rendered and compared
(`nearest_clip`). Everything is batched over clips and frames.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_grpo.worlds.shapes.render import (
    RADII,
    backdrop,
    coverage,
    motion_path,
    palette,
    pixel_centres,
    render,
    room,
    slack,
)
from sage_grpo.worlds.shapes.scene import ATTRIBUTES, SceneBatch

SHAPES, SIZES, COLOURS, BACKGROUNDS, MOTIONS, SPEEDS = (
    len(ATTRIBUTES[name]) for name in ("shape", "size", "colour", "background", "motion", "speed")
)

# By how much squared RGB distance, relative loss of matched-filter gain, or squared world units a belief falls to
# 1/e: as wide as clean clips allow, so that a half-right clip gets part of the credit and learning has a slope.
COLOUR_WIDTH = 0.07
BACKGROUND_WIDTH = 0.03
OUTLINE_WIDTH = 0.018
MOTION_WIDTH = 0.003

PRESENT_FROM, PRESENT_TO = 0.2, 0.6
"""Share of the object's own energy that the drawing explains: below the first there is no object, above all."""
STRAY_FROM, STRAY_TO = 0.008, 0.03
"""Energy (squared RGB x world area) of the worst other blob; the faintest object on any background has 0.05."""


@dataclass(frozen=True, kw_only=True)
class FrameFit:
    """Every frame explained by itself. Beliefs about its attributes sum to one, B x F x (number of values)."""

    shape: Tensor
    size: Tensor
    colour: Tensor
    background: Tensor
    centres: Tensor  # center of the object, B x F x 2 world units
    residual: Tensor  # r.m.s. difference to the nearest drawable frame, B x F
    gate: Tensor  # B x F in [0, 1]: is there exactly one object, of a plausible size and contrast?


@dataclass(frozen=True, kw_only=True)
class MotionFit:
    """The centers of each clip explained by each motion at each speed."""

    error: Tensor  # mean squared distance to the best path, B x (motions x speeds), world units
    still: Tensor  # the same for an object that does not move, B
    offset: Tensor  # best offset, B x (motions x speeds) x 2 in [-1, 1]
    phase: Tensor  # best phase, B x (motions x speeds)


def fit_frames(videos: Tensor) -> FrameFit:
    """Explain float clips B x F x H x W x 3 frame by frame."""
    batch, frames, height, width, _ = videos.shape
    pixels = videos.flatten(0, 1)
    background = _guess_background(pixels)
    plate = backdrop(background, height, width)
    excess = pixels - plate
    mask, colour = _guess_mask(excess, background)
    loss, centres, outline = _match_outlines(mask)
    shape, size = outline // SIZES, outline % SIZES
    centres = _refine_centres(mask, shape, size, centres)
    drawn = coverage(shape, size, centres, height, width)
    near = F.max_pool2d(drawn.unsqueeze(1), 5, stride=1, padding=2).squeeze(1) > 0

    energy = drawn.square().sum((1, 2)).clamp_min(1e-6)
    seen = torch.einsum("nhw,nhwc->nc", drawn, excess) / energy.unsqueeze(1) + _tone(background)
    far = (~near).unsqueeze(-1)
    shift = (excess * far).sum((1, 2)) / far.sum((1, 2)).clamp_min(1)

    paint = drawn.unsqueeze(-1) * (palette(colour)[:, None, None] - plate)
    rest = excess - paint
    present = 1 - (rest.square().sum(-1) * near).sum((1, 2)) / paint.square().sum((1, 2, 3)).clamp_min(1e-6)
    gate = ramp(present, PRESENT_FROM, PRESENT_TO) * (
        1 - ramp(_stray((rest - shift[:, None, None]) * far), STRAY_FROM, STRAY_TO)
    )
    outlines = torch.softmax(-loss / OUTLINE_WIDTH, dim=1).unflatten(1, (SHAPES, SIZES))
    fit = FrameFit(
        shape=outlines.sum(2),
        size=outlines.sum(1),
        colour=_beliefs(seen, palette(_all(COLOURS, seen)), COLOUR_WIDTH),
        background=_beliefs(shift + _tone(background), _tone(_all(BACKGROUNDS, seen)), BACKGROUND_WIDTH),
        centres=centres,
        residual=rest.square().mean((1, 2, 3)).sqrt(),
        gate=gate,
    )
    return FrameFit(**{name: value.unflatten(0, (batch, frames)) for name, value in vars(fit).items()})


def fit_motion(centres: Tensor, size: Tensor, grid: int = 48, rounds: int = 3) -> MotionFit:
    """Fit every motion and speed to centers B x F x 2 of objects of these sizes (B)."""
    frames, device = centres.shape[1], centres.device
    kinds = torch.arange(MOTIONS * SPEEDS, device=device)
    motion, speed = kinds // SPEEDS, kinds % SPEEDS
    bound = slack(motion, speed, size.unsqueeze(1))[:, :, None]  # B x K x 1 x 2

    def errors(phase: Tensor) -> tuple[Tensor, Tensor]:
        # phase: (B or 1) x K x P. The best offset given a phase is a mean.
        shape = phase.shape[1:]
        path = motion_path(motion[:, None].expand(shape), speed[:, None].expand(shape), phase, frames)
        gap = centres[:, None, None] - path
        offset = torch.minimum(torch.maximum(gap.mean(-2), -bound), bound)
        return (gap - offset.unsqueeze(-2)).square().sum(-1).mean(-1), offset

    step = 1.0 / grid
    phase = torch.arange(grid, device=device).mul(step).expand(1, len(kinds), grid)
    for _ in range(rounds + 1):
        error, offset = errors(phase)
        least, at = error.min(-1, keepdim=True)
        best = phase.expand(error.shape).gather(-1, at)
        phase, step = best + step * torch.linspace(-1, 1, 9, device=device), step / 4
    offset = offset.gather(2, at.unsqueeze(-1).expand(-1, -1, -1, 2)).squeeze(2) / bound.squeeze(2)
    still = (centres - centres.mean(1, keepdim=True)).square().sum(-1).mean(-1)
    return MotionFit(error=least.squeeze(-1), still=still, offset=offset, phase=best.squeeze(-1) % 1.0)


def nearest_clip(videos: Tensor, frames: FrameFit, motions: MotionFit, tries: int = 2) -> tuple[SceneBatch, Tensor]:
    """The nearest renderable clip found, and its r.m.s. distance (B): the `tries` best motions are rendered and compared, with the most believed attributes.

    For a clip far from every scene this is an upper bound of the distance, not the exact minimum.
    """
    count, length, height, width, _ = videos.shape
    kinds = motions.error.topk(tries, dim=1, largest=False).indices
    best = {
        name: getattr(frames, name).mean(1).argmax(1).repeat_interleave(tries)
        for name in ("shape", "size", "colour", "background")
    }
    batch = SceneBatch(
        **best,
        motion=(kinds // SPEEDS).flatten(),
        speed=(kinds % SPEEDS).flatten(),
        offset=motions.offset.gather(1, kinds.unsqueeze(-1).expand(-1, -1, 2)).flatten(0, 1),
        phase=motions.phase.gather(1, kinds).flatten(),
    )
    drawn = render(batch, length, height, width).unflatten(0, (count, tries))
    distance, at = (drawn - videos.unsqueeze(1)).square().mean((2, 3, 4, 5)).sqrt().min(1)
    return batch[torch.arange(count, device=videos.device) * tries + at], distance


def pick(values: Tensor, index: Tensor) -> Tensor:
    return values[torch.arange(len(index), device=index.device), index]


def ramp(value: Tensor, start: float, stop: float) -> Tensor:
    t = ((value - start) / (stop - start)).clamp(0, 1)
    return t * t * (3 - 2 * t)


def _guess_background(pixels: Tensor) -> Tensor:
    """The background that most pixels are near to, N; a capped distance, so that the object does not vote."""
    plates = backdrop(_all(BACKGROUNDS, pixels), *pixels.shape[1:3])
    costs = [(pixels - plate).square().sum(-1).clamp_max(0.1).mean((1, 2)) for plate in plates]
    return torch.stack(costs, 1).argmin(1)


def _guess_mask(excess: Tensor, background: Tensor) -> tuple[Tensor, Tensor]:
    """Per frame the object color that explains the foreground best, and every pixel's share of it, N x H x W."""
    ray = palette(_all(COLOURS, excess)) - _tone(background).unsqueeze(1)  # N x colors x 3
    along = torch.einsum("nhwc,nkc->nkhw", excess, ray)
    length = ray.square().sum(-1)[:, :, None, None]
    share = along / length
    inside = share.clamp(0, 1)
    cost = (inside * (inside * length - 2 * along)).mean((2, 3))  # |excess - share ray|^2 less |excess|^2
    colour = cost.argmin(1)
    return pick(share, colour), colour


def _match_outlines(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Matched filter for every shape and size at every place: the relative loss of gain against the best outline (N x 10), its center, and the outline.

    The gain of an outline is the energy that it explains at its best amplitude, so a faint object is not taken for a small one.
    """
    height, width = mask.shape[1:]
    x, y = pixel_centres(height, width, mask.device)
    outlines = torch.arange(SHAPES * SIZES, device=mask.device)
    size = outlines % SIZES
    middle = torch.stack([x[width // 2], y[height // 2]]).expand(len(outlines), 2)
    filters = coverage(outlines // SIZES, size, middle, height, width)
    spectrum = torch.fft.rfft2(filters.roll((-(height // 2), -(width // 2)), (1, 2))).conj()
    match = torch.fft.irfft2(torch.fft.rfft2(mask).unsqueeze(1) * spectrum, s=(height, width))
    gain = match.clamp_min(0).square() / filters.square().sum((1, 2))[:, None, None]

    reach = room(size)[:, None, None] + 1 / min(height, width)
    allowed = (x.abs() <= reach) & (y.abs()[:, None] <= reach)
    at = (gain * allowed).flatten(2).argmax(2)
    row, column = at // width, at % width
    flat = gain.flatten(2)
    centre, peak = [], flat.gather(2, at.unsqueeze(-1)).squeeze(-1)
    top = peak
    for place, limit, stride in ((column, width, 1), (row, height, width)):
        before, after = (
            flat.gather(2, (at + side * stride * ((place + side >= 0) & (place + side < limit))).unsqueeze(-1))
            for side in (-1, 1)
        )
        before, after = before.squeeze(-1), after.squeeze(-1)
        bend = (2 * peak - before - after).clamp_min(1e-9)
        shift = (0.5 * (after - before) / bend).clamp(-0.5, 0.5)
        top = top + 0.25 * (after - before) * shift
        centre.append((2 * (place + shift) + 1 - limit) / min(height, width))
    best = top.argmax(1)
    loss = 1 - top / top.max(1, keepdim=True).values.clamp_min(1e-9)
    return loss, torch.stack([pick(axis, best) for axis in centre], dim=-1), best


def _refine_centres(mask: Tensor, shape: Tensor, size: Tensor, centres: Tensor, rounds: int = 3) -> Tensor:
    """Gauss-Newton on the pixels, with the slope of the drawn outline taken from its own image."""
    height, width = mask.shape[1:]
    bound = room(size).unsqueeze(1)
    for _ in range(rounds):
        drawn = coverage(shape, size, centres, height, width)
        amplitude = (mask * drawn).sum((1, 2)) / drawn.square().sum((1, 2)).clamp_min(1e-6)
        amplitude = amplitude.clamp_min(0.1)[:, None, None]
        rest = mask - amplitude * drawn
        slope_y, slope_x = torch.gradient(drawn, dim=(1, 2))
        slope = torch.stack([slope_x, slope_y], 1) * (-amplitude.unsqueeze(1) * min(height, width) / 2)
        normal = torch.einsum("nihw,njhw->nij", slope, slope) + 1e-4 * torch.eye(2, device=mask.device)
        pull = torch.einsum("nihw,nhw->ni", slope, rest)
        step = _solve(normal, pull).clamp(-RADII[0] / 4, RADII[0] / 4)
        centres = torch.minimum(torch.maximum(centres + step, -bound), bound)
    return centres


def _solve(matrix: Tensor, vector: Tensor) -> Tensor:
    """2 x 2 systems by hand: no call into a solver, so no device synchronization."""
    (a, b), (c, d) = matrix.permute(1, 2, 0)
    u, v = vector.unbind(1)
    return torch.stack([d * u - b * v, a * v - c * u], 1) / (a * d - b * c).unsqueeze(1)


def _stray(rest: Tensor) -> Tensor:
    """Energy of the strongest blob, of the size of a small object, in the part that the drawing leaves unexplained, N."""
    short = min(rest.shape[1:3])
    smooth = F.avg_pool2d(rest.movedim(-1, 1), 3, stride=1, padding=1)  # white noise all but vanishes
    window = 2 * round(RADII[0] * short / 2) + 1
    energy = smooth.square().sum(1, keepdim=True)
    for kernel in ((1, window), (window, 1)):
        energy = F.avg_pool2d(energy, kernel, stride=1, padding=(kernel[0] // 2, kernel[1] // 2))
    return energy.amax((1, 2, 3)) * (2 * window / short) ** 2


def _beliefs(seen: Tensor, known: Tensor, width: float) -> Tensor:
    """N x 3 colors against K known ones -> N x K."""
    return torch.softmax(-(seen.unsqueeze(1) - known).square().sum(-1) / width, dim=1)


def _tone(background: Tensor) -> Tensor:
    """RGB of a background at mid-height."""
    return backdrop(background, 1, 1)[..., 0, 0, :]


def _all(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)
