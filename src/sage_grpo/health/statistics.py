"""Figures of an iteration that the sentinel asks for, free or nearly so: agreement of rewards, the look of clips, and how far weights have gone."""

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
    """For every witness the mean over groups of the rank correlation of its score with the total, and the standard error of that mean.

    Members of a group differ in their noise alone, so this is what a step along the total does to the witness: between groups prompts
    differ, which no step changes. A witness without any group in which both tell clips apart has no agreement.
    """
    metrics = {}
    for title, weights in witnesses.items():
        score = torch.stack([weight * parts[name].double() for name, weight in weights.items()]).sum(0)
        pairs = [correlation(total[groups == g].double(), score[groups == g]) for g in groups.unique()]
        found = [pair for pair in pairs if pair is not None]
        if found:
            metrics[AGREEMENT + title], metrics[STDERR + title] = _mean(found)
    return metrics


def correlation(a: Tensor, b: Tensor) -> tuple[float, float] | None:
    """Rank correlation, and its variance if there were none (exact for ranks in any order); None where one of the two is constant."""
    both = torch.isfinite(a) & torch.isfinite(b)
    a, b = _ranks(a[both]), _ranks(b[both])
    size = float(a.square().sum() * b.square().sum())
    if not size:
        return None
    return float((a * b).sum()) / math.sqrt(size), 1.0 / (len(a) - 1)


def _ranks(x: Tensor) -> Tensor:
    """Centred ranks; equals share theirs."""
    return 0.5 * torch.sign(x[:, None] - x[None, :]).sum(1)


def _mean(found: list[tuple[float, float]]) -> tuple[float, float]:
    """Mean and standard error: the scatter from group to group, but not less than chance alone has."""
    values, count = [value for value, _ in found], len(found)
    mean = sum(values) / count
    chance = sum(variance for _, variance in found) / count
    scatter = sum((value - mean) ** 2 for value in values) / (count - 1) if count > 1 else 0.0
    return mean, math.sqrt(max(chance, scatter) / count)


FRAMES, SIDE = 4, 8
"""A clip is looked at as this many frames, evenly spread, of this many pixels a side: enough for means and for what moves."""
AT_ONCE = 1 << 22
"""Values of chosen frames that are looked at together: many small clips, or one large one."""


def appearance(small: Tensor, members: Sequence[Member], world: World) -> dict[str, float]:
    """Metrics of all ranks' clips, the same bits on each; `small` are thumbnails of this process's clips, `members` says which these are."""
    places = torch.tensor([(m.group, m.index) for m in members], dtype=torch.float64).reshape(-1, 2)
    rows = world.gather(torch.cat([places, small.flatten(1).double()], 1))
    order = torch.argsort(rows[:, 0] * (rows[:, 1].max() + 1) + rows[:, 1])
    return describe(rows[order, 2:].reshape(-1, FRAMES, 3, SIDE, SIDE), rows[order, 0].long())


def frames_seen(count: int) -> list[int]:
    """The frames of a clip that `appearance` looks at."""
    return torch.linspace(0, max(0, count - 1), FRAMES).round().long().tolist()


def thumbnails(videos: Tensor) -> Tensor:
    """uint8 N x F x H x W x 3 as float32 N x FRAMES x 3 x SIDE x SIDE in [0, 1]; few at once, because a clip is large."""
    chosen = frames_seen(videos.shape[1])
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


MOST = 1 << 18
"""Weights that each process keeps of the start: means over so many are exact to a fraction of a percent."""


class Travel:
    """Remembers every n-th trainable weight as the run begins. Nothing is saved: a continued run begins with the same weights."""

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self.params = dict(params)
        self.stride = -(-sum(local(p).numel() for p in self.params.values()) // MOST) or 1
        self.start = self._sample()

    def measure(self, world: World) -> dict[str, float]:
        """Distance from the start relative to its norm, and the share of weights that are not what they were; the same on all ranks."""
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
        return torch.cat(parts).to("cpu", torch.float64)  # one copy: each would wait for the GPU
