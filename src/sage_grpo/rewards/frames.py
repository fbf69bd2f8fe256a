"""Picking and resizing frames, by time: the one place where fps becomes frame indices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Statistics = tuple[tuple[float, float, float], tuple[float, float, float]]
CLIP_PIXELS: Statistics = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""Mean and std of the pixels that CLIP and Qwen2-VL were trained on."""
Halves = Literal["even", "down"]
"""Rounding of a center crop's offset when it ends in half a pixel."""


def check_clips(videos: Tensor, prompts: object, fps: float) -> None:
    """Raise ValueError unless `videos` is uint8 B x F x H x W x 3, with a prompt a clip and fps > 0."""
    if videos.dtype != torch.uint8 or videos.ndim != 5 or videos.shape[-1] != 3:
        raise ValueError(f"Rewards take uint8 clips B x F x H x W x 3, got {videos.dtype} {tuple(videos.shape)}.")
    if isinstance(prompts, str) or len(prompts) != videos.shape[0]:  # type: ignore[arg-type]
        count = "one string" if isinstance(prompts, str) else f"{len(prompts)} prompts"  # type: ignore[arg-type]
        raise ValueError(f"One prompt a clip is needed: got {count} for {videos.shape[0]} clips.")
    if not (math.isfinite(fps) and fps > 0):
        raise ValueError(f"fps must be the clips' own positive frame rate, got {fps}.")


def sample_times(num_frames: int, fps: float, *, sample_fps: float, max_frames: int = 0) -> list[float]:
    """Evenly spaced times in seconds, the centers of equal slices of the clip's duration num_frames / fps: the same at 8, 16 or 24 fps."""
    if num_frames < 1:
        raise ValueError("A clip without frames cannot be sampled.")
    if sample_fps <= 0:
        raise ValueError(f"sample_fps must be positive, got {sample_fps}.")
    duration = num_frames / fps
    most = max_frames if max_frames > 0 else num_frames
    count = min(max(1, round(duration * sample_fps)), most, num_frames)
    return [(k + 0.5) * duration / count for k in range(count)]


def sample_indices(num_frames: int, fps: float, *, sample_fps: float, max_frames: int = 0) -> list[int]:
    """Indices of the frames shown at `sample_times`; frame i is on screen from i / fps to (i + 1) / fps."""
    times = sample_times(num_frames, fps, sample_fps=sample_fps, max_frames=max_frames)
    # the small number keeps a time on a frame's first instant from rounding down to the frame before
    return [min(num_frames - 1, int(time * fps + 1e-6)) for time in times]


def short_edge_size(height: int, width: int, size: int) -> tuple[int, int]:
    """Rows and columns once the short edge is `size`; the long one is cut to a whole number, as torchvision and transformers do."""
    short = min(height, width)
    rows, columns = (size if side == short else int(size * side / short) for side in (height, width))
    return rows, columns


def centre_offset(side: int, size: int, *, halves: Halves = "even") -> int:
    """Offset of a center crop of `size` pixels in `side`; of half a pixel left over, torchvision takes the even offset, transformers the lower one."""
    left_over = side - size
    return round(left_over / 2) if halves == "even" else left_over // 2


def straight_through(values: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """`rounding(values)` with the gradient of `values` (straight-through), because rounding itself has none."""
    if not values.requires_grad:
        return rounding(values)
    return values + (rounding(values.detach()) - values.detach())


def resize_as_pillow(images: Tensor, rows: int, columns: int) -> Tensor:
    """Antialiased bicubic resize of N x 3 x H x W in 0..255 to whole values (floats), as Pillow does with bytes: columns first, each pass rounded half up
    (a gradient passes straight through). Pillow's weights are fixed-point numbers: exact halves may fall the other way, by one gray level.
    """
    height = images.shape[-2]
    return _to_whole(_to_whole(images.float(), height, columns), rows, columns)


def _to_whole(images: Tensor, rows: int, columns: int) -> Tensor:
    if tuple(images.shape[-2:]) == (rows, columns):
        return images
    resized = F.interpolate(images, (rows, columns), mode="bicubic", antialias=True, align_corners=False)
    return straight_through(resized.clamp_(0, 255), lambda x: x.add(0.5).floor_())


def resize_uint8(images: Tensor, height: int, width: int) -> Tensor:
    """Antialiased bicubic resize of uint8 N x 3 x H x W, rounded once to uint8, as torchvision does with a tensor of bytes: leaving the rounding out
    changes VideoAlign's scores visibly. Floats in 0..255 are rounded as well, and stay floats with a gradient.
    """
    if tuple(images.shape[-2:]) == (height, width):
        return images
    resized = F.interpolate(images.float(), (height, width), mode="bicubic", antialias=True, align_corners=False)
    return straight_through(resized.clamp_(0, 255), torch.round).to(images.dtype)


def normalise(pixels: Tensor, statistics: Statistics = CLIP_PIXELS) -> Tensor:
    """Normalize N x 3 x H x W in 0..1 for an encoder: minus the mean, over the std."""
    mean, std = (torch.tensor(values, device=pixels.device).view(3, 1, 1) for values in statistics)
    return (pixels - mean) / std
