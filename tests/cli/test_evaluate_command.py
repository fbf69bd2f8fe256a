"""What `sage-grpo evaluate` pairs, prints and writes of scores, and how it ends; the demo's table and its estimate of the time."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sage_grpo.cli import demo, evaluate
from sage_grpo.cli.evaluate import pairs_table as table
from sage_grpo.generation import evaluate as module
from sage_grpo.generation.evaluate import EvaluateSpec, compare, measure, measure_pair, pairs_document
from sage_grpo.generation.files import ScoredVideo
from sage_grpo.models.spec import ModelSpec
from sage_grpo.rewards.member import RewardFailure
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.saved import Weights
from sage_grpo.training.config import EvalConfig
from sage_grpo.training.evaluate import Evaluation

CLIPS = torch.zeros(2, 3, 8, 8, 3, dtype=torch.uint8)


def result(**changes: Any) -> Evaluation:
    return replace(Evaluation({"eval/total": 1.00005, "eval/a": -0.5}, CLIPS, ["a", "b"], "one failed", []), **changes)


def test_scores_are_a_table_or_json_and_files(tmp_path: Path, calls, capsys, monkeypatch) -> None:
    found = {"total": 1.00005, "a": -0.5}
    monkeypatch.setattr(evaluate, "measure", lambda options, say: say("half way") or result())
    assert evaluate.run(evaluate.Options(out=tmp_path / "out")) == 0
    told = capsys.readouterr()
    assert told.out == "total     1.0001\na        -0.5000\n"
    assert told.err.endswith("the miniature included in the package.\nsage-grpo: half way\none failed\n")
    assert json.loads((tmp_path / "out" / "scores.json").read_text()) == found
    assert (tmp_path / "out" / "clips.png").is_file()
    calls("sage_grpo.cli.evaluate.measure", result(report="", clips=CLIPS[:0]))
    model = ModelSpec(path="here", train=False)
    assert evaluate.run(evaluate.Options(out=tmp_path / "other", json=True, model=model)) == 0
    told = capsys.readouterr()
    assert (json.loads(told.out), told.err) == (found, "")
    assert not (tmp_path / "other" / "clips.png").exists()

    def fails(options: Any, say: Any) -> None:
        raise RewardFailure("all of them")

    monkeypatch.setattr(evaluate, "measure", fails)
    assert evaluate.run(evaluate.Options(run="x")) == 1
    assert capsys.readouterr().err == "sage-grpo evaluate stopped: all of them\n"


def test_pairs_are_a_table_or_json_and_files(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(evaluate, "measure_pair", lambda options, say: (replace(BASE, report="lost"), TUNED))
    assert evaluate.run(evaluate.Options(run="x", pairs=True, out=tmp_path)) == 0
    told = capsys.readouterr()
    assert told.err == "base: lost\n"
    assert told.out.splitlines() == [
        "score       base     tuned    change   95% interval        wins",
        "total     2.2500    4.0000   +2.0000   -0.4841 to +4.4841      75%",
        "TA        1.0000    1.0000   +0.0000   +0.0000 to +0.0000      50%",
        "4 pairs of clips, 3 prompts; wins count a tie as half; the interval is over prompts.",
        "Left out, because a reward failed: total 2.",
    ]
    assert evaluate.run(evaluate.Options(run="x", pairs=True, json=True)) == 0
    written = json.loads((tmp_path / "pairs.json").read_text())
    assert json.loads(capsys.readouterr().out) == written
    assert (written["differences"]["total"]["change"], len(written["pairs"])) == (2.0, 6)
    whole = compare(BASE, replace(BASE, rows=list(BASE.rows)))
    assert "Left out" not in evaluate.pairs_table({"TA": whole["TA"]})


def test_files_are_scored_by_the_options_that_matter_alone(tmp_path: Path, calls, capsys) -> None:
    row = ScoredVideo("a.mp4", "p", {}, 8.0, 5, 32, 32, {"a": 1.0}, "")
    asked = calls("sage_grpo.generation.files.score_videos", [row])
    options = evaluate.Options(videos=tmp_path, prompts="p.csv", out=tmp_path / "out", micro_batch=3, json=True)
    assert evaluate.run(options) == 0
    assert json.loads(capsys.readouterr().out) == {"a": {"mean": 1.0, "standard_error": None, "count": 1}}
    named = {"output": tmp_path / "out", "batch_size": 3, "device": torch.device("cpu")}
    assert asked == [((tmp_path, Path("p.csv"), options.rewards), named)]
    for changes, said in (
        ({"prompts": None}, "one prompt per video"),
        ({"prompts": "shapes"}, "one prompt per video"),
        ({"lora": "x", "pairs": True}, "--lora, --pairs would change nothing"),
        ({"model": ModelSpec(shift=3.0, train=False)}, "--model would change nothing"),
    ):
        with pytest.raises(ValueError, match=said):
            evaluate.run(replace(options, **changes))
    evaluate.run(replace(options, model=replace(options.model, device="cpu"), json=False))
    assert "1 videos" in capsys.readouterr().out
    row.scores["a"] = math.nan
    with pytest.raises(ValueError, match="None of the 1 videos"):
        evaluate.run(options)


def test_the_demo_ends_with_before_and_after(tmp_path: Path, calls, capsys) -> None:
    rows = [{"iteration": n, "eval/total": total, "eval/TA": 0.5} for n, total in ((0, 1.0), (1, 9.0), (2, 1.25))]
    calls("sage_grpo.tools.report.summary.verdict", ["Better."])
    calls("sage_grpo.tools.report.run_data.read_run", SimpleNamespace(evaluations=rows))
    calls("sage_grpo.tools.report.page.leave_report", "Report of mine.")
    seen = calls("sage_grpo.run.session.run")
    assert demo.run(demo.Options(out=str(tmp_path / "mine"), iterations=2, seed=3)) == 0
    told = capsys.readouterr().out
    assert "\nheld-out prompts       base    tuned   change\n" in told
    assert "total" not in told.partition("change\n")[2] or "\ntotal                 1.000    1.250   +0.250\n" in told
    assert "\nTA                    0.500    0.500   +0.000\n" in told
    assert "\n\nBetter.\n\nReport of mine.    (" in told
    ((config, _), _), *_ = seen
    assert (config.out, config.seed, config.iterations, config.evaluate.every) == (str(tmp_path / "mine"), 3, 2, 2)
    rows[2]["iteration"] = 1  # it was stopped
    assert demo.run(demo.Options(out=str(tmp_path / "mine"), iterations=2)) == 0
    assert "held-out prompts" not in capsys.readouterr().out


def found_of(rows: list[tuple[str, float | None]], **changed: str) -> Evaluation:
    made: list[Any] = []
    for place, (prompt, score) in enumerate(rows):
        scores = {"total": score, "TA": 1.0}
        made.append({"prompt": prompt, "noise": changed.get("noise", str(place)), "scores": scores, "clip": None})
    return Evaluation({"eval/total": math.nan}, torch.zeros(0), [], "", made)


BASE = found_of([("a", 1.0), ("a", 3.0), ("b", 0.0), ("c", 5.0), ("d", None), ("e", 2.0)])
TUNED = found_of([("a", 4.0), ("a", 2.0), ("b", 2.0), ("c", 8.0), ("d", 9.0), ("e", None)])


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
        compare(BASE, found_of([(row["prompt"], 1.0) for row in TUNED.rows], noise="7"))


def test_one_prompt_has_no_interval_and_says_so() -> None:
    base, tuned = found_of([("a", 1.0), ("b", None)]), found_of([("a", 2.0), ("b", 1.0)])
    found = compare(base, tuned)
    assert "+1.0000   none" in table(found)
    written = json.loads(json.dumps(pairs_document(found, base, tuned), allow_nan=False))
    assert (written["differences"]["total"]["low"], written["base"]["total"]) == (None, None)
    scores = {"base": {"total": None, "TA": 1.0}, "tuned": {"total": 1.0, "TA": 1.0}}
    assert written["pairs"][1] == {"prompt": "b", "noise": "1", **scores}


def test_rewards_without_weights_have_no_total_and_say_so() -> None:
    rewards = [RewardSpec(name="video_stats")]
    options = EvaluateSpec(rewards=rewards, settings=EvalConfig(prompts=2, steps=1), micro_batch=2)
    with pytest.warns(UserWarning, match="No reward has a weight, so there is no total"):
        result = measure(options)
    assert math.isfinite(result.metrics["eval/motion"])
    assert not {"eval/total", "eval/total_stderr"} & result.metrics.keys()
    assert all("motion" in row["scores"] and "total" not in row["scores"] for row in result.rows)


def test_what_is_evaluated_is_what_was_asked_for(calls, monkeypatch: pytest.MonkeyPatch) -> None:
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
    seen = calls("sage_grpo.utils.video.contact_sheet")
    shown = [Evaluation({}, clips + place, ["p", "q"], "", []) for place in (0, 1)]
    module.write_pairs(tmp_path, {"a": 1}, *shown)
    (((file, sheet, captions), _),) = seen
    assert (file, captions) == (tmp_path / "pairs.png", ["base: p", "tuned: p", "base: q", "tuned: q"])
    assert torch.equal(torch.stack([*sheet]), torch.stack([clips[0], clips[0] + 1, clips[1], clips[1] + 1]))
    assert json.loads((tmp_path / "pairs.json").read_text()) == {"a": 1}
    assert len(compare(BASE, TUNED)) == 2
    assert compare(found_of([]), found_of([])) == {}
    lost = compare(found_of([("a", None)]), found_of([("a", 1.0)]))["total"]
    assert (lost.pairs, lost.left_out, math.isnan(lost.base), math.isnan(lost.win_share)) == (0, 1, True, True)
