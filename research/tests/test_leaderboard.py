"""The leaderboard: who is an entry, in which order, and that `compare` writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import leaderboard
import pytest

from sage_grpo.tools.compare.design import Arm, Column, Suite
from sage_grpo.utils.text import fixed

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
    wide = [0.01 * (-1) ** n for n in range(8)]
    a, c = rows("a", [1.5 + w for w in wide]), rows("c", [1.505 + w for w in wide], spread=0.3)
    b = rows("b", [1.6 + 1.1 * w for w in wide])
    found = board("a", "c", "b", runs=[*a, *b, *c])["entries"]
    assert [entry["name"] for entry in found] == ["test: b", "test: c", "test: a"]
    places = {entry["name"]: entry["place"] for entry in found}
    assert places["test: b"] == {"passes": 1, "clips": 1}
    assert places["test: c"]["passes"] == 1  # other prompts might turn it round
    assert places["test: a"]["passes"] == 2


def test_an_entry_as_it_is_written() -> None:
    own = {"rewards": [{"name": "shapes_proxy"}, {"name": "shapes", "metric_only": True}], "optimizer.lr": 1e-3}
    runs = rows("long", [1.5] * 8, base={"Overall": 1.25, "total": 0.5, "drift": 0.07}, settings={**RULES, **own})
    for place, run in enumerate(runs):
        run |= {"iterations": 9, "budgets": {"passes": 2, "clips": 4}}
        run |= {"supervised": place == 5, "commit": "ba"[place % 2]}
        run["evaluations"] |= {
            "4": {"Overall": 1.625, "total": 1.5, "drift": 0.25, "flicker": 0.5},
            "9": {"Overall": 1.0 + place / 8, "total": 1.5, "drift": 0.5, "flicker": 0.5},
        }
        run["by_prompt"] |= {"4": {"Overall": [1.5, 1.75]}, "9": {"Overall": [1.0 + place / 8] * 2}}
        run["passes"]["9"] = 10**6 + place

    def flat(mean: float) -> dict[str, Any]:
        return {"mean": mean, "half": 0.0, "count": 8}

    found = board("long", runs=runs)
    (entry,) = found.pop("entries")
    rules = {"version": leaderboard.__version__, "budgets": {"passes": 22_680, "clips": 6_480}, "seeds": list(SEEDS)}
    evaluation = {"prompts": 256, "per_prompt": 2, "steps": 20, "seed": 1234}
    rules["evaluation"] = {f"evaluate.{name}": value for name, value in evaluation.items()}
    assert found == {"format": 2, "rules": rules, "left_out": {}}
    end, gain = entry["final"].pop("Overall"), entry.pop("gain_true")
    half = pytest.approx(2.364624 * 0.125 * math.sqrt(6) / math.sqrt(8), rel=1e-6)
    assert (end["mean"], end["half"]) == (1.4375, half)
    assert gain == {**end, "mean": 0.1875}
    assert entry["at"].pop("clips")["mean"] == 1.625
    assert entry == {
        "name": "test: long",
        "recipe": "shapes/branch",
        "settings": {"optimizer.lr": 1e-3},
        "trained_on": ["shapes_proxy"],
        "supervised": True,
        "at": {"passes": {"mean": 1.5, "half": pytest.approx(12.706205 * 0.1), "count": 8}},
        "passes": 10**6 + 3.5,
        "final": {"drift": flat(0.5), "flicker": flat(0.5)},
        "gain_own": flat(1.0),
        "commit": ["a", "b"],
        "place": {"passes": 1, "clips": 1},
    }
    for run in runs:
        run["settings"] = RULES
        run["evaluations"]["0"]["total"] = None
    runs[3]["evaluations"]["9"]["flicker"] = None
    (entry,) = board("long", runs=runs)["entries"]
    assert (entry["trained_on"], entry["gain_own"], list(entry["final"])) == (["shapes"], None, ["Overall", "drift"])


def test_an_arm_that_breaks_a_rule_is_left_out_with_the_reason() -> None:
    good = [1.5] * 8

    def reason(runs: list[dict[str, Any]], **fields: Any) -> str:
        found = board("a", runs=runs, **fields)
        assert len(found["entries"]) + len(found["left_out"]) == 1
        return next(iter(found["left_out"].values()), "")

    def changed(place: int, **changes: Any) -> list[dict[str, Any]]:
        return [{**one, **changes} if n == place else one for n, one in enumerate(rows("a", good))]

    missing = f"seed {SEEDS[7]} is missing: a run that diverged or was left out counts as one"
    assert reason(rows("a", good)) == ""
    assert reason(rows("a", good[:7])) == reason(changed(7, status="diverged")) == missing
    assert reason(changed(7, seed=SEEDS[0])) == missing
    other = f"seed 1000 is not one of this version's ({SEEDS[0]} to {SEEDS[7]})"
    assert reason([*rows("a", good), *rows("a", [1.5], seed=1000)]) == other
    assert reason(rows("a", good), kind="rollout") == "nothing was trained"
    assert reason(rows("a", good), passes=1000) == "the suite's budget of passes must be 22,680"
    assert reason(changed(3, budgets={"passes": 2})) == "a run ended before 6,480 clips"
    assert reason(rows("a", good, recipe="wan/sage")) == "recipe wan/sage is not of the shapes world"
    for name, value, why in (
        ("evaluate.steps", 5, "evaluate.steps must be 20"),
        ("evaluate.seed", 7, f"evaluate.seed must be {leaderboard.EDITION.noise}"),
        ("model.path", "mine", "model.path is not free"),
        ("data.prompts", "mine", "data.prompts is not free"),
        ("evaluate.solver", "ab2", "evaluate.solver is not free"),
    ):
        assert reason(rows("a", good, settings={**RULES, name: value})) == why
    assert reason(rows("a", good, settings={k: v for k, v in RULES.items() if k != "evaluate.seed"})) == ""
    assert reason(rows("a", good, settings={k: v for k, v in RULES.items() if k != "evaluate.steps"})) != ""
    for point in ("2", "4"):  # at the end, at a budget
        runs = changed(5, iterations=4, passes={"4": 1})
        runs[5]["evaluations"] = {at: dict(BASE) for at in ("0", "2", "4")}
        runs[5]["by_prompt"] = {at: {"Overall": [1.0]} for at in ("2", "4")}
        assert reason(runs) == ""
        del runs[5]["by_prompt"][point]
        assert reason(runs) == "scores by prompt are missing"
        for name in ("Overall", "drift"):
            runs[5]["evaluations"][point] = {**BASE, name: None}
            assert reason(runs) == "the judge was not among the rewards"


def test_a_figure_just_below_a_half_is_not_lifted_by_a_rounding_before() -> None:
    """1.23549999 is 1.235; six digits first would make 1.2355 and then 1.236 of it."""
    (entry,) = leaderboard.board([(suite("a"), rows("a", [1.23549999] * 8, spread=None))])["entries"]
    assert fixed(entry["final"]["Overall"]["mean"], 3) == "1.235"


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_places_are_decided_on_all_digits(order: tuple[str, str]) -> None:
    both = [*rows("a", [1.5] * 8, spread=None), *rows("b", [1.5 + 1e-9] * 8, spread=None)]
    found = leaderboard.board([(suite(*order), both)])["entries"]
    assert [entry["name"] for entry in found] == ["test: b", "test: a"]
