"""The second world's renderer obeys geometry: inside the frame, same world at every size and frame rate, near before far."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from research.scenes.render import COLOURS, MARGIN, PAN, RADIUS, appearance, layout_of, render, scroll_of, slack
from research.scenes.scene import ATTRIBUTES, FRAMES, SceneBatch, random_scenes


def some(n: int, seed: int = 0) -> SceneBatch:
    return random_scenes(n, torch.Generator().manual_seed(seed), "all")


def test_every_scene_stays_whole_inside_the_frame_and_on_the_ground() -> None:
    batch = some(1000)
    # The extreme places are the dangerous ones.
    batch = replace(batch, offset=batch.offset.sign(), layout=batch.layout.sign())
    layout = layout_of(batch, 33)
    reach = layout.centres.abs().amax((2, 3)) + RADIUS
    assert reach[layout.present].max() <= 1 - MARGIN + 1e-5
    assert slack(batch).min() >= 0
    assert layout.ground[layout.present].min() > 0.1, "on the ground, not in the sky"


def test_the_camera_moves_the_place_and_what_stands_in_it() -> None:
    batch = some(400)
    pan = scroll_of(batch, 9)[:, -1] - scroll_of(batch, 9)[:, 0]
    for index, way in enumerate((0.0, -PAN, PAN)):
        assert torch.allclose(pan[batch.camera == index], torch.tensor(way), atol=1e-5)
    pair = batch[batch.relation > 0]
    stands = layout_of(pair, 9).centres[:, 3, :, 0] + scroll_of(pair, 9)
    assert torch.allclose(stands, stands[:, :1].expand_as(stands), atol=1e-5)


@pytest.mark.parametrize("relation", ["front", "behind"])
def test_the_nearer_object_hides_the_farther(relation: str) -> None:
    batch = some(600, seed=3)
    plain = (batch.relation == ATTRIBUTES["relation"].index(relation)) & (batch.kind == 0) & (batch.other_kind == 2)
    batch = batch[plain][:4]
    batch = replace(batch, texture=torch.zeros_like(batch.texture), layout=torch.zeros_like(batch.layout))
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
