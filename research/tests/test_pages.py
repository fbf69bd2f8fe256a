"""No number in README.md, docs/benchmark.md or research/results comes from anything but a committed data file."""

from __future__ import annotations

from pathlib import Path

import claims
import pages
import pictures
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_marked_places_are_fresh_and_every_number_has_a_source() -> None:
    assert pages.problems() == [], "run: PYTHONPATH=src python research/benchmarks/pages.py"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It gains +0.02 ± 0.01, or 40% of it.", ["+0.02", "0.01", "40%"]),
        ("<!-- data: x y -->1.521<!-- end --> and then .3", [".3"]),
        ("Wan 2.1 1.3B at `lr 0.5` with HunyuanVideo-1.5, arXiv 2603.21872, 8 seeds, 135 iterations, 95% interval", []),
        ("```\n0.5\n```\n[a](b-1.5.md)", []),
    ],
)
def test_a_number_without_a_source_is_found(text: str, found: list[str]) -> None:
    assert [number for _, number in pages.loose_numbers(text)] == found


def test_a_stale_place_is_found_and_refreshed() -> None:
    query = "number research/benchmarks/results/ceiling.json key=after_vae.Overall digits=2"
    text = f"The ceiling is <!-- data: {query} -->9.99<!-- end -->."
    assert pages.refreshed(text) == f"The ceiling is <!-- data: {query} -->1.92<!-- end -->."
    with pytest.raises(ValueError, match="no view 'nubmer'"):
        pages.refreshed(text.replace("number", "nubmer"))


def test_a_figure_of_other_rows_is_found(monkeypatch) -> None:
    assert list(pictures.stale()) == []
    monkeypatch.setattr(pictures, "digest", lambda folders: "other")
    assert pictures.EVIDENCE in pictures.stale()
    assert ROOT / "research/results/regime/steps.png" in pictures.stale()


def test_sentences_are_filled_in_from_the_rows(tmp_path) -> None:
    (tmp_path / "answers.yaml").write_text(
        "part:\n- It is {number research/benchmarks/results/ceiling.json after_vae.Overall digits=2}.\n"
        "table: {heads: [a], rows: [['{number research/benchmarks/results/ceiling.json key=after_vae.Overall}']]}\n"
    )
    results = tmp_path / "research" / "results"
    results.mkdir(parents=True)
    file = (tmp_path / "answers.yaml").rename(results / "answers.yaml")
    (tmp_path / "research" / "benchmarks").symlink_to(ROOT / "research" / "benchmarks")
    assert pages.VIEWS["answers"](file, "part") == "- It is 1.92."
    assert "| 1.919 |" in pages.VIEWS["answers"](file, "table")
    assert list(pages.loose_numbers("{value x y} and 0.5")) == [(1, "0.5")]


@pytest.mark.parametrize(
    ("difference", "words"),
    [("-0.134 ± 0.025", "0.134 ± 0.025 lower"), ("+0.017 ± 0.019", "0.017 ± 0.019 higher (not distinguishable)")],
)
def test_a_difference_in_words(difference: str, words: str) -> None:
    assert claims.than(difference) == words


def test_notes_correct_for_all_differences_of_a_page_and_name_uncommitted_code(tmp_path, monkeypatch) -> None:
    """Of three, .01 and .04 are below .05 and .04 is not once it is doubled; what stood on another page does not count."""
    shown = iter([("-0.3 ± 0.1", 0.01), ("+0.2 ± 0.1", 0.04), ("+0.1 ± 0.2", 0.5), ("", float("nan"))])
    monkeypatch.setitem(pages.TESTED, (9.0, 9.0), ("of another page", 0.001))

    def show(query: str) -> str:
        text, p = next(shown)
        pages.TESTED[len(pages.TESTED), 0.0] = text, p
        return text

    monkeypatch.setattr(pages, "view", show)
    page = tmp_path / "page.md"
    folders = ("heat", "headline", "headline")
    places = [f"<!-- data: value research/results/{name} arm=x -->?<!-- end -->" for name in folders]
    answers = "<!-- data: answers research/results/answers.yaml part=table2 -->?<!-- end -->"
    page.write_text("\n".join([*places, answers, "<!-- data: notes_on page.md -->?<!-- end -->"]))
    assert pages.notes_on(page) == (
        "Holm's correction: 2 of 3 differences on this page have an interval without zero, 1 after it (not +0.2±0.1). "
        "`+changes`: `heat`, `strategy`, `table2`, `table2_a`."
    )
