"""docs/results: the command that a page names makes the very runs that it shows, and they show what is recommended."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from sage_grpo.lab import store
from sage_grpo.lab.prepare import prepare
from sage_grpo.lab.report import text
from sage_grpo.lab.suites import SUITES
from sage_grpo.lab.suites.common import Size
from sage_grpo.lab.summary import summarize
from sage_grpo.recipes import recipe
from slowly import slow_but

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FOLDERS = sorted(file.parent for file in RESULTS.glob(f"*/{store.SUITE}"))
REMOVED = ("reuse",)
"""Suites of something that was taken out again because it did not help: the page stays, and the commit that it names has the code."""
THERE = [folder for folder in FOLDERS if folder.name not in REMOVED]


@pytest.mark.parametrize("folder", slow_but(THERE, *THERE[:3]), ids=lambda folder: folder.name)
def test_the_command_of_a_page_makes_its_runs(folder: Path, benchmark_module, monkeypatch) -> None:
    _, _, command = store.load_suite(folder)
    for beside in ("long_runs", "long_cheap"):
        monkeypatch.setitem(SUITES, beside, getattr(benchmark_module("long_runs"), beside))
    found = re.search(r"--suite (\S+)(?: --size (\S+))?", command)
    assert found, command
    name, size = found.groups()
    assert name == folder.name
    assert size is None or size in get_args(Size)
    rows = {(row["arm"], row["seed"]): row["key"] for row in store.read_rows(folder / store.ROWS)}
    suite = SUITES[name](size or "full")
    assert rows
    assert rows.keys() <= {(arm.name, seed) for arm in suite.arms for seed in suite.seeds}
    # Parsing takes a tenth of a second an arm, and many suites share the rest: four arms of each are enough to see a change.
    arms = tuple(arm for arm in suite.arms if arm.name in {arm for arm, _ in rows} | {suite.baseline})[:4]
    some = replace(suite, arms=arms, baseline=arms[0].name)
    jobs = {(job.arm, job.seed): job.key for job in prepare(some, recipe)}
    assert {place: key for place, key in rows.items() if place in jobs}.items() <= jobs.items()


@pytest.mark.parametrize("name", REMOVED)
def test_a_page_of_what_was_removed_names_the_commit_that_had_it(name: str) -> None:
    assert name not in SUITES
    (commit,) = {row["commit"] for row in store.read_rows(RESULTS / name / store.ROWS)}
    assert f"commit {commit}," in (RESULTS / f"{name}.md").read_text()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_report_can_be_written_of_the_rows_that_are_kept(folder: Path, benchmark_module) -> None:
    """`compare --table` of a folder of docs/results, but for the figures."""
    suite, rows, command = benchmark_module("views").loaded(folder)
    written = text(summarize(suite, rows), rows, [], command)
    assert all(f"\n- {part}: " in written for part in ("machine", "versions", "commit"))


@pytest.fixture
def summary_of(benchmark_module):
    """The numbers of a comparison."""
    return benchmark_module("views").summary_of


@pytest.mark.parametrize(
    ("name", "recommended"),
    [
        ("headline", "branch"),
        ("table2", "branch"),
        ("table2_a", "branch/a"),
        ("scaling", "branch 4 x 12"),
    ],
)
def test_the_recommended_recipe_is_ahead_of_all_others_at_equal_passes_and_no_farther_from_the_manifold(
    name: str, recommended: str, benchmark_module
) -> None:
    """What the pages recommend must stand in the rows: intervals that exclude 0, and no drift elsewhere that is lower beyond its interval."""
    suite, rows, _ = benchmark_module("views").loaded(RESULTS / name)
    arms = summarize(replace(suite, baseline=recommended), rows).arms
    others = [arm for arm in arms.values() if not arm.name.startswith("branch")]
    assert others
    for arm in others:
        assert arm.counts["done"] == 8, arm.name
        assert arm.equal_difference["Overall"].high < 0, arm.name
        assert arm.equal_difference["drift"].high >= 0, arm.name


def test_a_target_kl_holds_hot_runs_and_costs_a_good_one_nothing(summary_of) -> None:
    arms = summary_of(RESULTS / "heat").arms
    for row in store.read_rows(RESULTS / "heat" / store.ROWS):
        if row["arm"].startswith("target_kl"):
            assert all(score["Overall"] >= row["evaluations"]["0"]["Overall"] for score in row["evaluations"].values())
    assert {arm.counts["done"] for arm in arms.values()} == {8}
    assert arms["target_kl 5e-05"].difference["Overall"].low > -0.01
    assert arms["none 2e-04"].difference["Overall"].high < -0.3, "there is something to hold"


@pytest.mark.parametrize(("name", "beyond"), [("distance", 8), ("headline", 7)])
def test_the_recipe_for_long_runs_gets_beyond_55_per_cent_with_less_drift_than_the_base(
    name: str, beyond: int, summary_of
) -> None:
    """In every seed of `distance`, whose seeds had a part in choosing it, and in 7 of 8 that had none."""
    overall = summary_of(RESULTS / name).suite.columns[0]
    runs = [row for row in store.read_rows(RESULTS / name / store.ROWS) if row["arm"] == "branch_long"]
    ways = []
    for row in runs:
        base, last = row["evaluations"]["0"], row["evaluations"]["400"]
        ways.append((last[overall.key] - base[overall.key]) / (overall.ceiling - base[overall.key]))
        assert last["drift"] < base["drift"], row["seed"]
    assert (sum(way >= 0.55 for way in ways), len(ways)) == (beyond, 8)


def test_the_recipe_for_long_runs_is_no_worse_than_it_was_for_a_third_fewer_passes(summary_of) -> None:
    arms = summary_of(RESULTS / "after_long").arms
    before, now = arms["16 prompts, 3 euler"], arms["24 prompts, 2 ab2, steps 2 to 4"]
    assert (before.counts["done"], now.counts["done"]) == (8, 8)
    assert now.passes < 0.65 * before.passes
    assert now.difference["Overall"].low > -0.01
    assert now.equal_difference["Overall"].low > 0
    assert now.equal_difference["drift"].high < 0


def test_runs_that_were_made_again_on_a_gpu_have_every_digit(benchmark_module) -> None:
    again = "benchmarks/results/equaliser_again_h200.jsonl"
    assert benchmark_module("views").made_again(RESULTS / "equaliser", again) == "11 of 11"


def test_a_run_with_another_digit_is_not_counted_as_made_again(benchmark_module, tmp_path) -> None:
    rows = store.read_rows(RESULTS / "equaliser" / store.ROWS)[:2]
    rows[1]["evaluations"]["45"]["VQ"] += 1e-9
    file = tmp_path / "again.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert benchmark_module("views").made_again(RESULTS / "equaliser", str(file)) == "1 of 2"
