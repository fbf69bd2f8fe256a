"""Malformed calls: each is refused with exit status 2 and one message, none raises, none is accepted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sage_grpo.cli.main import main


class Accepted(BaseException):
    """Something expensive was about to start; no command may catch this."""


def accept(*args: object, **kwargs: object) -> None:
    raise Accepted


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever takes time, writes or listens fails the test instead; the current folder has a few useless files."""
    for place in (
        "sage_grpo.run.session.run",
        "sage_grpo.models.families.wan.load",
        "sage_grpo.models.checkpoints.checkpoint._download",
        "uvicorn.Server.run",
    ):
        monkeypatch.setattr(place, accept)
    monkeypatch.chdir(tmp_path)
    files = {
        "good.txt": "a cat\n",
        "no_options.yaml": "rewards: [{name: video_stats, options: null}]\n",
        "no_iterations.yaml": "iterations: null\n",
        "half.json": '["\\ud800"]',
        "number.json": '[{"prompt": 5}]',
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("iterations: 3\n")


def reward(name: object, **more: object) -> list[str]:
    return ["--rewards", json.dumps([{"name": name, **more}])]


OWN = ["mine", "folder/../mine/new"]
"""Places in the folder of a run."""


def refused(calls: list[list[str]], capsys: pytest.CaptureFixture[str], says: str = "") -> list[str]:
    """Those of the calls that are not refused in words, with `says` among them, and without a secret."""
    problems = []
    for call in calls:
        try:
            status: Any = main(call)
        except SystemExit as left:
            status = f"SystemExit({left.code})"
        except Accepted:
            status = "accepted"
        except Exception as error:  # noqa: BLE001 - exactly what must not happen
            status = f"{type(error).__name__}: {error}"
        said = capsys.readouterr()
        lines = [line for line in said.err.splitlines() if line.startswith("sage-grpo: ")]
        good = lines and len(lines[-1]) >= 20 and says in said.err and "Traceback" not in said.err and not said.out
        if status != 2 or not good or "abc123" in said.err:
            problems.append(f"{' '.join(call)[:100]}: {str(status)[:200]} {said.err[-300:]!r} {said.out[-100:]!r}")
    return problems


PLAN = ["plan", "--recipe", "shapes/sage", "--config"]
URLS = ("http://host:1?key=abc123", "http://me:abc123@host:1", "ftp://host?token=abc123")
GIVEN = {
    "null": ("null", [[*PLAN, "no_options.yaml"], [*PLAN, "no_iterations.yaml"]]),
    "revisions": (
        "revision",
        [["train", *words, "--model.revision", "main"] for words in ([], ["--model.path", "./folder"])],
    ),
    "exports": ("own folder", [["export", "--run", "mine", "--out", out] for out in OWN]),
    "clips": (
        "own folder",
        [["generate", "--run", "mine", "--weights", "base", "--prompts", "a", "--out", out] for out in OWN],
    ),
    "studies": ("one folder", [["study", "create", "--methods", "{a: folder, b: link}", "--prompts", "good.txt"]]),
    "empty names": ("is empty", [["train", "--data.eval_prompts", ""], ["evaluate", "--prompts", " "]]),
    "prompts": ("must be a text", [["evaluate", "--prompts", "number.json"]]),
    "letters": ("is not text", [["train", "--data.prompts", "half.json"]]),
    "servers": ("url", [["evaluate", *reward("remote", weights={"a": 1.0}, options={"urls": [url]})] for url in URLS]),
    "judges": (
        "url",
        [
            ["serve-reward", *reward("vlm_judge", options={"url": url, "model": "m", "dimensions": {"a": "b"}})]
            for url in URLS
        ],
    ),
    "words with secrets": (
        "x",
        [["train", "--iterations", "http://x?key=abc123"], ["train", "--model.device", "http://me:abc123@x"]],
    ),
}
"""What was once accepted in silence, fell over or hung, by kind: words of the refusal, and calls."""


@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.usefixtures("no_work")
def test_what_is_given_is_refused_where_it_enters(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    says, calls = GIVEN[kind]
    problems = refused(calls, capsys, says)
    assert not problems, "\n".join(problems)


def test_a_reader_who_has_gone_ends_a_command_in_silence(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    inspect = ["inspect", "--steps", "3", "--kernels", "ode"]
    for words, buffered in ((["doctor", "--help"], -1), (["doctor", "--help"], 1), (inspect, -1)):
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "w", buffering=buffered) as gone:
            monkeypatch.setattr("sys.stdout", gone)
            assert main(words) == 141
            monkeypatch.undo()
    assert capfd.readouterr().err == ""


SCORED = {"prompt": "a cat", "noise": "0/0/0", "scores": {"total": 1.0}, "clip": None}
INDEX = {"width": 8, "height": 8, "frames": 1, "fps": 8.0, "rows": [SCORED]}
ROW = {"iteration": 1, "reward/total": 1.0, "eval/total": 2.0, "reward/failed": 0.0}
ODD: list[Any] = [None, True, 1.5, "x", [], {}, {"a": 1}, 10**400]
DEEP = "[" * 5000 + "]" * 5000


@pytest.fixture
def given_run(tmp_path: Path) -> Path:
    (tmp_path / "videos").mkdir()
    (tmp_path / "config.yaml").write_text("kernel: {name: sage}\nrewards: [{name: video_stats}]\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "schedule.json").write_text('{"sigmas": [1.0, 0.5, 0.0], "stochastic": [true, false]}')
    (tmp_path / "videos" / "heldout-000001.json").write_text(json.dumps(INDEX))
    return tmp_path


def odd_documents(document: Any) -> Iterator[str]:
    """The document with each of its parts in turn replaced by what does not belong there."""

    def places(part: Any) -> Iterator[tuple[Any, Any]]:
        for key, inner in part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ():
            yield part, key
            yield from places(inner)

    for holder, key in places(document):
        before = holder[key]
        for odd in ODD:
            holder[key] = odd
            yield json.dumps(document)
        holder[key] = before


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["metrics.jsonl", "schedule.json", "videos/heldout-000001.json", "events.jsonl"])
def test_a_run_of_somebody_else_is_read_or_refused_in_words(name: str, given_run: Path) -> None:
    from sage_grpo.tools.report.run_data import noise_picture, read_run, series, stepwise

    assert read_run(given_run).clips[1][0].prompt == "a cat"
    file = given_run / name
    start = (
        json.loads(file.read_text()) if file.is_file() else {"time": 1.0, "kind": "start", "iteration": 1, "text": "x"}
    )
    for text in (*odd_documents(start), *("", "{", "null", DEEP, "1" * 5000)):
        file.write_text(text + "\n")
        try:
            run = read_run(given_run)
        except ValueError as error:
            assert len(str(error)) < 500  # noqa: PT017 - most are read
            continue
        assert series(run.rows)["every"] == 1
        stepwise(run.rows)
        noise_picture(run)


def test_scores_of_clips_are_numbers(given_run: Path) -> None:
    from sage_grpo.tools.report.run_data import read_run

    for odd in ("x", [], {}, True, 10**400):
        rows = [{**SCORED, "scores": {"total": odd}}]
        (given_run / "videos" / "heldout-000001.json").write_text(json.dumps({**INDEX, "rows": rows}))
        with pytest.raises(ValueError, match="'total' must be"):
            read_run(given_run)
