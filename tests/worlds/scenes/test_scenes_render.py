"""The second world's renderer obeys geometry: inside the frame, same world at every size and frame rate, near before far."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from sage_grpo.worlds.scenes.render import (
    COLOURS,
    MARGIN,
    PAN,
    RADIUS,
    appearance,
    backdrop,
    layout_of,
    render,
    scroll_of,
    slack,
    to_uint8,
)
from sage_grpo.worlds.scenes.scene import ATTRIBUTES, FRAMES, MEMBERS, SceneBatch, random_scenes


def some(n: int, seed: int = 0) -> SceneBatch:
    return random_scenes(n, torch.Generator().manual_seed(seed), "all")


def changed(batch: SceneBatch, **values: torch.Tensor) -> SceneBatch:
    return SceneBatch(**{**vars(batch), **values})


def test_every_scene_stays_whole_inside_the_frame_and_on_the_ground() -> None:
    batch = some(3000)
    # The extreme places are the dangerous ones.
    batch = changed(batch, offset=batch.offset.sign(), layout=batch.layout.sign())
    layout = layout_of(batch, 33)
    reach = layout.centres.abs().amax((2, 3)) + RADIUS
    assert reach[layout.present].max() <= 1 - MARGIN + 1e-5
    assert slack(batch).min() >= 0
    assert layout.ground[layout.present].min() > 0.1, "on the ground, not in the sky"


def test_objects_of_a_group_never_merge() -> None:
    layout = layout_of(some(2000), 9)
    gap = (layout.centres[:, :3].unsqueeze(2) - layout.centres[:, :3].unsqueeze(1)).norm(dim=-1).amin(3)
    both = layout.present[:, :3].unsqueeze(2) & layout.present[:, :3].unsqueeze(1) & ~torch.eye(3, dtype=torch.bool)
    assert gap[both].min() > 1.55 * RADIUS


def test_no_object_is_larger_than_its_radius_and_kinds_and_textures_are_told_apart() -> None:
    side = 64
    x = (torch.arange(side) + 0.5) / side * 2 * RADIUS - RADIUS
    dx, dy = x.repeat(side), x.repeat_interleave(side)
    kinds, textures = torch.arange(5).repeat_interleave(4), torch.arange(4).repeat(5)
    cover, tone, _ = appearance(
        kinds, textures, torch.zeros(20), dx.expand(20, -1), dy.expand(20, -1), 2 * RADIUS / side
    )
    far = (dx.square() + dy.square()).sqrt() > RADIUS * 1.02
    assert cover[:, far].max() == 0
    looks = F.normalize(torch.cat([cover, 2 * cover * tone], 1))
    assert (looks @ looks.T - torch.eye(20)).max() < 0.95
    share = ((cover * tone).sum(1) / cover.sum(1)).unflatten(0, (5, 4))
    assert (share[:, 0] == 0).all()
    assert share[:, 1:].min() > 0.15
    assert share.max() < 0.75, "an object has its colour"


def test_time_does_not_depend_on_the_frame_rate() -> None:
    batch = some(12)
    assert torch.allclose(layout_of(batch, 17).centres[:, :, ::2], layout_of(batch, 9).centres, atol=1e-5)


def test_verbs_are_what_they_say_on_the_ground() -> None:
    batch = some(3000, seed=1)
    layout = layout_of(batch, 33)
    # Seen from the ground the camera does not matter.
    ground = layout.centres[:, 0, :, 0] + scroll_of(batch, 33)
    rise = -layout.centres[:, 0, :, 1].diff(dim=1)
    steps = ground.diff(dim=1)
    turn = layout.angles[:, 0].diff(dim=1)
    own = {name: batch.verb == index for index, name in enumerate(ATTRIBUTES["verb"])}
    for name, sign in (("right", 1), ("left", -1)):
        assert (sign * steps[own[name]] > 0).all()
        assert rise[own[name]].abs().max() < 1e-5
        rolls = own[name] & (batch.kind != 1) & (batch.kind != 4)
        assert torch.allclose(turn[rolls] * RADIUS, steps[rolls], atol=1e-4), "what rolls does not slip"
        assert turn[own[name] & ~rolls].abs().max() == 0, "boxes and cones slide"
    assert (rise[own["rise"]] > 0).all()
    assert (rise[own["bounce"]] > 0).any(1).all()
    assert (rise[own["bounce"]] < 0).any(1).all()
    assert (turn[own["spin"]] > 0).all()
    for name in ("bounce", "spin", "rise"):
        assert steps[own[name]].abs().max() < 1e-5, name
    x, y = steps[own["circle"]], -rise[own["circle"]]
    assert (x[:, :-1] * y[:, 1:] - y[:, :-1] * x[:, 1:] > 0).all(), "turns clockwise"


def test_the_camera_moves_the_place_and_what_stands_in_it() -> None:
    batch = some(400)
    pan = scroll_of(batch, 9)[:, -1] - scroll_of(batch, 9)[:, 0]
    for index, way in enumerate((0.0, -PAN, PAN)):
        assert torch.allclose(pan[batch.camera == index], torch.tensor(way), atol=1e-5)
    pair = batch[batch.relation > 0]
    stands = layout_of(pair, 9).centres[:, 3, :, 0]
    assert torch.allclose(
        stands + scroll_of(pair, 9), (stands + scroll_of(pair, 9))[:, :1].expand_as(stands), atol=1e-5
    )


def test_far_layers_move_less_than_the_ground() -> None:
    place = torch.arange(4)
    still, moved = (backdrop(place, torch.full((4, 1), at), 64, 64)[:, 0] for at in (0.3, 0.3 + 4 / 32))
    shifted = still.roll(-4, 2)
    ground, sky = slice(40, None), slice(0, 34)
    near = (moved - shifted)[:, ground, :56].abs().mean((1, 2, 3))
    far = (moved - shifted)[:, sky, :56].abs().mean((1, 2, 3))
    assert near.max() < 1e-4
    assert far.min() > 1e-3


def test_places_are_pale_and_every_colour_stands_out() -> None:
    plates = backdrop(torch.arange(4), torch.linspace(-1.5, 1.5, 7).expand(4, -1), 64, 64)
    assert (plates.amax(-1) - plates.amin(-1)).max() < 0.36
    gap = (plates.flatten(0, 3).unsqueeze(1) - torch.tensor(COLOURS)).square().sum(-1)
    assert gap.min() > 0.09
    colours = torch.tensor(COLOURS)
    assert torch.pdist(colours).min() > 0.5


def test_relations_are_what_they_say() -> None:
    batch = some(4000, seed=2)
    layout = layout_of(batch, FRAMES)
    gap = layout.centres[:, 0, :, 0] - layout.centres[:, 3, :, 0]
    depth = layout.ground[:, 0] - layout.ground[:, 3]
    own = {name: batch.relation == index for index, name in enumerate(ATTRIBUTES["relation"])}
    assert (gap[own["left"]] < 0).all()
    assert (gap[own["right"]] > 0).all()
    for name in ("front", "behind"):
        assert (gap[own[name]].amin(1) < -RADIUS).all(), "it goes past"
        assert (gap[own[name]].amax(1) > RADIUS).all()
    assert (depth[own["front"]] > 0.2).all()
    assert (depth[own["behind"]] < -0.2).all()
    assert not layout.present[own["alone"], 3].any()
    assert layout.present.sum(1).max() < MEMBERS


@pytest.mark.parametrize("relation", ["front", "behind"])
def test_the_nearer_object_hides_the_farther(relation: str) -> None:
    batch = some(600, seed=3)
    plain = (batch.relation == ATTRIBUTES["relation"].index(relation)) & (batch.kind == 0) & (batch.other_kind == 2)
    batch = batch[plain][:4]
    batch = changed(batch, texture=torch.zeros_like(batch.texture), layout=torch.zeros_like(batch.layout))
    side = 128
    layout = layout_of(batch, FRAMES)
    pictures = render(batch, FRAMES, side, side)[:, FRAMES // 2]
    # Where the lower edge of the farther and the upper edge of the nearer overlap, both are there.
    centres = layout.centres[:, [0, 3], FRAMES // 2]
    edge = RADIUS * torch.tensor([0.95, 0.72])  # of a ball and a box
    far, near = (1, 0) if relation == "front" else (0, 1)
    low, high = centres[:, far, 1] + edge[far], centres[:, near, 1] - edge[near]
    assert (low > high).all()
    x, y = ((torch.stack([centres[..., 0].mean(1), (low + high) / 2]) + 1) * side / 2).long()
    seen = pictures[torch.arange(len(batch)), y, x]
    nearer = layout.colour[:, 0] if relation == "front" else layout.colour[:, 3]
    gap = (seen.unsqueeze(1) - torch.tensor(COLOURS)).square().sum(-1)
    assert gap.argmin(1).tolist() == nearer.tolist()


def test_shadows_lie_on_the_ground_and_fade_with_height() -> None:
    batch = some(400)
    rising = batch[(batch.verb == ATTRIBUTES["verb"].index("rise")) & (batch.count == 0) & (batch.relation == 0)][:6]
    dark = backdrop(rising.place, scroll_of(rising, 5), 64, 64) - render(rising, 5, 64, 64)
    layout = layout_of(rising, 5)
    row = ((layout.ground[:, 0] + 1) * 32).long()
    column = ((layout.centres[:, 0, :, 0] + 1) * 32).long()
    strength = dark[torch.arange(len(rising))[:, None], torch.arange(5), row[:, None] + 1, column].mean(-1)
    assert (strength[:, -1] > 0.02).all()
    assert (strength[:, 2] > strength[:, -1]).all()


def test_textures_turn_with_the_object() -> None:
    """A striped ball that has turned by a quarter has its stripes across."""
    side = 48
    x = ((torch.arange(side) + 0.5) / side * 2 - 1) * RADIUS
    dx, dy = x.repeat(side).unsqueeze(0), x.repeat_interleave(side).unsqueeze(0)
    striped, ball = torch.tensor([1]), torch.tensor([0])
    upright, turned = (
        appearance(ball, striped, torch.tensor([angle]), dx, dy, 2 * RADIUS / side)[1].reshape(side, side)
        for angle in (0.0, math.pi / 2)
    )
    assert torch.allclose(turned, upright.T, atol=1e-4)
    assert not torch.allclose(turned, upright, atol=0.5)


def test_displacement_moves_what_moves_and_nothing_else() -> None:
    batch = some(200)
    pair = batch[batch.relation > 2][:3]
    zero = torch.zeros(3, 5, 2)
    still, moved = render(pair, 5, 64, 64, zero), render(pair, 5, 64, 64, zero + 0.05)
    assert torch.equal(still, render(pair, 5, 64, 64))
    assert not torch.equal(still, moved)
    there = ((layout_of(pair, 5).centres[:, 3, 0] + 1) * 32).long()
    n = torch.arange(3)
    assert torch.equal(still[n, 0, there[:, 1], there[:, 0]], moved[n, 0, there[:, 1], there[:, 0]])
    assert to_uint8(still).dtype == torch.uint8
