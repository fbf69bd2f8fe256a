"""Scoring video files: the file's own fps, prompts by name, and files that cannot be read."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
import torch

from sage_grpo.cli.main import main
from sage_grpo.generation.files import ScoredVideo, judge, score_videos, summarize, write_scores
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.utils.video import write_mp4


def write_video(path: Path, levels: list[int], fps: float, size: int = 32) -> None:
    write_mp4(path, torch.tensor(levels).view(-1, 1, 1, 1).expand(-1, size, size, 3).to(torch.uint8), fps)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    videos = tmp_path_factory.mktemp("videos")
    (videos / "more").mkdir(parents=True)
    write_video(videos / "a.mp4", [50] * 8, 8)
    write_video(videos / "b.mp4", [200] * 12, 24)
    write_video(videos / "more" / "c.mp4", [100] * 8, 24000 / 1001, size=48)
    (videos / "broken.mp4").write_bytes(b"no video at all")
    return videos


SPECS = [
    RewardSpec(name="toy_rewards:two_parts", weights={"level": 1.0, "rate": 0.5}),
    RewardSpec(name="video_stats", options={"parts": ["motion"]}, metric_only=True),
    RewardSpec(name="toy_rewards:worth", metric_only=True),
    RewardSpec(name="toy_rewards:with_reasons", metric_only=True, try_out=False),
]


def test_rows_of_files_name_their_rewards(folder, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"video": "a.mp4", "prompt": "a", "rewards": ["as_list"]}, {"video": "b.mp4", "prompt": "bb"}]
    rows += [{"video": name, "prompt": "c", "rewards": "two_parts"} for name in ("more/c.mp4", "broken.mp4")]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    specs = [RewardSpec(name="toy_rewards:as_list"), RewardSpec(name="toy_rewards:two_parts", weights={"level": 1.0})]
    found = {row.video: row.scores for row in score_videos(folder, prompts, specs)}
    assert found["a.mp4"]["total"] == 1.0
    assert found["b.mp4"]["total"] == 2.0 + found["b.mp4"]["level"]
    assert [math.isnan(found[name]["as_list"]) for name in ("b.mp4", "more/c.mp4")] == [False, True]
    with pytest.raises(RewardConfigError, match="there is no reward 'as_list'"):
        score_videos(folder, prompts, specs[1:])


def test_files_are_scored_at_their_own_fps_with_their_rows(folder, tmp_path):
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("video,prompt,worth\na.mp4,a dog,1\nb,bad,2\nmore/c.mp4,two,3\nbroken.mp4,none,4\n")
    rows = {row.video: row for row in score_videos(folder, prompts, SPECS, output=tmp_path / "out")}
    assert rows["a.mp4"].scores["rate"] == 8
    assert rows["b.mp4"].scores["rate"] == 24
    assert rows["more/c.mp4"].scores["rate"] == pytest.approx(24000 / 1001)
    for name, level in (("a.mp4", 50), ("b.mp4", 200), ("more/c.mp4", 100)):
        assert rows[name].scores["level"] == pytest.approx(level, abs=4)
        assert rows[name].scores["total"] == pytest.approx(rows[name].scores["level"] + 0.5 * rows[name].fps, rel=1e-6)
        assert rows[name].scores["motion"] == 0
    assert [row.scores["worth"] for row in rows.values() if row.scores["worth"] > 0] == [1, 2, 3]
    assert rows["b.mp4"].reason == "with_reasons: because of bad"
    assert math.isnan(rows["broken.mp4"].scores["level"])
    assert "cannot be read" in rows["broken.mp4"].reason
    assert (rows["b.mp4"].frames, rows["more/c.mp4"].height) == (12, 48)
    with (tmp_path / "out" / "scores.csv").open() as file:
        table = {row["video"]: row for row in csv.DictReader(file)}
    assert float(table["a.mp4"]["total"]) == rows["a.mp4"].scores["total"]
    assert table["broken.mp4"]["level"] == ""
    document = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert document["summary"]["level"]["count"] == 3
    assert document["summary"]["level"]["mean"] == pytest.approx(summarize(list(rows.values()), "level")["mean"])
    assert [video["scores"]["level"] for video in document["videos"] if video["video"] == "broken.mp4"] == [None]
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_rewards_of_files_are_tried_with_the_rows_of_several(folder, monkeypatch):
    rows = [ScoredVideo(f"{name}.mp4", name, {}) for name in "abc"]
    tried = []
    monkeypatch.setattr(
        "sage_grpo.rewards.base.CompositeReward.try_out",
        lambda self, text, *, others, **more: tried.append((text, others)) or "",
    )
    judge(SPECS[1:2], rows, "cpu")
    assert tried == [("a", [("b", {}), ("c", {})])]


def evaluate(videos: Path, prompts: str, rewards: str, *words: str) -> int:
    (videos / "prompts.txt").write_text(prompts)
    return main(
        ["evaluate", "--videos", str(videos), "--prompts", str(videos / "prompts.txt"), "--rewards", rewards, *words]
    )


@pytest.mark.parametrize(("there", "asked", "used"), [(True, [], "cuda"), (True, ["cpu"], "cpu")])
def test_rewards_of_files_are_on_the_gpu_where_there_is_one(there, asked, used, folder, monkeypatch):
    seen, rewards = [], '[{"name": "video_stats", "try_out": false}]'  # there is no such device to try them on
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr("sage_grpo.generation.files.score_clips", lambda reward, *_: seen.append(reward.device))
    evaluate(folder, "one\n" * 4, rewards, *(f"--model.device={device}" for device in asked))
    assert {device.type for device in seen} == {used}


def test_scores_of_files_as_json_without_what_means_nothing_for_files(folder, tmp_path, capsys):
    rewards = '[{"name": "toy_rewards:two_parts", "weights": {"level": 1.0, "rate": 0.0}}]'
    assert evaluate(folder, "one\n" * 4, rewards, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["level"]["count"] == 3
    assert found["total"]["mean"] == pytest.approx((50 + 200 + 100) / 3, abs=4)
    assert evaluate(folder, "one\n" * 4, rewards, "--settings.steps", "3") == 2
    assert "--settings would change nothing" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("rewards: [{name: mine:one, weights: {a: 1.0}}]\n")
    assert evaluate(folder, "one\n" * 4, rewards, "--json", "--run", str(tmp_path)) == 0, "they are not called"
    assert evaluate(folder, "one\n" * 4, '[{"name": "toy_rewards:ranked", "options": {"takes": "group"}}]') == 2
    assert "clips are scored one by one. Leave it out here." in capsys.readouterr().err


def test_no_video_that_can_be_scored_is_an_error_after_the_table_is_written(tmp_path, capsys):
    for name in ("a.mp4", "b.mp4"):
        (tmp_path / name).write_bytes(b"no video at all")
    rewards = '[{"name": "video_stats", "weights": {"motion": 1.0}}]'
    assert evaluate(tmp_path, "one\ntwo\n", rewards, "--out", str(tmp_path / "out")) == 2
    assert (tmp_path / "out" / "scores.csv").read_text().count(",cannot be read: ") == 2
    assert capsys.readouterr().out.split()[:2] == ["2", "videos"], "the title of the table"


def test_texts_of_others_are_no_formulas_in_the_table(tmp_path):
    texts = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "a = b", "1"]
    rows = [ScoredVideo(f"={text}", text, scores={"-level": -1.5}, reason=text) for text in texts]
    write_scores(tmp_path, rows)
    with (tmp_path / "scores.csv").open(newline="") as file:
        header, *table = csv.reader(file)
    assert [row[header.index("'-level")] for row in table] == ["-1.5"] * len(texts)
    told = ["'=1+1", "'+1", "'-1", "'@SUM(A1)", "'\t=1", "' =1", "a = b", "1"]
    assert [(row[0], row[1], row[-1]) for row in table] == [
        ("'" + f"={text}".replace("\r", " "), one, one) for text, one in zip(texts, told)
    ]
    assert [row["prompt"] for row in json.loads((tmp_path / "scores.json").read_text())["videos"]] == texts
