"""fps is a contract: clips are read by time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sage_grpo.rewards.frames import check_clips, resize_uint8, sample_indices, sample_times


@pytest.mark.parametrize("fps", [8, 16, 24])
def test_the_same_clip_is_read_at_the_same_times(fps):
    """A clip of three seconds whose content is its time: every frame rate shows the same moments."""
    shown = torch.arange(3 * fps) / fps
    read = shown[sample_indices(3 * fps, fps, sample_fps=2.0)]
    wanted = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.25, 2.75])
    torch.testing.assert_close(read, wanted, atol=1e-6, rtol=0)


@given(st.integers(1, 200), st.sampled_from([5.0, 8.0, 12.5, 16.0, 23.976, 24.0, 30.0]), st.floats(0.5, 8))
def test_frames_are_on_screen_at_their_times(frames, fps, sample_fps):
    times = sample_times(frames, fps, sample_fps=sample_fps)
    indices = sample_indices(frames, fps, sample_fps=sample_fps)
    assert indices == sorted(set(indices))
    for time, index in zip(times, indices):
        assert index / fps - 1e-6 <= time <= (index + 1) / fps + 1e-6


def test_a_limit_spreads_the_frames_over_the_whole_clip():
    assert sample_indices(80, 8.0, sample_fps=4.0, max_frames=4) == [10, 30, 50, 70]
    assert sample_indices(1, 24.0, sample_fps=2.0) == [0]


def test_resize_keeps_whole_values_and_even_pictures():
    even = torch.full((1, 3, 9, 13), 200, dtype=torch.uint8)
    assert torch.equal(resize_uint8(even, 20, 30), torch.full((1, 3, 20, 30), 200, dtype=torch.uint8))
    assert resize_uint8(even, 9, 13) is even


@pytest.mark.parametrize(
    ("videos", "prompts", "fps", "message"),
    [
        (torch.zeros(1, 2, 4, 4, 3), ["x"], 8.0, "uint8"),
        (torch.zeros(1, 2, 3, 4, 4, dtype=torch.uint8), ["x"], 8.0, "uint8"),
        (torch.zeros(2, 2, 4, 4, 3, dtype=torch.uint8), ["x"], 8.0, "One prompt a clip"),
        (torch.zeros(2, 2, 4, 4, 3, dtype=torch.uint8), "xx", 8.0, "one string"),
        (torch.zeros(1, 2, 4, 4, 3, dtype=torch.uint8), ["x"], 0.0, "fps"),
        (torch.zeros(1, 2, 4, 4, 3, dtype=torch.uint8), ["x"], float("nan"), "fps"),
    ],
)
def test_wrong_input_is_refused(videos, prompts, fps, message):
    with pytest.raises(ValueError, match=message):
        check_clips(videos, prompts, fps)
