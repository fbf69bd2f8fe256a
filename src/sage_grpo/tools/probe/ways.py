"""Compares cheap schedules of a clip by their ranking of a group's clips with the full schedule's: with the same exploration noise on the
user's model and reward, without any gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
import yaml
from torch import Tensor

from sage_grpo.data.groups import Member
from sage_grpo.models.base import abilities
from sage_grpo.models.cheap import CheapSpec
from sage_grpo.plan.passes import Guiding, PassCount
from sage_grpo.samplers.noise import keyed_noise
from sage_grpo.samplers.solvers import Rule
from sage_grpo.samplers.windows import Window
from sage_grpo.tools.probe.estimate import Estimate, bootstrap
from sage_grpo.tools.probe.probe import Counting, ProbeKeys, Prober
from sage_grpo.training.config import RolloutConfig
from sage_grpo.training.plan import Plan
from sage_grpo.training.planner import check_cheap


@dataclass(frozen=True, kw_only=True)
class CheapSetting:
    """Settings of the steps that do not explore."""

    after: int
    """Steps after the branch."""
    before: int
    """Steps before it."""
    solver: Rule
    cheap: CheapSpec

    def rollout(self, base: RolloutConfig) -> RolloutConfig:
        """The rollouts of a run with this way."""
        before, after = self.before or None, self.after or None
        return replace(
            base,
            before_steps=before,
            after_steps=after,
            after_fraction=1.0,
            solver=self.solver,
            cheap=self.cheap,
        )

    def fields(self) -> dict[str, Any]:
        """Configuration fields for it; cheap fields at their defaults are left out."""
        named = {"before_steps": self.before, "after_steps": self.after}
        cheap = {
            one.name: list(value) if isinstance(value, tuple) else value
            for one in dataclasses.fields(self.cheap)
            if (value := getattr(self.cheap, one.name)) != one.default
        }
        return {"solver": self.solver, **{name: number for name, number in named.items() if number}, "cheap": cheap}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of a way."""

    way: CheapSetting
    passes: float
    """Forward passes of the network per clip of the run's own group size."""
    seconds: float
    """Of sampling, per clip of this probe."""
    correlation: Estimate
    """Spearman's, within groups, with the full way's rewards."""
    reward: Estimate
    """Mean reward minus that of the full way."""


@dataclass(frozen=True)
class WaysResult:
    """All results of a probe of ways."""

    full: CheapSetting
    full_passes: float
    full_seconds: float
    step: int
    """The step of the branch."""
    ways: list[Measured]
    best: Measured | None
    """The cheapest way that ranks alike; None if there is none."""
    passes: int
    """Velocities of the probe."""


@dataclass(frozen=True)
class WayKeys(ProbeKeys):
    """Noises of groups as in training, every member its own; the same for all ways."""

    def step(self, members: Sequence[Member], step: int, shape: tuple[int, ...], kind: str = "ways") -> Tensor:
        """Exploration noise of a step."""
        rows = [keyed_noise(shape, kind, self.seed, self.prompt, one.group, one.index, step) for one in members]
        return torch.stack(rows)


@dataclass
class _Run:
    """The plans and rewards of a way, prompt by prompt."""

    prober: Prober
    plans: list[Plan]
    rewards: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0


def choose_ways(prober: Prober) -> tuple[Window, CheapSetting, list[CheapSetting]]:
    """The window, the full way, and the ways to compare with it."""
    window = _window(prober)
    config, spec = prober.config, prober.spec.ways
    rollout = config.rollout
    own = replace(rollout, before_steps=None, after_steps=None, after_fraction=1.0, cheap=CheapSpec())
    schedule = _plans(prober, window, own)[0].groups[0].schedule
    first, stop = schedule.exploring_range()
    before, after = first, schedule.num_steps - stop
    if not after:
        raise ValueError(
            f"No step follows the exploring one (step {first} of {schedule.num_steps}), so that there is nothing to make cheap: give an earlier "
            "one with probe.steps."
        )
    # As many steps as the evaluation has on either side.
    fine = prober.model.sigmas(config.evaluate.steps_for(config.model), rollout.shift)[:-1]
    full = CheapSetting(
        before=max(int((fine > schedule.sigmas[first]).sum()), 1) if before else 0,
        after=max(int((fine <= schedule.sigmas[stop]).sum()), 1),
        solver="ab2" if config.evaluate.solver == "ab2" else "euler",
        cheap=CheapSpec(),
    )
    afters = spec.after or sorted({max(1, round(after / part)) for part in (1, 2, 3, 4)}, reverse=True)
    befores = [0] if not before else spec.before or [rollout.before_steps or before]
    cheaps = list(dict.fromkeys([rollout.cheap, *spec.cheap]))
    ways = [
        CheapSetting(after=after, before=before, solver=solver, cheap=cheap)
        for cheap, before, solver, after in product(cheaps, befores, spec.solvers, afters)
    ]
    return window, full, ways


def _window(prober: Prober) -> Window:
    """The window with one exploring step, to which numbers of steps around it belong."""
    window, steps = prober.config.rollout.window, prober.spec.steps
    if steps is not None and len(steps) == 1:
        return Window(kind="drawn", at=steps)
    if steps is None and window.kind == "fixed":
        return window
    if steps is None and window.kind == "drawn" and window.at is not None and len(window.at) == 1:
        return window
    raise ValueError(
        f"Ways are compared for one exploring step, and {'probe.steps' if steps else 'rollout.window'} has several: name one, as in --probe.steps [2]."
    )


def _plans(prober: Prober, window: Window, rollout: RolloutConfig) -> list[Plan]:
    changed = replace(prober, config=replace(prober.config, rollout=replace(rollout, window=window)))
    return changed.plans(window, prober.config.kernel.eta)


def ways(prober: Prober, say: Callable[[str], None], counting: Counting) -> WaysResult:
    """Sample every way with the same noises, compare its rewards with the full way's, and choose. `say` gets the forecast."""
    window, full, listed = choose_ways(prober)
    base = prober.config.rollout
    runs = []
    for way in (full, *listed):
        config = replace(prober.config, rollout=replace(way.rollout(base), window=window))
        changed = replace(prober, config=config)
        check_cheap(config, prober.model, changed.planner(window, config.kernel.eta))
        runs.append(_Run(changed, changed.plans(window, config.kernel.eta)))
    total = _velocities(runs)
    say(
        f"{prober.spec.prompts} prompts x {prober.spec.starts} start noises x {prober.spec.members} clips, the full way ({full.before} steps before "
        f"and {full.after} after the branch) and {len(listed)} others: {total} velocities."
    )
    with counting("ways", total) as advance:
        for number in range(len(prober.prompts)):
            prefixes: dict[Hashable, Any] = {}
            for run in runs:
                rollout = run.prober.config.rollout
                known = prefixes.setdefault((rollout.solver, rollout.cheap), {})
                keys = WayKeys(prober.config.seed, 0, same_start=True, prompt=number)
                one = replace(run.prober, progress=advance)
                clips = one.clips(run.plans[number], prober.config.kernel.eta, keys, known)
                run.rewards.append(clips.reward)
                run.seconds += clips.seconds
    reference, *others = runs
    theirs = torch.stack(reference.rewards)
    found = [
        Measured(
            way=way,
            passes=_per_clip(run),
            seconds=run.seconds / theirs.numel(),
            correlation=correlation(torch.stack(run.rewards), theirs),
            reward=_change(torch.stack(run.rewards), theirs),
        )
        for way, run in zip(listed, others)
    ]
    best = recommend(found, prober.spec.ways.least)
    step = reference.plans[0].groups[0].label(reference.plans[0].groups[0].schedule.exploring_range()[0])
    return WaysResult(full, _per_clip(reference), reference.seconds / theirs.numel(), step, found, best, total)


def recommend(found: Sequence[Measured], least: float) -> Measured | None:
    """The cheapest way whose correlation is at least this with the whole of its interval; of equally cheap ones the closest."""
    alike = [one for one in found if one.correlation.low >= least]
    return min(alike, key=lambda one: (one.passes, -one.correlation.value), default=None)


def correlation(ours: Tensor, theirs: Tensor) -> Estimate:
    """Spearman's correlation within groups, of rewards of shape (prompts, starts, members): the mean over groups, with its interval over prompts.

    A group without a ranking (all rewards equal, or one missing) is left out.
    """
    values = torch.tensor(
        [[spearman(*pair) for pair in zip(*rows)] for rows in zip(ours.tolist(), theirs.tolist())], dtype=torch.float64
    )
    means = values.nanmean(1)
    means = means[means.isfinite()]
    if len(means) < 2:
        raise ValueError(
            f"Only {len(means)} of {len(ours)} prompts have clips that a reward tells apart, and 2 are needed: raise probe.prompts or "
            "probe.members, or branch earlier (probe.steps)."
        )
    return bootstrap(means[:, None], lambda mean: mean[:, 0])


def spearman(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Correlation of the ranks; equal values share their mean rank. NaN without a ranking."""
    ranks = torch.stack([_ranks(ours), _ranks(theirs)])
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: Sequence[float]) -> Tensor:
    row = torch.tensor(values, dtype=torch.float64)
    below = (row[None, :] < row[:, None]).double().sum(1)
    equal = (row[None, :] == row[:, None]).double().sum(1)
    return torch.where(row.isfinite(), below + (equal - 1) / 2, torch.nan)


def _change(ours: Tensor, theirs: Tensor) -> Estimate:
    rows = (ours - theirs).double().nanmean((1, 2))
    return bootstrap(rows[rows.isfinite()][:, None], lambda mean: mean[:, 0])


def _velocities(runs: Sequence[_Run]) -> int:
    """Velocities of all ways together; a prefix that ways share counts once."""
    seen: set[Hashable] = set()
    own = 0
    for run in runs:
        rollout = run.prober.config.rollout
        for plan in run.plans:
            own += sum(not one.shared for one in plan.sampled(0))
            keys = (key for groups in plan.prefixes(0) for key in zip(*map(plan.prefix, groups)))
            seen |= {(plan.iteration, rollout.solver, rollout.cheap, key) for key in keys}
    return own + len(seen)


def _per_clip(run: _Run) -> float:
    """Forward passes per clip, in groups of the run's own size."""
    prober, plan = run.prober, run.plans[0]
    model, guidance, spec = prober.model, prober.config.model.training_guidance, prober.spec

    def branches(sigma: float) -> int:
        guided = abilities(model).guided
        if guided is not None:
            return guided.branches(sigma, guidance)
        return 1 if (model.guidance_scale if guidance is None else guidance) == 1 else 2

    guiding = Guiding(branches)
    costs = [(one.shared, guiding.one(one.rows, one.sigma, one.guide)) for one in plan.sampled(0)]
    common = sum((cost for shared, cost in costs if shared), PassCount()).clips / spec.starts
    own = sum((cost for shared, cost in costs if not shared), PassCount()).clips / spec.starts / spec.members
    return common / prober.config.batch.group_size + own


def described(way: CheapSetting) -> str:
    """The savings of a way, in few words."""
    cheap, words = way.cheap, []
    if cheap.guidance is not None:
        words.append(f"guided {cheap.guidance[0]:g}..{cheap.guidance[1]:g}")
    if cheap.negative_every > 1:
        words.append(f"negative 1/{cheap.negative_every}")
    return ", ".join(words) or "-"


def ways_snippet(finding: WaysResult) -> str | None:
    """The recommendation as YAML for `sage-grpo train --config`; None without one."""
    if finding.best is None:
        return None
    text = yaml.safe_dump({"rollout": finding.best.way.fields()}, sort_keys=False)
    return "# The cheapest way that ranks clips as the full one does, by `sage-grpo probe`.\n" + text


def ways_document(prober: Prober, finding: WaysResult) -> dict[str, Any]:
    """Content of ways.json."""
    spec = prober.spec

    def row(way: CheapSetting, passes: float, seconds: float) -> dict[str, Any]:
        return {"way": way.fields(), "passes_per_clip": passes, "seconds_per_clip": seconds}

    return {
        "sampled": {
            "prompts": spec.prompts,
            "starts": spec.starts,
            "members": spec.members,
            "velocities": finding.passes,
        },
        "step": finding.step,
        "full": row(finding.full, finding.full_passes, finding.full_seconds),
        "ways": [
            {
                **row(one.way, one.passes, one.seconds),
                "correlation": dataclasses.asdict(one.correlation),
                "reward": dataclasses.asdict(one.reward),
            }
            for one in finding.ways
        ],
        "least": spec.ways.least,
        "judged_by": "passes",
        "recommended": None if finding.best is None else finding.best.way.fields(),
    }
