"""The embedded world's renderer: objects stay inside the frame, and bytes are rounded."""

from __future__ import annotations

from dataclasses import replace

import torch

from sage_grpo.worlds.shapes import render as shapes
from sage_grpo.worlds.shapes import scene


def test_every_object_stays_whole_inside_the_frame() -> None:
    batch = scene.batch_of(scene.scenes_of("all"), torch.Generator().manual_seed(0))
    batch = replace(batch, offset=batch.offset.sign())  # the extreme places are the dangerous ones
    reach = shapes.trajectory(batch, 9).abs().amax((1, 2)) + torch.tensor(shapes.RADII)[batch.size]
    assert reach.max() <= 1 - shapes.MARGIN + 1e-6


def test_bytes_round_to_nearest() -> None:
    values = torch.tensor([-1.0, 0.0, 0.499 / 255, 0.501 / 255, 1.0, 2.0])
    assert shapes.to_uint8(values).tolist() == [0, 0, 0, 1, 255, 255]
