"""The study in a real browser: clicked through over a crash, by keyboard and by pixels, to its results."""

from __future__ import annotations

import contextlib
import csv
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sage_grpo.tools.study.making import open_study
from studies import BRIGHTNESS, call, serving, small_study

pytestmark = pytest.mark.slow

HTML = """<img src=x onerror="window.hacked=1"><script>window.hacked=1</script> & "a" 'b'"""
TEXTS = [HTML, "一只红色的球从左向右滚动", "كرة حمراء تتدحرج", ("a ball " * 60).strip()]
DIMENSIONS = ("visual quality", "motion quality", "semantic alignment")

# A rater who clicks through all pages: answers follow from the text of the page and the rater's number, and each is noted.
CLICKS = """
(rater) => {
  window.clicked = {};
  window.limit = 6;
  document.getElementById("start").click();
  let last = null;
  const step = () => {
    const form = document.getElementById("compare");
    if (form.hidden) return void (window.finished = true);
    if (state.done >= window.limit) return void setTimeout(step, 20);
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


def wait_for(condition: Callable[[], bool], page: Any, seconds: float = 200, pause: int = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        page.wait_for_timeout(pause)


def until(page: Any, expression: str) -> None:
    """Playwright's own way to wait evaluates text in the page, which the page's security policy forbids."""
    wait_for(lambda: page.evaluate(expression), page, 30, pause=20)


def rate_by_sight(page: Any, tasks: int) -> None:
    page.click("#start")
    seen = set()
    for done in range(tasks):
        until(page, f"state.done === {done} && loaded()")
        seen.add(page.text_content("#prompt"))
        assert page.locator("#prompt *").count() == 0
        light = page.evaluate(
            """() => shown().map((video) => {
                const canvas = Object.assign(document.createElement("canvas"), { width: 8, height: 8 });
                const context = canvas.getContext("2d");
                context.drawImage(video, 0, 0, 8, 8);
                return context.getImageData(4, 4, 1, 1).data[0];
            })"""
        )
        assert abs(light[0] - light[1]) > 50
        side = ("left", "right")[light[1] > light[0]]
        assert page.evaluate("shown().map((video) => video.parentNode.id)") == ["left", "right"]
        for place in range(len(DIMENSIONS)):
            page.check(f"#q{place}-{side}", force=True)
        page.click("#submit")
    page.wait_for_selector("#message-title:has-text('Thank you')")
    assert seen == set(TEXTS)  # any script is text, and HTML is harmless
    assert page.evaluate("window.hacked") is None


def test_raters_click_through_a_study_over_a_crash(open_page: Any, tmp_path: Path) -> None:
    study, admin, tokens = small_study(tmp_path, prompts=4, raters=2, checks=0, texts=TEXTS)
    with serving(study, "--limits.rate", "1000", "--limits.burst", "1000") as server:
        link = f"http://127.0.0.1:{server.port}/rate#"
        page = open_page(link + tokens[0], reduced_motion="reduce")  # nothing plays by itself: quicker
        page.wait_for_selector("#start:not([hidden])")
        page.evaluate(CLICKS, 0)
        wait_for(lambda: given(study) > 3, page, pause=20)
        server.kill()  # before the rater is through
        server.start()
        page.evaluate("window.limit = Infinity")
        wait_for(lambda: page.evaluate("window.finished === true"), page)
        clicked = page.evaluate("window.clicked")
        assert page.text_content("#message-title") == "Thank you!"
        assert all("Failed to load resource" in fault for fault in page.faults)  # while there was no server
        page.faults.clear()
        rate_by_sight(open_page(link + tokens[1]), tasks=12)
        rows = rows_of(server.port, admin)
    # no vote lost: what was clicked is what is stored; none doubled: one row per rater, task and dimension
    with contextlib.closing(open_study(study)) as store:
        names = dict(store._read("SELECT rater || ' ' || (place + 1), name FROM tasks"))
    assert len(rows) == 2 * 12 * len(DIMENSIONS)
    assert len({(row["rater"], row["place"], row["dimension"]) for row in rows}) == len(rows)
    for row in rows:
        if row["rater"] == "1":
            wanted = clicked[names[f"1 {row['place']}"]]
            assert row["answer"] == wanted[DIMENSIONS.index(row["dimension"])]
        else:
            assert row["preferred"] == max(row["left"], row["right"], key=BRIGHTNESS.__getitem__)
