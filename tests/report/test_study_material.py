"""Making a study: what is missing is named, nothing outside the folders is taken, copies tell nothing about where they came from."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import av
import pytest
import torch

from sage_grpo.cli.main import main
from sage_grpo.data.prompts import Prompt
from sage_grpo.tools.study.making import (
    StudyPlan,
    _check,
    _design,
    clip_file,
    copy_clip,
    find_clips,
    make,
    open_study,
    spoil_clip,
)
from sage_grpo.tools.study.store import StudyError
from sage_grpo.utils.safe_io import CONTROL, LeadsOut
from sage_grpo.utils.video import read_video, write_mp4
from studies import created, folders, study

PROMPTS = [Prompt("a"), Prompt("b"), Prompt("c")]


def named(*files: str) -> list[Prompt]:
    return [Prompt(f"prompt {file}", metadata={"file": file}) for file in files]


@pytest.fixture
def methods(tmp_path: Path) -> dict[str, Path]:
    return folders(tmp_path / "clips", 3)


def test_every_missing_clip_is_named(methods: dict[str, Path]) -> None:
    (methods["flow"] / "0001-clip.mp4").unlink()
    (methods["base"] / "0002-clip.mp4").rename(methods["base"] / "0000-again.mp4")
    with pytest.raises(StudyError) as error:
        find_clips(methods, PROMPTS)
    text = str(error.value)
    assert "flow: prompt 2 ('b'): no clip" in text
    assert "base: prompt 1 ('a'): several clips begin with 0 (0000-again.mp4, 0000-clip.mp4)" in text
    assert "base: prompt 3 ('c'): no clip" in text
    assert "sage" not in text


def test_a_column_names_the_files(methods: dict[str, Path]) -> None:
    found = find_clips(methods, named("0002-clip.mp4", "0000-clip.mp4"))
    assert [path.name for path in found["sage"]] == ["0002-clip.mp4", "0000-clip.mp4"]
    with pytest.raises(StudyError, match=r"no video 0002-clp\.mp4 .* Did you mean '0002-clip.mp4'"):
        find_clips(methods, named("0002-clp.mp4"))


@pytest.mark.parametrize(
    "name", ["../secret.mp4", "/etc/passwd", "sub/../../secret.mp4", "link.mp4", "folder/secret.mp4"]
)
def test_nothing_outside_a_methods_folder_is_taken(methods: dict[str, Path], tmp_path: Path, name: str) -> None:
    secret = write_mp4(tmp_path / "clips" / "secret.mp4", torch.zeros(2, 16, 16, 3, dtype=torch.uint8), 8)
    for folder in methods.values():
        (folder / "link.mp4").symlink_to(secret)
        (folder / "folder").symlink_to(secret.parent)
        (folder / "sub").mkdir()
    with pytest.raises(StudyError, match=r"leads out of its folder|must be a name inside"):
        find_clips(methods, named(name))


def test_copies_have_the_same_pictures_and_nothing_else(tmp_path: Path) -> None:
    clip = torch.randint(0, 256, (6, 32, 48, 3), dtype=torch.uint8)
    plain = write_mp4(tmp_path / "plain.mp4", clip, 8)
    tagged = tmp_path / "sage-best-method.mp4"
    with av.open(str(plain)) as old, av.open(str(tagged), "w") as new:
        new.metadata.update(title="SECRET-SAGE", comment="SECRET-SAGE")
        stream = new.add_stream_from_template(old.streams.video[0])
        for packet in old.demux(old.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                new.mux(packet)
    assert b"SECRET-SAGE" in tagged.read_bytes()
    (tmp_path / "out").mkdir()
    name, kind = copy_clip(tagged, tmp_path / "out")
    copy = tmp_path / "out" / name
    assert b"SECRET" not in copy.read_bytes()
    assert "sage" not in name
    assert kind == "48 x 32, 0.75 s"
    assert torch.equal(read_video(copy)[0], read_video(plain)[0])
    assert copy.stat().st_mtime == 0


def test_what_browsers_do_not_play_is_refused(tmp_path: Path) -> None:
    odd = write_mp4(tmp_path / "odd.mp4", torch.zeros(2, 17, 17, 3, dtype=torch.uint8), 8)
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video")
    with pytest.raises(StudyError, match=r"odd\.mp4 is h264 with yuv444p pixels, which not every browser plays"):
        copy_clip(odd, tmp_path)
    with pytest.raises(StudyError, match=r"broken\.mp4 cannot be read as a video"):
        copy_clip(broken, tmp_path)


def test_a_failed_study_leaves_nothing_and_a_made_one_is_never_overwritten(methods: dict[str, Path], tmp_path) -> None:
    plan = StudyPlan(title="t", methods=methods, prompts=PROMPTS, seed=1)
    good = (methods["base"] / "0002-clip.mp4").read_bytes()
    (methods["base"] / "0002-clip.mp4").write_bytes(b"no video")
    with pytest.raises(StudyError, match="cannot be read"):
        make(tmp_path / "study", plan)
    assert sorted(os.listdir(tmp_path)) == ["clips"]
    (methods["base"] / "0002-clip.mp4").write_bytes(good)
    make(tmp_path / "study", plan)
    with pytest.raises(StudyError, match="never overwritten"):
        make(tmp_path / "study", plan)
    with contextlib.closing(open_study(tmp_path / "study")) as store:
        files = store.files()
    assert len(files) == 9 + 1  # one spoilt copy for the one attention check
    (tmp_path / "study" / "clips" / files[0]).unlink()
    with pytest.raises(StudyError, match="lacks 1 videos"):
        open_study(tmp_path / "study")


def test_spoilt_copies_are_worse_and_clips_that_differ_are_pointed_out(methods: dict[str, Path], tmp_path) -> None:
    ramp = torch.arange(64, dtype=torch.uint8).mul(3).view(1, 1, 64, 1).expand(6, 64, 64, 3).contiguous()
    for name in methods:
        write_mp4(methods[name] / "0000-clip.mp4", ramp[: 3 if name == "base" else 6], 8)
    _, notes = make(tmp_path / "study", StudyPlan(title="t", methods=methods, prompts=PROMPTS[:1], checks=0.5, seed=1))
    assert len(notes) == 1
    assert "1 of 1 prompts" in notes[0]
    assert "base 64 x 64, 0.38 s" in notes[0]
    with contextlib.closing(open_study(tmp_path / "study")) as store:
        ((file, prompt, method),) = store._read("SELECT file, prompt, method FROM clips WHERE degraded")
        assert [prompt, method] in [list(one) for one in store.study.pool]
        ((whole,),) = store._read("SELECT file FROM clips WHERE NOT degraded AND method = ?", (method,))
    clips = [read_video(tmp_path / "study" / "clips" / name)[0][:3].float() for name in (file, whole)]
    spoilt, plain = ((clip - ramp[:3]).abs().mean() for clip in clips)
    assert spoilt > 4 > 2 > plain, "blocks of five pixels are 0, 3, 6, 9 and 12 darker than the ramp"


def test_a_spoilt_copy_holds_every_third_frame(tmp_path: Path) -> None:
    steps = torch.arange(0, 210, 30, dtype=torch.uint8).view(7, 1, 1, 1).expand(7, 32, 32, 3)
    write_mp4(tmp_path / "whole.mp4", steps, 8)
    name = spoil_clip(tmp_path / "whole.mp4", tmp_path)
    frames, fps = read_video(tmp_path / name)
    assert ((frames.float().mean((1, 2, 3)) / 30).round().tolist(), fps) == ([0, 0, 0, 3, 3, 3, 6], 8)


@pytest.mark.parametrize(
    ("host", "said"), [("0.0.0.0", "not encrypted; put a proxy with HTTPS"), ("::1", "Only this machine")]
)
def test_who_can_reach_the_server_is_said(host: str, said: str, tmp_path: Path, monkeypatch, capsys) -> None:
    served: list[dict[str, object]] = []
    monkeypatch.setattr("sage_grpo.cli.study.open_study", lambda folder: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr("sage_grpo.tools.study.app.create_app", lambda *given, **named: "app")
    monkeypatch.setattr("sage_grpo.utils.http_server.check_port", lambda host, port: None)
    monkeypatch.setattr(
        "sage_grpo.utils.http_server.serve", lambda app, **named: served.append(named) or len(served) < 2
    )
    words = ["study", "--action", "serve", "--study", str(tmp_path), "--host", host]
    assert main([*words, "--port", "7"]) == 0
    assert said in capsys.readouterr().out.splitlines()[0]
    assert (served[0]["host"], served[0]["port"]) == (host, 7)
    assert main(words) == 2
    assert f"could not listen on {host}" in capsys.readouterr().err


def test_the_commands_make_invite_count_and_export(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    folders(tmp_path, 32)
    (tmp_path / "prompts.txt").write_text("".join(f"prompt {place}\n" for place in range(32)))
    words = ["--methods", "{sage: sage, flow: flow, base: base}", "--prompts", "prompts.txt", "--checks", "0"]
    assert main(["study", "create", *words, "--against", "sage", "--url", "https://example.org/s"]) == 0
    said = capsys.readouterr().out
    assert "https://example.org/s/results#" in said
    assert "study: 3 methods, 32 prompts." in said
    assert main(["study", "links", "--raters", "2"]) == 0
    told = capsys.readouterr()
    links = told.out.split()
    assert "ssh -L 8770:127.0.0.1:8770" in told.err
    assert main(["study", "links"]) == 0
    assert "rater 2: 0 of 64" in capsys.readouterr().out  # the first method against the two others
    with contextlib.closing(open_study(tmp_path / "study")) as store:
        rater = store.rater_of(links[2].split("#")[1])
        assert rater == 1
        for _ in range(8):
            name = store.ask(rater)[0].name
            store.vote(rater, name, name, dict.fromkeys(store.study.dimensions, "tie"))
    assert main(["study", "results"]) == 0
    text = capsys.readouterr().out
    assert "8 votes of 1 raters on 32 prompts" in text
    counted = [line.replace("|", "").split() for line in text.splitlines() if line.startswith("| sage vs")]
    assert [" ".join(line[2:6] + line[7:]) for line in counted] == ["flow - - 0 0", "base - - 0 0"] * 3
    assert sum(int(line[6]) for line in counted) == 8 * 3
    assert main(["study", "export", "--out", "all.csv"]) == 0
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 1 + 8 * 3
    for renew, answer in (("admin", 0), ("2", 0), ("9", 2), ("x", 2)):
        assert main(["study", "links", "--renew", renew]) == answer


def test_a_title_does_not_steer_the_terminal(tmp_path: Path, capsys) -> None:
    (tmp_path / "clips").mkdir()
    with contextlib.closing(
        created(tmp_path / "study.sqlite", replace(study(prompts=1, methods=2), title="t\x1b]0;owned\x07"))
    ) as store:
        for file in store.files():
            (tmp_path / "clips" / file).write_bytes(b"video")
    assert main(["study", "results", "--study", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("t\\x1b]0;owned\\x07: 0 votes")
    assert not CONTROL.search(told)


@pytest.mark.parametrize("name", ["study.sqlite", "study.sqlite-wal", "study.sqlite-journal", "clips"])
def test_a_study_that_was_given_to_us_opens_nothing_elsewhere(tmp_path: Path, name: str) -> None:
    given, private = tmp_path / "given", tmp_path / "private"
    (given / "clips").mkdir(parents=True)
    private.mkdir()
    with contextlib.closing(created(given / "study.sqlite", study(prompts=1, methods=2))) as store:
        files = store.files()
    for file in files:
        (given / "clips" / file).write_bytes(b"video")
    open_study(given).close()
    if (given / name).exists():
        (given / name).rename(private / name)
    (given / name).symlink_to(private / name)
    before = sorted(file.name for file in private.iterdir())
    with pytest.raises(LeadsOut, match=name):
        open_study(given)
    assert sorted(file.name for file in private.iterdir()) == before


def test_a_name_in_the_database_is_one_of_a_copy(tmp_path: Path) -> None:
    """The database may be somebody else's: whatever it names, only copies in the study's own folder are served."""
    clips = tmp_path / "clips"
    (clips / "sub").mkdir(parents=True)
    for place in (clips / "0.mp4", clips / "sub" / "0.mp4", tmp_path / "secret.mp4", clips / "study.sqlite"):
        place.write_bytes(b"secret")
    (clips / "link.mp4").symlink_to("0.mp4")
    assert clip_file(clips, "0.mp4") == clips / "0.mp4"
    for name in ("../secret.mp4", "sub/0.mp4", "/secret.mp4", "link.mp4", "study.sqlite", "..", "", "gone.mp4"):
        assert clip_file(clips, name) is None, name


def test_a_design_counts_its_comparisons_and_checks(tmp_path: Path) -> None:
    plan = StudyPlan(
        title="t", methods={name: tmp_path / name for name in "abc"}, prompts=PROMPTS * 5, checks=0.1, seed=7
    )
    for more, against, checks in (({}, None, 4), ({"against": "b"}, 1, 3)):
        made = _design(replace(plan, **more))
        assert (made.against, made.checks, made.seed) == (against, checks, 7)
        assert len(made.pool) == (checks + 1) // 2
        assert made.pool == sorted(made.pool)
    for bad, said in (
        ({"methods": {"a": tmp_path}}, "compares two methods or more"),
        ({"methods": {"a": tmp_path, "b": tmp_path / "x" / ".."}}, "are one folder"),
        ({"prompts": [Prompt("x" * 8001)]}, "8001 characters, more than 8000"),
    ):
        with pytest.raises(StudyError, match=said):
            _check(replace(plan, **bad))
    _check(replace(plan, prompts=[*PROMPTS * 4, *PROMPTS[:2], Prompt("x" * 8000)]))
