"""Scenes of the first world: free wording, and a renderer that obeys geometry at every size and frame rate."""

from __future__ import annotations

import pytest
import torch

from sage_grpo.worlds.shapes.render import MARGIN, RADII, to_uint8, trajectory
from sage_grpo.worlds.shapes.scene import Scene, SceneBatch, all_scenes, batch_of, from_text


def test_free_wording_is_understood() -> None:
    scene = from_text("On sand, a BIG ring: red, bouncing quickly.")
    assert scene == Scene(shape="ring", colour="red", motion="bounce", speed="fast", size="large", background="sand")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a small red circel moves up slowly on a white background", "Did you mean 'circle'"),
        ("a small red blue circle moves up slowly on a white background", "two values of colour"),
        ("a red circle moves up slowly on a white background", "does not name: size"),
    ],
)
def test_bad_text_is_explained(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_text(text)


def test_every_scene_stays_whole_inside_the_frame() -> None:
    batch = batch_of(all_scenes(), torch.Generator().manual_seed(0))
    # The extreme offsets are the dangerous ones.
    batch = SceneBatch(**{**vars(batch), "offset": batch.offset.sign()})
    reach = trajectory(batch, 9).abs().amax((1, 2)) + torch.tensor(RADII)[batch.size]
    assert reach.max() <= 1 - MARGIN + 1e-6


def test_bytes_round_to_nearest() -> None:
    assert to_uint8(torch.tensor([-1.0, 0.0, 0.499 / 255, 0.501 / 255, 1.0, 2.0])).tolist() == [0, 0, 0, 1, 255, 255]
