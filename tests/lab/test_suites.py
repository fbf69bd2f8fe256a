"""The suites by name: they build, they compare what they say, and what they measure is what docs/benchmark.md says."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from sage_grpo.data.prompts import Prompt
from sage_grpo.flow.kernels import KERNELS
from sage_grpo.flow.schedule import Schedule
from sage_grpo.inspector import transitions
from sage_grpo.lab.design import FIRST_SEED, Column
from sage_grpo.lab.measure import measure, rollout_cost, scored_clips, update_cost
from sage_grpo.lab.prepare import Job, key_of, prepare
from sage_grpo.lab.suites import SUITES, common, expected_seconds, second
from sage_grpo.lab.suites.methods import MATCHED
from sage_grpo.recipes import recipe
from sage_grpo.session.preflight import check_files
from sage_grpo.training.planner import Planner
from sage_grpo.worlds.scenes.learned import LearnedReward
from sage_grpo.worlds.world import SCENES, SHAPES, World
from slowly import slow_but

ROOT = Path(__file__).parents[2]
SHIFT = json.loads((ROOT / "src/sage_grpo/worlds/shapes/assets/scheduler/scheduler_config.json").read_text())["shift"]


@cache
def jobs_of(name: str) -> tuple[Job, ...]:
    """One job per arm of the full size: parsing settings is what takes time here."""
    full = SUITES[name]("full")
    return tuple(prepare(replace(full, seeds=full.seeds[:1]), recipe))


QUICK = ("regime",)


@pytest.mark.parametrize("name", slow_but(SUITES, *QUICK))
def test_every_arm_of_a_suite_builds_plans_and_differs_from_the_others(name: str) -> None:
    jobs = jobs_of(name)
    keys = {key_of(replace(job.config, seed=0), job.points, job.kind): job.arm for job in jobs}
    assert len(keys) == len(jobs), "two arms are the same run"
    for job in jobs:
        config = job.config
        grid = Schedule.shifted(config.rollout.steps, SHIFT)
        planner = Planner(config, grid, config.kernel.build(), trains=lambda sigma: True)
        planner.check()
        plan = planner.plan(0, [Prompt(str(place)) for place in range(config.batch.prompts)])
        assert plan.updates == config.update.updates_per_rollout
        assert (config.evaluate.prompts * config.evaluate.per_prompt, config.evaluate.steps) in (
            [(128, 4)] if name == "few_steps" else [(128, 20), (512, 20)]  # a few-step model at its own steps
        )


SECOND = (
    *("scenes_headline", "scenes_tuning", "scenes_rates", "scenes_hacking", "scenes_sentinel"),
    *("scenes_equaliser", "scenes_prompts", "scenes_lora", "scenes_size"),
)


def test_every_suite_has_its_rows() -> None:
    assert [name for name in SUITES if not rows_of(name).is_file()] == []


def rows_of(name: str) -> Path:
    """The committed rows of a suite."""
    return ROOT / "docs/results" / name / "runs.jsonl"


@pytest.mark.parametrize("name", slow_but(list(SUITES), *QUICK))
def test_what_was_measured_is_still_what_the_suite_runs(name: str) -> None:
    """The key of a run is that of its settings: a preset that changes must leave what was measured with it pinned in the arm."""
    rows = rows_of(name).read_text().splitlines()
    first = SUITES[name]("full").seeds[0]
    measured = {(row["arm"], row["key"]) for row in map(json.loads, rows) if row["seed"] == first}
    jobs: tuple[Job, ...] = jobs_of(name)
    if name == "sentinel":  # the one that was measured at the brief size, which has fewer iterations
        brief = SUITES[name]("brief")
        jobs = tuple(prepare(replace(brief, seeds=brief.seeds[:1]), recipe))
    assert measured <= {(job.arm, job.key) for job in jobs}


@pytest.mark.parametrize("name", SUITES)
def test_sizes_are_what_they_promise(name: str) -> None:
    smoke, brief, full = (SUITES[name](size) for size in ("smoke", "brief", "full"))
    assert smoke.name == brief.name == full.name == name
    assert len(full.seeds) >= 8 or full.seeds[-1] < FIRST_SEED  # what only chooses may do with fewer
    assert full.seeds == brief.seeds
    assert expected_seconds(smoke) < expected_seconds(brief) < expected_seconds(full)
    assert expected_seconds(full) < (1800 if name in SECOND else 1000)  # about ten minutes, or half an hour
    assert (len(smoke.arms), smoke.iterations) == (2, 2)
    names = {arm.name for arm in full.arms}
    assert {arm.name for arm in brief.arms} <= names
    assert f"{expected_seconds(full):.0f} s" in full.notes


def test_the_smaller_model_is_asked_for_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is no part of the repository; without the dot before it, it could be a name on the hub, which a run asks first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for job in [job for job in jobs_of("scenes_size") if job.arm.endswith("smaller")]:
        with pytest.raises(FileNotFoundError, match="scenes-smaller/pipeline"):
            check_files(job.config)


def costs_of(job: Job) -> tuple[int, int]:
    """Samples through the network, and scored clips, of a run without references."""
    config = job.config
    planner = Planner(config, Schedule.shifted(config.rollout.steps, SHIFT), config.kernel.build(), lambda sigma: True)
    plan = planner.plan(0, [Prompt(str(place)) for place in range(config.batch.prompts)])
    return config.iterations * (rollout_cost(plan) + update_cost(plan, [0])), config.iterations * scored_clips(plan)


@pytest.mark.parametrize("name", ["headline", "scenes_headline"])
def test_budgets_are_what_the_baseline_costs(name: str) -> None:
    suite = SUITES[name]("full")
    (arm,) = [arm for arm in suite.arms if arm.name == suite.baseline]
    (job,) = prepare(replace(suite, arms=(arm,), seeds=suite.seeds[:1]), recipe)
    assert costs_of(job) == (suite.passes, suite.clips)


def test_settings_of_long_runs_to_choose_from_cost_about_the_same_and_no_more_than_is_said(benchmark_module) -> None:
    suite = benchmark_module("long_runs").long_cheap()
    assert suite.seeds[-1] < FIRST_SEED  # they only choose
    costs = {job.arm: costs_of(job)[0] for job in prepare(replace(suite, seeds=suite.seeds[:1]), recipe)}
    assert costs[suite.baseline] == 172_800
    assert all(0.95 * 172_800 < cost <= 0.65 * 268_800 for cost in costs.values()), costs


def test_the_recipe_for_long_runs_is_what_was_measured_for_it() -> None:
    """No setting of that arm but how it is evaluated differs from the recipe."""
    (job,) = [job for job in jobs_of("after_long") if job.arm == "24 prompts, 2 ab2, steps 2 to 4"]
    assert job.recipe == "shapes/branch_long"
    assert {name for name in job.settings if not name.startswith("evaluate.")} == {"rewards"}
    assert job.config.iterations == recipe("shapes/branch_long").iterations


def test_the_second_world_is_asked_about_the_same_methods() -> None:
    first, second = ({arm.name: arm for arm in SUITES[name]("full").arms} for name in ("headline", "scenes_headline"))
    assert set(first) - set(second) == {"branch_long"}
    for name, arm in second.items():
        ours, theirs = recipe(arm.recipe), recipe(first[name].recipe)
        assert (ours.data.prompts, ours.model.path, ours.rewards[0].name) == ("scenes", "scenes", "scenes")
        assert (ours.objective.kind, ours.kernel) == (theirs.objective.kind, theirs.kernel)
        assert ours.rollout.window.kind == theirs.rollout.window.kind
        changed = {key: value for key, value in arm.options.items() if key != "optimizer.lr"}
        assert changed.items() <= first[name].options.items()


def test_a_learned_reward_is_never_its_own_witness() -> None:
    """In every run on it the judge watches, and Overall, by which runs are compared, is the judge's."""
    for name in ("scenes_hacking", "scenes_sentinel"):
        suite = SUITES[name]("full")
        for arm in suite.arms:
            given = {reward["name"]: reward for reward in {**suite.options, **arm.options}["rewards"]}
            trained = [title for title, reward in given.items() if not reward.get("metric_only")]
            assert trained == (["scenes"] if "judge" in arm.name.split(",")[0] else ["scenes_learned"])
            assert "VQ" in given["scenes"]["weights"]
    assert "Overall" not in LearnedReward.names


def test_table2_has_every_method_with_and_without_the_dual_region() -> None:
    arms = {job.arm: job.config for job in jobs_of("table2")}
    for method in ("dance", "flow", "cps", "sage", "sage_exact", "branch"):
        assert arms[method].trust_region.mode == "none"
        dual = arms[f"{method} + dual"]
        assert (dual.trust_region.mode, dual.kl.kind, dual.kl.lambda_max) == ("dual", "two_stage", 1e-5)
    setting_a = jobs_of("table2_a")[0].config.rewards[0].weights
    assert setting_a == {"TA": 1.0, "MQ": 1.0, "VQ": 1.0}
    assert arms["sage"].rewards[0].weights == {"TA": 1.0, "MQ": 0.5, "VQ": 0.5}


def test_matched_kernels_inject_the_variance_of_sage() -> None:
    steps = recipe("shapes/sage_paper").rollout.steps

    def injected(name: str, eta: float) -> float:
        kernel = KERNELS[name](eta=eta)
        grid = Schedule.shifted(steps, SHIFT).exploring([True] * steps, deterministic_last=kernel.leaves_noise)
        return float(transitions(kernel, grid).std.square().sum())

    for name, eta in MATCHED.items():
        assert injected(name, eta) == pytest.approx(injected("sage", 0.5), rel=1e-4), name
        assert injected(name, 0.5) != pytest.approx(injected("sage", 0.5), rel=1e-2), name


@pytest.mark.parametrize("name", slow_but(SUITES, *QUICK))
def test_the_metric_that_is_not_trained_on_counts_in_no_run(name: str) -> None:
    for job in jobs_of(name):
        (spec,) = [reward for reward in job.config.rewards if reward.name == "video_stats"]
        assert not spec.counts
        assert "flicker" in spec.weights


@pytest.mark.parametrize(
    ("file", "world", "column"), [("ceiling", SHAPES, common.OVERALL), ("scenes_ceiling", SCENES, second.OVERALL)]
)
def test_the_ceiling_is_the_one_that_was_measured(file: str, world: World, column: Column) -> None:
    measured = json.loads((ROOT / f"benchmarks/results/{file}.json").read_text())
    best = measured["after_vae"]
    assert best["Overall"] == pytest.approx(column.ceiling, abs=2e-5)  # of rounded parts
    assert {part: round(best[part], 5) for part in ("TA", "MQ", "VQ")} == world.ceiling
    assert best["Overall"] < measured["clean"]["Overall"]
    assert best["drift"] > measured["clean"]["drift"]


@pytest.mark.parametrize(
    ("name", "arm"),
    slow_but([("hacking", "proxy, branch"), ("noise", "dance 0.5, 6 steps")], ("noise", "dance 0.5, 6 steps")),
)
def test_a_smoke_run_gives_every_column(name: str, arm: str) -> None:
    suite = SUITES[name]("smoke")
    arms = tuple(one for one in suite.arms if one.name == arm)
    (job,) = prepare(replace(suite, arms=arms, baseline=arm, seeds=(1000,), iterations=1, points=(1,)), recipe)
    row = measure(job, {}, lambda done: None)
    assert row["status"] == "done", row["error"]
    last = row["evaluations"]["1"]
    assert all(isinstance(last[column.key], float) for column in suite.columns)
    if name == "hacking":  # trained on the proxy alone, watched by the judge
        assert last["total"] == pytest.approx(last["proxy"], rel=1e-5)
        assert row["steps"]["2"]["raw"] > 0
