"""The OCR reward with a fake engine."""

from __future__ import annotations

import pytest
import torch

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.built_in.ocr import OcrReward, edit_distance, quoted_text, reading_order, text_score
from sage_grpo.rewards.spec import RewardSpec

WORDS = {10: "OPEN", 20: "OPEM", 30: "nothing alike"}


def fake_engine(frame):
    word = WORDS.get(int(frame[0, 0, 2]))
    boxes = [[[0, 0], [1, 0], [1, 1], [0, 1]]]
    return ([[boxes[0], word, 0.9]] if word else None), 0.1


def clip(*reds: int) -> torch.Tensor:
    video = torch.zeros(1, len(reds), 8, 8, 3, dtype=torch.uint8)
    video[..., 0] = torch.tensor(reds, dtype=torch.uint8).view(1, -1, 1, 1)
    return video


def test_quoted_text_only():
    assert quoted_text('a sign says "OPEN now" and "24 h"') == "OPEN now 24 h"
    assert quoted_text("it's a dog's life") == ""
    assert quoted_text("ein Schild “offen”") == "offen"


def test_edit_distance_and_score_values():
    assert edit_distance("kitten", "sitting") == edit_distance("sitting", "kitten") == 3
    pairs = {("", ""): 0, ("", "ab"): 2, ("abc", "abc"): 0, ("ab", "ba"): 2, ("abc", "xbcd"): 2}
    assert {pair: edit_distance(*pair) for pair in pairs} == pairs
    assert text_score("Open!", "o p e n") == 1
    assert text_score("OPEN", "OPEM") == 0.75
    assert text_score("OPEN", "") == text_score("a", "b") == 0


def test_mean_over_frames():
    video = clip(10, 20, 0, 10)
    mean = OcrReward(engine=fake_engine)(video, ['"open"'], 1.0)["OCR"]
    assert mean.item() == pytest.approx((1 + 0.75 + 0 + 1) / 4)


def box(left: float, top: float, width: float = 40, height: float = 12, tilt: float = 0.0):
    """Corners from the top left clockwise; the right end is lower by `tilt`."""
    right = left + width
    return [[left, top], [right, top + tilt], [right, top + tilt + height], [left, top + height]]


@pytest.mark.parametrize(("tilt", "top"), [(0, 0), (5, 7), (-5, 7)])
def test_reading_order_survives_a_tilt(tilt, top):
    words = [
        (box(50 * column, top + 16 * line + tilt * column, tilt=tilt), f"{line}{column}")
        for column in (2, 0, 1)
        for line in (1, 0)
    ]
    assert reading_order(words) == ["00", "01", "02", "10", "11", "12"]


def test_the_reward_reads_in_that_order():
    def engine(frame):
        return [[box(50, 4), "now", 0.9], [box(0, 6), "open", 0.9], [box(0, 30), "late", 0.9]], 0.1

    assert OcrReward(engine=engine)(clip(10), ['"open now late"'], 1.0)["OCR"].item() == 1
    assert reading_order([]) == []
    assert reading_order([(box(0, 9.6), "lower"), (box(50, 0), "upper")]) == ["upper", "lower"]  # a fifth is no line
    assert reading_order([(box(0, 100, height=40), "BIG"), (box(50, 102), "small")]) == ["BIG", "small"]
    assert reading_order([(box(150, 0, 20), "late"), (box(0, 0, 200), "wide")]) == ["wide", "late"]
    # the second is from 100 to 110 in its middle
    half = [(box(0, 105, height=10), "lower"), (box(50, 92, height=10, tilt=16), "upper")]
    assert reading_order(half) == ["lower", "upper"]
    assert reading_order([(box(0, 106, height=10), "lower"), half[1]]) == ["upper", "lower"]


def test_a_prompt_without_text_cannot_be_scored_and_says_why():
    composite = CompositeReward([RewardSpec(name="ocr", options={"engine": fake_engine})])
    scores, report = composite.score(torch.cat([clip(10), clip(10)]), ['"open"', "no text"], 1.0)
    assert scores.valid.tolist() == [True, False]
    assert "quotation marks" in report.failures[0].reason
