"""The renderer obeys geometry: inside the frame, same world at every size and frame rate."""

from __future__ import annotations

import torch

from sage_grpo.worlds.shapes.render import MARGIN, RADII, to_uint8, trajectory
from sage_grpo.worlds.shapes.scene import ATTRIBUTES, SceneBatch, all_scenes, batch_of, random_scenes


def some(n: int, seed: int = 0) -> SceneBatch:
    return random_scenes(n, torch.Generator().manual_seed(seed), "all")


def test_every_scene_stays_whole_inside_the_frame() -> None:
    batch = batch_of(all_scenes(), torch.Generator().manual_seed(0))
    # The extreme offsets are the dangerous ones.
    batch = SceneBatch(**{**vars(batch), "offset": batch.offset.sign()})
    reach = trajectory(batch, 9).abs().amax((1, 2)) + torch.tensor(RADII)[batch.size]
    assert reach.max() <= 1 - MARGIN + 1e-6


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


def test_bytes_round_to_nearest() -> None:
    assert to_uint8(torch.tensor([-1.0, 0.0, 0.499 / 255, 0.501 / 255, 1.0, 2.0])).tolist() == [0, 0, 0, 1, 255, 255]
