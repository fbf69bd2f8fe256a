"""What the clips of an iteration look like, in five numbers that need no reward: the sentinel watches them in every run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_grpo.data.groups import Member
from sage_grpo.parallel.world import World

FRAMES, SIDE = 4, 8
"""A clip is looked at as this many frames, evenly spread, of this many pixels a side: enough for means and for what moves."""
AT_ONCE = 1 << 22
"""Values of chosen frames that are looked at together: many small clips, or one large one."""


def appearance(videos: Tensor, members: Sequence[Member], world: World) -> dict[str, float]:
    """Metrics of all ranks' clips, the same bits on each; `members` says which clips this process has."""
    places = torch.tensor([(m.group, m.index) for m in members], dtype=torch.float64).reshape(-1, 2)
    rows = world.gather(torch.cat([places, thumbnails(videos).flatten(1).double()], 1))
    order = torch.argsort(rows[:, 0] * (rows[:, 1].max() + 1) + rows[:, 1])
    return describe(rows[order, 2:].reshape(-1, FRAMES, 3, SIDE, SIDE), rows[order, 0].long())


def thumbnails(videos: Tensor) -> Tensor:
    """uint8 N x F x H x W x 3 as float32 N x FRAMES x 3 x SIDE x SIDE in [0, 1]; few at once, because a clip is large."""
    chosen = torch.linspace(0, max(0, videos.shape[1] - 1), FRAMES).round().long()
    together = max(1, AT_ONCE // max(1, FRAMES * videos[0, :1].numel())) if len(videos) else 1
    small = [
        F.adaptive_avg_pool2d(clips[:, chosen].flatten(0, 1).permute(0, 3, 1, 2).float() / 255, SIDE).cpu()
        for clips in videos.split(together)  # whole clips stay 8 bit
    ]
    return torch.cat(small).unflatten(0, (-1, FRAMES)) if len(videos) else torch.zeros((0, FRAMES, 3, SIDE, SIDE))


def describe(small: Tensor, groups: Tensor) -> dict[str, float]:
    """Means over clips, and how much the clips of a group differ."""
    grey = small.mean(dim=2)
    spread = [small[groups == g].std(dim=0, correction=0).mean() for g in groups.unique()]
    return {
        "video/brightness": float(grey.mean()),
        "video/contrast": float(grey.flatten(2).std(dim=2, correction=0).mean()),
        "video/saturation": float((small.amax(dim=2) - small.amin(dim=2)).mean()),
        "video/motion": float((grey[:, 1:] - grey[:, :-1]).abs().mean()),
        "video/spread": float(torch.stack(spread).mean()),
    }
