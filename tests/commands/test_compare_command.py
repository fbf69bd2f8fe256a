"""`sage-grpo compare`: its words, what the options change in a suite, and how a comparison ends."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sage_grpo.cli import main
from sage_grpo.commands import compare
from sage_grpo.commands.compare import Options
from sage_grpo.configure import ConfigError
from sage_grpo.lab.design import FIRST_SEED, Arm, Column, Suite
from sage_grpo.lab.store import ROWS, SUITE


def test_words_are_lists_of_fields_and_values() -> None:
    words = ["a", "--vary", "x=1", "b", "--seeds", "3", "--vary=y=2", "--set", "q=1", "--suite=", "--arms"]
    found = ["a", "--seeds", "3", "--vary", "x=1", "b", "y=2", "--set", "q=1", "--suite", ""]
    assert compare.defaults(words) == (None, found)
    assert compare._fields(["x=1", "2", "y.z=[a", "b]"]) == ["x=1,2", "y.z=[a,b]"]
    assert compare._fields(["1", "2"]) == ["1,2"]
    assert compare._split("1,[2,3],{a: (4,5)},,6") == ["1", "[2,3]", "{a: (4,5)}", "6"]
    assert compare._pair("optimizer.lr=a=b") == ("optimizer.lr", "a=b")
    for word in ("lr", "lr="):
        with pytest.raises(ConfigError, match="is no setting"):
            compare._pair(word)


def test_a_grid_has_an_arm_for_every_combination_and_each_option_changes_its_own() -> None:
    vary = ["optimizer.lr=1,2", "kernel.eta=3"]
    (made,) = compare.suites_of(Options(recipes=["shapes/branch", "shapes/sage"], vary=vary, out="x/mine"))
    assert (made.name, made.title) == ("mine", "shapes/branch and shapes/sage over optimizer.lr, kernel.eta")
    options = {"optimizer.lr": "2", "kernel.eta": "3"}
    assert made.arms[1] == Arm(name="shapes/branch lr=2 eta=3", recipe="shapes/branch", options=options)
    assert (made.baseline, len(made.arms)) == ("shapes/branch lr=1 eta=3", 4)
    (twins,) = compare.suites_of(Options(recipes=["shapes/sage"], vary=["a.lr=1", "b.lr=2"]))
    assert (twins.title, twins.arms[0].name) == ("shapes/sage over a.lr, b.lr", "shapes/sage a.lr=1 b.lr=2")
    (plain,) = compare.suites_of(Options(recipes=["shapes/sage"]))
    assert (plain.title, plain.arms[0].name, plain.iterations) == ("shapes/sage", "shapes/sage", None)
    assert plain.seeds == tuple(range(FIRST_SEED, FIRST_SEED + 8))
    more = {"set": ["seed=4"], "seeds": 2, "first_seed": 7, "iterations": 5, "points": [1, 3], "columns": ["TA", "new"]}
    (changed,) = compare.suites_of(Options(recipes=["shapes/sage"], **more))
    assert (changed.options, changed.seeds, changed.iterations, changed.points) == ({"seed": "4"}, (7, 8), 5, (1, 3))
    known = {column.key: column for column in plain.columns}
    key = list(known)[-1]
    assert compare._columns(plain.columns, [key, "new"]) == (known[key], Column(key="new"))
    assert [column.key for column in changed.columns] == ["TA", "new"]
    (rules,) = compare.suites_of(Options(recipes=["shapes/sage"], benchmark=True))
    assert (rules.points, bool(rules.passes), bool(rules.clips)) == ((0,), True, True)
    assert rules.options["evaluate.prompts"] > 16
    for wrong, said in (
        ({"benchmark": True, "seeds": 2, "recipes": ["shapes/sage"]}, "leave out --seeds"),
        ({"suite": ["heat", "heat"]}, "'heat' twice"),
        ({"suite": ["heat"], "recipes": ["shapes/sage"]}, "Name recipes"),
        ({}, "Name recipes"),
        ({"suite": ["heat"], "vary": vary}, "a suite has its own"),
    ):
        with pytest.raises(ConfigError, match=said):
            compare.suites_of(Options(**wrong))


def test_a_baseline_is_an_arm_or_a_recipes_own_values_or_its_first() -> None:
    arms = [Arm(name=f"sage {lr}", recipe="shapes/sage", options={"optimizer.lr": lr}) for lr in ("1e-3", "5e-5")]
    suite = Suite(name="s", title="", question="", arms=(Arm(name="b", recipe="shapes/branch"), *arms), baseline="b")
    names = {name: compare._baseline(suite, name) for name in ("b", "shapes/sage", "shapes/cps", "sage 1e-3")}
    assert names == {"b": "b", "shapes/sage": "sage 5e-5", "shapes/cps": "shapes/cps", "sage 1e-3": "sage 1e-3"}
    other = Suite(name="s", title="", question="", arms=(arms[0], Arm(name="b", recipe="shapes/branch")), baseline="b")
    assert compare._baseline(other, "shapes/sage") == "sage 1e-3"
    assert compare.chosen([other], []) is None
    assert compare.chosen([other], ["b"]) == ["b"]
    with pytest.raises(ConfigError, match=r"no arm 'c'\. Arms: sage 1e-3, b"):
        compare.chosen([other], ["c"])


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What runs are asked for, and how they end; tables are one word."""
    asked: dict[str, Any] = {"failed": 0, "missing": 0}

    def begin(parts: Any, **named: Any) -> Any:
        asked.update(named, parts=parts)
        for part in parts:
            part.folder.mkdir(parents=True)
            (part.folder / SUITE).write_text("{}")
        if asked.get("interrupted"):
            raise KeyboardInterrupt
        return SimpleNamespace(finished=1, failed=asked["failed"], missing=asked["missing"])

    def render(folder: Path, place: Path) -> Any:
        asked.setdefault("drawn", []).append((folder, place))
        return SimpleNamespace(suite=SimpleNamespace(title=f"Title of {folder.name}"))

    monkeypatch.setattr("sage_grpo.lab.run.run", begin)
    monkeypatch.setattr("sage_grpo.lab.prepare.prepare", lambda suite, recipe, look: look(None) or [suite.name])
    monkeypatch.setattr(import_module("sage_grpo.session.preflight"), "preflight", lambda config: ["slow"])
    monkeypatch.setattr("sage_grpo.lab.report.render", render)
    monkeypatch.setattr("sage_grpo.lab.report.tables", lambda summary: "TABLE")
    monkeypatch.setattr("sage_grpo.lab.store.unfinished", lambda folder: "cut off" if folder.name == "noise" else "")
    return asked


def test_a_comparison_ends_with_its_tables_and_says_what_is_lacking(lab, tmp_path: Path, capsys) -> None:
    ways = [(0, 0, 0, ""), (2, 3, 1, "2 run(s) failed; "), (0, 3, 3, "3 run(s) are not done: the budget is spent.")]
    for place, (failed, missing, status, said) in enumerate(ways):
        out, lab["failed"], lab["missing"] = tmp_path / str(place), failed, missing
        options = Options(recipes=["shapes/sage"], out=str(out), jobs=3, budget=5.0, weights=True, mps=False)
        assert compare.run(options) == status
        told = capsys.readouterr()
        packed = f"tar -czf {place}.tar.gz -C {tmp_path} {place}"
        assert told.out == f"TABLE\n\nReport: {out}/report.md\nData: {out}. In one file: {packed}\n"
        assert told.err.startswith("sage-grpo: slow\n")
        assert said in told.err
        assert told.err.count("\n") == 1 + bool(failed) + bool(missing)
    (part,) = lab["parts"]
    assert (part.folder, part.jobs, part.arms, lab["out"]) == (out, [part.suite.name], None, out)
    assert (lab["side_by_side"], lab["budget"], lab["weights"], lab["engine"].share) == (3, 5.0, True, False)


def test_suites_have_folders_of_their_names_and_an_interruption_is_told(lab, tmp_path: Path, capsys) -> None:
    lab["interrupted"] = True
    assert compare.run(Options(suite=["heat", "noise"], size="smoke", out=str(tmp_path / "out"))) == 130
    told, folders = capsys.readouterr(), [tmp_path / "out" / name for name in ("heat", "noise")]
    assert [part.folder for part in lab["parts"]] == folders
    assert (lab["side_by_side"], lab["weights"], lab["engine"].share) == (None, False, True)
    heads = [f"Title of {one.name}\n\nTABLE\n\nReport: {one}/report.md\n" for one in folders]
    assert told.out.startswith(f"{heads[0]}{heads[1]}cut off\nData: ")
    assert told.err == "sage-grpo: slow\nInterrupted. The same command continues.\n"
    with pytest.raises(ConfigError, match="add --on ray"):
        compare.run(Options(recipes=["shapes/sage"], address="auto"))


def test_tables_are_drawn_where_they_are_or_elsewhere_and_over_no_other_rows(lab, tmp_path: Path, capsys) -> None:
    table, out = tmp_path / "table", tmp_path / "out"
    for name in ("one", "two"):
        (table / name).mkdir(parents=True)
        (table / name / SUITE).write_text("{}")
    assert main(["compare", "--table", str(table)]) == 0
    assert main(["compare", "--table", str(table), "--out", str(out)]) == 0
    assert lab["drawn"] == [(table / name, place / name) for place in (table, out) for name in ("one", "two")]
    assert compare._folders(tmp_path) == [tmp_path]
    (table / SUITE).write_text("{}")
    assert compare._folders(table) == [table]
    capsys.readouterr()
    out.mkdir()
    (out / ROWS).write_text("")
    assert main(["compare", "--table", str(table), "--out", str(out)]) == 2
    assert "out has runs of its own" in capsys.readouterr().err
    (table / ROWS).write_text("")
    assert main(["compare", "--table", str(table), "--out", str(table)]) == 0
    assert main(["compare", "--table", str(table), "--seeds", "2", "--weights"]) == 2
    assert "leave out seeds, weights." in capsys.readouterr().err
