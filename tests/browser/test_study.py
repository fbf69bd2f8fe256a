"""The study in a real browser: a whole one clicked through over a crash, and what keyboard, phone and videos do."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from studies import BRIGHTNESS, call, serving, small_study

from sage_grpo.report.study.making import open_study
from sage_grpo.report.study.statistics import wilson

PROMPTS, RATERS = 32, 5
DIMENSIONS = ("visual quality", "motion quality", "semantic alignment")

# A rater who clicks through all pages: answers follow from the text of the page and the rater's number, and each is noted.
CLICKS = """
(rater) => {
  window.clicked = {};
  document.getElementById("start").click();
  let last = null;
  const step = () => {
    const form = document.getElementById("compare");
    if (form.hidden) return void (window.finished = true);
    const fields = [...document.querySelectorAll("fieldset")];
    const submit = document.getElementById("submit");
    if (state.task.name !== last) {
      last = state.task.name;
      window.clicked[last] = fields.map((field, place) => {
        const choice = [...(state.task.prompt + place + rater + (place ? last : ""))].reduce((sum, one) => (sum * 31 + one.charCodeAt(0)) % 10007, 7) % 3;
        const input = field.querySelectorAll("input")[choice];
        input.click();
        return input.value;
      });
    }
    if (submit.getAttribute("aria-disabled") === "false") submit.click();
    setTimeout(step, 2);
  };
  step();
}
"""


def rows_of(port: int, admin: str) -> list[dict[str, str]]:
    status, body, _ = call(port, "GET", "/api/votes.csv", token=admin)
    assert status == 200
    return list(csv.DictReader(io.StringIO(body.decode())))


def given(study: Path) -> int:
    with contextlib.closing(open_study(study)) as store:
        return sum(done for done, _ in store.progress().values())


def wait_for(condition: Any, page: Any, seconds: float = 150) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        page.wait_for_timeout(100)


def test_five_raters_click_through_the_papers_study_over_a_crash(open_page: Any, tmp_path: Path) -> None:
    study, admin, tokens = small_study(tmp_path, prompts=PROMPTS, raters=RATERS, checks=0.04)
    total = 96 + 4
    with serving(study, "--limits.rate", "1000", "--limits.burst", "1000") as server:
        pages = [open_page(f"http://127.0.0.1:{server.port}/rate#{token}") for token in tokens]
        for number, page in enumerate(pages):
            page.wait_for_selector("#start:not([hidden])")
            page.evaluate(CLICKS, number)
        wait_for(lambda: given(study) > RATERS * total / 3, pages[0])
        server.kill()
        stored = given(study)
        assert stored < RATERS * total * 0.9
        server.start()
        wait_for(lambda: all(page.evaluate("window.finished === true") for page in pages), pages[0])
        clicked = [page.evaluate("window.clicked") for page in pages]
        for page in pages:
            assert page.text_content("#message-title") == "Thank you!"
            assert all("Failed to load resource" in fault for fault in page.faults)  # while there was no server
            page.faults.clear()
        rows = rows_of(server.port, admin)
        status, body, _ = call(server.port, "GET", "/api/results", token=admin)
        assert status == 200
        results = json.loads(body)
    # no vote lost: what was clicked is what is stored; none doubled: one row per rater, task and dimension
    with contextlib.closing(open_study(study)) as store:
        names = dict(store._read("SELECT rater || ' ' || (place + 1), name FROM tasks"))
    assert len(rows) == RATERS * total * len(DIMENSIONS)
    keys = Counter((row["rater"], row["place"], row["dimension"]) for row in rows)
    assert max(keys.values()) == 1
    for row in rows:
        wanted = clicked[int(row["rater"]) - 1][names[f"{row['rater']} {row['place']}"]]
        assert row["answer"] == wanted[DIMENSIONS.index(row["dimension"])]
    by_hand(results, rows)


def by_hand(results: Any, rows: list[dict[str, str]]) -> None:
    """Win rates counted from the CSV alone."""
    for dimension in results["dimensions"]:
        own = [row for row in rows if row["dimension"] == dimension["name"] and row["kind"] == "pair"]
        assert len(dimension["pairs"]) == 3
        for pair in dimension["pairs"]:
            votes = [row["preferred"] for row in own if {row["left"], row["right"]} == {pair["first"], pair["second"]}]
            assert len(votes) == RATERS * PROMPTS
            wins, losses = votes.count(pair["first"]), votes.count(pair["second"])
            assert (pair["wins"], pair["ties"], pair["losses"]) == (wins, votes.count("tie"), losses)
            assert pair["rate"] == pytest.approx(wins / (wins + losses))
            assert (pair["low"], pair["high"]) == pytest.approx(wilson(wins, wins + losses))
