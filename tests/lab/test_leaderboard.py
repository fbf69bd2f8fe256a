"""The leaderboard: who is an entry, in which order, and that `compare` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sage_grpo.lab import leaderboard, report, store
from sage_grpo.lab.design import Arm, Suite

SEEDS = tuple(range(1000, 1008))
RULES = {"evaluate.prompts": 128, "evaluate.steps": 20}


def rows(arm: str, scores: list[float], *, passes: int = leaderboard.BUDGET, **changes: Any) -> list[dict[str, Any]]:
    """Runs of an arm, by their final scores."""
    base = {"Overall": 1.25, "total": 1.25, "drift": 0.07}
    return [
        {
            **{"format": 1, "arm": arm, "recipe": "shapes/branch", "seed": 1000 + place, "key": f"{arm}-{place}"},
            **{"kind": "train", "status": "done", "error": None, "iterations": 2, "settings": RULES, "commit": "abc"},
            **{"updates": 2, "steps": {}, "seconds": {"iteration": 1.0, "evaluate": 1.0, "total": 3.0}},
            "evaluations": {"0": base, "2": {"Overall": score, "total": score, "drift": 0.06}},
            "passes": {"0": 0, "2": passes},
            **changes,
        }
        for place, score in enumerate(scores)
    ]


def suite(*arms: str, kind: str = "train") -> Suite:
    made = tuple(Arm(name=name, recipe="shapes/branch") for name in arms)
    return Suite(name="test", title="", question="", arms=made, baseline=arms[0], seeds=SEEDS, kind=kind)  # type: ignore[arg-type]


def test_entries_are_ranked_at_the_budget_and_not_by_what_more_passes_buy() -> None:
    cheap = rows("cheap", [1.5] * 8)
    dear = rows("dear", [1.6] * 8, passes=4 * leaderboard.BUDGET)
    short = rows("short", [1.9] * 8, passes=leaderboard.BUDGET // 2)
    found = leaderboard.board(suite("short", "dear", "cheap"), [*short, *dear, *cheap])["entries"]
    assert [entry["name"] for entry in found] == ["test: cheap", "test: dear", "test: short"]
    # a quarter of the way between the two evaluations
    assert found[1]["at_budget"]["mean"] == 1.25 + 0.35 / 4
    assert found[2]["at_budget"] is None


def test_an_arm_that_breaks_a_rule_is_left_out_with_the_reason() -> None:
    cases = {
        "few": (rows("few", [1.5] * 7), "7 seeds"),
        "easy": (rows("easy", [1.5] * 8, settings={**RULES, "evaluate.steps": 5}), "evaluate.steps must be 20"),
        "noise": (rows("noise", [1.5] * 8, settings={**RULES, "evaluate.seed": 7}), "evaluate.seed is not free"),
        "model": (rows("model", [1.5] * 8, settings={**RULES, "model.path": "mine"}), "model.path is not free"),
        "other": (rows("other", [1.5] * 8, recipe="wan/sage"), "not of the shapes world"),
        "blind": (
            rows("blind", [1.5] * 8, evaluations={"0": {"total": 1.0}, "2": {"total": 2.0}}),
            "the judge was not among the rewards",
        ),
    }
    every = [row for made, _ in cases.values() for row in made]
    found = leaderboard.board(suite(*cases), every)
    assert not found["entries"]
    for name, (_, reason) in cases.items():
        assert reason in found["left_out"][name]
    assert leaderboard.board(suite("a", kind="rollout"), rows("a", [1.5] * 8))["left_out"] == {
        "a": "nothing was trained"
    }


def test_a_run_that_is_there_twice_is_one_seed() -> None:
    runs = rows("copied", [1.5] * 8)
    runs[7] |= {"seed": runs[0]["seed"]}
    found = leaderboard.board(suite("copied"), runs)
    assert not found["entries"]
    assert found["left_out"]["copied"].startswith("7 seeds")


def test_a_diverged_run_costs_the_score_at_the_budget() -> None:
    runs = rows("hot", [1.5] * 8)
    runs[3] |= {"status": "diverged", "evaluations": {"0": runs[3]["evaluations"]["0"]}, "passes": {"0": 0}}
    (entry,) = leaderboard.board(suite("hot"), runs)["entries"]
    assert (entry["seeds"], entry["diverged"], entry["at_budget"]) == (7, 1, None)


def test_a_hacked_reward_shows_as_a_gain_that_truth_has_not() -> None:
    base = {"Overall": 1.25, "total": 0.5, "drift": 0.07}
    rewards = [{"name": "shapes_proxy"}, {"name": "shapes", "metric_only": True}]
    runs = rows(
        "proxy",
        [0.0] * 8,
        settings={**RULES, "rewards": rewards},
        evaluations={"0": base, "2": {"Overall": 1.0, "total": 1.5, "drift": 0.1}},
    )
    (entry,) = leaderboard.board(suite("proxy"), runs)["entries"]
    assert (entry["gain_own"]["mean"], entry["gain_true"]["mean"]) == (1.0, -0.25)
    assert entry["trained_on"] == ["shapes_proxy"]


def test_compare_writes_the_leaderboard(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(report, "draw", lambda summary, folder: [])
    runs = rows("one", [1.5] * 8)
    (tmp_path / store.ROWS).write_text("".join(json.dumps(row) + "\n" for row in runs))
    store.save_suite(tmp_path, suite("one"), [row["key"] for row in runs], "sage-grpo compare")
    report.render(tmp_path)
    written = json.loads((tmp_path / "leaderboard.json").read_text())
    assert written == leaderboard.board(suite("one"), runs)
    assert written["entries"][0]["at_budget"]["mean"] == 1.5
