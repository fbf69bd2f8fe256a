"""From suites to jobs: settings arrive, mistakes are named before anything runs, keys tell runs apart."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sage_grpo.cli import main
from sage_grpo.commands import compare
from sage_grpo.configure import ConfigError
from sage_grpo.lab.design import Arm, Suite
from sage_grpo.lab.prepare import evaluated, key_of, prepare
from sage_grpo.recipes import recipe
from sage_grpo.session.preflight import preflight
from sage_grpo.training.config import EvalConfig, TrainConfig
from sage_grpo.worlds.world import SHAPES


def suite(*arms: Arm, **fields: Any) -> Suite:
    """A suite of these arms."""
    start = {"name": "s", "title": "", "question": "", "arms": arms, "baseline": arms[0].name, "seeds": (5, 6)}
    return Suite(**{**start, **fields})


def test_settings_arrive_in_their_order_and_are_told() -> None:
    arms = (
        Arm(name="a", recipe="shapes/sage", options={"kernel.eta": 0.7}),
        Arm(
            name="b",
            recipe="shapes/branch",
            options={"optimizer.lr": "2e-5", "rewards": [{"name": "video_stats"}]},
            iterations=9,
        ),
    )
    jobs = prepare(suite(*arms, options={"kernel.eta": 0.3, "evaluate.prompts": 7}, iterations=3), recipe)
    assert [(job.arm, job.seed) for job in jobs] == [("b", 5), ("a", 5), ("b", 6), ("a", 6)]  # by seed, long ones first
    b, a = jobs[0].config, jobs[1].config
    assert (a.kernel.eta, a.iterations, a.seed, a.evaluate.prompts) == (0.7, 3, 5, 7)
    assert (b.kernel.eta, b.iterations, b.optimizer.lr, [r.name for r in b.rewards]) == (0.3, 9, 2e-5, ["video_stats"])
    told = {"kernel.eta": 0.7, "iterations": 3, "evaluate.prompts": 7, "evaluate.steps": 20}
    assert jobs[1].settings == {**told, "evaluate.per_prompt": 1, "evaluate.seed": 1234}


@pytest.mark.parametrize(
    ("arm", "said"),
    [
        (
            Arm(name="x", recipe="shapes/sagee"),
            r"Arm 'x': There is no recipe 'shapes/sagee'.*Did you mean 'shapes/sage'",
        ),
        (
            Arm(name="x", recipe="sage", options={"optimizer.lrr": 1}),
            r"Arm 'x': .*optimizer.lrr.*Did you mean 'optimizer.lr'",
        ),
        (Arm(name="x", recipe="sage", options={"optimizer.lr": -1}), r"Arm 'x': optimizer.lr must be positive"),
        (Arm(name="x", recipe="sage", options={"kernel.name": "sagee"}), r"Arm 'x': kernel.name must be one of"),
        (Arm(name="x", recipe="sage", options={"seed": 3}), r"seed cannot be compared: the seeds are the suite's"),
        (Arm(name="x", recipe="sage", options={"keep.videos": 3}), r"keep.videos cannot be compared"),
        (Arm(name="x", recipe="sage", options={"data.prompts": "absent.txt"}), r"Arm 'x': A file or folder is missing"),
    ],
)
def test_mistakes_of_an_arm_are_named_before_anything_runs(arm: Arm, said: str) -> None:
    good = Arm(name="good", recipe="shapes/sage")
    with pytest.raises(ConfigError, match=said):
        prepare(suite(good, arm), recipe, preflight)


def test_points_are_the_first_the_last_and_what_was_asked_for() -> None:
    assert evaluated((15, 45, 90), EvalConfig(every=7), 45) == [0, 15, 45]
    assert evaluated(None, EvalConfig(every=20), 45) == [0, 20, 40, 45]
    assert evaluated(None, EvalConfig(every=0), 45) == [0, 45]
    assert evaluated(None, EvalConfig(every=20, early=[4, 2, 45]), 45) == [0, 2, 4, 20, 40, 45]


def test_a_key_goes_by_what_is_computed_and_by_nothing_else() -> None:
    config = recipe("shapes/sage")
    key = key_of(config, (0, 45), "train")
    free = replace(
        config, out="elsewhere", keep=replace(config.keep, videos=1), evaluate=replace(config.evaluate, show=1)
    )
    assert key_of(free, (0, 45), "train") == key
    others = [
        key_of(replace(config, seed=1), (0, 45), "train"),
        key_of(replace(config, iterations=46), (0, 45), "train"),
        key_of(replace(config, optimizer=replace(config.optimizer, lr=1e-3)), (0, 45), "train"),
        key_of(replace(config, rewards=[replace(config.rewards[0], weights={"TA": 1.0})]), (0, 45), "train"),
        key_of(config, (0, 20, 45), "train"),
        key_of(config, (0, 45), "rollout"),
    ]
    assert len({key, *others}) == 1 + len(others)
    assert key_of(TrainConfig(), (), "train") == key_of(replace(TrainConfig(), out="x"), (), "train")


def options(*words: str) -> compare.Options:
    """The command's options, as the command line gives them."""
    from sage_grpo.configure import parse

    _, argv = compare.defaults([*([] if words[0].startswith("--") else ["--recipes"]), *words])
    return parse(compare.Options, argv, prog="sage-grpo compare")


def test_a_grid_is_every_combination_and_the_baseline_may_be_a_recipe() -> None:
    (made,) = compare.suites_of(
        options(
            *(
                "shapes/branch",
                "shapes/sage",
                "--vary",
                "optimizer.lr=2e-5,5e-5",
                "--vary",
                "rollout.window.at=[1],[2,3]",
            ),
            *("--set", "evaluate.prompts=8", "--seeds", "3", "--iterations", "4", "--points", "[2]"),
        )
    )
    assert [arm.name for arm in made.arms][:4] == [
        "shapes/branch lr=2e-5 at=[1]",
        "shapes/branch lr=2e-5 at=[2,3]",
        "shapes/branch lr=5e-5 at=[1]",
        "shapes/branch lr=5e-5 at=[2,3]",
    ]
    assert len(made.arms) == 8
    assert (made.seeds, made.points, made.iterations) == ((1000, 1001, 1002), (2,), 4)
    (made,) = compare.suites_of(
        options("shapes/branch", "shapes/sage", "--vary", "optimizer.lr=2e-5,5e-5", "--baseline", "shapes/sage")
    )
    assert made.baseline == "shapes/sage lr=5e-5"  # the recipe's own
    (job, *_) = prepare(made, recipe)
    assert job.config.optimizer.lr == 2e-5


def test_the_miniatures_ceiling_goes_by_the_weights_of_its_judge() -> None:
    (first, *rest) = compare.suites_of(options("shapes/sage", "shapes/branch"))[0].columns
    best = SHAPES.ceiling
    assert first.ceiling == pytest.approx(best["TA"] + 0.5 * best["MQ"] + 0.5 * best["VQ"])
    assert first.ceiling == pytest.approx(1.92, abs=0.005)
    assert [column.key for column in rest] == ["TA", "MQ", "VQ", "drift"]
    assert [c.ceiling for c in compare.suites_of(options("wan/sage"))[0].columns] == [None]


@pytest.mark.parametrize(
    "words",
    [
        ["--suite", "heat,noise"],
        ["--suite", "heat", "noise"],
        ["--suite=heat,noise"],
        ["--suite", "heat", "--suite", "noise"],
        ["--suite", '["heat", "noise"]'],
    ],
)
def test_suites_are_listed_as_other_lists_are_and_take_the_same_changes(words: list[str]) -> None:
    made = compare.suites_of(options(*words, "--size", "smoke", "--seeds", "3", "--set", "evaluate.prompts=1"))
    assert [suite.name for suite in made] == ["heat", "noise"]
    assert {suite.seeds for suite in made} == {(1000, 1001, 1002)}
    assert {suite.options["evaluate.prompts"] for suite in made} == {"1"}


def test_an_arm_that_no_suite_has_is_named() -> None:
    made = [suite(Arm(name="one", recipe="sage"), name="a"), suite(Arm(name="two", recipe="sage"), name="b")]
    assert compare.chosen(made, ["two"]) == ["two"]
    assert compare.chosen(made, []) is None
    with pytest.raises(ConfigError, match=r"no arm 'tow'. Arms: one, two.*Did you mean 'two'"):
        compare.chosen(made, ["tow"])
    with pytest.raises(ConfigError, match="no arm 'tow'"):
        compare.chosen(made, ["one", "tow"])


def test_what_is_missing_comes_with_what_the_suite_says_about_it() -> None:
    missing = Arm(name="x", recipe="sage", options={"data.prompts": "absent.txt"})
    wrong = Arm(name="x", recipe="sage", options={"optimizer.lr": -1.0})
    with pytest.raises(ConfigError, match=r"(?s)absent\.txt.*Made first, by MAKE\.$"):
        prepare(replace(suite(missing), notes="Made first, by MAKE."), recipe, preflight)
    with pytest.raises(ConfigError, match=r"(?s)^((?!MAKE).)*$"):
        prepare(replace(suite(wrong), notes="Made first, by MAKE."), recipe, preflight)


def test_arms_with_commas_in_their_names_are_named_as_they_stand_in_the_table() -> None:
    arms = [Arm(name=name, recipe="sage") for name in ("cps", "cps, eta 1", "branch, 3 ab2, 1 before")]
    asked = options("--suite", "heat", "--arms", "cps, eta 1", "cps", "branch, 3 ab2, 1 before").arms
    assert compare.chosen([suite(*arms)], asked) == ["cps, eta 1", "cps", "branch, 3 ab2, 1 before"]


def test_what_preflight_remarks_is_told_once_before_anything_runs(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(import_module("sage_grpo.session.preflight"), "preflight", lambda config: ["Slow here."])

    def begin(*parts: object, **options: object) -> None:
        assert capsys.readouterr().err.count("sage-grpo: Slow here.") == 1  # of two arms
        raise KeyboardInterrupt

    monkeypatch.setattr("sage_grpo.lab.run.run", begin)
    words = ["compare", "shapes/branch", "--vary", "kernel.eta=1.0,1.2", "--seeds", "1", "--out", str(tmp_path / "out")]
    assert main(words) == 130
