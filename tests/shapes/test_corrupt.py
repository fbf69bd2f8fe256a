"""Corruptions do what their strength says."""

from __future__ import annotations

import pytest
import torch

from sage_grpo.shapes import corrupt
from sage_grpo.shapes.render import render
from sage_grpo.shapes.scene import random_scenes


@pytest.fixture(scope="module")
def videos() -> torch.Tensor:
    return render(random_scenes(6, torch.Generator().manual_seed(0)), 9, 32, 32)


def test_zero_strength_changes_nothing(videos: torch.Tensor) -> None:
    for spoiled in (corrupt.noise(videos, 0.0), corrupt.blur(videos, 0.0), corrupt.flicker(videos, 0.0)):
        assert torch.allclose(spoiled, videos, atol=1e-6)
    assert corrupt.jitter(3, 9, 0.0).abs().max() == 0


def test_strengths_are_standard_deviations() -> None:
    generator = torch.Generator().manual_seed(0)
    grey = torch.full((4, 9, 32, 32, 3), 0.5)
    assert (corrupt.noise(grey, 0.05, generator) - grey).std().item() == pytest.approx(0.05, rel=0.02)
    assert corrupt.jitter(500, 9, 0.1, generator).std().item() == pytest.approx(0.1, rel=0.05)
    flicker = corrupt.flicker(grey.repeat(50, 1, 1, 1, 1), 0.1, generator)
    assert torch.equal(flicker.amax((2, 3, 4)), flicker.amin((2, 3, 4))), "one brightness a frame"
    assert (flicker.mean((2, 3, 4)) / 0.5).std().item() == pytest.approx(0.1, rel=0.1)


def test_blur_spreads_but_keeps_the_light(videos: torch.Tensor) -> None:
    point = torch.zeros(1, 1, 33, 33, 3)
    point[0, 0, 16, 16] = 1
    spread = corrupt.blur(point, 2.0)[0, 0, :, :, 0]
    at = torch.arange(33) - 16.0
    assert spread.sum().item() == pytest.approx(1, abs=1e-5)
    assert (spread.sum(0) * at.square()).sum().item() == pytest.approx(4, rel=0.05)


def test_every_clip_may_have_its_own_strength(videos: torch.Tensor) -> None:
    strength = torch.tensor([0.0, 0.3, 0.6, 0.9, 1.2, 1.5])
    changed = (corrupt.blur(videos, strength) - videos).square().mean((1, 2, 3, 4))
    assert changed[0] < 1e-10
    assert (changed[2:] > 0).all()
    assert torch.allclose(corrupt.blur(videos, strength)[3:4], corrupt.blur(videos[3:4], 0.9), atol=1e-6)
    generator = torch.Generator().manual_seed(0)
    wobble = corrupt.jitter(3, 9, torch.tensor([0.0, 0.1, 0.0]), generator)
    assert wobble[[0, 2]].abs().max() == 0
    assert wobble[1].abs().max() > 0
