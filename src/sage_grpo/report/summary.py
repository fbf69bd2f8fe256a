"""The numbers above the pictures: scores before and after with intervals, and in which settings runs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sage_grpo.effects import MEANING, affects
from sage_grpo.report.run_data import Clip, RunData
from sage_grpo.statistics import mean_interval
from sage_grpo.training.config import TrainConfig

NOT_SCORES = ("total_stderr", "failed")


@dataclass(frozen=True)
class Interval:
    """A mean with its 95% interval."""

    mean: float
    half: float | None
    """Half of the interval's width; None where there is only one value."""
    count: int
    of: str
    """What varies: "prompts" or "seeds"."""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {"mean": self.mean, "half": self.half, "count": self.count, "of": self.of}


def interval(values: Sequence[float], of: str) -> Interval | None:
    """Mean and 95% interval by Student's t; None without values."""
    if not values:
        return None
    found = mean_interval(values)
    return Interval(found.mean, found.half if found.count > 1 else None, found.count, of)


def parts(runs: Sequence[RunData]) -> list[str]:
    """Names of scores, the total first, then parts, then parts of parts."""
    names = {
        name.removeprefix("eval/")
        for run in runs
        for row in run.evaluations
        for name in row
        if name.startswith("eval/")
    }
    names = {name for name in names if not name.startswith(NOT_SCORES)}
    return sorted(names, key=lambda name: (name != "total", name.count("/"), name))


def table(runs: Sequence[RunData]) -> dict[str, Any]:
    """Rows of the summary: every base model, every run, and every group of runs that differ in their seed only."""
    names = parts(runs)
    evaluated = [(place, run) for place, run in enumerate(runs) if run.evaluations]
    bases: dict[str, tuple[int, RunData]] = {}
    for place, run in evaluated:
        if run.evaluations[0]["iteration"] == 0:
            bases.setdefault(scored_key(run), (place, run))
    rows = []
    for place, run in bases.values():
        label = "base" if len(bases) == 1 else f"base of {run.name}"
        rows.append(
            {"label": label, "kind": "base", "run": place, "iteration": 0, **_scores(run, 0, names, gain=False)}
        )
    for place, run in evaluated:
        rows.append({"label": run.name, "kind": "run", "run": place, **_last(run, names)})
    rows += [_over_seeds([runs[place] for place in members], members, names) for members in _same_but_seed(runs)]
    return {"parts": names, "rows": rows, "better": {name: sign for name in names if (sign := _direction(runs, name))}}


def base_key(run: RunData) -> str:
    """Runs with equal keys start from the same model and sample it alike: before training their clips are equal. A new adapter adds nothing."""
    settings = run.settings
    counted = [
        (key, value)
        for key, value in settings.items()
        if key.startswith(("model.", "evaluate.")) and affects(TrainConfig, key) in ("values", "content")
    ]
    return repr((sorted(counted), settings.get("data.eval_prompts") or settings.get("data.prompts")))


def scored_key(run: RunData) -> str:
    """Runs with equal keys have equal scores before training too: they have the same rewards."""
    rewards = [(key, value) for key, value in run.settings.items() if key.startswith("rewards")]
    return repr((base_key(run), [one for one in rewards if affects(TrainConfig, one[0]) in MEANING]))


def differences(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Settings that are not the same in all runs."""
    keys = list(dict.fromkeys(key for run in runs for key in run.settings if key != "out"))
    return [
        {"key": key, "values": [run.settings.get(key) for run in runs]}
        for key in keys
        if len({repr(run.settings.get(key)) for run in runs}) > 1
    ]


def _direction(runs: Sequence[RunData], name: str) -> int:
    """1 where more of a score is better, -1 where less is, 0 where it counts in no reward."""
    if name == "total":
        return 1
    weights = [
        weight
        for run in runs
        for reward in run.config.get("rewards") or ()
        if isinstance(reward, dict) and isinstance(reward.get("weights"), dict)
        for part, weight in reward["weights"].items()
        if name == part or name.startswith(f"{part}/") or name.endswith(f"/{part}")
    ]
    return 0 if not weights else 1 if min(weights) > 0 else -1 if max(weights) < 0 else 0


def _last(run: RunData, names: Sequence[str]) -> dict[str, Any]:
    iteration = run.evaluations[-1]["iteration"]
    return {"iteration": iteration, **_scores(run, iteration, names, gain=iteration > 0)}


def _scores(run: RunData, iteration: int, names: Sequence[str], *, gain: bool) -> dict[str, Any]:
    """Scores of an evaluation, over its prompts where they were kept, and the gain over the same clips before training."""
    row = next(row for row in reversed(run.evaluations) if row["iteration"] == iteration)
    clips, before = run.clips.get(iteration, ()), {clip.key: clip for clip in run.clips.get(0, ())}
    scores, gains = {}, {}
    for name in names:
        found = interval(_column(clips, name), "prompts")
        if found is None and isinstance(row.get(f"eval/{name}"), float):
            stderr = row.get("eval/total_stderr") if name == "total" else None
            found = Interval(row[f"eval/{name}"], 1.96 * stderr if stderr else None, 1, "prompts")
        scores[name] = None if found is None else found.plain()
        if gain:
            pairs = [(clip.scores.get(name), before[clip.key].scores.get(name)) for clip in clips if clip.key in before]
            paired = interval([new - old for new, old in pairs if new is not None and old is not None], "prompts")
            change = paired or _plain_gain(run, row, name)
            gains[name] = None if change is None else change.plain()
    return {"scores": scores, "gains": gains}


def _plain_gain(run: RunData, row: Mapping[str, Any], name: str) -> Interval | None:
    old, new = run.evaluations[0].get(f"eval/{name}"), row.get(f"eval/{name}")
    if run.evaluations[0]["iteration"] != 0 or old is None or new is None:
        return None
    return Interval(new - old, None, 1, "prompts")


def _column(clips: Sequence[Clip], name: str) -> list[float]:
    return [value for clip in clips if (value := clip.scores.get(name)) is not None]


def _same_but_seed(runs: Sequence[RunData]) -> list[list[int]]:
    """Places of runs that are one experiment with several seeds, at the same iteration."""
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        if run.evaluations and run.config:
            kept = {key: value for key, value in run.settings.items() if _is_of_experiment(key)}
            groups.setdefault(repr((run.evaluations[-1]["iteration"], sorted(kept.items(), key=repr))), []).append(
                place
            )
    several = [members for members in groups.values() if len(members) > 1]
    return [
        members for members in several if len({runs[place].settings.get("seed") for place in members}) == len(members)
    ]


def _is_of_experiment(key: str) -> bool:
    """Whether a setting must be the same in all runs of one experiment."""
    return key != "seed" and affects(TrainConfig, key) in (*MEANING, "course", "content")


def _over_seeds(runs: Sequence[RunData], members: list[int], names: Sequence[str]) -> dict[str, Any]:
    each = [_last(run, names) for run in runs]

    def over(kind: str, name: str) -> dict[str, Any] | None:
        found = interval([one[kind][name]["mean"] for one in each if one[kind].get(name) is not None], "seeds")
        return None if found is None else found.plain()

    return {
        "label": f"{len(runs)} seeds: {', '.join(run.name for run in runs)}",
        "kind": "seeds",
        "run": members[0],
        "members": members,
        "iteration": each[0]["iteration"],
        "scores": {name: over("scores", name) for name in names},
        "gains": {name: over("gains", name) for name in names},
    }
