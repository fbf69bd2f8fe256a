"""The renderer obeys geometry: inside the frame, same world at every size and frame rate."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sage_grpo.worlds.shapes.render import (
    MARGIN,
    RADII,
    backdrop,
    coverage,
    draw,
    palette,
    pixel_centres,
    render,
    to_uint8,
    trajectory,
)
from sage_grpo.worlds.shapes.scene import ATTRIBUTES, SceneBatch, all_scenes, batch_of, random_scenes


def some(n: int, seed: int = 0) -> SceneBatch:
    return random_scenes(n, torch.Generator().manual_seed(seed), "all")


def test_every_scene_stays_whole_inside_the_frame() -> None:
    batch = batch_of(all_scenes(), torch.Generator().manual_seed(0))
    # The extreme offsets are the dangerous ones.
    batch = SceneBatch(**{**vars(batch), "offset": batch.offset.sign()})
    reach = trajectory(batch, 9).abs().amax((1, 2)) + torch.tensor(RADII)[batch.size]
    assert reach.max() <= 1 - MARGIN + 1e-6


def test_no_object_is_larger_than_its_radius() -> None:
    shape, size = torch.arange(5).repeat(2), torch.arange(2).repeat_interleave(5)
    masks = coverage(shape, size, torch.zeros(10, 2), 256, 256) > 0
    x, y = pixel_centres(256, 256, masks.device)
    far = torch.maximum(x.abs(), y.abs()[:, None])
    extent = (masks * far).amax((1, 2))
    radius = torch.tensor(RADII)[size]
    assert (extent <= radius + 1 / 128).all()
    assert (extent >= 0.8 * radius).all()


def test_frames_hold_pixels_of_an_object_and_values_of_a_picture() -> None:
    batch = some(200)
    videos = render(batch, 5, 24, 40)
    assert videos.min() >= 0
    assert videos.max() <= 1
    empty = backdrop(batch.background, 24, 40).unsqueeze(1)
    assert ((videos - empty).abs().sum(-1) > 0.1).flatten(2).any(2).all()


def test_time_does_not_depend_on_the_frame_rate() -> None:
    batch = some(64)
    assert torch.allclose(trajectory(batch, 17)[:, ::2], trajectory(batch, 9), atol=1e-5)


def test_anti_aliasing_keeps_the_area_when_an_object_moves_by_a_fraction_of_a_pixel() -> None:
    shape = torch.arange(5).repeat_interleave(20)
    centres = 0.3 * torch.rand(100, 2, generator=torch.Generator().manual_seed(0))
    area = coverage(shape, torch.ones_like(shape), centres, 32, 32).sum((1, 2)).unflatten(0, (5, 20))
    assert (area.std(1) / area.mean(1)).max() < 0.02
    assert area.mean(1).min() > 80, "large enough for a small encoder to see"


def test_a_shift_by_whole_pixels_shifts_the_picture() -> None:
    shape = torch.arange(5)
    size = torch.zeros_like(shape)
    centres = torch.full((5, 2), 0.03)
    moved = centres + torch.tensor([3 * 2 / 32, -2 * 2 / 32])
    before, after = coverage(shape, size, centres, 32, 32), coverage(shape, size, moved, 32, 32)
    assert torch.allclose(before.roll((-2, 3), (1, 2)), after, atol=1e-4)


def test_shapes_are_told_apart_by_their_pixels() -> None:
    shape = torch.arange(5).repeat(2)
    size = torch.arange(2).repeat_interleave(5)
    masks = coverage(shape, size, torch.zeros(10, 2), 32, 32).flatten(1)
    overlap = F.normalize(masks) @ F.normalize(masks).T
    assert (overlap - torch.eye(10)).max() < 0.96


def test_motions_are_what_they_say() -> None:
    batch = batch_of(all_scenes(), torch.Generator().manual_seed(1))
    centres = trajectory(batch, 33)
    way = centres[:, -1] - centres[:, 0]
    steps = centres.diff(dim=1)
    for name, axis, sign in (("right", 0, 1), ("left", 0, -1), ("up", 1, -1), ("down", 1, 1)):
        own = batch.motion == ATTRIBUTES["motion"].index(name)
        fast = batch.speed[own] == 1
        assert (sign * steps[own][..., axis] > 0).all()
        assert steps[own][..., 1 - axis].abs().max() < 1e-6
        length = way[own].norm(dim=-1)
        assert torch.allclose(length[fast], 2 * length[~fast].mean(), atol=1e-5)
    loop = batch.motion == ATTRIBUTES["motion"].index("loop")
    before, after = steps[loop, :-1], steps[loop, 1:]
    assert (before[..., 0] * after[..., 1] - before[..., 1] * after[..., 0] > 0).all(), "turns clockwise"
    bounce = batch.motion == ATTRIBUTES["motion"].index("bounce")
    assert steps[bounce][..., 0].abs().max() < 1e-6
    assert (steps[bounce][..., 1] > 0).any(1).all()
    assert (steps[bounce][..., 1] < 0).any(1).all()


def test_draw_paints_the_colours_it_was_told() -> None:
    batch = some(200)
    solid = batch[batch.shape < 3]  # the middle of a ring is background
    videos = draw(solid.shape, solid.colour, solid.size, solid.background, torch.zeros(len(solid), 1, 2), 32, 32)
    assert torch.allclose(videos[:, 0, 16, 16], palette(solid.colour), atol=1e-6)
    assert torch.allclose(videos[:, 0, 0], backdrop(solid.background, 32, 32)[:, 0], atol=1e-6)


def test_bytes_round_to_nearest() -> None:
    assert to_uint8(torch.tensor([-1.0, 0.0, 0.499 / 255, 0.501 / 255, 1.0, 2.0])).tolist() == [0, 0, 0, 1, 255, 255]
