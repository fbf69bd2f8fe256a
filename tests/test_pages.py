"""No number in README.md, docs/benchmark.md or docs/results comes from anything but a committed data file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import pages  # noqa: E402
import pictures  # noqa: E402
import views  # noqa: E402


def test_marked_places_are_fresh_and_every_number_has_a_source() -> None:
    assert pages.problems() == [], "run: PYTHONPATH=src python benchmarks/pages.py"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It reaches 1.521 here.", ["1.521"]),
        ("It gains +0.02 ± 0.01, or 40% of it.", ["+0.02", "0.01", "40%"]),
        ("| branch | 1.521 |", ["1.521"]),
        ("<!-- data: x y -->1.521<!-- end --> and then .3", [".3"]),
        ("Wan 2.1 1.3B at `lr 0.5` with HunyuanVideo-1.5, arXiv 2603.21872, 8 seeds, 135 iterations, 95% interval", []),
        ("```\n0.5\n```\n[a](b-1.5.md)", []),
    ],
)
def test_a_number_without_a_source_is_found(text: str, found: list[str]) -> None:
    assert [number for _, number in pages.loose_numbers(text)] == found


def test_a_stale_place_is_found_and_refreshed() -> None:
    query = "number benchmarks/results/ceiling.json key=after_vae.Overall digits=2"
    text = f"The ceiling is <!-- data: {query} -->9.99<!-- end -->."
    assert pages.refreshed(text) == f"The ceiling is <!-- data: {query} -->1.92<!-- end -->."
    with pytest.raises(ValueError, match="no view 'nubmer'"):
        pages.refreshed(text.replace("number", "nubmer"))
    with pytest.raises(ValueError, match=r"there is no benchmarks/results/seiling\.json"):
        pages.refreshed(text.replace("ceiling.json", "seiling.json"))


def test_a_figure_of_other_rows_is_found(monkeypatch) -> None:
    assert list(pictures.stale()) == []
    monkeypatch.setattr(pictures, "digest", lambda folders: "other")
    assert pictures.EVIDENCE in pictures.stale()
    assert ROOT / "docs/results/heat/curves.png" in pictures.stale()


def test_what_a_sentinel_said_is_counted_run_by_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(seed: int, scores: list[float], *said: tuple[int, str, str]) -> dict:
        points = dict(zip(("0", "5", "10", "20"), ({"Overall": score} for score in scores), strict=True))
        return {"seed": seed, "iterations": 20, "evaluations": points, "sentinel": [list(one) for one in said]}

    arms = {
        "warned": [
            run(1, [1.0, 1.3, 1.25, 0.5], (12, "hacking", "warn"), (20, "hacking", "warn")),  # 0.05 of 0.3 lost
            run(2, [1.0, 1.3, 1.1, 0.6], (10, "decoupled", "warn")),  # two thirds lost
            run(3, [1.0, 1.3, 1.2, 0.7]),  # said nothing
        ],
        "acted": [
            run(1, [1.0, 1.3, 1.25, 0.9], (10, "hacking", "warn"), (15, "hacking", "rollback")),
            run(2, [1.0, 1.3, 1.25, 0.5]),
        ],
    }
    monkeypatch.setattr(views, "_runs", lambda folder, arm: arms[arm])
    assert views.told_in_time(ROOT, "warned") == "1 of 3"
    assert views.first_words(ROOT, "warned") == "hacking 12, decoupled 10, nothing"
    assert (views.acted(ROOT, "warned"), views.acted(ROOT, "acted")) == ("0 of 3", "1 of 2")
    assert views.ahead_of(ROOT, "acted", "warned") == "1 of 2"  # of the seeds that both have
    assert views.past_best(ROOT, "warned") == "3 of 3"
    arms["warned"][0]["evaluations"]["20"]["Overall"] = 1.4  # as text, 5 comes after 20
    assert views.past_best(ROOT, "warned") == "2 of 3"
    arms["warned"][0]["evaluations"]["20"]["Overall"] = 0.5
    assert views.between(ROOT, "acted", "warned").startswith("+0.150 ± ")  # +0.4 and -0.1


def test_what_holds_in_two_worlds_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace as Record

    def world(**differences: tuple[float, float]) -> Record:
        found = {
            name: {"Overall": Record(mean=mean, half=half, low=mean - half, high=mean + half)}
            for name, (mean, half) in differences.items()
        }
        arms = {name: Record(clips_difference=one, equal_difference={}) for name, one in found.items()}
        return Record(arms=arms, suite=Record(baseline="branch", columns=[Record(key="Overall")]))

    worlds = {
        "first": world(branch=(0, 0), sage=(-0.2, 0.1), flow=(-0.2, 0.1), mix=(0.05, 0.1), nft=(1, 1)),
        "second": world(branch=(0, 0), sage=(-0.3, 0.1), flow=(0.2, 0.1), mix=(0.0, 0.1)),
    }
    monkeypatch.setattr(views, "summary_of", lambda folder: worlds[folder.name])
    monkeypatch.setattr("sage_grpo.lab.report.plus_minus", lambda one, signed: "?" if one is None else f"{one.mean:+g}")
    assert views.both(Path("first"), "second").splitlines()[2:] == [
        "| sage | -0.2 | -0.3 | behind in both | ? | ? | - in both |",
        "| flow | -0.2 | +0.2 | behind / ahead | ? | ? | - in both |",
        "| mix | +0.05 | +0 | level in both | ? | ? | - in both |",
    ]
