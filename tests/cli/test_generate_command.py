"""`sage-grpo generate` and clips in files: the right clips in the right files, whatever the batch, and their scores."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import double
import tiny
import trainer_toys
from sage_grpo.cli.evaluate import print_scores
from sage_grpo.cli.generate import Options, run
from sage_grpo.data.examples import load_examples
from sage_grpo.data.prompts import Prompt
from sage_grpo.generation import files
from sage_grpo.generation.files import (
    ScoredVideo,
    best_and_worst,
    find_videos,
    read_prompts,
    score_clips,
    summarize,
    write_scores,
)
from sage_grpo.generation.generate import GenerateSpec, _policy, clips_of, prompts_of, sample
from sage_grpo.models.spec import ModelSpec
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.samplers.kernels import KernelSpec
from sage_grpo.samplers.noise import keyed_noise
from sage_grpo.types import Sound
from trainer_zoo.toy import ToyModel


@pytest.fixture
def wan(checkpoint):
    return checkpoint("wan_t2v")


def options(folder, out, **fields) -> Options:
    spec = fields.pop("model", ModelSpec(path=str(folder), cache=None, guidance_scale=1.0))
    return Options(model=spec, out=str(out), progress=False, steps=2, **fields)


@pytest.mark.parametrize("last", [True, False])
def test_the_last_step_explores_only_where_its_noise_may_stay(last: bool, wan, tmp_path) -> None:
    given = options(wan, tmp_path, prompts="a cat", kernel=KernelSpec(name="sage"), deterministic_last=last)
    model = given.model.load("cpu")
    assert _policy(given, model).schedule.stochastic == (True, not last)
    # Unless told, as a run does it: on this grid the step before the last would hold far too much noise, too.
    assert _policy(replace(given, deterministic_last=None), model).schedule.stochastic == (False, False)
    exact = replace(given, deterministic_last=None, kernel=KernelSpec(name="sage_exact"))
    assert _policy(exact, model).schedule.stochastic == (True, True)


def test_the_checkpoints_solver_makes_the_stock_pipelines_clip(wan, tmp_path, monkeypatch) -> None:
    from sage_grpo.models.family import FamilyModel

    folder = tiny.variant(wan, tmp_path / "unipc", scheduler=tiny.unipc())
    call = {"height": 32, "width": 32, "num_frames": 5, "guidance_scale": 1.0, "num_inference_steps": 5}
    decode, made = FamilyModel.decode, []
    monkeypatch.setattr(FamilyModel, "decode", lambda self, latents: made.append(latents) or decode(self, latents))
    with double.whole():
        noise = keyed_noise((16, 2, 4, 4), "generate", 0, "start")[None]
        stock = tiny.pipeline(folder)(prompt="a cat", latents=noise, output_type="latent", **call).frames
        for solver in ("checkpoint", "euler"):
            run(replace(options(folder, tmp_path / solver, prompts="a cat", solver=solver), steps=5))
    torch.testing.assert_close(made[0], stock, rtol=double.CLOSE, atol=double.CLOSE)
    assert (made[1] - stock).abs().max() > 1e-3


def test_the_best_and_the_worst_clip_of_a_prompt_become_a_pair(wan, tmp_path, capsys, written) -> None:
    """Which they are is what the sampled clips score, whose files a codec has changed."""
    (tmp_path / "p.csv").write_text("prompt,told\na cat,1\na dog,2\na third,3\n")
    bright = [RewardSpec(name="trainer_toys:bright", weights={"trainer_toys:bright": 1.0})]
    fields = {"prompts": str(tmp_path / "p.csv"), "first": 2, "per_prompt": 3, "rewards": bright}
    assert run(options(wan, tmp_path / "out", batch=4, **fields)) == 0
    assert "6 clips, their scores and 2 pairs" in capsys.readouterr().out
    shines = {file: trainer_toys.bright(clip[None], [""], 8.0).item() for file, clip in written.items()}
    listed = [json.loads(line) for line in (tmp_path / "out" / "prompts.jsonl").read_text().splitlines()]
    videos = [file.name for file in shines]
    told = [
        {"told": str(1 + n // 3), "prompt": ("a cat", "a dog")[n // 3], "video": name} for n, name in enumerate(videos)
    ]
    assert listed == told
    with (tmp_path / "out" / "scores.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert {tmp_path / "out" / row["video"]: float(row["total"]) for row in rows} == shines
    assert {(row["fps"], row["frames"], row["height"], row["width"]) for row in rows} == {("8.0", "5", "32", "32")}
    examples = load_examples(tmp_path / "out", pairs=True)
    assert [(one.text, dict(one.metadata)) for one in examples] == [("a cat", {"told": "1"}), ("a dog", {"told": "2"})]
    for place, one in enumerate(examples):
        files = list(shines)[3 * place : 3 * place + 3]
        assert one.clips == (max(files, key=shines.__getitem__), min(files, key=shines.__getitem__))
    with pytest.raises(ValueError, match="set --per_prompt to 2 or more"):
        options(wan, tmp_path, prompts="a cat", rewards=bright)


def test_videos_that_nothing_tells_apart_make_no_pair() -> None:
    totals = [("a", 1.0), ("a", 1.0), ("b", math.nan), ("b", 2.0), ("c", 0.5), ("c", 0.0)]
    rows = [ScoredVideo(f"{n}.mp4", text, scores={"total": total}) for n, (text, total) in enumerate(totals)]
    assert best_and_worst(rows) == [{"prompt": "c", "win": "4.mp4", "lose": "5.mp4"}]


def test_videos_of_a_folder_are_found_with_their_prompts(tmp_path: Path) -> None:
    for name in ("b.MP4", "in/a.webm", "c.txt", "d.mp4/x.gif"):
        (tmp_path / "v" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "v" / name).write_text("")
    names = [path.relative_to(tmp_path / "v").as_posix() for path in find_videos(tmp_path / "v")]
    assert names == ["b.MP4", "d.mp4/x.gif", "in/a.webm"]
    for name in ("c.txt", "in/none"):
        with pytest.raises(ValueError, match="is not a folder"):
            find_videos(tmp_path / "v" / name)

    def read(name: str, text: str) -> list[str]:
        (tmp_path / name).write_text(text)
        return [one.text for one in read_prompts(tmp_path / name, names)]

    assert read("p.txt", "x\ny\nz\n") == ["x", "y", "z"]
    assert read("p.csv", "video,prompt\na.webm,z\nb,x\nd.mp4/x.gif,y\n") == ["x", "y", "z"]
    assert read("p.json", json.dumps({"b.MP4": "x", "x": {"prompt": "y"}, "in/a": "z"})) == ["x", "y", "z"]
    for name, text, said in (
        ("p.txt", "x\n", "has 1 prompts for 3 videos"),
        ("p.csv", "video,prompt\nb,x\n", "no prompt for 2 of 3 videos: d.mp4/x.gif, in/a.webm"),
        ("p.csv", "video,prompt\nb,x\nb,y\n", "'y': b has two rows"),
        ("p.csv", "file,prompt\nb,x\n", "every row needs video and prompt"),
    ):
        with pytest.raises(ValueError, match=said):
            read(name, text)
    with pytest.raises(FileNotFoundError, match="no prompt file"):
        read_prompts(tmp_path / "none.txt", names)


def rows_of(*totals: float) -> list[ScoredVideo]:
    scores = [{"TA": total, "total": total} for total in totals]
    return [ScoredVideo(f"{n}.mp4", "=a", {}, 8.0, 3, 4, 5, found, "") for n, found in enumerate(scores)]


def test_scores_are_written_and_summed_up_over_what_could_be_scored(tmp_path: Path, capsys) -> None:
    rows = rows_of(1.0, 2.0, math.nan, 6.0)
    rows[2].reason = "cannot be read"
    assert summarize(rows, "TA") == pytest.approx({"mean": 3.0, "standard_error": math.sqrt(7 / 3), "count": 3})
    assert summarize(rows[:1], "TA")["count"] == 1
    assert [math.isnan(value) for value in summarize(rows[2:3], "TA").values()] == [True, True, False]
    write_scores(tmp_path, rows[:1])
    write_scores(tmp_path, rows)
    lines = (tmp_path / "scores.csv").read_text().splitlines()
    assert lines[0] == "video,prompt,fps,frames,height,width,TA,total,reason"
    assert lines[1] == "0.mp4,'=a,8.0,3,4,5,1.0,1.0,"
    assert lines[3] == "2.mp4,'=a,8.0,3,4,5,,,cannot be read"
    found = json.loads((tmp_path / "scores.json").read_text())
    assert (found["summary"]["TA"]["count"], found["videos"][2]["scores"]) == (3, {"TA": None, "total": None})
    assert files.summary([]) == {}
    assert files.summary(rows[2:3])["TA"] == {"mean": None, "standard_error": None, "count": 0}
    files.refuse_unscored(tmp_path, rows)
    with pytest.raises(ValueError, match=r"None of the 1 videos in .*\. 2\.mp4: cannot be read"):
        files.refuse_unscored(tmp_path, rows[2:3])
    rows[1].reason, rows[3].reason = "cannot be read", "[odd]"
    capsys.readouterr()
    print_scores(rows, limit=3)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip(" ─")]
    assert lines[2:] == [
        "0.mp4 8 3 1.0000 1.0000", "1.mp4 8 3 2.0000 2.0000", "2.mp4 8 3 nan nan", "and 1 more", "mean 3.0000 3.0000",
        "standard_error 1.528 1.528", "count 3 3", "x2, first 1.mp4: cannot be read", "3.mp4: [odd]",
    ]  # fmt: skip


def test_scores_go_to_their_rows_with_what_a_reward_says(monkeypatch) -> None:
    asked: list[Any] = []

    def score(clips: Any, texts: Any, fps: float, **named: Any) -> Any:
        asked.append((len(clips), texts, fps, named["metadata"]))
        said = [SimpleNamespace(index=1, reward="TA", reason="odd")]
        found = SimpleNamespace(parts={"TA": torch.tensor([1.0, 2.0])}, total=torch.tensor([3.0, 4.0]))
        return found, SimpleNamespace(failures=said, remarks=said)

    reward: Any = SimpleNamespace(hears=False, score=score)
    rows, clips = rows_of(0.0, 0.0), torch.zeros(2, 7, 8, 9, 3)
    rows[0].metadata = {"n": 1}
    score_clips(reward, rows, clips, None)
    assert [row.scores for row in rows] == [{"TA": 1.0, "total": 3.0}, {"TA": 2.0, "total": 4.0}]
    assert [(row.frames, row.height, row.width) for row in rows] == [(7, 8, 9)] * 2
    assert [row.reason for row in rows] == ["", "TA: odd; TA: odd"]
    assert asked == [(2, ["=a", "=a"], 8.0, [{"n": 1}, {}])]
    reward.hears = True
    score_clips(reward, rows[:1], clips[:1], None)
    assert (rows[0].reason, len(asked)) == ("it has no sound, and a reward listens", 1)
    score_clips(reward, rows, clips, Sound(torch.zeros(2, 1, 4), 4))
    assert len(asked) == 2


def test_files_of_one_size_and_rate_are_scored_together(monkeypatch) -> None:
    seen: list[Any] = []
    sizes = iter([(4, 8.0), (4, 8.0), (4, 8.0), (5, 8.0), (5, 6.0), None])

    def read(path: Path) -> Any:
        found = next(sizes)
        if found is None:
            raise ValueError("half")
        return torch.zeros(found[0], 2, 2, 3), found[1]

    monkeypatch.setattr(files, "read_video", read)
    rows = rows_of(*[0.0] * 6)
    for some, batch in files._batches([Path()] * 6, rows, 2):
        seen.append(([row.video for row in some], tuple(batch.shape[:2])))
    assert seen == [(["0.mp4", "1.mp4"], (2, 4)), (["2.mp4"], (1, 4)), (["3.mp4"], (1, 5)), (["4.mp4"], (1, 5))]
    assert (rows[4].fps, rows[5].reason) == (6.0, "cannot be read: half")


def test_clips_have_the_seeds_pictures_and_names_of_their_prompts(tmp_path: Path) -> None:
    prompts = [Prompt("A cat!"), Prompt("b" * 60, seed=0), Prompt("猫")]
    made = clips_of(GenerateSpec(prompts="x", per_prompt=2, seed=3), prompts)
    assert [clip.seed for clip in made] == [3, 4, 0, 1, 7, 8]
    assert [clip.file for clip in made][::2] == ["0000-a-cat.mp4", f"0002-{'b' * 48}.mp4", "0004-clip.mp4"]
    one = clips_of(GenerateSpec(prompts="x", images=["i.png"]), prompts)
    assert [str(clip.prompt.image) for clip in one] == ["i.png"] * 3
    each = clips_of(GenerateSpec(prompts="x", images=["i.png", "j.png"]), prompts[:2])
    assert [str(clip.prompt.image) for clip in each] == ["i.png", "j.png"]
    assert Path(str(each[1].prompt.columns(absolute=True)["image"])).is_absolute()
    with pytest.raises(ValueError, match="2 images for 3 prompts"):
        clips_of(GenerateSpec(prompts="x", images=["i.png", "j.png"]), prompts)
    assert [one.text for one in prompts_of(GenerateSpec(prompts=["a", "b.txt"]))] == ["a", "b.txt"]
    assert len(prompts_of(GenerateSpec(prompts="starter"))) > 5
    (tmp_path / "list.txt").write_text("x\ny\n")
    assert [one.text for one in prompts_of(GenerateSpec(prompts=[str(tmp_path / "list.txt")]))] == ["x", "y"]
    odd = [(["a", " "], "Prompt 2 of 2 is empty"), ([], "nothing to generate"), ("none.XLSX", "none.XLSX")]
    for given, said in odd:
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            prompts_of(GenerateSpec(prompts=given))
    with pytest.raises(ValueError, match="does not explore"):
        GenerateSpec(prompts="a", solver="ab2", kernel=KernelSpec(name="sage"))


@pytest.mark.parametrize("kernel", ["ode", "sage_exact"])
def test_a_clips_noise_is_of_its_own_seed_whatever_the_batch(kernel: str, monkeypatch) -> None:
    model, prompts = ToyModel(ModelSpec(family="trainer_zoo.toy")), [Prompt(text) for text in ("a", "b", "c")]
    found, keys = [], set[Any]()
    recorded = lambda shape, *key: keys.add(key) or keyed_noise(shape, *key)  # noqa: E731
    monkeypatch.setattr("sage_grpo.samplers.noise.keyed_noise", recorded)
    for batch in (1, 2):
        spec = KernelSpec(name=kernel, eta=1.0)
        options = GenerateSpec(prompts="x", steps=3, batch=batch, progress=False, kernel=spec)
        batches = list(sample(options, model, clips_of(options, prompts)))
        assert [len(some) for some, _, _ in batches] == ([1, 1, 1] if batch == 1 else [2, 1])
        found.append(torch.cat([videos for _, videos, _ in batches]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0][0], found[0][1])
    assert {key[3] for key in keys if key[2] == "step"} == (
        set() if kernel == "ode" else {0, 1}
    )  # the last is deterministic


def test_a_reward_that_listens_gets_the_sound_of_its_own_file(tmp_path: Path, calls, monkeypatch) -> None:
    sounds = {tmp_path / "a.mp4": Sound(torch.ones(2, 4), 4)}
    monkeypatch.setattr(files, "find_videos", lambda folder: [folder / "a.mp4", folder / "b.mp4"])
    monkeypatch.setattr(files, "read_prompts", lambda path, names: [Prompt(name) for name in names])
    monkeypatch.setattr(files, "read_sound", sounds.get)
    calls("sage_grpo.generation.files.judge", SimpleNamespace(hears=True))
    calls("sage_grpo.generation.files.read_video", (torch.zeros(1, 2, 2, 3), 8.0))
    heard = calls("sage_grpo.generation.files.score_clips")
    rows = files.score_videos(tmp_path, tmp_path / "p.txt", [])
    assert [[row.video for row in words[1]] for words, _ in heard] == [["a.mp4"], ["b.mp4"]]
    ((*_, sound), _), ((*_, silence), _) = heard
    assert (sound.waves.shape, sound.rate, silence) == ((1, 2, 4), 4, None)
    assert [row.prompt for row in rows] == ["a.mp4", "b.mp4"]
