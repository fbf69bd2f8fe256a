"""Tables, figures and the report of a comparison, all from its rows."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_grpo.tools.compare import store
from sage_grpo.tools.compare.design import Column, Suite
from sage_grpo.tools.compare.summary import ArmSummary, Summary, summarize
from sage_grpo.utils import text as printing
from sage_grpo.utils.safe_io import printable, replace_text, replacing
from sage_grpo.utils.statistics import Interval
from sage_grpo.utils.text import NONE, fixed, markdown, number

TABLE, REPORT = "table.md", "report.md"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
"""Okabe and Ito's, which color-blind readers tell apart (brown in place of yellow, too pale for a line)."""
BASE = {"color": "#999999", "lw": 0.9, "ls": ":"}
STYLES = ("-", "--", ":", "-.")
"""After every eight arms the next style; together with the colors they name an arm."""


def render(folder: Path, out: Path | None = None) -> Summary:
    """Write table.md (without times: the same rows give the same file), report.md and the figures of a comparison; beside its rows, or in a folder
    of their own."""
    suite, keys, command = store.load_suite(folder)
    rows = list(store.latest(store.read_rows(folder / store.ROWS), keys).values())
    rows.sort(key=lambda row: keys.index(row["key"]))
    summary = summarize(suite, rows)
    place = out or folder
    # Names come from the folder, which may be another user's, and are read in terminals.
    replace_text(place / TABLE, printable(tables(summary)) + "\n")
    figures = draw(summary, place)
    replace_text(place / REPORT, printable(text(summary, rows, figures, command)) + "\n")
    return summary


def tables(summary: Summary) -> str:
    return "\n".join([*_scores(summary), "", *_differences(summary)]).strip()


def _scores(summary: Summary) -> list[str]:
    suite, first, arms = summary.suite, summary.suite.columns[0], summary.arms.values()
    # Columns after those of the suite: heading, the base's cell, and an arm's.
    more: list[tuple[str, str, Callable[[ArmSummary], str]]] = []
    if any(arm.way is not None for arm in arms):
        more.append(("gap closed", "0%", lambda arm: percent(arm.way)))
    if any(arm.equal for arm in arms):
        title = f"{first.title} at {_whole(summary.budget)} network evaluations"
        more.append((title, "", lambda arm: plus_minus(arm.equal.get(first.key))))
    if suite.clips is not None:
        title = f"{first.title} at {_whole(suite.clips)} clips"
        more.append((title, "", lambda arm: plus_minus(arm.clips.get(first.key))))
    more += [
        ("network evaluations", "0", lambda arm: _whole(arm.passes)),
        ("updates", "0", lambda arm: _whole(arm.updates)),
    ]
    heads = ["arm", "seeds", "iterations", *(column.title for column in suite.columns), *(head for head, _, _ in more)]
    rows = []
    for names, base in _bases(summary):
        scores = (base.get(column.key, NONE) for column in suite.columns)
        rows.append([f"base{names}", "", "0", *scores, *(cell for _, cell, _ in more)])
    for arm in arms:
        others = [f"{count} {state}" for state, count in arm.counts.items() if count and state != "done"]
        seeds = f"{arm.counts['done']}" + (f" ({', '.join(others)})" if others else "")
        scores = (plus_minus(arm.final[column.key]) for column in suite.columns)
        rows.append([arm.name, seeds, str(arm.iterations), *scores, *(cell(arm) for _, _, cell in more)])
    return markdown(heads, rows)


def _differences(summary: Summary) -> list[str]:
    suite, first = summary.suite, summary.suite.columns[0]
    arms = [arm for arm in summary.arms.values() if arm.difference]
    if not arms:
        return []
    # A score gained at the price of drift is no gain: show both, at equal cost.
    both = [column for column in suite.columns if column.key in (first.key, "drift")]
    at_passes = both if any(arm.equal_difference for arm in arms) else []
    at_clips = both if suite.clips is not None else []
    heads = [f"minus {suite.baseline}", "pairs", *(column.title for column in suite.columns)]
    heads += [f"p ({first.title}, Holm)"]
    heads += [f"{column.title} at equal network evaluations" for column in at_passes]
    heads += [f"{column.title} at equal clips" for column in at_clips]
    rows = []
    for arm in arms:
        cells = [arm.name, str(arm.difference[first.key].count if first.key in arm.difference else 0)]
        cells += [plus_minus(arm.difference.get(column.key), signed=True) for column in suite.columns]
        cells += [_p(summary.adjusted.get(arm.name))]
        cells += [plus_minus(arm.equal_difference.get(column.key), signed=True) for column in at_passes]
        cells += [plus_minus(arm.clips_difference.get(column.key), signed=True) for column in at_clips]
        rows.append(cells)
    return markdown(heads, rows)


def _bases(summary: Summary) -> list[tuple[str, dict[str, str]]]:
    """Scores before training as they are printed, with their arms; arms whose runs started equal share a row, which holds for all of them."""
    groups: list[list[ArmSummary]] = []
    for arm in summary.arms.values():
        if arm.base:
            group = next((group for group in groups if _alike(arm.base_range, _ranges(group))), None)
            if group is None:
                groups.append([arm])
            else:
                group.append(arm)
    mark = "; " if any("," in name for name in summary.arms) else ", "
    return [
        (
            "" if len(groups) == 1 else f" of {mark.join(arm.name for arm in group)}",
            {key: " to ".join(dict.fromkeys(map(number, ends))) for key, ends in _ranges(group).items()},
        )
        for group in groups
    ]


def _ranges(arms: Sequence[ArmSummary]) -> dict[str, tuple[float, float]]:
    return {
        key: (min(arm.base_range[key][0] for arm in arms), max(arm.base_range[key][1] for arm in arms))
        for key in arms[0].base_range
    }


def _alike(one: Mapping[str, tuple[float, float]], other: Mapping[str, tuple[float, float]]) -> bool:
    """True where the printed values of two ranges overlap in every column."""
    if one.keys() != other.keys():
        return False
    gaps = [(max(one[key][0], other[key][0]), min(one[key][1], other[key][1])) for key in one]
    return all(low <= high or number(low) == number(high) for low, high in gaps)


def text(summary: Summary, rows: Sequence[Mapping[str, Any]], figures: Sequence[Path], command: str) -> str:
    suite = summary.suite
    parts = [f"# {suite.title}", suite.question, f"    {command}", "## Results", tables(summary), READING]
    if suite.notes:
        parts.append(suite.notes)
    parts += [f"![{file.stem}]({file.name})" for file in figures]
    faults = [f"- {row['arm']}, seed {row['seed']}: {row['status']}. {row['error']}" for row in rows if row["error"]]
    if faults:
        parts += ["## Runs that did not end", "\n".join(faults)]
    parts += ["## Settings", "\n".join(_settings(suite, rows)), "## Time and machine", "\n".join(_times(summary, rows))]
    return "\n\n".join(parts)


READING = (
    "Mean ± half of the 95% interval: over seeds and prompts where rows have scores by prompt (docs/method.md, Intervals), "
    "else over seeds. Differences are taken seed by seed, and prompt by prompt, where both arms ended; their intervals are plain (each for itself), the p "
    "values are adjusted for the number of arms (Holm). Runs that diverged or failed are counted and in no mean. A network evaluation is a sample through the "
    "network in training: 1 forward, 3 forward and backward; clips are those that were scored. At a budget of the suite a score is measured after the last iteration "
    "within it; elsewhere, at equal network evaluations, it lies on the line between the scores before and after."
)


def _settings(suite: Suite, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [f"Seeds {', '.join(map(str, suite.seeds))}. What differs from the recipe:", ""]
    for arm in suite.arms:
        own = next((row["settings"] for row in rows if row["arm"] == arm.name), dict(arm.options))
        changes = ", ".join(f"`{key}` {json.dumps(value)}" for key, value in sorted(own.items())) or "nothing"
        lines.append(f"- {arm.name}: {arm.recipe}; {changes}")
    return lines


def _times(summary: Summary, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    arms = summary.arms.values()
    seconds = [(arm.name, number(arm.seconds["iteration"]), _whole(arm.seconds["total"])) for arm in arms]
    lines = markdown(["arm", "s / iteration", "s / run"], seconds)
    lines += ["", "Runs shared the machine, so that these seconds are those of a busy one.", ""]
    for part in ("machine", "versions", "commit", "code"):
        # Rows that were saved for a page may lack some fields.
        values = sorted({json.dumps(row[part], sort_keys=True) for row in rows if "machine" in row and part in row})
        shown = "; ".join(_words(json.loads(value)) for value in values)
        mixed = " (runs differ in this: take care)" if len(values) > 1 else ""
        lines.append(f"- {part}: {shown or 'unknown'}{mixed}")
    return lines


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return str(value)[:60] or "unknown"


def plus_minus(value: Interval | None, *, signed: bool = False) -> str:
    if value is None or value.count == 0:
        return NONE
    return printing.plus_minus(value.mean, value.half, signed=signed)


def percent(value: Interval | None) -> str:
    if value is None:
        return NONE
    mean = printing.percent(value.mean)
    return mean if math.isnan(value.half) else f"{mean} ± {printing.percent(value.half)}"


def _p(value: float | None) -> str:
    if value is None or math.isnan(value):
        return NONE
    return fixed(value, 3) if value >= 0.001 else "< 0.001"


def _whole(value: float) -> str:
    return NONE if math.isnan(value) else fixed(value, 0, grouped=True)


def draw(summary: Summary, folder: Path) -> list[Path]:
    if not any(arm.counts["done"] for arm in summary.arms.values()):
        return []
    try:
        import matplotlib  # noqa: F401
    except ImportError as missing:
        warnings.warn(
            f"No figures: matplotlib cannot be imported ({missing}). pip install matplotlib; sage-grpo compare --table FOLDER then draws them.",
            stacklevel=2,
        )
        return []
    return [file for name in summary.suite.figures if (file := DRAW[name](summary, folder / f"{name}.png")) is not None]


def _curves(summary: Summary, path: Path) -> Path | None:
    """Rows: columns of the table; left over iterations, right over network evaluations."""
    columns = [c for c in summary.suite.columns if any(len(a.curves[c.key]) > 1 for a in summary.arms.values())]
    if not columns:
        return None
    figure, axes = _panels(len(columns), 2, height=2.7)
    for column, row in zip(columns, axes):
        for place, arm in enumerate(summary.arms.values()):
            curve = arm.curves[column.key]
            points = sorted(curve)
            low = [curve[p].mean - _band(curve[p].half) for p in points]
            high = [curve[p].mean + _band(curve[p].half) for p in points]
            for axis, x in ((row[0], points), (row[1], [arm.passes_at.get(p, math.nan) for p in points])):
                axis.plot(x, [curve[p].mean for p in points], **_look(place), label=arm.name)
                axis.fill_between(x, low, high, color=_look(place)["color"], alpha=0.15, lw=0)
        for axis in row:
            axis.set_ylabel(_label(column))
        if not math.isnan(summary.budget):
            row[1].axvline(summary.budget, **BASE)
    axes[-1][0].set_xlabel("iterations")
    for row in axes:
        row[0].xaxis.get_major_locator().set_params(integer=True)
        row[1].xaxis.get_major_locator().set_params(nbins=5)  # long numbers
    axes[-1][1].set_xlabel("network evaluations (forward 1, forward and backward 3)")
    return _save(figure, axes, path, "held-out prompts, mean and 95% interval over seeds")


def _steps(summary: Summary, path: Path) -> Path | None:
    """By denoising step: the measured gradient norm at the velocity, before and after the equalizer, and what |b| / std predicts."""
    arms = [(n, a) for n, a in enumerate(summary.arms.values()) if any("raw" in v for v in a.steps.values())]
    if not arms:
        return None
    figure, axes = _panels(1, 3, height=3.6)
    panels = (
        ("sensitivity", "predicted: |b| / std"),
        ("raw", "measured gradient norm"),
        ("sent", "gradient norm sent to the network"),
    )
    for axis, (name, title) in zip(axes[0], panels):
        for place, arm in arms:
            points = [step for step, values in arm.steps.items() if name in values and "raw" in values]
            axis.plot(
                points, [arm.steps[step][name] for step in points], marker="o", ms=3, **_look(place), label=arm.name
            )
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("denoising step")
        axis.locator_params(axis="x", integer=True)
        axis.set_yscale("log")
    return _save(figure, axes, path, "by denoising step, mean over iterations and seeds")


def _bars(summary: Summary, path: Path) -> Path | None:
    arms = [arm for arm in summary.arms.values() if arm.counts["done"]]
    columns = summary.suite.columns
    figure, axes = _panels(1, len(columns), height=1.2 + 0.32 * len(arms), width=3.6)
    for axis, column in zip(axes[0], columns):
        found = [arm.final[column.key] for arm in arms]
        places = list(range(len(arms)))[::-1]
        for place, value, colour in zip(places, found, range(len(arms))):
            axis.errorbar(value.mean, place, xerr=_band(value.half), fmt="o", capsize=3, color=_look(colour)["color"])
        if arms[0].base.get(column.key) is not None:
            axis.axvline(arms[0].base[column.key], **BASE)
        axis.set_yticks(places, [arm.name for arm in arms] if axis is axes[0][0] else [""] * len(arms))
        axis.set_ylim(-0.6, len(arms) - 0.4)
        axis.set_xlabel(_label(column))
    return _save(figure, axes, path, "after the last iteration, mean and 95% interval over seeds", legend=False)


DRAW: dict[str, Callable[[Summary, Path], Path | None]] = {"curves": _curves, "steps": _steps, "bars": _bars}


def _panels(rows: int, columns: int, *, height: float, width: float = 4.6) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (width * columns + 2.4, height * rows + 0.5)
    return pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)


def _label(column: Column) -> str:
    return f"{column.title} ({'higher' if column.higher else 'lower'} is better)"


def _look(place: int) -> dict[str, Any]:
    return {"color": COLOURS[place % len(COLOURS)], "ls": STYLES[place // len(COLOURS) % len(STYLES)], "lw": 1.6}


def _band(half: float) -> float:
    return 0.0 if math.isnan(half) else half


def _save(figure: Any, axes: Any, path: Path, title: str, *, legend: bool = True) -> Path:
    """Write the file at once, with the legend beside the panels, where it hides no line."""
    from matplotlib import pyplot

    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, lw=0.6)
    if legend:
        handles, names = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside right upper", frameon=False, fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    with replacing(path) as fresh:
        figure.savefig(fresh, format="png", dpi=120)
    pyplot.close(figure)
    return path
