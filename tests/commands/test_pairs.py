"""`sage-grpo evaluate --pairs`: what is paired with what, and what is made of the differences."""

from __future__ import annotations

import json
import math

import pytest
import torch

from sage_grpo.clips.evaluate import EvaluateSpec, compare, measure, pairs_document
from sage_grpo.commands.evaluate import pairs_table as table
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.training.config import EvalConfig
from sage_grpo.training.evaluate import Evaluation


def result(rows: list[tuple[str, float | None]], **changed: str) -> Evaluation:
    made = [
        {
            "prompt": prompt,
            "noise": changed.get("noise", str(place)),
            "scores": {"total": score, "TA": 1.0},
            "clip": None,
        }
        for place, (prompt, score) in enumerate(rows)
    ]
    return Evaluation({"eval/total": math.nan}, torch.zeros(0), [], "", made)


BASE = result([("a", 1.0), ("a", 3.0), ("b", 0.0), ("c", 5.0), ("d", None), ("e", 2.0)])
TUNED = result([("a", 4.0), ("a", 2.0), ("b", 2.0), ("c", 8.0), ("d", 9.0), ("e", None)])


def test_a_prompt_counts_once_and_every_clip_can_win() -> None:
    found = compare(BASE, TUNED)["total"]
    # prompts differ by (3 - 1) / 2, 2 and 3: mean 2, deviation 1, and t of 2 degrees of freedom is 4.30265
    half = 4.302652729911275 / math.sqrt(3)
    assert (found.change, found.prompts, found.pairs, found.left_out) == (2.0, 3, 4, 2)
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half), rel=1e-9)
    assert (found.base, found.tuned) == (2.25, 4.0)
    assert (found.wins, found.ties, found.win_share) == (3, 0, 0.75)
    same = compare(BASE, TUNED)["TA"]
    assert (same.change, same.low, same.high, same.ties, same.win_share) == (0, 0, 0, 6, 0.5)


def test_clips_of_other_noises_are_not_paired() -> None:
    with pytest.raises(ValueError, match="other prompts or noises"):
        compare(BASE, result([(row["prompt"], 1.0) for row in TUNED.rows], noise="7"))


def test_one_prompt_has_no_interval_and_says_so() -> None:
    base, tuned = result([("a", 1.0), ("b", None)]), result([("a", 2.0), ("b", 1.0)])
    found = compare(base, tuned)
    shown = table(found)
    assert "+1.0000   none" in shown
    assert "Left out, because a reward failed: total 1." in shown
    written = json.loads(json.dumps(pairs_document(found, base, tuned), allow_nan=False))
    assert (written["differences"]["total"]["low"], written["base"]["total"]) == (None, None)
    assert written["pairs"][1] == {
        "prompt": "b", "noise": "1", "base": {"total": None, "TA": 1.0}, "tuned": {"total": 1.0, "TA": 1.0}
    }  # fmt: skip


@pytest.mark.parametrize("reward", [{"weights": {"motion": 0.0}}, {"metric_only": True}, {}])
def test_rewards_without_weights_have_no_total_and_say_so(reward: dict) -> None:
    options = EvaluateSpec(
        rewards=[RewardSpec(name="video_stats", **reward)], settings=EvalConfig(prompts=2, steps=1), micro_batch=2
    )
    with pytest.warns(UserWarning, match="No reward has a weight, so there is no total"):
        result = measure(options)
    assert math.isfinite(result.metrics["eval/motion"])
    assert not {"eval/total", "eval/total_stderr"} & result.metrics.keys()
    assert all("motion" in row["scores"] and "total" not in row["scores"] for row in result.rows)
