"""The suites of research/suites and the rows of research/results: files load, a suite makes the very runs that its rows are of, and these show what is
recommended."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pages
import pytest
from views import loaded

from sage_grpo.cli.compare import start
from sage_grpo.data.prompts import Prompt
from sage_grpo.recipes import names
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.tools.compare import store
from sage_grpo.tools.compare.design import Size, load
from sage_grpo.tools.compare.prepare import CompareJob, key_of, prepare
from sage_grpo.tools.compare.report import text
from sage_grpo.tools.compare.summary import summarize
from sage_grpo.training.planner import Planner

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "research/results"
FILES = {file.stem: file for file in sorted((ROOT / "research/suites").glob("*.yaml"))}
WITHOUT = sorted({file.parent.name for file in RESULTS.glob(f"*/{store.SUITE}")} - {*FILES, "reuse"})
"""Comparisons whose suite is beside the rows alone; the option of reuse is gone."""
FIRST = [name for name in [*FILES, *WITHOUT] if not name.startswith("scenes_")]
"""Suites of the first world, whose keys are those of the rows. The rows of the second are older than its reward and model as files."""
SHIFT = json.loads((ROOT / "src/sage_grpo/worlds/shapes/assets/scheduler/scheduler_config.json").read_text())["shift"]


@cache
def jobs_of(name: str, size: Size) -> tuple[CompareJob, ...]:
    """One job per arm, made once: parsing settings is what takes time here."""
    suite = load(FILES[name], size) if name in FILES else loaded(RESULTS / name)[0]
    return tuple(prepare(replace(suite, seeds=suite.seeds[:1]), start))


@pytest.mark.quick
@pytest.mark.parametrize("name", WITHOUT)
def test_a_suite_that_is_beside_the_rows_alone_is_written_as_a_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.yaml"
    file.write_text(pages.suite_file(name))
    assert replace(load(file), notes="") == replace(loaded(RESULTS / name)[0], notes="")


@pytest.mark.quick
@pytest.mark.parametrize("name", FILES)
def test_a_suite_is_what_was_asked_for(name: str) -> None:
    """The arms, seeds and columns beside the rows are those of the file, as far as they were run."""
    suite, asked = load(FILES[name]), loaded(RESULTS / name)[0]
    assert {arm.name for arm in asked.arms} <= {arm.name for arm in suite.arms}
    assert [(one.key, one.ceiling and round(one.ceiling, 9)) for one in asked.columns] == [
        (one.key, one.ceiling and round(one.ceiling, 9)) for one in suite.columns
    ]
    for size in ("brief", "smoke"):
        assert {arm.name for arm in load(FILES[name], size).arms} <= {arm.name for arm in suite.arms}


@pytest.mark.quick
@pytest.mark.parametrize("name", FILES)
def test_every_arm_starts_from_a_recipe_that_there_is(name: str) -> None:
    suite = load(FILES[name])
    assert {arm.recipe for arm in suite.arms} <= {*names()}
    assert suite.config is None or (ROOT / suite.config).is_file()


@pytest.mark.quick
@pytest.mark.parametrize(
    "name", [name for name in FILES if name not in FIRST or name in FIRST[::6]]
)  # all are prepared at full size below
def test_a_suite_prepares_at_smoke_size(name: str) -> None:
    jobs = jobs_of(name, "smoke")
    assert {(job.config.iterations, job.points, job.seed) for job in jobs} <= {(2, (0, 2), 1000), (2, (), 1000)}
    assert len(jobs) == 2


@pytest.mark.parametrize("name", FIRST)
def test_a_suite_makes_the_runs_of_its_rows(name: str) -> None:
    """The key of a run is that of its settings: a preset that changes must leave what was measured with it pinned in the arm."""
    _, _, command = store.load_suite(RESULTS / name)
    found = re.search(r"--suite (\S+)(?: --size (\S+))?", command)
    assert found, command
    assert Path(found[1]).stem == name
    size: Any = found[2] or "full"
    suite = load(FILES[name], size) if name in FILES else loaded(RESULTS / name)[0]
    rows = store.read_rows(RESULTS / name / store.ROWS)
    measured = {(row["arm"], row["key"]) for row in rows if row["seed"] == suite.seeds[0]}
    assert measured
    assert measured <= {(job.arm, job.key) for job in jobs_of(name, size)}


@pytest.mark.parametrize("name", FIRST)
def test_every_arm_of_a_suite_builds_plans_and_differs_from_the_others(name: str) -> None:
    jobs = jobs_of(name, "full")
    keys = {key_of(replace(job.config, seed=0), job.points, job.kind): job.arm for job in jobs}
    assert len(keys) == len(jobs), "two arms are the same run"
    for config in (job.config for job in jobs):
        grid = Schedule.shifted(config.rollout.steps, SHIFT)
        planner = Planner(config, grid, config.kernel.build(), trains=lambda sigma: True)
        planner.check()
        plan = planner.plan(0, [Prompt(str(place)) for place in range(config.batch.prompts)])
        assert plan.updates == config.update.updates_per_rollout
        shown = (config.evaluate.prompts * config.evaluate.per_prompt, config.evaluate.steps)
        # At the model's own steps.
        assert shown in ([(128, 4)] if name == "few_steps" else [(128, 20), (256, 20), (512, 20)])
        (watching,) = [reward for reward in config.rewards if reward.name == "video_stats"]
        assert (watching.counts, "flicker" in watching.weights) == (False, True)


@pytest.mark.parametrize(("file", "suite"), [("ceiling", "headline"), ("scenes_ceiling", "scenes_headline")])
def test_the_ceiling_is_the_one_that_was_measured(file: str, suite: str) -> None:
    measured = json.loads((ROOT / f"research/benchmarks/results/{file}.json").read_text())
    best = measured["after_vae"]
    assert best["Overall"] == pytest.approx(load(FILES[suite]).columns[0].ceiling, abs=2e-5)  # of rounded parts
    assert best["Overall"] < measured["clean"]["Overall"]
    assert best["drift"] > measured["clean"]["drift"]


def test_what_was_measured_of_the_second_model_is_what_its_card_says() -> None:
    """A model that is exchanged without its figures, or the other way round, would leave documents that speak of another one."""
    kept = json.loads((ROOT / "research/benchmarks/results/scenes_model.json").read_text())
    card = (ROOT / "research/scenes/model/README.md").read_text()
    assert f"{kept['psnr']:.2f} dB PSNR" in card
    for part in ("VQ", "MQ", "TA", "Overall", "drift"):
        assert f"| {part} | {kept['model'][part]:.3f} |" in card


@pytest.mark.parametrize("folder", sorted(RESULTS.glob(f"*/{store.SUITE}")), ids=lambda file: file.parent.name)
def test_a_report_can_be_written_of_the_rows_that_are_kept(folder: Path) -> None:
    """`compare --table` of a folder of research/results, but for the figures."""
    suite, rows, command = loaded(folder.parent)
    written = text(summarize(suite, rows), rows, [], command)
    assert all(f"\n- {part}: " in written for part in ("machine", "versions", "commit"))


@pytest.mark.parametrize(
    ("name", "recommended"),
    [("headline", "branch"), ("table2", "branch"), ("table2_a", "branch/a"), ("scaling", "branch 4 x 12")],
)
def test_the_recommended_recipe_is_ahead_of_all_others_at_equal_passes_and_no_farther_from_the_manifold(
    name: str, recommended: str
) -> None:
    """Recommendations of the pages are in the rows: intervals that exclude 0, and no drift elsewhere that is lower beyond its interval."""
    suite, rows, _ = loaded(RESULTS / name)
    arms = summarize(replace(suite, baseline=recommended), rows).arms
    others = [arm for arm in arms.values() if not arm.name.startswith("branch")]
    assert others
    for arm in others:
        assert arm.counts["done"] == 8, arm.name
        assert arm.equal_difference["Overall"].high < 0, arm.name
        assert arm.equal_difference["drift"].high >= 0, arm.name
