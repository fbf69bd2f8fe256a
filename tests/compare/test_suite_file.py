"""A suite from a YAML file: its sizes, options that arms share, mistakes by file and key; and recipe files as the start of an arm."""

from __future__ import annotations

from pathlib import Path

import pytest

from sage_grpo.cli.compare import start
from sage_grpo.config.parsing import ConfigError
from sage_grpo.recipes import recipe
from sage_grpo.tools.compare.design import TINY, Column, Suite, load
from sage_grpo.tools.compare.prepare import prepare

TEXT = """
title: Rates
question: Which?
baseline: slow
seconds: 7
brief: [slow, fast]
brief_iterations: 5
iterations: 9
points: [0, 4, 8]
columns: [{key: total, ceiling: 2.0}, {key: drift, higher: false}]
options: {kernel.eta: 0.4, batch.prompts: 8}
groups:
  own: {optimizer.lr: 1.0e-4, kernel.eta: 0.3}
arms:
- {name: other, recipe: shapes/sage, iterations: 3, options: {rollout.window: null}}
- {name: slow, recipe: shapes/branch, groups: [own], options: {optimizer.lr: 2.0e-5}}
- {name: fast, recipe: shapes/branch, groups: [own]}
"""


def written(folder: Path, text: str = TEXT) -> Path:
    file = folder / "rates.yaml"
    file.write_text(text)
    return file


def test_a_suite_is_read_and_cut_to_a_size(tmp_path: Path) -> None:
    full = load(written(tmp_path))
    assert (full.name, full.title, full.baseline, full.iterations) == ("rates", "Rates", "slow", 9)
    assert (full.seeds, full.points, full.figures) == (Suite.seeds, (0, 4, 8), ("curves",))
    assert full.columns == (Column(key="total", ceiling=2.0), Column(key="drift", higher=False))
    assert [arm.options for arm in full.arms[1:]] == [
        {"optimizer.lr": 2e-5, "kernel.eta": 0.3},
        {"optimizer.lr": 1e-4, "kernel.eta": 0.3},
    ]
    assert full.notes == "Estimated at 7 s of one H200 with 16 runs side by side."
    brief = load(written(tmp_path), "brief")
    assert ([arm.name for arm in brief.arms], brief.iterations, brief.points) == (["slow", "fast"], 5, (0, 4))
    assert brief.notes == ""
    smoke = load(written(tmp_path), "smoke")
    assert [(arm.name, arm.iterations) for arm in smoke.arms] == [("other", None), ("slow", None)]
    assert (smoke.seeds, smoke.iterations, smoke.points) == ((1000, 1001), 2, (0, 2))
    assert smoke.options == {"kernel.eta": 0.4, **TINY}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("title: Rates", "titel: Rates", '"titel", which this version does not know'),
        ("title: Rates", "name: x", "'name', which is the file's"),
        ("recipe: shapes/sage,", "", r"suite.arms\[\] lacks 'recipe'"),
        ("points: [0, 4, 8]", "points: [a]", r"suite.points\[\] must be"),
        ("groups: [own]}", "groups: [won]}", "group 'won', and `groups` has none. Did you mean 'own'"),
        ("groups: [own], options: {optimizer.lr: 2.0e-5}", "options: 3", r"suite.arms\[\].options must be"),
        ("brief: [slow, fast]", "brief: [slow, fats]", "brief names 'fats'"),
        (TEXT, "title: [", "is not valid YAML"),
    ],
)
def test_a_mistake_is_named_by_its_file_and_key(old: str, new: str, said: str, tmp_path: Path) -> None:
    assert TEXT.count(old) == 1
    with pytest.raises(ConfigError, match=said) as error:
        load(written(tmp_path, TEXT.replace(old, new)))
    assert str(tmp_path / "rates.yaml") in str(error.value)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml: there is no such file"):
        load(tmp_path / "nowhere.yaml")


def test_an_arm_may_start_from_a_recipe_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: shapes/branch\noptimizer: {lr: 0.003}\n")
    assert start(str(file)).optimizer.lr == 0.003
    assert start(str(file)).rollout == recipe("shapes/branch").rollout
    assert start(str(file), 9).rollout.window == recipe("shapes/branch", 9).rollout.window
    assert start("shapes/branch") == recipe("shapes/branch")
    arms = f"arms: [{{name: a, recipe: {file}, options: {{kernel.eta: 0.4}}}}]"
    suite = load(written(tmp_path, f"{{title: '', question: '', baseline: a, seeds: [3], {arms}}}"))
    (job,) = prepare(suite, start)
    assert (job.config.optimizer.lr, job.config.kernel.eta, job.recipe) == (0.003, 0.4, str(file))
    assert job.settings["kernel.eta"] == 0.4
    assert "optimizer.lr" not in job.settings
