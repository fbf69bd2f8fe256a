"""fps is a contract: clips are read by time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sage_grpo.rewards.frames import (
    centre_offset,
    check_clips,
    resize_as_pillow,
    resize_uint8,
    sample_indices,
    sample_times,
    short_edge_size,
)


@pytest.mark.parametrize("fps", [8, 24])
def test_the_same_clip_is_read_at_the_same_times(fps):
    shown = torch.arange(3 * fps) / fps
    read = shown[sample_indices(3 * fps, fps, sample_fps=2.0)]
    wanted = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.25, 2.75])
    torch.testing.assert_close(read, wanted, atol=1e-6, rtol=0)
    assert sample_indices(3 * fps, fps, sample_fps=2.0, max_frames=1) == [3 * fps // 2]


@settings(max_examples=30)
@given(st.integers(1, 200), st.sampled_from([5.0, 8.0, 12.5, 16.0, 23.976, 24.0, 30.0]), st.floats(0.5, 8))
def test_frames_are_on_screen_at_their_times(frames, fps, sample_fps):
    times = sample_times(frames, fps, sample_fps=sample_fps)
    indices = sample_indices(frames, fps, sample_fps=sample_fps)
    assert indices == sorted(set(indices))
    for time, index in zip(times, indices):
        assert index / fps - 1e-6 <= time <= (index + 1) / fps + 1e-6


def test_resize_keeps_whole_values_and_even_pictures():
    even = torch.full((1, 3, 9, 13), 200, dtype=torch.uint8)
    assert torch.equal(resize_uint8(even, 20, 30), torch.full((1, 3, 20, 30), 200, dtype=torch.uint8))
    assert resize_uint8(even, 9, 13) is even


# torchvision 0.28: the size after Resize(224), and where CenterCrop(224) begins in a grid of numbered pixels of that size
TORCHVISION = {
    (480, 848): ((224, 395), (0, 86)),
    (704, 1280): ((224, 407), (0, 92)),
    (512, 512): ((224, 224), (0, 0)),
}


@pytest.mark.parametrize("size", TORCHVISION)
def test_sizes_and_centre_crops_are_those_of_torchvision(size):
    target, offsets = TORCHVISION[size]
    assert short_edge_size(*size, 224) == target
    assert tuple(centre_offset(side, 224) for side in target) == offsets


@settings(max_examples=30)
@given(size=st.integers(1, 500), left_over=st.integers(0, 800))
def test_half_a_pixel_goes_to_the_even_offset_or_is_dropped(size, left_over):
    even, down = (centre_offset(size + left_over, size, halves=halves) for halves in ("even", "down"))
    assert down == left_over // 2
    assert abs(even - left_over / 2) <= 0.5
    assert even == down if left_over % 2 == 0 else even % 2 == 0


@pytest.mark.parametrize(("rows", "columns"), [(20, 33), (41, 70), (56, 28)])
def test_pictures_are_resized_as_pillow_resizes_bytes(rows, columns):
    noise = torch.randint(0, 256, (1, 3, 37, 61), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    picture = Image.fromarray(noise[0].permute(1, 2, 0).contiguous().numpy())
    theirs = torch.from_numpy(np.array(picture.resize((columns, rows), Image.Resampling.BICUBIC))).permute(2, 0, 1)
    gap = (resize_as_pillow(noise, rows, columns)[0] - theirs).abs()
    # Pillow's weights are fixed-point numbers: halves may fall the other way, rarely and by one. One rounding for both passes
    # would miss by a gray level or more in a fifth of the pixels.
    assert gap.max() <= 1
    assert (gap > 0).float().mean() < 0.01


@pytest.mark.parametrize(
    ("videos", "prompts", "fps", "message"),
    [
        (torch.zeros(1, 2, 4, 4, 3), ["x"], 8.0, "uint8"),
        (torch.zeros(2, 2, 4, 4, 3, dtype=torch.uint8), ["x"], 8.0, "One prompt a clip"),
        (torch.zeros(2, 2, 4, 4, 3, dtype=torch.uint8), "xx", 8.0, "one string"),
        (torch.zeros(1, 2, 4, 4, 3, dtype=torch.uint8), ["x"], 0.0, "fps"),
        (torch.zeros(1, 2, 4, 4, 3, dtype=torch.uint8), ["x"], float("nan"), "fps"),
    ],
)
def test_wrong_input_is_refused(videos, prompts, fps, message):
    with pytest.raises(ValueError, match=message):
        check_clips(videos, prompts, fps)
