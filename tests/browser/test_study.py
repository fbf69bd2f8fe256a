"""The study in a real browser: a whole one clicked through over a crash, and what keyboard, phone and videos do."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sage_grpo.study.making import open_study
from sage_grpo.study.results import wilson
from sage_grpo.types import Sound
from studies import BRIGHTNESS, ask, call, serving, small_study, vote_for

pytestmark = pytest.mark.slow

PROMPTS, RATERS = 32, 5
HTML = """<img src=x onerror="window.hacked=1"><script>window.hacked=1</script> & "a" 'b'"""
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


def wait_for(condition: Callable[[], bool], page: Any, seconds: float = 200, pause: int = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        page.wait_for_timeout(pause)


def until(page: Any, expression: str) -> None:
    """Playwright's own way to wait evaluates text in the page, which the page's security policy forbids."""
    wait_for(lambda: page.evaluate(expression), page, 30, pause=20)


def test_five_raters_click_through_the_papers_study_over_a_crash(open_page: Any, tmp_path: Path) -> None:
    study, admin, tokens = small_study(tmp_path, prompts=PROMPTS, raters=RATERS, checks=0.04)
    total = 96 + 4
    with serving(study, "--limits.rate", "1000", "--limits.burst", "1000") as server:
        link = f"http://127.0.0.1:{server.port}/rate#"
        pages = [
            open_page(link + token, reduced_motion="reduce") for token in tokens
        ]  # nothing plays by itself: quicker
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


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, list[str], int]]:
    """A study with prompts that are not plain English: folder, results' token, raters' tokens, port."""
    folder = tmp_path_factory.mktemp("study")
    texts = [HTML, "一只红色的球从左向右滚动", "كرة حمراء تتدحرج", ("a ball " * 60).strip()]
    study, admin, tokens = small_study(folder, prompts=4, raters=7, checks=0, texts=texts)
    with serving(study) as server:
        yield study, admin, tokens, server.port


def start(open_page: Any, served: Any, number: int, **options: Any) -> Any:
    page = open_page(f"http://127.0.0.1:{served[3]}/rate#{served[2][number]}", **options)
    page.click("#start")
    until(page, "loaded()")
    return page


def answers_of(served: Any, rater: int) -> list[tuple[str, ...]]:
    with contextlib.closing(open_study(served[0])) as store:
        return [tuple(vote.answers[name] for name in DIMENSIONS) for vote in store.votes() if vote.rater == rater + 1]


def test_the_keyboard_alone_is_enough(open_page: Any, served: Any) -> None:
    page = start(open_page, served, 0)
    page.keyboard.press("Enter")  # nothing is answered yet: nothing is sent
    assert page.text_content("#count") == "0 of 12"
    assert "Nothing is answered yet" in page.text_content("#hint")
    assert page.get_attribute("#left video", "aria-label") == "Video A"
    assert page.get_attribute("#q0-right", "aria-label").endswith(": B is better")
    for keys in (("1", "2", "3"), ("ArrowLeft", "ArrowDown", "ArrowRight")):
        for key in (*keys, "Enter"):
            page.keyboard.press(key)
        until(page, f"state.done === {1 if keys[0] == '1' else 2} && loaded()")
    for key in ("1", "1", "ArrowUp", "3", "2", "Enter"):  # the second answer is corrected
        page.keyboard.press(key)
    until(page, "state.done === 3")
    assert answers_of(served, 0) == [("left", "tie", "right")] * 2 + [("left", "right", "tie")]
    page.keyboard.press("Space")
    assert page.evaluate("shown().every((video) => video.paused)")
    page.reload()  # goes on where it was
    until(page, "state?.done === 3")
    assert page.text_content("#count") == "3 of 12"


def test_what_is_seen_on_a_side_is_what_is_stored_for_it(open_page: Any, served: Any) -> None:
    """The rater looks at the pixels and prefers the brighter video; the CSV must name the brighter method each time."""
    page = start(open_page, served, 1)
    for done in range(12):
        until(page, f"state.done === {done} && loaded()")
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
        for place in range(3):
            page.check(f"#q{place}-{side}", force=True)
        page.click("#submit")
    page.wait_for_selector("#message-title:has-text('Thank you')")
    rows = [row for row in rows_of(served[3], served[1]) if row["rater"] == "2"]
    assert len(rows) == 36
    for row in rows:
        assert row["preferred"] == max(row["left"], row["right"], key=BRIGHTNESS.__getitem__)


def test_both_videos_play_together(open_page: Any, served: Any) -> None:
    page = start(open_page, served, 2)
    assert not page.is_visible("#sound")  # there is none
    until(page, "shown().every((video) => video.currentTime > 0)")
    page.click("#play")  # while they stand still, nothing but the page itself can bring them together
    page.evaluate("shown()[1].currentTime = 0.4; shown()[0].currentTime = 0")
    until(page, "Math.abs(shown()[0].currentTime - shown()[1].currentTime) < 0.12")
    page.evaluate(
        "() => { const seek = document.getElementById('seek'); seek.value = 500; seek.dispatchEvent(new Event('input')); }"
    )
    assert page.evaluate("shown().map((video) => [video.paused, video.currentTime])") == [[True, 0.25], [True, 0.25]]
    page.click("#speed")
    assert page.evaluate("shown().map((video) => video.playbackRate)") == [0.5, 0.5]
    page.click("#play")
    until(page, "shown().every((video) => !video.paused)")


def test_prompts_in_any_script_are_text_and_html_is_harmless(open_page: Any, served: Any) -> None:
    page = start(open_page, served, 3)
    seen = set()
    for done in range(12):
        until(page, f"state.done === {done} && loaded()")
        seen.add(page.text_content("#prompt"))
        assert page.locator("#prompt *").count() == 0
        if page.text_content("#prompt").startswith("كرة"):
            assert page.evaluate("getComputedStyle(document.getElementById('prompt')).direction") == "rtl"
        for key in ("2", "2", "2", "Enter"):
            page.keyboard.press(key)
    assert seen == {HTML, "一只红色的球从左向右滚动", "كرة حمراء تتدحرج", ("a ball " * 60).strip()}
    assert page.evaluate("window.hacked") is None


def test_on_a_phone_videos_are_stacked_and_nothing_is_cut_off(open_page: Any, served: Any) -> None:
    page = start(open_page, served, 4, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    left, right = (page.locator(f"#{side}").bounding_box() for side in ("left", "right"))
    assert right["y"] >= left["y"] + left["height"]
    assert left["x"] >= 0
    assert left["x"] + left["width"] <= 390
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for place in range(3):
        page.tap(f"#q{place} .choice:nth-child(2)")
    page.tap("#submit")
    until(page, "state.done === 1")
    assert answers_of(served, 4) == [("tie", "tie", "tie")]


def test_two_windows_of_one_rater_do_not_vote_twice(open_page: Any, served: Any) -> None:
    first, second = start(open_page, served, 5), start(open_page, served, 5)
    for page, key in ((first, "1"), (second, "3")):
        for word in (key, key, key, "Enter"):
            page.keyboard.press(word)
        until(page, "state.done === 1")
    second.faults.clear()  # the server refused the second vote, and said so
    assert answers_of(served, 5) == [("left", "left", "left")]


def test_links_that_are_not_valid_say_so(open_page: Any, served: Any) -> None:
    for link in ("rate", "rate#nonsense", "rate#" + "x" * 43, f"rate#{served[1]}"):
        page = open_page(f"http://127.0.0.1:{served[3]}/{link}")
        page.wait_for_selector("#message-title:has-text('not valid')")
        page.faults.clear()
    page = open_page(f"http://127.0.0.1:{served[3]}/results#{served[2][0]}")
    page.wait_for_selector("#notice:has-text('not valid')")
    assert page.is_hidden("#main")
    page.faults.clear()


def test_the_results_page_shows_the_figures_and_gives_the_csv(open_page: Any, served: Any) -> None:
    state = ask(served[3], served[2][6])
    while state["task"]:
        vote = vote_for(state, ("left", "right")[state["done"] % 2], nonce=f"{state['done']:032x}")
        state = json.loads(call(served[3], "POST", "/api/vote", token=served[2][6], body=vote)[1])
    page = open_page(f"http://127.0.0.1:{served[3]}/results#{served[1]}")
    page.wait_for_selector("#main:not([hidden])")
    found = json.loads(call(served[3], "GET", "/api/results", token=served[1])[1])
    assert page.locator(".dimension").count() == 3
    cards = page.locator(".dimension").all_inner_texts()
    for card, part in zip(cards, found["dimensions"]):
        for pair in part["pairs"]:
            assert f"{pair['first']} vs {pair['second']}" in card
            assert f"{100 * pair['rate']:.1f}%" in card
            assert f"{100 * pair['low']:.1f}–{100 * pair['high']:.1f}%" in card
    assert page.locator("#raters tbody tr").count() == 7
    with page.expect_download() as download:
        page.click("#download")
    assert download.value.suggested_filename == "votes.csv"
    assert download.value.path().read_bytes() == call(served[3], "GET", "/api/votes.csv", token=served[1])[1]


def test_one_of_two_sounds_is_heard_at_a_time_and_none_at_first(open_page: Any, tmp_path: Path) -> None:
    hum = Sound(0.3 * torch.sin(torch.arange(8_000) / 6)[None], 16_000)
    study, _, tokens = small_study(tmp_path, prompts=2, raters=1, checks=0.3, sound=hum)
    with serving(study) as server:
        page = start(open_page, (study, "", tokens, server.port), 0)
        muted = "shown().map((video) => video.muted)"
        assert page.is_visible("#sound")
        for expected in ([True, True], [False, True], [True, False], [True, True], [False, True]):
            assert page.evaluate(muted) == expected
            page.click("#sound")
        until(page, "shown().some((video) => video.webkitAudioDecodedByteCount > 0)")
        page.evaluate("document.activeElement.blur()")  # Enter would press the button again
        for key in ("1", "2", "3", "Enter"):
            page.keyboard.press(key)
        until(page, "state.done === 1 && loaded()")
        assert page.evaluate(muted) == [True, True]  # the next pair begins in silence
        page.close()  # before its server
