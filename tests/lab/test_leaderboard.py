"""The leaderboard: who is an entry, in which order, and that `compare` writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sage_grpo.commands.compare import Options, suites_of
from sage_grpo.configure import ConfigError
from sage_grpo.lab import leaderboard, report, store
from sage_grpo.lab.design import Arm, Column, Suite
from sage_grpo.lab.prepare import prepare
from sage_grpo.lab.summary import summarize
from sage_grpo.printing import fixed
from sage_grpo.recipes import recipe

SEEDS = leaderboard.EDITION.seeds
RULES = dict(leaderboard.EVALUATION)
BASE = {"Overall": 1.25, "total": 1.25, "drift": 0.07}
COLUMNS = (Column(key="Overall"), Column(key="drift"))


def rows(
    arm: str, scores: list[float], *, spread: float | None = 0.0, base: Mapping[str, float] = BASE, **changes: Any
) -> list[dict[str, Any]]:
    """Runs of an arm by their scores, which are the same at both budgets and at the end; prompts differ, and arms by `spread` in how (None:
    there is one prompt)."""
    return [
        {
            **{"format": 1, "arm": arm, "recipe": "shapes/branch", "seed": SEEDS[place], "key": f"{arm}-{place}"},
            **{"kind": "train", "status": "done", "error": None, "iterations": 2, "settings": RULES, "commit": "abc"},
            **{"updates": 2, "steps": {}, "seconds": {"iteration": 1.0, "evaluate": 1.0, "total": 3.0}},
            "evaluations": {"0": base, "2": {"Overall": score, "total": score, "drift": 0.06}},
            "passes": {"0": 0, "2": leaderboard.BUDGETS["passes"]},
            "budgets": {"passes": 2, "clips": 2},
            "by_prompt": {
                "2": {"Overall": [score] if spread is None else [score - 0.1 - spread, score + 0.1 + spread]}
            },
            **changes,
        }
        for place, score in enumerate(scores)
    ]


def suite(*arms: str, **fields: Any) -> Suite:
    made = tuple(Arm(name=name, recipe="shapes/branch") for name in arms)
    given = {**leaderboard.BUDGETS, "seeds": SEEDS, **fields}
    return Suite(name="test", title="", question="", arms=made, baseline=arms[0], **given)


def board(*arms: str, runs: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return leaderboard.board([(suite(*arms, **fields), runs)])


def test_entries_that_cannot_be_told_apart_share_a_place() -> None:
    """b is better than a in every seed by about as much; c differs from a by less than its prompts do."""
    wide = [0.01 * (-1) ** n for n in range(8)]
    a, c = rows("a", [1.5 + w for w in wide]), rows("c", [1.505 + w for w in wide], spread=0.3)
    b = rows("b", [1.6 + 1.1 * w for w in wide])
    found = board("a", "c", "b", runs=[*a, *b, *c])["entries"]
    assert [entry["name"] for entry in found] == ["test: b", "test: c", "test: a"]
    places = {entry["name"]: entry["place"] for entry in found}
    assert places["test: b"] == {"passes": 1, "clips": 1}
    assert places["test: c"]["passes"] == 1  # other prompts might turn it round
    assert places["test: a"]["passes"] == 2


def test_scores_are_those_at_the_budgets_and_not_what_more_passes_buy() -> None:
    long = rows("long", [1.5] * 8)
    for row in long:
        row["iterations"] = 9
        row["evaluations"]["9"] = {"Overall": 1.9, "total": 1.9, "drift": 0.05}
        row["by_prompt"]["9"] = {"Overall": [1.9, 1.9]}
        row["passes"]["9"] = 10**6
    (entry,) = board("long", runs=long)["entries"]
    assert entry["at"]["passes"]["mean"] == entry["at"]["clips"]["mean"] == 1.5
    assert (entry["final"]["Overall"]["mean"], entry["passes"]) == (1.9, 10**6)


def test_an_arm_that_breaks_a_rule_is_left_out_with_the_reason() -> None:
    cases = {
        "few": (rows("few", [1.5] * 7), f"seed {SEEDS[7]} is missing"),
        "hot": ([*rows("hot", [1.5] * 7), rows("hot", [1.5] * 8, status="diverged")[7]], f"seed {SEEDS[7]} is missing"),
        "copied": ([*rows("copied", [1.5] * 8)[:7], rows("copied", [1.5])[0]], f"seed {SEEDS[7]} is missing"),
        "own": ([*rows("own", [1.5] * 8)[1:], rows("own", [1.5], seed=1000)[0]], "seed 1000 is not one of"),
        "short": (rows("short", [1.5] * 8, budgets={"passes": 2}), "ended before 6,480 clips"),
        "easy": (rows("easy", [1.5] * 8, settings={**RULES, "evaluate.steps": 5}), "evaluate.steps must be 20"),
        "noise": (rows("noise", [1.5] * 8, settings={**RULES, "evaluate.seed": 7}), "evaluate.seed must be"),
        "model": (rows("model", [1.5] * 8, settings={**RULES, "model.path": "mine"}), "model.path is not free"),
        "other": (rows("other", [1.5] * 8, recipe="wan/sage"), "not of the shapes world"),
        "means": (rows("means", [1.5] * 8, by_prompt={}), "scores by prompt are missing"),
        "blind": (
            rows("blind", [1.5] * 8, evaluations={"0": {"total": 1.0}, "2": {"total": 2.0}}),
            "the judge was not among the rewards",
        ),
    }
    found = board(*cases, runs=[row for made, _ in cases.values() for row in made])
    assert not found["entries"]
    for name, (_, reason) in cases.items():
        assert reason in found["left_out"][f"test: {name}"]
    assert board("a", runs=rows("a", [1.5] * 8), kind="rollout")["left_out"] == {"test: a": "nothing was trained"}
    assert "budget of passes must be" in board("a", runs=rows("a", [1.5] * 8), passes=1000)["left_out"]["test: a"]


def test_a_hacked_reward_shows_as_a_gain_that_truth_has_not() -> None:
    base = {"Overall": 1.25, "total": 0.5, "drift": 0.07}
    rewards = [{"name": "shapes_proxy"}, {"name": "shapes", "metric_only": True}]
    runs = rows(
        "proxy",
        [1.0] * 8,
        settings={**RULES, "rewards": rewards},
        evaluations={"0": base, "2": {"Overall": 1.0, "total": 1.5, "drift": 0.1}},
    )
    (entry,) = board("proxy", runs=runs)["entries"]
    assert (entry["gain_own"]["mean"], entry["gain_true"]["mean"]) == (1.0, -0.25)
    assert entry["trained_on"] == ["shapes_proxy"]


def test_compare_writes_the_leaderboard(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(report, "draw", lambda summary, folder: [])
    runs = rows("one", [1.5] * 8)
    (tmp_path / store.ROWS).write_text("".join(json.dumps(row) + "\n" for row in runs))
    store.save_suite(tmp_path, suite("one"), [row["key"] for row in runs], "sage-grpo compare")
    report.render(tmp_path)
    written = json.loads((tmp_path / "leaderboard.json").read_text())
    assert written == board("one", runs=runs)
    assert written["entries"][0]["at"]["passes"]["mean"] == 1.5


def test_a_figure_just_below_a_half_is_not_lifted_by_a_rounding_before() -> None:
    """1.23549999 is 1.235; six digits first would make 1.2355 and then 1.236 of it."""
    (entry,) = leaderboard.board([(suite("a"), rows("a", [1.23549999] * 8, spread=None))])["entries"]
    assert fixed(entry["final"]["Overall"]["mean"], 3) == "1.235"


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_places_are_decided_on_all_digits(order: tuple[str, str]) -> None:
    both = [*rows("a", [1.5] * 8, spread=None), *rows("b", [1.5 + 1e-9] * 8, spread=None)]
    found = leaderboard.board([(suite(*order), both)])["entries"]
    assert [entry["name"] for entry in found] == ["test: b", "test: a"]


def test_arms_share_a_row_of_bases_only_where_it_is_true_for_all() -> None:
    """0.0500 and 0.0504 are printed with four digits: two rows, though they agree in three."""
    bases = [{"Overall": 1.25, "total": 1.25, "drift": drift} for drift in (0.05, 0.0504)]
    both = [*rows("a", [1.5, 1.6], base=bases[0]), *rows("b", [1.5, 1.6], base=bases[1])]
    lines = [
        line
        for line in report.tables(summarize(suite("a", "b", columns=COLUMNS), both)).splitlines()
        if "| base" in line
    ]
    assert ["0.0500" in lines[0], "0.0504" in lines[-1], len(lines)] == [True, True, 2]


@pytest.mark.slow
def test_as_a_benchmark_every_arm_keeps_the_rules() -> None:
    (suite,) = suites_of(Options(recipes=["shapes/branch"], vary=["kernel.eta=1.0,1.2"], benchmark=True))
    assert suite.seeds == leaderboard.EDITION.seeds
    assert {"passes": suite.passes, "clips": suite.clips} == leaderboard.BUDGETS
    for job in prepare(suite, recipe):
        assert {name: job.settings[name] for name in leaderboard.EVALUATION} == leaderboard.EVALUATION
    with pytest.raises(ConfigError, match="leave out --seeds"):
        suites_of(Options(recipes=["shapes/branch"], seeds=3, benchmark=True))
