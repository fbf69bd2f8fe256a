"""What a report says is what the folders of runs hold: scores, intervals, differences, pairs of clips."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from report_zoo import FPS, FRAMES, GAINS, PROMPTS, fake_run
from sage_grpo.cli import report
from sage_grpo.tools.report.page import as_script, describe, gallery, leave_report, render
from sage_grpo.tools.report.picture import slug, write_pairs
from sage_grpo.tools.report.run_data import MOST_POINTS, RunData, noise_picture, read_run, series
from sage_grpo.tools.report.summary import by_attribute, interval, table, verdict
from sage_grpo.utils.json_schema import DocumentError
from sage_grpo.utils.statistics import t_quantile
from sage_grpo.utils.video import read_video
from sage_grpo.worlds.shapes.scene import ATTRIBUTES, scenes_of, to_text


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [fake_run(folder / "a"), fake_run(folder / "b", seed=1), fake_run(folder / "c", lr=1e-4)]


def test_gains_are_paired_clip_by_clip_with_their_interval(runs: list[Path]) -> None:
    base, tuned = table([read_run(runs[0])])["rows"]
    assert (base["kind"], tuned["kind"]) == ("base", "run")
    gain, score = tuned["gains"]["total"], tuned["scores"]["total"]
    assert gain["mean"] == pytest.approx(statistics.mean(GAINS))
    assert gain["half"] == pytest.approx(
        t_quantile(0.975, len(GAINS) - 1) * statistics.stdev(GAINS) / math.sqrt(len(GAINS))
    )
    finals = [1 + 0.01 * place + GAINS[place] for place in range(len(GAINS))]
    assert score["mean"] == pytest.approx(statistics.mean(finals))
    assert base["gains"] == {}


def in_shapes(start: Path, folder: Path) -> Path:
    """A run whose prompts name attributes: those of crosses lose a quarter of their shape, all others gain a little of everything."""
    scenes = [scene for scene in scenes_of("heldout") if scene.shape in ("cross", "ring")][:30]
    for file in sorted((Path(shutil.copytree(start, folder)) / "videos").glob("heldout-*.json")):
        index = json.loads(file.read_text())
        share = int(file.stem.removeprefix("heldout-")) / 4
        index["rows"] = []
        for place, scene in enumerate(scenes):
            scores = {f"TA/{name}": 0.5 + (0.1 + 0.001 * place) * share for name in ATTRIBUTES}
            if scene.shape == "cross":
                scores["TA/shape"] = 0.5 - (0.25 + 0.002 * place) * share
            scores["total"] = 1 + (0.2 + 0.01 * place) * share
            index["rows"].append({"prompt": to_text(scene, place), "noise": str(place), "scores": scores, "clip": None})
        file.write_text(json.dumps(index))
    return folder


def test_what_fell_most_is_told_beside_what_was_gained(runs: list[Path], tmp_path: Path) -> None:
    run = read_run(in_shapes(runs[0], tmp_path / "shapes"))
    lowest, *others = by_attribute(run)
    crosses = [place for place, clip in enumerate(run.clips[0]) if "cross" in clip.prompt]
    losses = [-(0.25 + 0.002 * place) for place in crosses]
    assert (lowest["label"], lowest["part"], lowest["count"]) == ("shape = cross", "TA/shape", len(crosses))
    assert (lowest["before"], lowest["after"]) == (pytest.approx(0.5), pytest.approx(0.5 + statistics.mean(losses)))
    half = t_quantile(0.975, len(losses) - 1) * statistics.stdev(losses) / math.sqrt(len(losses))
    assert (lowest["mean"], lowest["half"]) == (pytest.approx(statistics.mean(losses)), pytest.approx(half))
    assert all(row["mean"] > 0 and row["count"] >= 5 for row in others)
    assert by_attribute(replace(run, clips={0: run.clips[0]})) == []
    unscored = [replace(clip, scores={"total": clip.scores["total"]}) for clip in run.clips[0]]
    assert by_attribute(replace(run, clips={**run.clips, 0: unscored})) == []
    gained, lost = verdict(run)
    assert "better (+0.345" in gained
    assert "What fell most is shape = cross" in lost
    assert f"{lowest['mean']:.3f}" in lost
    told = describe([run])[0]["verdict"]
    assert told == [[gained, lost]]
    plain = verdict(read_run(runs[0]), "a")  # prompts that name no attributes that we know of
    assert len(plain) == 1
    assert plain[0].startswith("a: after 4 iterations")
    assert "no clear difference" in plain[0]
    assert by_attribute(read_run(runs[0])) == []


def with_gains(run: RunData, gains: list[float]) -> RunData:
    """The run, with these gains of the total at its last evaluation, prompt by prompt."""
    last, before = max(run.clips), {clip.key: clip.scores["total"] for clip in run.clips[0]}
    after = [
        replace(clip, scores={**clip.scores, "total": before[clip.key] + gain})
        for clip, gain in zip(run.clips[last], gains)
    ]
    return replace(run, clips={**run.clips, last: after})


@pytest.mark.parametrize(
    ("gains", "told"),
    [
        ([0.3, 0.31, 0.29, 0.3, 0.32, 0.28], "better (+0.300"),
        ([-0.3, -0.31, -0.29, -0.3, -0.32, -0.28], "worse (-0.300"),
        ([0.3, -0.31, 0.29, -0.3, 0.32, -0.28], "no clear difference (+0.003"),
        ([-0.3, 0.31, -0.29, 0.3, -0.32, 0.28], "no clear difference (-0.003"),
        ([0.0] * 6, "no clear difference (+0.000"),
    ],
)
def test_a_verdict_is_better_worse_or_not_clear(gains: list[float], told: str, runs: list[Path]) -> None:
    (text,) = verdict(with_gains(read_run(runs[0]), gains))
    assert told in text.replace("\u2212", "-")
    assert f"scores {1.025 + statistics.mean(gains):.3f} on 6 held-out clips, the base model 1.025" in text


def test_a_page_says_how_far_a_run_is_and_how_long_it_took(runs: list[Path], tmp_path: Path) -> None:
    (told,) = describe([read_run(runs[0])])[0]["runs"]
    assert (told["iteration"], told["iterations"], told["finished"]) == (4, 4, True)
    assert told["hours"] == pytest.approx(4 * 1.5 / 3600)
    assert "sound" not in read_run(runs[0]).size
    alike = [Path(shutil.copytree(runs[0], tmp_path / place / "run")) for place in "xy"]
    for file in (alike[0] / "videos").glob("*.json"):
        file.write_text(file.read_text().replace('"sound": false', '"sound": true'))
    assert read_run(alike[0]).size == {"width": 32, "height": 32, "frames": FRAMES, "fps": FPS, "sound": 1}
    assert [run["name"] for run in describe([read_run(run) for run in alike])[0]["runs"]] == ["x/run", "y/run"]
    data = describe([read_run(run) for run in runs])[0]
    differs = {"seed": [0, 1, 0], "optimizer.lr": [5e-5, 5e-5, 1e-4]}
    assert {row["key"]: row["values"] for row in data["differs"]} == differs
    kinds = [(event["kind"], event["iteration"]) for event in told["events"]]
    assert sorted(kinds) == [("masked", 2), ("resume", 2), ("sentinel", 3), ("start", 0)]


def test_seeds_of_one_experiment_are_taken_together(runs: list[Path]) -> None:
    found = table([read_run(run) for run in runs])
    assert [row["label"] for row in found["rows"]] == ["base", "a", "b", "c", "2 seeds: a, b"]
    over = found["rows"][-1]["scores"]["total"]
    assert (over["count"], over["of"]) == (2, "seeds")
    assert over["half"] == pytest.approx(0)  # both runs were made alike
    assert (found["rows"][-1]["run"], found["rows"][-1]["members"], found["rows"][-1]["iteration"]) == (0, [0, 1], 4)
    assert found["rows"][-1]["gains"]["total"]["mean"] == pytest.approx(statistics.mean(GAINS))
    assert found["better"]["total"] == found["better"]["TA"] == 1
    assert "drift" not in found["better"]  # it counts in no reward


def test_a_copy_of_a_run_is_no_second_seed(runs: list[Path], tmp_path: Path) -> None:
    """It would count what one seed found as found twice, with an interval of nothing."""
    copied = read_run(Path(shutil.copytree(runs[0], tmp_path / "copy")))
    first, second = (read_run(run) for run in runs[:2])
    for together in ([first, copied], [first, copied, second]):
        assert not [row for row in table(together)["rows"] if row["kind"] == "seeds"]


BASE = {
    "model.path": "other", "model.revision": "main", "model.family": "other", "model.frames": 5, "model.height": 64, "model.width": 64,
    "model.guidance_scale": 3.0, "model.guidance_scale_2": 2.0, "model.dtype": "bfloat16", "model.shift": 2.0, "model.negative_prompt": "bad",
    "model.lora.path": "start", "evaluate.seed": 77, "evaluate.steps": 3, "evaluate.solver": "ab2", "evaluate.prompts": 2,
    "evaluate.per_prompt": 2, "data.eval_prompts": "other.txt",
}  # fmt: skip


def test_runs_that_do_not_begin_alike_have_bases_of_their_own(runs: list[Path]) -> None:
    """Runs that begin alike share one, however they go on; other rewards score the same clips otherwise."""
    first, second = read_run(runs[0]), read_run(runs[2])

    def shared(changed: dict[str, Any]) -> tuple[list[str], list[list[int]]]:
        other = replace(second, settings={**second.settings, **changed})
        shown, files = gallery([first, other])
        pictures = [files[cell[1]][1].parent.parent.name for cell in shown["entries"][0]["base"]]
        assert pictures == ["a", "c"][: len(shown["bases"])]
        return [row["label"] for row in table([first, other])["rows"]], shown["bases"]

    for key, value in BASE.items():
        assert shared({key: value}) == (["base of a", "base of c", "a", "c"], [[0], [1]]), key
    same = {"evaluate.every": 7, "model.device": "cpu", "model.lora.rank": 2, "rewards[0].batch_size": 1, "seed": 9}
    assert shared(same) == (["base", "a", "c"], [[0, 1]])
    assert shared({"rewards[0].weights.TA": 9.0}) == (["base of a", "base of c", "a", "c"], [[0, 1]])


def test_intervals_of_the_page_are_students_95_of_100() -> None:
    assert interval([], "seeds") is None
    assert (interval([1.5], "seeds") or {})["half"] is None
    for count, quantile in ((2, 12.7062), (3, 4.3027), (100, 1.98422), (1000, 1.96234)):  # tables give them so
        values = [0.0, 2.0] * (count // 2) + [1.0] * (count % 2)
        found = interval(values, "seeds")
        assert found is not None
        assert found["half"] == pytest.approx(quantile * statistics.stdev(values) / math.sqrt(count), rel=1e-4)


def test_a_run_without_an_index_still_has_its_figures_and_clips(runs: list[Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs[0], tmp_path / "old"))
    for file in (folder / "videos").glob("*.json"):
        file.unlink()
    second = read_run(folder).clips[4][1]
    assert (second.key, second.scores) == ((PROMPTS[1], "1"), {})
    assert second.file == folder / "videos" / "heldout-000004-01.mp4"
    base, tuned = table([read_run(folder)])["rows"]
    assert tuned["gains"]["total"] == {"mean": pytest.approx(sum(GAINS) / 6), "half": None, "count": 1, "of": "prompts"}
    assert base["scores"]["total"]["half"] == pytest.approx(1.96 * 0.01, rel=1e-4)
    shown, files = gallery([read_run(folder)])
    assert len(shown["entries"]) == len(PROMPTS)
    assert len(files) == 3 * len(PROMPTS)


def test_the_gallery_pairs_prompt_and_noise_over_runs_and_evaluations(runs: list[Path]) -> None:
    shown, files = gallery([read_run(run) for run in runs])
    assert [entry["prompt"] for entry in shown["entries"]] == list(PROMPTS)
    assert shown["iterations"] == [2, 4]
    entry = shown["entries"][1]
    assert [[cell[0] for cell in run] for run in entry["runs"]] == [[2, 4]] * 3
    (base,) = entry["base"]
    assert files[base[1]][1] == runs[0] / "videos" / "heldout-000000-01.mp4"
    place, file = files[entry["runs"][1][1][1]]
    assert (place, file) == (1, runs[1] / "videos" / "heldout-000004-01.mp4")
    total = shown["parts"].index("total")
    assert entry["runs"][0][1][2][total] - base[2][total] == pytest.approx(GAINS[1])


def test_another_noise_is_another_entry(runs: list[Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs[0], tmp_path / "run"))
    file = folder / "videos" / "heldout-000004.json"
    index = json.loads(file.read_text())
    index["rows"][0]["noise"] = "77"
    file.write_text(json.dumps(index))
    shown, _ = gallery([read_run(folder)])
    assert len(shown["entries"]) == len(PROMPTS) + 1
    tuned = table([read_run(folder)])["rows"][1]
    assert tuned["gains"]["total"]["count"] == len(PROMPTS) - 1


def test_long_runs_have_as_many_points_as_a_screen() -> None:
    many = [{"iteration": number + 1, "reward/total": float(number)} for number in range(10 * MOST_POINTS)]
    found = series(many)
    assert len(found["iteration"]) == MOST_POINTS
    assert found["every"] == 10
    assert found["iteration"][-1] == 10 * MOST_POINTS
    assert found["values"]["reward/total"][0] == pytest.approx(4.5)
    for count, every in ((MOST_POINTS, 1), (MOST_POINTS + 1, 2)):
        some = series(many[:count])
        assert (some["every"], some["iteration"][-1], len(some["iteration"])) == (every, count, -(-count // every))
    odd = [{"iteration": 3, "a": None, "gradient/raw/000": 1.0}, {"iteration": 5, "a": math.nan, "b": 2}]
    assert series(odd) == {"iteration": [3, 5], "every": 1, "values": {"a": [None, None], "b": [None, 2.0]}}


def test_data_stay_data_inside_the_page(runs: list[Path], tmp_path: Path) -> None:
    text = as_script({"x": "</script><!--\u2028 & \ud800", "y": float("nan")})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text)["x"].startswith("</script><!--\u2028 & ")
    assert json.loads(text)["y"] is None
    run = Path(shutil.copytree(runs[0], tmp_path / "%%DATA%% <b>name<"))
    page = render(describe([read_run(run)])[0])
    assert "<b>name" not in page
    assert page.count("<script") == 2
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page


def test_before_and_after_stand_side_by_side(runs: list[Path], tmp_path: Path) -> None:
    files = write_pairs(read_run(runs[0]), tmp_path / "pairs", most=2)
    assert [file.name for file in files] == ["00-a-red-circle-moves-left.mp4", "01-a-blue-ring-on-a-navy-wall.mp4"]
    video, fps = read_video(files[1])
    assert (video.shape[0], fps) == (FRAMES, FPS)
    assert video.shape[1] == 512 + 512 // 12
    assert video.shape[2] == 512 + 10 + 512  # large enough to look at
    assert abs(int(video[0, 60, 60, 0]) - 31) < 8  # the shade of the base
    assert abs(int(video[0, 60, -60, 0]) - 161) < 8
    assert int(video[0, 60:, 514:520].float().mean()) > 200
    words = video[0, :42, :, 0] < 100  # in the white band above: "base" on the left, the longer "tuned" on the right
    assert 0 < int(words[:, :512].sum()) < int(words[:, 522:].sum())


def test_a_report_that_fails_is_a_warning(runs: list[Path], tmp_path: Path, monkeypatch) -> None:
    folder = Path(shutil.copytree(runs[0], tmp_path / "run"))
    monkeypatch.setattr("sage_grpo.tools.report.page.write_pairs", lambda run, folder: None)
    (folder / "report.html").mkdir()  # nothing can be written there
    with pytest.warns(UserWarning, match=r"could not be written .*`sage-grpo report"):
        assert leave_report(folder) == ""


def test_a_finished_run_that_is_started_again_keeps_its_report(runs: list[Path], tmp_path: Path, monkeypatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr("sage_grpo.tools.report.page.write_pairs", lambda run, folder: made.append(folder))
    folder = Path(shutil.copytree(runs[0], tmp_path / "run"))
    page, pairs = folder / "report.html", folder / "before_after"
    assert leave_report(folder) == f"Report: {page}"  # no pair, no word of one
    pairs.mkdir()
    (pairs / "00-a.mp4").write_bytes(b"")
    assert leave_report(folder) == f"Report: {page}   before and after: {pairs}"
    assert made == [pairs]
    written = page.stat().st_mtime_ns
    for later, times in ((10**9, 2), (-(10**9), 2)):
        os.utime(folder / "metrics.jsonl", ns=(written + later, written + later))
        leave_report(folder)
        assert made == [pairs] * times
        os.utime(page, ns=(written, written))


def test_damaged_files_are_passed_over_or_named(runs: list[Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs[0], tmp_path / "run"))
    (folder / "videos" / "heldout-000002.json").write_text("{")
    (folder / "schedule.json").write_text('{"sigmas": [2, 1]}')
    (folder / "events.jsonl").write_text('{"kind": 1}\nnonsense\n')
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"iteration": 5, "rew')
    run = read_run(folder)
    assert sorted(run.clips) == [0, 2, 4]  # 2 from its list of prompts
    assert noise_picture(run) is None
    render(describe([run])[0])
    index = json.loads((folder / "videos" / "heldout-000004.json").read_text())
    for odd in ({"prompt": 1}, {"noise": None}, {"scores": []}, {"scores": {"total": "1"}}, {"clip": 3}):
        rows = [{**index["rows"][0], **odd}]
        (folder / "videos" / "heldout-000004.json").write_text(json.dumps({**index, "rows": rows}))
        with pytest.raises(DocumentError, match=r"heldout-000004\.json: (a row|scores)"):
            read_run(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="is it the folder of a run"):
        read_run(tmp_path / "empty")


def test_linear_is_drawn_only_where_the_runs_grid_is_known(runs: list[Path]) -> None:
    """Its law needs the second sigma of the run's own grid; a group with other steps before its window (an offset) has another."""
    run = read_run(runs[0])
    assert run.schedule is not None
    linear = {**run.config, "kernel": {"name": "linear", "eta": 1.0}}
    found = noise_picture(replace(run, config=linear))
    assert found is not None
    second, sigma, after = (run.schedule["sigmas"][place] for place in (1, 1, 2))
    assert found["rows"][1]["std"] == pytest.approx(second * sigma * (sigma - after) ** 0.5, rel=1e-5)
    assert noise_picture(replace(run, config=linear, schedule={**run.schedule, "offset": 2})) is None
    assert noise_picture(replace(run, schedule={**run.schedule, "offset": 2})) is not None


def test_a_watched_page_is_written_again_when_the_run_has_changed(tmp_path: Path, monkeypatch, capsys) -> None:
    folder, pages = fake_run(tmp_path / "going"), []
    (folder / ".finished").unlink()

    def sleep(seconds: float) -> None:
        pages.append((folder / "report.html").stat().st_mtime_ns)
        if len(pages) > 1:
            (folder / ".finished").touch()

    monkeypatch.setattr("time.sleep", sleep)
    assert report.run(report.Options(runs=[str(folder)], watch=True)) == 0
    assert pages[0] == pages[1] < (folder / "report.html").stat().st_mtime_ns
    assert "going" in capsys.readouterr().out


def test_a_prompt_becomes_part_of_a_name() -> None:
    assert slug("A/../b: <c>") == "a-b-c"
    assert slug("红色的圆" * 20) == "红色的圆" * 8  # 96 bytes of three for a letter
    assert slug("ab" * 48) == "ab" * 24
    assert slug("a" * 47 + " b") == "a" * 47
    assert slug("///") == "clip"
