"""Laws of the training-free statistics."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sage_grpo.rewards.built_in.video_stats import SMOOTH, VideoStats, _pooled


def picture(height: int = 64, width: int = 64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, height // 6, width // 6, generator=generator)
    full = F.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)[0]
    return (full * 255).round().to(torch.uint8).permute(1, 2, 0)


def walk(places: list[int], height: int = 64) -> torch.Tensor:
    wide = picture(height, 64 + max(places))
    return torch.stack([wide[:, place : place + 64] for place in places]).unsqueeze(0)


def pan(step: int, frames: int = 9, height: int = 64) -> torch.Tensor:
    return walk([step * i for i in range(frames)], height)


def measure(part: str, videos: torch.Tensor, fps: float = 8.0) -> float:
    return VideoStats(parts=[part])(videos, ["x"] * videos.shape[0], fps)[part][0].item()


def test_sharpness_is_the_variance_of_the_laplacian():
    levels = torch.randint(0, 256, (16, 16), generator=torch.Generator().manual_seed(2))
    grey = levels.to(torch.uint8)[None, None, :, :, None].expand(1, 2, 16, 16, 3).contiguous()
    x = levels / 255
    edges = x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:] - 4 * x[1:-1, 1:-1]
    assert measure("sharpness", grey) == pytest.approx(1000 * float(edges.var(correction=0)), rel=1e-4)
    assert measure("sharpness", grey[:, :, :3, :3]) == 0  # one place has no variance
    with pytest.raises(ValueError, match="at least 3 x 3"):
        measure("sharpness", grey[:, :, :2, :3])


def test_frames_are_pooled_until_their_short_side_is_small():
    for side, pooled in (((192, 500), (96, 250)), ((191, 500), (191, 500)), ((500, 384), (125, 96))):
        assert _pooled(torch.zeros(1, 1, *side)).shape[2:] == pooled


def test_colours_of_known_pictures():
    grey = picture().float().mean(dim=-1, keepdim=True).round().to(torch.uint8).expand(-1, -1, 3)
    assert measure("saturation", grey.expand(1, 3, -1, -1, -1)) == 0
    red = torch.zeros(1, 2, 16, 16, 3, dtype=torch.uint8)
    red[..., 0] = 200
    assert measure("saturation", red) == 1
    assert measure("colour_entropy", red) == 0
    red[..., 0] = 1  # nearly black
    assert measure("saturation", red) == 1
    levels = torch.arange(8) * 32 + 5
    every = torch.cartesian_prod(levels, levels, levels).view(1, 2, 16, 16, 3).to(torch.uint8)
    assert measure("colour_entropy", every) == pytest.approx(1.0, abs=1e-6)


def test_heights_are_heights_whatever_the_shape_and_the_direction():
    across = pan(2, height=40)  # 40 x 64: widths would be 8 / 5 of that
    assert measure("motion", across, fps=8) == pytest.approx(2 / 40 * 8, rel=0.15)
    upwards = across.transpose(2, 3).contiguous()  # 64 x 40
    assert measure("motion", upwards, fps=8) == pytest.approx(2 / 64 * 8, rel=0.15)
    for clip in (across, upwards):
        still_error = (clip[:, 1:].float() - clip[:, :-1].float()).abs().mean().item() / 255
        assert measure("midframe_error", clip) < 0.25 * still_error


def test_steady_motion_has_a_low_midframe_error_and_stutter_and_jitter_a_high_one():
    steady = measure("midframe_error", pan(2))
    for unsteady in ([4 * (i // 2) for i in range(9)], [2 * i + (4 if i % 2 else 0) for i in range(9)]):
        assert measure("midframe_error", walk(unsteady)) > 4 * steady
    still_error = (walk([0] * 9)[0, 0].float() - walk([2] * 9)[0, 0].float()).abs().mean().item() / 255
    assert steady < 0.25 * still_error  # the neighbors are moved, not only averaged
    # a steady pan is as steady with every second frame left out
    assert measure("midframe_error", pan(4)) < 0.35 * still_error


def test_flicker_sees_alternation_but_not_a_steady_fade():
    frames = torch.arange(9)
    fade = (100 + 10 * frames).view(1, 9, 1, 1, 1).expand(1, 9, 16, 16, 3).to(torch.uint8)
    flash = (100 + 40 * (frames % 2)).view(1, 9, 1, 1, 1).expand(1, 9, 16, 16, 3).to(torch.uint8)
    assert measure("flicker", fade) < 1e-5  # float32: 1.5e-7 measured
    assert measure("flicker", flash) == pytest.approx(80 / 255, rel=1e-4)


def test_repeated_frames_are_counted():
    clip = pan(2, frames=5).repeat_interleave(2, dim=1)
    assert measure("duplicate_frames", clip) == pytest.approx(5 / 9)
    for share, repeats in ((2, 0.0), (5, 1.0)):  # half of the pixels brighter by two levels, or a fifth of them
        frames = torch.full((1, 2, 10, 10, 3), 100, dtype=torch.uint8)
        frames[:, 1, :, : 10 // share] += 2
        assert measure("duplicate_frames", frames) == repeats


@pytest.mark.parametrize(
    ("part", "frames"),
    [("motion", 2), ("warp_error", 2), ("duplicate_frames", 2), ("flicker", 3), ("midframe_error", 3)],
)
def test_what_compares_frames_cannot_be_measured_on_too_few(part, frames):
    result = VideoStats(parts=[part, "brightness"])(pan(2, frames - 1), ["x"], 8.0)
    assert result[part].isnan().all()
    assert result["brightness"].isfinite().all()
    assert result.reasons == {0: f"the clip has {frames - 1} frame(s): {part} needs {frames}"}
    enough = VideoStats(parts=[part])(pan(2, frames), ["x"], 8.0)
    assert enough[part].isfinite().all()
    assert not enough.reasons


def waves(frames: int, height: int, width: int) -> torch.Tensor:
    t, y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in (frames, height, width)), indexing="ij")
    wave = 60 * torch.sin(0.31 * (x - 1.7 * t) + 0.13 * y) + 40 * torch.sin(0.37 * (y + 0.6 * t * t) - 0.11 * x)
    grain = (x * 7 + y * 13 + t * 5 + x * y) % 11
    rgb = [128 + wave + grain, 120 + 0.5 * wave - grain, 60 + 0.4 * wave.flip(1)]
    return torch.stack(rgb, -1).round().clamp(0, 255).to(torch.uint8)


PINNED = {
    (5, 40, 56, 8.0): [0.47195, 0.53796, 0.44648, 0.52941, 0.60485, 0.0011485, 0.012444, 0.014075, 0.0],
    (6, 200, 230, 16.0): [0.48153, 0.53986, 0.44760, 0.53154, 0.63158, 0.0011202, 0.019125, 0.13076, 0.0],
    (4, 14, 9, 24.0): [0.42845, 0.54381, 0.52795, 0.45190, 0.0, 0.032162, 0.025397, 0.020041, 0.0],
}
"""Every statistic of such a clip (frames, height, width) with its rate, as users have it in their logs: large frames are pooled, tiny ones are one block."""


@pytest.mark.parametrize("size", PINNED)
def test_statistics_keep_their_scale_and_their_clip(size):
    clip, fps = waves(*size[:3]), size[3]
    found = VideoStats()(torch.stack([clip, clip.flip(0, 2)]), ["x"] * 2, fps)
    assert [float(value[0]) for value in found.values()] == pytest.approx(PINNED[size], rel=1e-3, abs=1e-7)
    alone = VideoStats()(clip.flip(0, 2)[None], ["x"], fps)
    for part, value in alone.items():
        torch.testing.assert_close(found[part][1:], value, rtol=1e-4, atol=1e-6)
    floats = VideoStats(parts=sorted(SMOOTH)).differentiable(clip[None].float(), ["x"], fps)
    for part, value in floats.items():
        torch.testing.assert_close(value, found[part][:1], rtol=1e-4, atol=1e-6)
