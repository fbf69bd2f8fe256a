"""Words, printed texts and exit statuses of the smaller commands."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from sage_grpo.cli import compare, doctor, plan, rewards, starting, train
from sage_grpo.cli.compare import Options
from sage_grpo.cli.main import main
from sage_grpo.config.parsing import ConfigError
from sage_grpo.models.spec import LoraSpec, ModelSpec
from sage_grpo.plan.hardware import find
from sage_grpo.recipes import recipe
from sage_grpo.rewards.spec import Readiness, RewardSpec
from sage_grpo.tools.compare.design import FIRST_SEED, Arm, Suite
from sage_grpo.tools.compare.store import ROWS, SUITE
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.loss import Diverged


def test_remarks_on_defaults_and_on_the_miniature_are_made_once_and_where_they_hold(
    tmp_path, capsys, monkeypatch
) -> None:
    file, whole = tmp_path / "whole.yaml", dict.fromkeys(TrainConfig.__dataclass_fields__, 1)
    file.write_text(yaml.safe_dump(whole))
    starting.from_recipe(TrainConfig, ["--config", str(file)])
    with monkeypatch.context() as other:
        other.setenv("RANK", "1")
        starting.from_recipe(TrainConfig, ["--recipe", "null"])
    for run, model in (("x", ModelSpec()), (None, ModelSpec(path="x")), (None, ModelSpec(family="wan"))):
        starting.say_whose_model(SimpleNamespace(run=run, model=model))  # type: ignore[arg-type]
    assert capsys.readouterr().err == ""
    whole.popitem()
    file.write_text(yaml.safe_dump(whole))
    starting.from_recipe(TrainConfig, ["--config", "other", "--config", str(file)])
    starting.say_whose_model(SimpleNamespace(run=None, model=ModelSpec()))  # type: ignore[arg-type]
    told = capsys.readouterr().err
    assert f"what {file} leaves out" in told
    assert "this is the miniature" in told
    extended = starting.extended(doctor.Options, recipe("shapes/cps"), json=True)
    assert (extended.json, starting.plain(extended)) == (True, recipe("shapes/cps"))


def test_a_reward_is_told_with_what_it_needs(capsys, monkeypatch) -> None:
    monkeypatch.setattr(rewards, "_gpu", lambda: {"name": "card", "gigabytes": 7.95})
    mine = RewardSpec(name="mine:one", label="L", weights={"a": 1.0, "b": 2.0})
    large = rewards._entry("hpsv3")
    rewards._show([large, rewards._entry("mine:one", mine)], "some.yaml")
    told = capsys.readouterr().out
    assert told.startswith("GPU: card, 8.0 GB\nRewards of some.yaml:\n\n")
    assert "\nmine:one (L): your own\n  returns   a, b\n" in told
    assert f"\n  memory    about {large['gigabytes']:g} GB for the weights\n" in told
    assert "\n  option    checkpoint: HPSv3.safetensors: hf download" in told
    assert "GB of weights, the GPU has 8.0" in told
    monkeypatch.setattr(rewards, "readiness", lambda spec: Readiness(missing=("a file",)))
    assert (rewards.run(rewards.Options()), rewards.run(rewards.Options(of="shapes/sage"))) == (0, 1)


def test_a_plan_that_does_not_fit_is_1_and_is_of_the_machine_that_was_named(calls, capsys, monkeypatch) -> None:
    found = SimpleNamespace(fits=True, phases=[], held_out=3)
    asked = calls("sage_grpo.plan.costs.forecast", found)
    calls("sage_grpo.plan.changes.changes", "changes")
    calls("sage_grpo.plan.changes.way_to_fit", "way")
    documents = calls("sage_grpo.plan.show.document", {})
    shown = calls("sage_grpo.plan.show.show")
    config = starting.extended(plan.Options, recipe("shapes/sage"), json=True, gpu="h200", gpus=4)
    assert plan.run(config) == 0
    assert json.loads(capsys.readouterr().out) == {}
    assert documents[0][0][1:4] == ("changes", "way", found)
    ((config_alone, device), named), *_ = asked
    assert (config_alone, device, named["gpus"]) == (recipe("shapes/sage"), find("h200", 4), 4)
    parallel = replace(config.parallel, dp_replicate=2, dp_shard=3, sp=5)
    wan = starting.extended(plan.Options, replace(recipe("wan/branch"), parallel=parallel))
    assert plan.run(replace(wan, json=True)) == 0
    assert (asked[-1][0][1], asked[-1][1]["gpus"], asked[-1][1]["held_out"]) == (find("h200", 30), 30, None)
    more = {"rollout": replace(config.rollout, on="ray"), "model": replace(config.model, lora=LoraSpec(rank=2))}
    assert plan.run(replace(config, gpus=None, worker_gpu="h100", **more)) == 0
    last = [(one[0][1], one[1]["gpus"], one[1]["held_out"]) for one in asked[-2:]]
    assert last == [(find("h200"), 1, 286), (find("h100"), 1, 3)]
    assert plan.run(replace(config, gpu=None)) == 0
    assert asked[-1][0][1].is_cpu
    found.fits, found.phases = False, [1]
    assert plan.run(wan) == 1
    assert [isinstance(one, Console) for one in shown[-1][0]] == [False, False, False, True, False]
    with pytest.raises(ConfigError, match=r"set --rollout\.on ray"):
        plan.run(replace(config, worker_gpu="h100"))
    for prompts, count in ((None, None), ("nowhere.txt", None), ("starter_eval", 40)):
        data = replace(config.data, eval_prompts=prompts, prompts="x.txt")
        left = plan._held_out(replace(recipe("wan/branch"), data=data))
        assert (left is None) == (count is None)


def test_training_that_stops_is_1_and_leaves_its_report(capsys, monkeypatch) -> None:
    monkeypatch.setattr("sage_grpo.tools.report.page.leave_report", lambda out: f"Report of {out}.")
    monkeypatch.setattr("sage_grpo.run.session.run", lambda config, world: None)
    config = recipe("shapes/sage")
    assert train.run(config) == 0
    assert capsys.readouterr().out.endswith(f"Report of {config.out}.\n")

    def stop(config: Any, world: Any) -> None:
        raise Diverged("not finite")

    monkeypatch.setattr("sage_grpo.run.session.run", stop)
    assert train.run(config) == 1
    assert capsys.readouterr().out == f"sage-grpo train stopped: not finite\nReport of {config.out}.\n"


def test_weights_are_converted_and_nothing_is_overwritten(tmp_path: Path, capsys, monkeypatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("sage_grpo.tools.convert.original_to_diffusers", lambda *words: asked.append(words) or 5)
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    words = ["export", str(source), "--base", "base", "--out", str(out), "--dtype", "bfloat16"]
    assert main(words) == 0
    assert "with 5 tensors of" in capsys.readouterr().out
    assert asked == [(source, "base", out, torch.bfloat16)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 1\n")
    capsys.readouterr()
    for wrong, said in (
        ([str(tmp_path / "nowhere")], "no file or folder"),
        ([str(source), "--out", str(source)], "exists already"),
        ([str(tmp_path / "run")], "sage-grpo export --run"),
        ([str(source), "--merged", "true"], "leave out --merged"),
        (["--base", "other"], "--base needs weights to convert"),
    ):
        assert main(["export", *wrong]) == 2
        assert said in capsys.readouterr().err


def test_a_grid_has_an_arm_for_every_combination_and_each_option_changes_its_own() -> None:
    vary = ["optimizer.lr=1,2", "kernel.eta=3"]
    made = compare.suite_of(Options(recipes=["shapes/branch", "shapes/sage"], vary=vary, out="x/mine"))
    assert (made.name, made.title) == ("mine", "shapes/branch and shapes/sage over optimizer.lr, kernel.eta")
    options = {"optimizer.lr": "2", "kernel.eta": "3"}
    assert made.arms[1] == Arm(name="shapes/branch lr=2 eta=3", recipe="shapes/branch", options=options)
    assert (made.baseline, len(made.arms)) == ("shapes/branch lr=1 eta=3", 4)
    twins = compare.suite_of(Options(recipes=["shapes/sage"], vary=["a.lr=1", "b.lr=2"]))
    assert (twins.title, twins.arms[0].name) == ("shapes/sage over a.lr, b.lr", "shapes/sage a.lr=1 b.lr=2")
    plain = compare.suite_of(Options(recipes=["shapes/sage"]))
    assert (plain.title, plain.arms[0].name, plain.iterations) == ("shapes/sage", "shapes/sage", None)
    assert plain.seeds == tuple(range(FIRST_SEED, FIRST_SEED + 8))
    more = {"set": ["seed=4"], "seeds": 2, "first_seed": 7, "iterations": 5, "points": [1, 3]}
    changed = compare.suite_of(Options(recipes=["shapes/sage"], **more))
    assert (changed.options, changed.seeds, changed.iterations, changed.points) == ({"seed": "4"}, (7, 8), 5, (1, 3))
    for name in ("shapes/sage", "shapes/sage lr=1 eta=3"):  # a recipe is its first arm
        named = Options(recipes=["shapes/branch", "shapes/sage"], vary=vary, baseline=name)
        assert compare.suite_of(named).baseline == "shapes/sage lr=1 eta=3"
    heat = Path("heat")
    for wrong, said in (
        ({"suite": heat, "recipes": ["shapes/sage"]}, "Name recipes"),
        ({}, "Name recipes"),
        ({"suite": heat, "vary": vary}, "a suite has its own"),
        ({"recipes": ["shapes/sage"], "baseline": "shapes/sagee"}, "Did you mean 'shapes/sage'"),
    ):
        with pytest.raises(ConfigError, match=said):
            compare.suite_of(Options(**wrong))
    compare._check_arms(made, [made.arms[1].name])
    with pytest.raises(ConfigError, match=r"no arm 'c'\. Arms: shapes/branch lr=1 eta=3, "):
        compare._check_arms(made, ["c"])


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs that are asked for, and their end; tables are one word."""
    asked: dict[str, Any] = {"ends": 0}

    def begin(folder: Path, suite: Suite, jobs: Any, **named: Any) -> int:
        asked.update(named, folder=folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SUITE).write_text("{}")
        if asked["ends"] is None:
            raise KeyboardInterrupt
        return asked["ends"]

    drawn = asked.setdefault("drawn", [])
    monkeypatch.setattr("sage_grpo.tools.compare.run.run", begin)
    monkeypatch.setattr(
        "sage_grpo.tools.compare.prepare.prepare", lambda suite, recipe, look: look(None) or [suite.name]
    )
    monkeypatch.setattr(import_module("sage_grpo.run.preflight"), "preflight", lambda config: ["slow"])
    monkeypatch.setattr("sage_grpo.tools.compare.report.render", lambda *folders: drawn.append(folders))
    monkeypatch.setattr("sage_grpo.tools.compare.report.tables", lambda summary: "TABLE")
    return asked


@pytest.mark.parametrize(
    ("ends", "status", "told"),
    [(None, 130, "Interrupted. The same command continues.\n"), (2, 1, "2 run(s) failed; "), (0, 0, "")],
)
def test_a_suite_is_run_and_drawn_and_its_end_is_told(ends, status, told, lab, tmp_path: Path, capsys) -> None:
    lab["ends"], file, out = ends, tmp_path / "heat.yaml", tmp_path / "out"
    file.write_text("{title: '', question: '', baseline: a, arms: [{name: a, recipe: shapes/branch}]}\n")
    assert compare.run(Options(suite=file, size="smoke", out=str(out))) == status
    printed = capsys.readouterr()
    assert (lab["folder"], lab["side_by_side"], lab["weights"], lab["arms"]) == (out, None, False, None)
    assert printed.out.startswith(f"TABLE\n\nReport: {out}/report.md\nData: ")
    assert printed.err.startswith(f"sage-grpo: slow\n{told}")


def test_tables_are_drawn_where_they_are_or_elsewhere_and_over_no_other_rows(lab, tmp_path: Path, capsys) -> None:
    table, out = tmp_path / "table", tmp_path / "out"
    table.mkdir()
    (table / SUITE).write_text("{}")
    assert main(["compare", "--table", str(table)]) == 0
    assert main(["compare", "--table", str(table), "--out", str(out)]) == 0
    assert lab["drawn"] == [(table, table), (table, out)]
    capsys.readouterr()
    out.mkdir()
    (out / ROWS).write_text("")
    assert main(["compare", "--table", str(table), "--out", str(out)]) == 2
    assert "out already has runs" in capsys.readouterr().err
    (table / ROWS).write_text("")
    assert main(["compare", "--table", str(table), "--out", str(table)]) == 0
    assert main(["compare", "--table", str(table), "--seeds", "2", "--weights"]) == 2
    assert "leave out seeds, weights." in capsys.readouterr().err
