"""The second world's renderer obeys geometry: inside the frame, and the camera moves the place."""

from __future__ import annotations

from dataclasses import replace

import torch

from research.scenes.render import MARGIN, PAN, RADIUS, layout_of, scroll_of, slack
from research.scenes.scene import SceneBatch, random_scenes


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
