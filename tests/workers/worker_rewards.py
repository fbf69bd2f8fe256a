"""What workers of tests load by its import path."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

SECONDS = 0.2


def slow(videos: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    """Brightness, for which one has to wait: long enough to die meanwhile."""
    time.sleep(SECONDS)
    return videos.float().mean(dim=(1, 2, 3, 4)) / 255


def smooth(videos: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    """How calm a clip is; it has a gradient."""
    return -(videos.float()[:, 1:] - videos.float()[:, :-1]).square().mean(dim=(1, 2, 3, 4)) / 255
