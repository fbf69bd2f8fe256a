"""Results of runs: scores before and after with intervals, in words too, losses, and the settings in which runs differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sage_grpo.config.metadata import MEANING, affects
from sage_grpo.tools.report.run_data import RunData
from sage_grpo.training.config import TrainConfig
from sage_grpo.utils.statistics import Z95, mean_interval
from sage_grpo.utils.text import fixed
from sage_grpo.worlds.world import world_of_prompts

NOT_SCORES = ("total_stderr", "failed")
MEANINGS = {
    "total": "the reward: the weighted sum of its parts, which training raises",
    "TA": "text alignment: how far the clip shows what the prompt says",
    "MQ": "motion quality: how smooth and natural the motion is",
    "VQ": "visual quality: how clean each frame is",
    "drift": "distance to the nearest clip that the world can draw; lower is better, and no reward asks for it",
}
"""The usual parts of a reward, explained for people."""
FEW = 5  # prompts that a value of an attribute needs for its change to be shown


def interval(values: Sequence[float], of: str) -> dict[str, Any] | None:
    """Mean and half of the 95% interval by Student's t (None of one value) over what varies, "prompts" or "seeds"; None without values."""
    if not values:
        return None
    found = mean_interval(values)
    return {"mean": found.mean, "half": found.half if found.count > 1 else None, "count": found.count, "of": of}


def parts(runs: Sequence[RunData]) -> list[str]:
    metrics = {name for run in runs for row in run.evaluations for name in row if name.startswith("eval/")}
    names = {name for metric in metrics if not (name := metric.removeprefix("eval/")).startswith(NOT_SCORES)}
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
        rows.append({"label": run.name if len(runs) > 1 else "tuned", "kind": "run", "run": place, **_last(run, names)})
    rows += [_over_seeds([runs[place] for place in members], members, names) for members in _same_but_seed(runs)]
    return {
        "parts": names,
        "rows": rows,
        "better": {name: sign for name in names if (sign := _direction(runs, name))},
        "meanings": {name: meaning(name, runs) for name in names},
    }


def base_key(run: RunData) -> str:
    """Runs with equal keys start from the same model and sample it alike: before training their clips are equal. A new adapter changes nothing."""
    settings = run.settings
    named = [(key, value) for key, value in settings.items() if key.startswith(("model.", "evaluate."))]
    counted = [(key, value) for key, value in named if affects(TrainConfig, key) in ("values", "content")]
    return repr((sorted(counted), settings.get("data.eval_prompts") or settings.get("data.prompts")))


def scored_key(run: RunData) -> str:
    """Runs with equal keys have equal scores before training too: they have the same rewards."""
    rewards = [(key, value) for key, value in run.settings.items() if key.startswith("rewards")]
    return repr((base_key(run), [one for one in rewards if affects(TrainConfig, one[0]) in MEANING]))


def meaning(name: str, runs: Sequence[RunData]) -> str:
    whole, _, part = name.partition("/")
    told = MEANINGS.get(name) or (f"the share of {whole} that is about {part}" if whole in MEANINGS and part else "")
    weights = {repr(weight): weight for weight in _weights(runs, lambda counted: counted == name)}
    counts = f"weight {' or '.join(f'{weight:g}' for weight in weights.values())} in the total" if weights else ""
    return "; ".join(filter(None, (told, counts)))


def by_attribute(run: RunData) -> list[dict[str, Any]]:
    """The change of the score of each value of an attribute on the prompts that name it, the largest loss first.

    For prompts of a world, whose judge scores every attribute; other prompts have no known attributes.
    """
    if 0 not in run.clips or len(run.clips) < 2:
        return []
    before = {clip.key: clip.scores for clip in run.clips[0]}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    after = run.clips[max(run.clips)]
    world = world_of_prompts([clip.prompt for clip in after])
    if world is None:
        return []
    for clip in after:
        for name, value in world.attributes(clip.prompt).items():
            old, new = before.get(clip.key, {}).get(f"TA/{name}"), clip.scores.get(f"TA/{name}")
            if old is not None and new is not None:
                found.setdefault((name, value), []).append((old, new))
    rows = [
        {
            "label": f"{name} = {value}",
            "part": f"TA/{name}",
            "before": mean_interval([old for old, _ in pairs]).mean,
            "after": mean_interval([new for _, new in pairs]).mean,
            **(interval([new - old for old, new in pairs], "prompts") or {}),
        }
        for (name, value), pairs in found.items()
        if len(pairs) >= FEW
    ]
    return sorted(rows, key=lambda row: float(row["mean"]))


def verdict(run: RunData, name: str = "") -> list[str]:
    """The results of a run in plain sentences: the total, and its price. Empty before there is a second evaluation."""
    if len(run.evaluations) < 2 or run.evaluations[0]["iteration"] != 0:
        return []
    last = _last(run, ["total"])
    score, gain = last["scores"]["total"], last["gains"]["total"]
    if score is None or gain is None:
        return []
    sure = gain["half"] is not None and abs(gain["mean"]) > gain["half"]
    what = ("better" if gain["mean"] > 0 else "worse") if sure else "no clear difference"
    clips = f"{score['count']} held-out clips" if score["count"] > 1 else "the held-out clips"
    told = [
        f"{f'{name}: a' if name else 'A'}fter {last['iteration']} iterations the tuned model scores {fixed(score['mean'], 3)} on {clips}, "
        f"the base model {fixed(score['mean'] - gain['mean'], 3)}: {what} ({_change(gain)})."
    ]
    values = by_attribute(run)
    if values:
        worst = values[0]
        fell = worst["mean"] < 0 and abs(worst["mean"]) > worst["half"]
        begin = (
            f"What fell most is {worst['label']}"
            if fell
            else f"No attribute fell clearly; the lowest is {worst['label']}"
        )
        told.append(
            f"{begin}: on the {worst['count']} clips whose prompts name it, {worst['part']} went from {fixed(worst['before'], 3)} to "
            f"{fixed(worst['after'], 3)} ({_change(worst)}; the lowest of {len(values)} values, so part of it is chance)."
        )
    return told


def _change(found: Mapping[str, Any]) -> str:
    half = "" if found["half"] is None else f" ± {fixed(found['half'], 3)}"
    return fixed(found["mean"], 3, signed=True) + half


def differences(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    keys = list(dict.fromkeys(key for run in runs for key in run.settings if key != "out"))
    return [
        {"key": key, "values": [run.settings.get(key) for run in runs]}
        for key in keys
        if len({repr(run.settings.get(key)) for run in runs}) > 1
    ]


def _direction(runs: Sequence[RunData], name: str) -> int:
    """1 if more of a score is better, -1 if less is, 0 if it counts in no reward."""
    if name == "total":
        return 1
    weights = _weights(runs, lambda part: name == part or name.startswith(f"{part}/") or name.endswith(f"/{part}"))
    return 0 if not weights else 1 if min(weights) > 0 else -1 if max(weights) < 0 else 0


def _weights(runs: Sequence[RunData], counts: Callable[[str], bool]) -> list[float]:
    return [
        weight
        for run in runs
        for reward in run.config.get("rewards") or ()
        if isinstance(reward, dict) and isinstance(reward.get("weights"), dict)
        for part, weight in reward["weights"].items()
        if counts(part)
    ]


def _last(run: RunData, names: Sequence[str]) -> dict[str, Any]:
    iteration = run.evaluations[-1]["iteration"]
    return {"iteration": iteration, **_scores(run, iteration, names, gain=iteration > 0)}


def _scores(run: RunData, iteration: int, names: Sequence[str], *, gain: bool) -> dict[str, Any]:
    """Scores of an evaluation, over its prompts if they were kept, and the gain over the same clips before training."""
    first, row = run.evaluations[0], next(row for row in reversed(run.evaluations) if row["iteration"] == iteration)
    clips, before = run.clips.get(iteration, ()), {clip.key: clip for clip in run.clips.get(0, ())}
    scores, gains = {}, {}
    for name in names:
        found = interval([value for clip in clips if (value := clip.scores.get(name)) is not None], "prompts")
        if found is None and isinstance(row.get(f"eval/{name}"), float):
            stderr = row.get("eval/total_stderr") if name == "total" else None
            half = Z95 * stderr if stderr else None
            found = {"mean": row[f"eval/{name}"], "half": half, "count": 1, "of": "prompts"}
        scores[name] = found
        if gain:
            pairs = [(clip.scores.get(name), before[clip.key].scores.get(name)) for clip in clips if clip.key in before]
            means = [(row.get(f"eval/{name}"), first.get(f"eval/{name}"))] if first["iteration"] == 0 else []
            gains[name] = _gain(pairs) or _gain(means)
    return {"scores": scores, "gains": gains}


def _gain(pairs: Sequence[tuple[float | None, float | None]]) -> dict[str, Any] | None:
    return interval([new - old for new, old in pairs if new is not None and old is not None], "prompts")


def _same_but_seed(runs: Sequence[RunData]) -> list[list[int]]:
    """Indices of runs that are one experiment with several seeds, at the same iteration."""
    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        if run.evaluations and run.config:
            fixed_keys = [key for key in run.settings if affects(TrainConfig, key) in (*MEANING, "course", "content")]
            kept = [(key, run.settings[key]) for key in fixed_keys if key != "seed"]
            experiment = repr((run.evaluations[-1]["iteration"], sorted(kept, key=repr)))
            groups.setdefault(experiment, []).append(place)
    several = [members for members in groups.values() if len(members) > 1]
    return [
        members for members in several if len({runs[place].settings.get("seed") for place in members}) == len(members)
    ]


def _over_seeds(runs: Sequence[RunData], members: list[int], names: Sequence[str]) -> dict[str, Any]:
    each = [_last(run, names) for run in runs]

    def over(kind: str, name: str) -> dict[str, Any] | None:
        return interval([one[kind][name]["mean"] for one in each if one[kind].get(name) is not None], "seeds")

    return {
        "label": f"{len(runs)} seeds: {', '.join(run.name for run in runs)}",
        "kind": "seeds",
        "run": members[0],
        "members": members,
        "iteration": each[0]["iteration"],
        "scores": {name: over("scores", name) for name in names},
        "gains": {name: over("gains", name) for name in names},
    }
