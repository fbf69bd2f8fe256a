"""Statistics of an iteration for the sentinel, at almost no cost: agreement of rewards, appearance of clips, drift of
the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sage_grpo.data.groups import Member
from sage_grpo.distributed.fsdp import local
from sage_grpo.distributed.world import World
from sage_grpo.health.evidence import AGREEMENT, STDERR


def agreements(
    total: Tensor, parts: Mapping[str, Tensor], groups: Tensor, witnesses: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Mean over groups of the rank correlation of every held-out reward with the total, and its standard error; none if
    no group has a spread in both.

    Members of a group differ in their noise alone, so this is the effect of a step along the total on the held-out
    reward: between groups prompts differ, which no step changes.
    """
    metrics = {}
    for title, weights in witnesses.items():
        score = torch.stack([weight * parts[name].double() for name, weight in weights.items()]).sum(0)
        pairs = [correlation(total[groups == g].double(), score[groups == g]) for g in groups.unique()]
        found = [pair for pair in pairs if pair is not None]
        if found:
            count = len(found)
            mean, chance = sum(value for value, _ in found) / count, sum(variance for _, variance in found) / count
            scatter = sum((value - mean) ** 2 for value, _ in found) / (count - 1) if count > 1 else 0.0
            metrics[AGREEMENT + title] = mean
            metrics[STDERR + title] = math.sqrt(max(chance, scatter) / count)  # at least that of chance
    return metrics


def correlation(a: Tensor, b: Tensor) -> tuple[float, float] | None:
    """Rank correlation, and its variance without correlation (exact for ranks in any order); None if one of the two is
    constant."""
    both = torch.isfinite(a) & torch.isfinite(b)
    a, b = _ranks(a[both]), _ranks(b[both])
    size = float(a.square().sum() * b.square().sum())
    if not size:
        return None
    return float((a * b).sum()) / math.sqrt(size), 1.0 / (len(a) - 1)


def _ranks(x: Tensor) -> Tensor:
    """Centered ranks; ties share theirs."""
    return 0.5 * torch.sign(x[:, None] - x[None, :]).sum(1)


FRAMES, SIDE = 4, 8
"""Thumbnails of a clip: this many frames, evenly spread, of this many pixels a side."""


def appearance(small: Tensor, members: Sequence[Member], world: World) -> dict[str, float]:
    """Metrics of all ranks' clips, equal bit for bit on each; `small` are thumbnails of this process's clips, `members`
    identifies these."""
    places = torch.tensor([(m.group, m.index) for m in members], dtype=torch.float64).reshape(-1, 2)
    rows = world.gather(torch.cat([places, small.flatten(1).double()], 1))
    order = torch.argsort(rows[:, 0] * (rows[:, 1].max() + 1) + rows[:, 1])
    return describe(rows[order, 2:].reshape(-1, FRAMES, 3, SIDE, SIDE), rows[order, 0].long())


def thumbnails(videos: Tensor) -> Tensor:
    """uint8 N x F x H x W x 3 as float32 N x FRAMES x 3 x SIDE x SIDE in [0, 1]; one clip at once, because it is large."""
    chosen = torch.linspace(0, max(0, videos.shape[1] - 1), FRAMES).round().long().tolist()
    small = [F.adaptive_avg_pool2d(clip[chosen].permute(0, 3, 1, 2).float() / 255, SIDE).cpu() for clip in videos]
    return torch.stack(small) if small else torch.zeros((0, FRAMES, 3, SIDE, SIDE))


def describe(small: Tensor, groups: Tensor) -> dict[str, float]:
    """Means over clips, and the spread of the clips of a group."""
    grey = small.mean(dim=2)
    spread = [small[groups == g].std(dim=0, correction=0).mean() for g in groups.unique()]
    return {
        "video/brightness": float(grey.mean()),
        "video/contrast": float(grey.flatten(2).std(dim=2, correction=0).mean()),
        "video/saturation": float((small.amax(dim=2) - small.amin(dim=2)).mean()),
        "video/motion": float((grey[:, 1:] - grey[:, :-1]).abs().mean()),
        "video/spread": float(torch.stack(spread).mean()),
    }


MOST = 1 << 18
"""Weights of the start that each process keeps: means over so many are exact to a fraction of a percent."""


class ParameterDrift:
    """Keeps every n-th trainable weight of the start. It is not saved: a resumed run begins with the same weights."""

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self.params = dict(params)
        self.stride = -(-sum(local(p).numel() for p in self.params.values()) // MOST) or 1
        self.start = self._sample()

    def measure(self, world: World) -> dict[str, float]:
        """Distance from the start relative to its norm, and the share of changed weights; the same on all ranks."""
        now = self._sample()
        sums = [(now - self.start).square().sum(), self.start.square().sum(), (now != self.start).sum()]
        apart, size, moved, count = world.sum(
            torch.stack([*(s.double() for s in sums), torch.tensor(float(len(now)))])
        ).tolist()
        return {"weights/distance": (apart / max(size, 1e-30)) ** 0.5, "weights/moved": moved / max(count, 1.0)}

    @torch.no_grad()
    def _sample(self) -> Tensor:
        parts = [local(p).detach().flatten()[:: self.stride] for p in self.params.values()]
        if not parts:
            return torch.zeros(0, dtype=torch.float64)
        return torch.cat(parts).to("cpu", torch.float64)  # one copy: each waits for the GPU
