"""Checks of a run's rows: each compares the newest row with the run's past and returns a text on the problem, or an
empty one.

Thresholds are relative: to medians of the run's past, in robust standard deviations (1.48 times the median absolute
deviation) of logarithms, because norms, ratios and KLs scatter by factors. A metric with an absolute range (a share, a
clip range) is compared with that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

LEAST = 1e-3
"""Smallest factor on the learning rate: a run that needs less is broken in another way."""
Row = Mapping[str, float | None]
LEAST_PAST = 5
"""Iterations before a check compares with the past."""
TINY = 1e-12
"""Values below this count as 0: their logarithm is meaningless."""
ROUNDING = 1e-6
"""Scores that differ by less than this share of their size are equal in float32."""
EXPLODED = 20.0
"""A reward whose spread is this many times that of the start no longer measures the same: clips, or the reward itself,
are broken."""
VANISHED = 0.05  # share of the spread at the start below which a reward no longer distinguishes clips
ALIKE = 0.2  # share of their difference at the start below which the clips of a group have collapsed
FAILING = 0.1  # share of clips without a reward that is more than chance
CLIPPED = 0.75  # share of members without a gradient because of the clip
RATIO_OFF = 0.1  # distance of a mean ratio from 1 that is too large
STUCK = 0.01  # least share of weights that must have moved
GROWS = {"gradient/norm": 5.0, "kl/total": 10.0, "optimizer/kl": 10.0, "ratio/largest_log": 10.0}
"""Least factor above its median for a metric to be out of range."""


@dataclass(frozen=True, kw_only=True)
class MetricHistory:
    """The past of a run, with which a row is compared: the first rows and the newest ones, without those that have the
    finding already."""

    start: Sequence[Row]
    recent: Sequence[Row]
    clips: int
    """Rollouts of an iteration."""
    clip_range: float
    deviations: float
    brake: float = 1.0
    """The sentinel's factor on the learning rate, independent of a target KL."""


def values(rows: Sequence[Row], name: str) -> list[float]:
    """Finite values of a metric."""
    return [value for row in rows if (value := row.get(name)) is not None and math.isfinite(value)]


def robust(numbers: Sequence[float]) -> tuple[float, float]:
    """Median and robust standard deviation."""
    middle = median(numbers)
    return middle, 1.4826 * median(abs(number - middle) for number in numbers)


def not_finite(row: Row, past: MetricHistory) -> str:
    names = ("reward/total", "reward/group_std", "gradient/norm", "ratio/mean", "ratio/largest_log", "kl/total")
    broken = ", ".join(name for name in names if name in row and not values([row], name))
    return broken and f"{broken} is not finite. Lower optimizer.lr, and look at the rewards of this iteration."


def spread_vanished(row: Row, past: MetricHistory) -> str:
    known, now = values(past.start, "reward/group_std"), row.get("reward/group_std")
    if now is None or len(known) < LEAST_PAST or not now <= VANISHED * median(known):
        return ""
    return (
        f"reward/group_std is {now:.3g}, it was {median(known):.3g} at the start: the reward no longer distinguishes the clips of a "
        "group, so there is nothing to learn from. Look at the reward (does a server give every clip the same score?) and at kernel.eta."
    )


def spread_exploded(row: Row, past: MetricHistory) -> str:
    now, known = row.get("reward/group_std"), sorted(values(past.start, "reward/group_std"))
    if now is None or not math.isfinite(now) or len(known) < LEAST_PAST:
        return ""
    # Not the median: for a rare reward, most iterations of the start may have no spread. Not the largest: it may be an
    # outlier.
    most, size = known[-2], max(map(abs, values(past.start, "reward/total")), default=0.0)
    if most <= max(TINY, ROUNDING * size) or now < EXPLODED * most:  # a spread of 0 has no range
        return ""
    return (
        f"reward/group_std is {now:.3g}, at the start it was up to {most:.3g}: scores as far apart as these are of broken clips, or of a "
        "broken reward, however good their mean is. Look at the clips and at the reward; lower optimizer.lr, or set optimizer.max_kl."
    )


def rewards_failing(row: Row, past: MetricHistory) -> str:
    failed = row.get("reward/failed") or 0.0
    if not failed > FAILING * past.clips:
        return ""
    return f"{failed:.0f} of {past.clips} clips have no reward: the rest is learned from alone. events.jsonl has the reasons."


def replay_differs(row: Row, past: MetricHistory) -> str:
    """The first update of a rollout has other probabilities than the rollout."""
    first = row.get("ratio/first_log", row.get("ratio/first_update"))  # its name in runs of earlier versions
    if first is None or not first > past.clip_range:
        return ""
    return (
        f"ratio/first_log is {first:.2g}, above the clip range of {past.clip_range:.2g}: before any step the replay should repeat the rollout "
        "(1e-6). Guidance, dtype, compilation or attention differ between the two: run `sage-grpo doctor`."
    )


def ratio_off(row: Row, past: MetricHistory) -> str:
    mean = row.get("ratio/mean")
    if mean is not None and abs(mean - 1.0) > RATIO_OFF:
        return f"ratio/mean is {mean:.3g}: the updates of a rollout go too far. Lower optimizer.lr or set optimizer.max_kl."
    return _grown(row, past, "ratio/largest_log", floor=past.clip_range)


def clipped_away(row: Row, past: MetricHistory) -> str:
    share = row.get("ratio/clip_fraction")
    if share is None or not share > CLIPPED:
        return ""
    return (
        f"ratio/clip_fraction is {share:.0%}: most of the rollout has no gradient. Raise surrogate.clip_scale, or lower optimizer.lr or "
        "update.updates_per_rollout."
    )


def gradient_exploded(row: Row, past: MetricHistory) -> str:
    return _grown(row, past, "gradient/norm")


def kl_away(row: Row, past: MetricHistory) -> str:
    return _grown(row, past, "kl/total") or _grown(row, past, "optimizer/kl")


def weights_stuck(row: Row, past: MetricHistory) -> str:
    moved, norm = row.get("weights/moved"), row.get("gradient/norm")
    if moved is None or not norm or moved >= STUCK:
        return ""
    return (
        f"Only {moved:.1%} of the weights have changed since the start, although the gradient's norm is {norm:.2g}: steps are "
        "rounded away. Keep the trainable weights in float32, or raise optimizer.lr."
    )


def rate_at_floor(row: Row, past: MetricHistory) -> str:
    """No learning rate reaches the target KL."""
    factor, kl = row.get("optimizer/lr_factor"), row.get("optimizer/kl")
    if factor is None or kl is None or factor > LEAST * past.brake:
        return ""
    return (
        f"optimizer/lr_factor is {factor:.2g}, the smallest there is, and a rollout's updates still move the policy by {kl:.2g} nats: nothing is "
        "learned at such a rate. In bfloat16 rounding alone has a KL, which no rate lowers: set optimizer.target_kl, and optimizer.max_kl, above it. "
        "In float32 optimizer.lr is far too high."
    )


def diversity_collapsed(row: Row, past: MetricHistory) -> str:
    known, now = values(past.start, "video/spread"), row.get("video/spread")
    if now is None or len(known) < LEAST_PAST or now >= ALIKE * median(known):
        return ""
    return (
        f"video/spread is {now:.2g}, it was {median(known):.2g} at the start: the clips of a prompt have become alike. Lower optimizer.lr, "
        "or hold the policy with trust_region.mode fixed."
    )


SIGNS = {
    sign.__name__: sign
    for sign in (
        not_finite, spread_vanished, spread_exploded, rewards_failing, replay_differs, ratio_off, clipped_away, gradient_exploded, kl_away,
        weights_stuck, rate_at_floor, diversity_collapsed,
    )
}  # fmt: skip
"""The checks of every row, by the name of the finding."""


def _grown(row: Row, past: MetricHistory, name: str, floor: float = 0.0) -> str:
    """Check a metric against its own range: a factor of its median and robust deviations of its logarithm."""
    now, known = row.get(name), values(past.recent, name)
    if now is None or not math.isfinite(now) or now <= max(floor, TINY) or len(known) < LEAST_PAST:
        return ""
    middle, deviation = robust([math.log(max(value, TINY)) for value in known])
    limit = max(middle + past.deviations * deviation, middle + math.log(GROWS[name]))
    if middle <= math.log(TINY) or math.log(now) <= limit:  # a metric that was 0 so far has no range
        return ""
    return f"{name} is {now:.3g}, usually {math.exp(middle):.3g} and at most {math.exp(limit):.3g}. Lower optimizer.lr, or set optimizer.max_kl."
