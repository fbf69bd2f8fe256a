"""Scoring video files: the file's own fps, prompts by name, and files that cannot be read."""

from __future__ import annotations

import csv
import json
import math
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from sage_grpo.clips.files import read_prompts, score_videos, summarize
from sage_grpo.commands.evaluate import print_scores
from sage_grpo.rewards.spec import RewardSpec


def write_video(path: Path, levels: list[int], fps: Fraction | int, size: int = 32) -> None:
    """A clip whose frames are even grey."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width = stream.height = size
        stream.pix_fmt = "yuv420p"
        for level in levels:
            picture = np.full((size, size, 3), level, dtype=np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


@pytest.fixture
def folder(tmp_path) -> Path:
    videos = tmp_path / "videos"
    (videos / "more").mkdir(parents=True)
    write_video(videos / "a.mp4", [50] * 8, 8)
    write_video(videos / "b.mp4", [200] * 12, 24)
    write_video(videos / "more" / "c.mp4", [100] * 8, Fraction(24000, 1001), size=48)
    (videos / "broken.mp4").write_bytes(b"no video at all")
    return videos


SPECS = [
    RewardSpec(name="toy_rewards:two_parts", weights={"level": 1.0, "rate": 0.5}),
    RewardSpec(name="video_stats", options={"parts": ["motion"]}, metric_only=True),
]


def test_files_are_scored_at_their_own_fps(folder, tmp_path, capsys):
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("video,prompt\na.mp4,first\nb,second\nmore/c.mp4,third\nbroken.mp4,none\n")
    rows = {row.video: row for row in score_videos(folder, prompts, SPECS, output=tmp_path / "out")}
    assert rows["a.mp4"].scores["rate"] == 8
    assert rows["b.mp4"].scores["rate"] == 24
    assert rows["more/c.mp4"].scores["rate"] == pytest.approx(24000 / 1001)
    for name, level in (("a.mp4", 50), ("b.mp4", 200), ("more/c.mp4", 100)):
        assert rows[name].scores["level"] == pytest.approx(level, abs=4)
        assert rows[name].scores["total"] == pytest.approx(rows[name].scores["level"] + 0.5 * rows[name].fps, rel=1e-6)
        assert rows[name].scores["motion"] == 0
    assert math.isnan(rows["broken.mp4"].scores["level"])
    assert "cannot be read" in rows["broken.mp4"].reason
    assert (rows["b.mp4"].frames, rows["more/c.mp4"].height) == (12, 48)
    print_scores(list(rows.values()))
    assert "broken.mp4: cannot be read" in capsys.readouterr().out
    with (tmp_path / "out" / "scores.csv").open() as file:
        table = {row["video"]: row for row in csv.DictReader(file)}
    assert float(table["a.mp4"]["total"]) == rows["a.mp4"].scores["total"]
    assert table["broken.mp4"]["level"] == ""
    document = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert document["summary"]["level"]["count"] == 3
    assert document["summary"]["level"]["mean"] == pytest.approx(summarize(list(rows.values()), "level")["mean"])
    assert [video["scores"]["level"] for video in document["videos"] if video["video"] == "broken.mp4"] == [None]
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_other_columns_reach_the_rewards(folder, tmp_path):
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("video,prompt,worth\na,first,1\nb,second,2\nmore/c,third,3\nbroken,none,4\n")
    rows = score_videos(folder, prompts, [RewardSpec(name="toy_rewards:worth")])
    assert {row.video: row.scores["worth"] for row in rows if not row.reason} == {
        "a.mp4": 1,
        "b.mp4": 2,
        "more/c.mp4": 3,
    }


@pytest.mark.parametrize(("there", "asked", "used"), [(True, [], "cuda"), (False, [], "cpu"), (True, ["cpu"], "cpu")])
def test_rewards_of_files_are_on_the_gpu_where_there_is_one(there, asked, used, folder, tmp_path, monkeypatch):
    from sage_grpo.cli import main

    seen, rewards = [], '[{"name": "video_stats", "try_out": false}]'  # there is no such device to try them on
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr("sage_grpo.clips.files._score_batch", lambda reward, *_: seen.append(reward.device))
    (tmp_path / "p.txt").write_text("one\n" * 4)
    words = ["--videos", str(folder), "--prompts", str(tmp_path / "p.txt"), "--rewards", rewards]
    main(["evaluate", *words, *(f"--model.device={device}" for device in asked)])
    assert {device.type for device in seen} == {used}


@pytest.mark.parametrize(
    "words", [["--model.path", "x"], ["--settings.steps", "3"], ["--lora", "x"], ["--max_failed_fraction", "0.5"]]
)
def test_options_that_mean_nothing_for_files_are_refused(words, folder, tmp_path, capsys):
    from sage_grpo.cli import main

    (tmp_path / "p.txt").write_text("one\n" * 4)
    assert main(["evaluate", "--videos", str(folder), "--prompts", str(tmp_path / "p.txt"), *words]) == 2
    assert f"{words[0].split('.')[0]} would change nothing" in capsys.readouterr().err


def test_scores_of_files_as_json(folder, tmp_path, capsys):
    from sage_grpo.cli import main

    (tmp_path / "p.txt").write_text("one\n" * 4)
    rewards = '[{"name": "toy_rewards:two_parts", "weights": {"level": 1.0, "rate": 0.0}}]'
    words = ["--videos", str(folder), "--prompts", str(tmp_path / "p.txt"), "--rewards", rewards]
    assert main(["evaluate", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["level"]["count"] == 3
    assert found["total"]["mean"] == pytest.approx((50 + 200 + 100) / 3, abs=4)


def test_no_video_that_can_be_scored_is_an_error_after_the_table_is_written(tmp_path, capsys):
    from sage_grpo.cli import main

    (tmp_path / "videos").mkdir()
    for name in ("a.mp4", "b.mp4"):
        (tmp_path / "videos" / name).write_bytes(b"no video at all")
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    rewards = json.dumps([{"name": "video_stats", "weights": {"motion": 1.0}}])
    words = ["--videos", str(tmp_path / "videos"), "--prompts", str(tmp_path / "prompts.txt"), "--rewards", rewards]
    assert main(["evaluate", *words, "--out", str(tmp_path / "out")]) == 2
    assert "None of the 2 videos" in capsys.readouterr().err
    assert (tmp_path / "out" / "scores.csv").read_text().count(",cannot be read: ") == 2


@pytest.mark.parametrize(
    ("name", "text"), [("p.txt", ""), ("p.csv", ""), ("p.csv", "video,prompt\n"), ("p.json", "{}")]
)
def test_an_empty_list_of_prompts_is_refused(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"0 prompts for 1 videos|no prompt for 1 of 1 videos: a\.mp4"):
        read_prompts(tmp_path / name, ["a.mp4"])


def test_scores_do_not_depend_on_the_batch(tmp_path):
    for index in range(5):
        write_video(tmp_path / f"{index}.mp4", [30 * index] * 4, 8)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"p{index}" for index in range(5)))
    totals = [
        [row.scores["total"] for row in score_videos(tmp_path, prompts, SPECS[:1], batch_size=size)]
        for size in (1, 2, 8)
    ]
    assert totals[0] == totals[1] == totals[2]


def test_prompt_files(tmp_path):
    names = ["a.mp4", "b.mp4"]
    contents = {
        "p.txt": "one\n\ntwo\n",
        "p.csv": "video,prompt\nb.mp4,two\na.mp4,one\n",
        "p.jsonl": '{"video": "b", "prompt": "two"}\n{"video": "a", "prompt": "one"}\n',
        "p.json": '{"a": "one", "b.mp4": "two", "unused": "x"}',
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
        assert [prompt.text for prompt in read_prompts(tmp_path / name, names)] == ["one", "two"]
    with pytest.raises(ValueError, match="2 prompts for 3 videos"):
        read_prompts(tmp_path / "p.txt", [*names, "c.mp4"])
    with pytest.raises(ValueError, match=r"no prompt for 1 of 3 videos: c\.mp4"):
        read_prompts(tmp_path / "p.csv", [*names, "c.mp4"])
    (tmp_path / "bad.csv").write_text("file,text\na,b\n")
    with pytest.raises(ValueError, match="needs video and prompt"):
        read_prompts(tmp_path / "bad.csv", names)


def test_prompts_of_files_are_read_as_those_of_a_run(tmp_path):
    """Comments and line separators alike; a second row for a video and what is no UTF-8 are refused by line."""
    (tmp_path / "p.txt").write_text("# by hand\na\u2028cat\na dog\n")
    assert [prompt.text for prompt in read_prompts(tmp_path / "p.txt", ["a.mp4", "b.mp4"])] == ["a\u2028cat", "a dog"]
    (tmp_path / "twice.csv").write_text("video,prompt\na,one\na,two\n")
    with pytest.raises(ValueError, match=r"twice\.csv, line 3 is the second row for a"):
        read_prompts(tmp_path / "twice.csv", ["a.mp4"])
    (tmp_path / "p.txt").write_bytes("a café".encode("latin1"))
    with pytest.raises(ValueError, match=r"p\.txt, line 1: byte 0xe9 is not UTF-8"):
        read_prompts(tmp_path / "p.txt", ["a.mp4"])
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(ValueError, match=r"p\.json is not JSON"):
        read_prompts(tmp_path / "p.json", ["a.mp4"])


def test_a_broken_reward_stops_before_any_file_is_read(folder, tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("bad\nb\nc\nd\n")
    read = []
    monkeypatch.setattr("sage_grpo.clips.files.read_video", lambda path: read.append(path))
    specs = [*SPECS, RewardSpec(name="toy_rewards:raises_for_bad", metric_only=True)]
    with pytest.raises(ValueError, match=r"'raises_for_bad' failed when it was tried out: TimeoutError"):
        score_videos(folder, prompts, specs)
    assert not read


def test_what_a_reward_says_about_a_video_is_in_its_row(folder, tmp_path):
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("video,prompt\na.mp4,a dog\nb,bad\nmore/c.mp4,third\nbroken.mp4,none\n")
    rows = {row.video: row for row in score_videos(folder, prompts, [RewardSpec(name="toy_rewards:with_reasons")])}
    assert rows["a.mp4"].reason == "with_reasons: a dog"
    assert rows["b.mp4"].reason == "with_reasons: nobody is in the picture"
    assert rows["more/c.mp4"].reason == ""
