"""What a run leaves for people: scores of every clip, events, and at its end the report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sage_grpo.commands.train import run
from sage_grpo.folder.journal import read_events
from sage_grpo.training.config import EvalConfig


def test_training_ends_with_its_report_and_clips_side_by_side(make_config, capsys, monkeypatch) -> None:
    config = make_config(iterations=1, evaluate=EvalConfig(every=1, prompts=2, steps=2, show=1))
    out = Path(config.out)
    assert run(config) == 0
    assert f"Report: {out / 'report.html'}   before and after: {out / 'before_after'}" in capsys.readouterr().out
    assert "a cat" in (out / "report.html").read_text()
    assert [file.name for file in (out / "before_after").iterdir()] == ["00-a-cat.mp4"]
    index = [json.loads((out / "videos" / f"heldout-00000{number}.json").read_text()) for number in (0, 1)]
    for found in index:
        assert [(row["prompt"], row["noise"], row["clip"] is None) for row in found["rows"]] == [
            ("a cat", "1234/0/0", False),
            ("a red dog", "1234/1/0", True),
        ]
    scores = [row["scores"]["total"] for row in index[1]["rows"]]
    assert scores[0] != scores[1]
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval/total"] == pytest.approx(sum(scores) / 2)
    assert index[0]["rows"][0]["scores"] != index[1]["rows"][0]["scores"]
    assert len(json.loads((out / "schedule.json").read_text())["sigmas"]) == config.rollout.steps + 1
    assert [event["kind"] for event in read_events(out)] == ["start", "finish"]
    # What goes wrong with the page does not touch the run.
    monkeypatch.setattr("sage_grpo.report.page.render", lambda data: 1 / 0)
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        assert run(replace(config, iterations=2)) == 0
    assert (out / ".finished").read_text().strip() == "2"
    assert [event["kind"] for event in read_events(out)] == ["start", "finish", "resume", "finish"]


def test_every_row_has_the_scores_of_its_own_clip(make_config, make_trainer) -> None:
    config = make_config(evaluate=EvalConfig(every=1, prompts=3, per_prompt=2, steps=2, show=5))
    trainer = make_trainer(config)
    trainer.encode_prompts()
    found = trainer.evaluate()
    assert [row["clip"] for row in found.rows] == [0, 1, 2, 3, 4, None]
    assert len({row["noise"] for row in found.rows}) == 6
    for row in found.rows[:5]:
        assert row["prompt"] == found.captions[row["clip"]]
        assert row["scores"]["total"] == pytest.approx(float(found.clips[row["clip"]].float().mean()) / 255, abs=1e-5)
    assert len({round(row["scores"]["total"], 7) for row in found.rows}) > 3
