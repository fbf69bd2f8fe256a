"""The report in a real browser: it draws itself without network, and every control does what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from report_zoo import GAINS, PROMPTS, fake_run
from sage_grpo.tools.report.page import write_report

pytestmark = pytest.mark.slow

OpenPage = Callable[..., Any]


def cards(page: Any) -> list[int]:
    return page.evaluate(
        "() => [...document.querySelectorAll('.clip-card')].sort((a, b) => a.dataset.place - b.dataset.place)"
        ".map(card => Number(card.dataset.entry))"
    )


def test_it_draws_tables_curves_steps_settings_and_events(open_page: OpenPage, tmp_path: Path) -> None:
    runs = [fake_run(tmp_path / "first"), fake_run(tmp_path / "second", seed=1, lr=1e-4, workers=True)]
    page = open_page(write_report(runs, tmp_path / "report.html"))
    table = page.inner_text("#summary")
    assert "base" in table
    assert "second" in table
    assert f"+{sum(GAINS) / len(GAINS):.3f}" in table
    assert "first: after 4 iterations the tuned model scores" in page.inner_text(".verdict")
    assert page.get_attribute("#summary abbr:text-is('TA')", "title").startswith("text alignment")
    page.wait_for_function(
        "() => [...document.querySelectorAll('#overview video')].every(video => video.readyState >= 2)"
    )
    # Base and two runs of three prompts, among which is the one with the lowest change.
    assert page.locator("#overview video").count() == 3 * 3
    assert "lowest change: a blue ring on a navy wall" in page.locator(".some").inner_text()
    assert page.locator("h2:text-is('Workers')").count() == 1
    chart = page.locator(".chart").first
    chart.locator("svg").hover(position={"x": 200, "y": 100})
    assert "iteration 2" in chart.locator(".tip").inner_text()
    assert "1.058" in chart.locator(".tip").inner_text()
    tip, area = chart.locator(".tip").bounding_box(), chart.locator("svg").bounding_box()
    assert area["y"] <= tip["y"] < area["y"] + area["height"] / 2
    assert abs(tip["x"] - area["x"] - 200) < tip["width"] + 130  # beside the pointer
    raw = page.locator(".chart").nth(1)
    before = raw.locator("path").first.get_attribute("d")
    page.locator("#smoothing").fill("0.9")
    assert raw.locator("path").nth(1).get_attribute("d") != before
    drawn = raw.locator("path").count()
    page.click(".legend button:has-text('second')")
    assert raw.locator("path").count() == drawn / 2
    page.keyboard.press("3")
    assert page.locator("#steps .chart").count() == 4
    assert "sage" in page.inner_text("#steps")
    page.keyboard.press("4")
    assert "0.0001" in page.inner_text("#differs")
    assert "batch.prompts" not in page.inner_text("#differs")
    page.keyboard.press("5")
    events = page.inner_text("#event-table")
    for word in ("resume", "lr halved", "3 rollouts had no reward", "<b>keep</b>"):
        assert word in events
    look_through_the_clips(page)


def look_through_the_clips(page: Any) -> None:
    """Worst first is one click, the filter is by words, and HTML in prompts is text."""
    page.click("#tab-gallery")
    page.wait_for_function("() => [...document.querySelectorAll('video')].length > 0")
    page.wait_for_function("() => [...document.querySelectorAll('video')].every(video => video.readyState >= 2)")
    assert cards(page) == list(range(len(PROMPTS)))
    page.click("text=Worst first")
    worst = sorted(range(len(PROMPTS)), key=lambda place: GAINS[place])
    assert cards(page) == worst
    assert "−0.400" in page.inner_text(f".clip-card[data-entry='{worst[0]}']")
    page.keyboard.press("b")
    assert cards(page) == worst[::-1]
    page.keyboard.press("/")
    page.keyboard.type("CIRCLE a")
    assert cards(page) == [5, 0]
    assert "2 of 6" in page.inner_text("#count")
    page.fill("#filter", "红色")
    assert cards(page) == [4]
    page.fill("#filter", "nothing like it")
    assert page.is_visible("#nothing")
    page.fill("#filter", "")
    page.select_option("#part", label="drift")
    assert cards(page) == list(range(len(PROMPTS)))  # no gain in it: as listed
    assert page.locator(".clip-card[data-entry='3'] button").inner_text() == PROMPTS[3]
    page.locator(".clip-card[data-entry='3'] .clip-head button").click()
    assert page.inner_text("#detail h2") == PROMPTS[3]
    assert page.locator("img").count() == 0
    assert page.evaluate("() => window.hacked") is None
    # And if something did get in, the page's policy would not run it.
    page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.hacked = 3'; document.body.append(s); }"
    )
    assert page.evaluate("() => window.hacked") is None
    assert any("Content Security Policy" in fault for fault in page.faults)
    page.faults.clear()
