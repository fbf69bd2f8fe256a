"""`sage-grpo evaluate --pairs`: what is paired with what, and what is made of the differences."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sage_grpo.clips import evaluate as module
from sage_grpo.clips.evaluate import EvaluateSpec, compare, measure, measure_pair, pairs_document
from sage_grpo.commands.evaluate import pairs_table as table
from sage_grpo.folder.saved import Weights
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.training.config import EvalConfig
from sage_grpo.training.evaluate import Evaluation


def result(rows: list[tuple[str, float | None]], **changed: str) -> Evaluation:
    made: list[Any] = []
    for place, (prompt, score) in enumerate(rows):
        scores = {"total": score, "TA": 1.0}
        made.append({"prompt": prompt, "noise": changed.get("noise", str(place)), "scores": scores, "clip": None})
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
    assert "+1.0000   none" in table(found)
    written = json.loads(json.dumps(pairs_document(found, base, tuned), allow_nan=False))
    assert (written["differences"]["total"]["low"], written["base"]["total"]) == (None, None)
    scores = {"base": {"total": None, "TA": 1.0}, "tuned": {"total": 1.0, "TA": 1.0}}
    assert written["pairs"][1] == {"prompt": "b", "noise": "1", **scores}


def test_rewards_without_weights_have_no_total_and_say_so() -> None:
    rewards = [RewardSpec(name="video_stats", metric_only=True)]
    options = EvaluateSpec(rewards=rewards, settings=EvalConfig(prompts=2, steps=1), micro_batch=2)
    with pytest.warns(UserWarning, match="No reward has a weight, so there is no total"):
        result = measure(options)
    assert math.isfinite(result.metrics["eval/motion"])
    assert not {"eval/total", "eval/total_stderr"} & result.metrics.keys()
    assert all("motion" in row["scores"] and "total" not in row["scores"] for row in result.rows)


def test_what_is_evaluated_is_what_was_asked_for(calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """One model after the other, each with the settings, the rewards and the prompts of the options."""
    loaded: list[Any] = []
    asked, tried = calls("sage_grpo.training.evaluate.evaluate", BASE), calls("sage_grpo.training.inputs.try_rewards")
    calls("sage_grpo.models.lora.read_header")
    monkeypatch.setattr(Weights, "load", lambda self, model: loaded.append(self.lora) or "model")
    weighed = [RewardSpec(name="video_stats", weights={"motion": 1.0})]
    weighed.append(RewardSpec(name="video_stats", label="b", metric_only=True))
    given = {"rewards": weighed, "settings": EvalConfig(prompts=300, steps=2), "max_failed_fraction": 0.125}
    options = EvaluateSpec(micro_batch=3, lora="x", **given)
    with pytest.warns(UserWarning, match=r"settings\.prompts .*300 .*286"):
        assert measure_pair(options) == (BASE, BASE)
    ((reward, prompts, spec), _), first, second = *tried, *asked
    assert (spec, len(prompts), loaded, reward.max_failed_fraction) == (options.model, 286, [None, "x"], 0.125)
    assert first[0] == second[0] == ("model", reward, prompts, options.settings)
    assert first[1]["micro_batch"] == 3
    for choice in (EvaluateSpec(), EvaluateSpec(run="r", weights="base")):
        with pytest.raises(ValueError, match="--pairs compares"):
            measure_pair(choice)
    odd = [(None, None, "no prompts"), (None, "r", "r was trained without held-out"), ("train", None, "give --run")]
    for prompts, run, said in odd:
        with pytest.raises(ValueError, match=said):
            module._prompts(EvaluateSpec(prompts=prompts, run=run))
    config = SimpleNamespace(data=SimpleNamespace(prompts="starter"))
    monkeypatch.setattr(module, "read_config", lambda run, trust: config)
    trained = module._prompts(EvaluateSpec(prompts="train", run="r"))
    assert [one.text for one in trained] == [one.text for one in module._prompts(EvaluateSpec(prompts="starter"))]
    assert len(module._prompts(EvaluateSpec(prompts="shapes"))) == 286
    metrics = {"eval/total": 0.0, "eval/total_stderr": 0.0, "eval/TA": 1.0}
    left = module._without_total(Evaluation(metrics, torch.zeros(0), [], "", BASE.rows[:1]))
    assert (left.metrics, left.rows[0]["scores"], left.rows[0]["prompt"]) == ({"eval/TA": 1.0}, {"TA": 1.0}, "a")


def test_pairs_are_written_and_lost_ones_left_out(calls, tmp_path) -> None:
    clips = torch.arange(2 * 3 * 8 * 8 * 3).reshape(2, 3, 8, 8, 3).to(torch.uint8)
    seen = calls("sage_grpo.video.contact_sheet")
    shown = [Evaluation({}, clips + place, ["p", "q"], "", []) for place in (0, 1)]
    module.write_pairs(tmp_path, {"a": 1}, *shown)
    (((file, sheet, captions), _),) = seen
    assert (file, captions) == (tmp_path / "pairs.png", ["base: p", "tuned: p", "base: q", "tuned: q"])
    assert torch.equal(torch.stack([*sheet]), torch.stack([clips[0], clips[0] + 1, clips[1], clips[1] + 1]))
    assert json.loads((tmp_path / "pairs.json").read_text()) == {"a": 1}
    assert len(compare(BASE, TUNED)) == 2
    assert compare(result([]), result([])) == {}
    lost = compare(result([("a", None)]), result([("a", 1.0)]))["total"]
    assert (lost.pairs, lost.left_out, math.isnan(lost.base), math.isnan(lost.win_share)) == (0, 1, True, True)
