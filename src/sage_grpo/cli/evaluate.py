"""Score a model on held-out prompts, or score existing video files, with any rewards.

`--run DIR` takes a run's model, weights, rewards, held-out prompts and settings as defaults, so that the scores equal the run's own;
options on the command line win. `--pairs true` also evaluates the base model and compares clip by clip.
"""

from __future__ import annotations

import json as json_module
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sage_grpo.cli import say
from sage_grpo.cli.starting import say_whose_model, trusted
from sage_grpo.config.parsing import given
from sage_grpo.generation.evaluate import EvaluateSpec, compare, measure, measure_pair, pairs_document, write_pairs
from sage_grpo.utils.safe_io import replace_text
from sage_grpo.utils.statistics import LEVEL
from sage_grpo.utils.text import fixed, narrow_table, percent

if TYPE_CHECKING:
    from sage_grpo.generation.evaluate import Difference
    from sage_grpo.generation.files import ScoredVideo
    from sage_grpo.training.evaluate import Evaluation


@dataclass(frozen=True, kw_only=True)
class Options(EvaluateSpec):
    """The model or clips to evaluate, and the output."""

    pairs: bool = False
    """Also evaluate the base model on the same prompts and noise, and report paired differences with intervals."""
    videos: Path | None = None
    """A folder of video files to score, instead of a model's clips."""
    out: Path | None = None
    """Folder for scores.json or pairs.json, and for a contact sheet or scores.csv."""
    json: bool = False
    """Print JSON only."""


def defaults(argv: list[str]) -> tuple[Options | None, list[str]]:
    run = given(argv, "run")
    if run is None:
        return None, argv
    return Options.of_run(run, trust=trusted(argv), rewards=given(argv, "rewards") is None), argv


def run(options: Options) -> int:
    from sage_grpo.rewards.member import RewardFailure

    try:
        if options.videos is not None:
            return _score_files(options)
        say_whose_model(options)
        if options.pairs:
            _report_pairs(options)
        else:
            _report(measure(options, say=say), options)
    except RewardFailure as failure:
        print(f"sage-grpo evaluate stopped: {failure}", file=sys.stderr)
        return 1
    return 0


def _report(result: Evaluation, options: Options) -> None:
    metrics = {name.removeprefix("eval/"): value for name, value in result.metrics.items()}
    if result.report:
        print(result.report, file=sys.stderr)
    if options.json:
        print(json_module.dumps(metrics))
    else:
        width = max(map(len, metrics))
        print("\n".join(f"{name:<{width}}  {fixed(value, 4):>9}" for name, value in metrics.items()))
    if options.out is not None:
        from sage_grpo.utils.video import contact_sheet

        replace_text(options.out / "scores.json", json_module.dumps(metrics, indent=1) + "\n")
        if len(result.clips):
            contact_sheet(options.out / "clips.png", list(result.clips), result.captions)


def _report_pairs(options: Options) -> None:
    base, tuned = measure_pair(options, say=say)
    for name, result in (("base", base), ("tuned", tuned)):
        if result.report:
            print(f"{name}: {result.report}", file=sys.stderr)
    differences = compare(base, tuned)
    document = pairs_document(differences, base, tuned)
    print(json_module.dumps(document) if options.json else pairs_table(differences))
    if options.out is not None:
        write_pairs(options.out, document, base, tuned)


def _score_files(options: Options) -> int:
    from sage_grpo.generation.files import refuse_unscored, score_videos, summary
    from sage_grpo.models.devices import choose_device
    from sage_grpo.training.inputs import NAMES

    assert options.videos is not None
    if options.prompts is None or options.prompts in (*NAMES, "train"):
        raise ValueError("--videos needs --prompts FILE: one prompt per video, in the order of the file names.")
    base = Options() if options.run is None else Options.of_run(options.run, trust=True)
    device, base = options.model.device, replace(base, model=replace(base.model, device=options.model.device))
    names = ("model", "settings", "weights", "checkpoint", "ema", "lora", "pairs", "max_failed_fraction")
    useless = [f"--{name}" for name in names if getattr(options, name) != getattr(base, name)]
    if useless:
        raise ValueError(
            f"--videos scores existing files: {', '.join(useless)} would change nothing (--model.device does)."
        )
    rows = score_videos(
        options.videos,
        Path(options.prompts),
        options.rewards,
        output=options.out,
        device=choose_device(device),
        batch_size=options.micro_batch,
    )
    if not options.json:
        print_scores(rows)
    refuse_unscored(options.videos, rows)
    if options.json:
        print(json_module.dumps(summary(rows)))
    return 0


def pairs_table(differences: Mapping[str, Difference]) -> str:
    width = max(map(len, [*differences, "score"]))
    lines = [f"{'score':<{width}}  {'base':>9} {'tuned':>9} {'change':>9}   {LEVEL:.0%} interval        wins"]
    for name, one in differences.items():
        low, high, change = (fixed(value, 4, signed=True) for value in (one.low, one.high, one.change))
        interval = "none" if math.isnan(one.low) else f"{low} to {high}"
        share = "none" if math.isnan(one.win_share) else percent(one.win_share)
        base, tuned = fixed(one.base, 4), fixed(one.tuned, 4)
        lines.append(f"{name:<{width}}  {base:>9} {tuned:>9} {change:>9}   {interval:<20}  {share:>5}")
    one = next(iter(differences.values()))
    lines.append(
        f"{one.pairs} pairs of clips, {one.prompts} prompts; wins count a tie as half; the interval is over prompts."
    )
    if any(one.left_out for one in differences.values()):
        lost = ", ".join(f"{name} {one.left_out}" for name, one in differences.items() if one.left_out)
        lines.append(f"Left out, because a reward failed: {lost}.")
    return "\n".join(lines)


def print_scores(rows: Sequence[ScoredVideo], limit: int = 40) -> None:
    """Print the scores of files as a table, with their means, and the reasons of missing ones."""
    from rich.console import Console

    from sage_grpo.generation.files import summarize

    columns = list(rows[0].scores)
    table = narrow_table(f"{len(rows)} videos", "video", "fps", "frames", *columns, left=["video"])
    table.columns[0].overflow = "fold"
    for row in rows[:limit]:
        scores = [fixed(row.scores[column], 4) for column in columns]
        table.add_row(row.video, f"{row.fps:g}", str(row.frames), *scores)
    if len(rows) > limit:
        table.add_row(f"and {len(rows) - limit} more", "", "", *["" for _ in columns])
    table.add_section()
    totals = [summarize(rows, column) for column in columns]
    table.add_row("mean", "", "", *[fixed(one["mean"], 4) for one in totals])
    table.add_row("standard_error", "", "", *[f"{one['standard_error']:.4g}" for one in totals])
    table.add_row("count", "", "", *[f"{one['count']:.0f}" for one in totals])
    console = Console()
    console.print(table)
    reasons: dict[str, list[str]] = {}
    for row in rows:
        reasons.setdefault(row.reason, []).append(row.video)
    for reason, videos in reasons.items():
        if reason:
            many = f"x{len(videos)}, first " if len(videos) > 1 else ""
            console.print(f"{many}{videos[0]}: {reason}", markup=False)
