"""Checks of a reward on sampled clips: pure functions of scores, and the scoring that gives them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sage_grpo.rewards.built_in.video_stats import VideoStats
from sage_grpo.tools.doctor.check import REMEDY, Check, Status, graded

STATISTICS = ("brightness", "saturation", "motion", "sharpness")
EXPLAINED = 0.9  # A reward of which trivial statistics explain a larger share measures little else
FEW = 4  # least degrees of freedom of a fit
NOISE = 2.0  # differences up to this multiple of those of two equal calls count as the reward's own noise
HIDDEN = "two equal calls differ by as much (reward spread)"


@dataclass(frozen=True)
class Scoring:
    """The scores of one set of clips, in several ways."""

    groups: Tensor  # the prompt of each clip
    first: Tensor
    again: Tensor  # the same call once more
    reversed: Tensor  # scored in the opposite order; stored in the first one's
    single: Tensor  # scored one by one
    path: Tensor  # scored as the trainer does
    swapped: Tensor  # with the prompts of other groups, a row for every rotation

    def finite(self) -> Scoring:
        keep = self.first.isfinite()
        return Scoring(**{field.name: getattr(self, field.name)[..., keep] for field in fields(self)})


Score = Callable[[Tensor, Sequence[int]], Tensor]  # (indices of clips, the group of each one's prompt) -> totals


def measure(score: Score, groups: Tensor, path: Tensor) -> Scoring:
    own, every = groups.tolist(), torch.arange(len(groups))
    names = sorted(set(own))
    back = every.flip(0)
    turned = []
    for turn in range(1, len(names)):
        other = {name: names[(place + turn) % len(names)] for place, name in enumerate(names)}
        turned.append(score(every, [other[name] for name in own]))
    return Scoring(
        groups=groups,
        first=score(every, own),
        again=score(every, own),
        reversed=score(back, [own[place] for place in back]).flip(0),
        single=torch.cat([score(every[place : place + 1], [own[place]]) for place in range(len(own))]),
        path=path,
        swapped=torch.stack(turned) if turned else torch.empty(0, len(own)),
    )


def valid(scores: Tensor, allowed: float) -> Check:
    failed = float((~scores.isfinite()).double().mean())
    status: Status = "fail" if failed > allowed or failed == 1 else "warn" if failed else "pass"
    value = f"{failed:.0%} of {len(scores)} clips have no score (max_failed_fraction {allowed:g})"
    return Check("reward valid", status, value, failed)


def spread(scoring: Scoring, *, eta: float | None = None, overshoots: bool = False) -> Check:
    """Spread of the scores within groups, against their own noise. The remedy depends on the cause: `eta` is the clips' exploration
    (None for none), `overshoots` is True where it is more than the sampler can remove."""
    inside, error, flat = within(scoring.first, scoring.groups), _noise(scoring) / math.sqrt(2), is_flat(scoring)
    gap = _units(scoring.again - scoring.first, scoring)
    status: Status = "fail" if flat or error > inside else "warn" if error > 0.3 * inside or gap > 0.01 else "pass"
    remedy = REMEDY["reward spread"]
    if not flat and status != "pass":
        remedy = "put the reward in eval mode, fix its seed, and let it sample frames by time; or score every clip several times and average"
    elif overshoots and eta is not None:
        remedy = f"lower kernel.eta ({eta:g}) until `stability` passes: these clips hold more noise than video, which no reward can rank"
    elif eta is not None:
        remedy += f"; or explore more than with kernel.eta {eta:g} (`sage-grpo probe` compares etas)"
    value = f"std within groups {inside:.3g}, of which noise {error:.2g}; two calls differ by up to {gap:.2g} of it"
    return Check("reward spread", status, value, inside, remedy=remedy)


def batch(scoring: Scoring) -> Check:
    turned, alone = (_units(other - scoring.first, scoring) for other in (scoring.reversed, scoring.single))
    gap = max(turned, alone)
    if gap > 0.05 and all(_is_noise(other - scoring.first, scoring) for other in (scoring.reversed, scoring.single)):
        return Check("reward batch", "skip", f"{HIDDEN}, so that the batch's part in it cannot be measured")
    value = f"of the spread: in another order {turned:.2g}, one by one {alone:.2g}"
    return Check("reward batch", graded(gap, warn=0.05, fail=0.5), value, gap)


def prompts(scoring: Scoring) -> Check:
    name = "reward prompt"
    if is_flat(scoring):
        return Check(name, "skip", "all clips have one score (reward spread)")
    gap = _units(scoring.path - scoring.first, scoring)
    chance = Check(name, "skip", f"{HIDDEN}, so that the prompt's part in it cannot be measured")
    if gap > 0.5 and _is_noise(scoring.path - scoring.first, scoring):
        return chance
    if gap > 0.5 or not math.isfinite(gap):
        value = f"the trainer's scores differ from those with the clips' own prompts by {gap:.2g} of the spread"
        return Check(name, "fail", value, gap)
    if not len(scoring.swapped):
        return Check(name, "skip", "one prompt only")
    change = max(_units(row - scoring.first, scoring) for row in scoring.swapped)
    gains = [_advantage(row - scoring.first, scoring.groups) for row in scoring.swapped]
    mean, error = max(gains, key=lambda gain: gain[0] / max(gain[1], 1e-12))
    ahead = mean / max(error, 1e-12)
    status: Status = "pass"
    value = (
        f"with another prompt scores change by up to {change:.2g} of the spread; own prompts score {-mean:+.3g} higher"
    )
    if change < 1e-3:
        status, value = "warn", "scores are the same with another clip's prompt"
    elif all(_is_noise(row - scoring.first, scoring) for row in scoring.swapped):
        return chance
    elif ahead > 2:
        status = "fail" if ahead > 4 else "warn"
        value = f"clips score {mean:.3g} +- {error:.2g} higher with the prompts of other clips"
    return Check(name, status, value, change)


def _advantage(difference: Tensor, groups: Tensor) -> tuple[float, float]:
    means = torch.stack([difference[groups == group].mean() for group in groups.unique()]).double()
    return float(means.mean()), float(means.std()) / math.sqrt(len(means)) if len(means) > 1 else math.inf


def statistics(scoring: Scoring, videos: Tensor, fps: float) -> Check:
    """Share of the score, within groups, that is a linear function of trivial statistics of the clips."""
    columns = torch.stack(list(VideoStats(parts=STATISTICS)(videos, [""] * len(videos), fps).values()), 1).double()
    names = [
        n for n, column in zip(STATISTICS, columns.T) if bool(column.isfinite().all()) and float(column.std()) > 1e-9
    ]
    columns = columns[:, [STATISTICS.index(n) for n in names]]
    count = len(scoring.groups.unique())
    freedom = len(videos) - count - len(names)
    if freedom < FEW or not names:
        return Check("reward statistics", "skip", f"{len(videos)} clips of {count} prompts are too few for a fit")
    x = torch.stack([_centred(column, scoring.groups) for column in columns.T], 1)
    x = x / x.norm(dim=0).clamp(min=1e-30)
    y = _centred(scoring.first.double(), scoring.groups)
    rest = y - x @ torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    total = float(y.square().sum()) / (len(videos) - count)
    share = 1 - float(rest.square().sum()) / freedom / total if total > 0 else 0.0
    value = f"{', '.join(names)} explain {max(0.0, share):.0%} of the scores' variance within groups"
    return Check("reward statistics", "warn" if share > EXPLAINED else "pass", value, share)


def _centred(values: Tensor, groups: Tensor) -> Tensor:
    result = values.double().clone()
    for group in groups.unique():
        result[groups == group] -= result[groups == group].mean()
    return result


def within(scores: Tensor, groups: Tensor) -> float:
    freedom = max(1, len(scores) - len(groups.unique()))
    return math.sqrt(float(_centred(scores, groups).square().sum()) / freedom)


def _units(difference: Tensor, scoring: Scoring) -> float:
    """The largest difference in units of the spread within groups; of a constant reward's, in its own size."""
    inside = within(scoring.first, scoring.groups)
    unit = max(inside, 1e-6 * float(scoring.first.abs().max()), 1e-9)
    return float(difference.abs().max()) / unit


def is_flat(scoring: Scoring) -> bool:
    return within(scoring.first, scoring.groups) <= 1e-6 * max(1.0, float(scoring.first.abs().max()))


def _noise(scoring: Scoring) -> float:
    return _rms(scoring.again - scoring.first)


def _is_noise(difference: Tensor, scoring: Scoring) -> bool:
    """True if a difference is no larger than chance makes it: any other explanation would mislead."""
    return 0 < _rms(difference) <= NOISE * _noise(scoring)


def _rms(values: Tensor) -> float:
    return math.sqrt(float(values.double().square().mean()))
