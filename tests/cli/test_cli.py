"""The command line: help, recipes, rewards, and what is said about mistakes."""

from __future__ import annotations

import errno
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sage_grpo import __version__
from sage_grpo.cli import COMMANDS
from sage_grpo.cli import main as cli
from sage_grpo.cli.main import main

MISTAKES = [
    ("train --config none.yaml", "--config none.yaml: there is no such file"),
    ("train wan/brunch", "no recipe 'wan/brunch'."),
    ("compare wan/branch wann", "Did you mean 'wan'?"),
    ("rewards nope", "nope"),
    ("evaluate --run none", "none is not the folder of a run"),
    ("generate --prompts none.csv", "There is no prompt file none.csv"),
    ("tran", "Did you mean 'train'?"),
    ("launch --nproc 2 train", "torchrun --nproc-per-node N -m sage_grpo train"),
    ("convert weights", "sage-grpo export SOURCE --out FOLDER"),
    ("train --learning-rate 1e-4", "Did you mean 'optimizer.lr'?"),
    ("train --rewards video_stats", """got 'video_stats'. Each is a mapping: --rewards '[{"name": ...}]'."""),
    ("evaluate --pairs true --videos clips --prompts p.txt", "--pairs would change nothing"),
    ("generate --bench vbench --prompts p.txt", "docs/bench-export.md names the clips"),
    ("compare shapes/sage --baseline shapes/sagee", "Did you mean 'shapes/sage'"),
    ("compare --suite nosuch.yaml", "--suite nosuch.yaml: there is no such file."),
    ("study", "--action is needed: one of create, links, serve, results, export."),
]


@pytest.mark.parametrize(("words", "answer"), MISTAKES)
def test_mistakes_exit_with_2_and_an_answer(words: str, answer: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("a cat\n")
    assert main(shlex.split(words)) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sage-grpo: ")]
    assert answer in said[-1]


@pytest.mark.parametrize(
    ("words", "at"),
    [
        ("--config steps.yaml", [3]),
        ("--recipe wan/branch --config steps.yaml --rollout.steps 6", [2]),
        ("--recipe wan/branch --rollout.steps 6 --rollout.window.at [1]", [1]),
        ("--recipe wan/mix_grpo --rollout.steps 6", None),
    ],
)
def test_drawn_windows_follow_the_number_of_steps_unless_they_are_set(words, at, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.yaml").write_text("recipe: wan/branch\nrollout: {steps: 10}\n")
    with pytest.raises(SystemExit):
        main(["train", *words.split(), "--print_config"])
    told = capsys.readouterr()
    assert yaml.safe_load(told.out)["rollout"]["window"]["at"] == at
    assert "starting" not in told.err, "nothing slow follows"


def test_words_about_help_are_found_wherever_they_stand(capsys) -> None:
    for words, topic, rest in (
        (["--help"], "", []),
        (["--a", "1", "-h", "model", "--b"], "model", ["--a", "1", "--b"]),
        (["--help", "--b"], "", ["--b"]),
        (["x", "--y"], None, ["x", "--y"]),
    ):
        assert cli._help_topic(words) == (topic, rest)
    for words in ([], ["help"], ["--help"]):
        assert main(words) == 0
        told = capsys.readouterr().out.splitlines()
        groups = [line for line in told if line.endswith(":") and " " not in line]
        assert groups == ["run:", "look:", "publish:", "serve:"]
        assert all(f"  {name} " in "\n".join(told) for name in COMMANDS)
    assert main(["--version"]) == main(["-V"]) == 0
    assert capsys.readouterr().out == f"sage-grpo {__version__}\n" * 2
    assert main(["help", "export"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: sage-grpo export [--config")
    assert main(["export", "--help"]) == 0
    assert capsys.readouterr().out == text


def test_errors_are_one_line_on_the_right_stream_with_a_status(monkeypatch, capsys) -> None:
    def ends(error: BaseException) -> tuple[int, str]:
        monkeypatch.setattr(cli, "_run", lambda name, words: (_ for _ in ()).throw(error))
        return main(["inspect"]), capsys.readouterr().err

    assert ends(ValueError("odd http://me:abc@host")) == (2, "sage-grpo: odd http://***@host\n")
    assert ends(OSError(13, "Permission denied", "file")) == (2, "sage-grpo: file: Permission denied.\n")
    monkeypatch.setattr(cli, "_discard_output", lambda: None)
    status, said = ends(OSError(errno.ENOSPC, "No space left on device"))
    assert (status, "No space left" in said) == (2, True)
    assert ends(KeyboardInterrupt()) == (130, "sage-grpo: interrupted.\n")
    assert ends(KeyboardInterrupt("in the middle")) == (130, "sage-grpo: in the middle\n")
    for error in (OSError(5, "Input/output error"), RuntimeError("bug")):
        with pytest.raises(type(error)):
            ends(error)
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = iter([True, False])
    monkeypatch.setattr("sage_grpo.distributed.heartbeat.is_first_to_say", lambda message: next(told))
    assert (ends(ValueError("x")), ends(ValueError("x"))) == ((2, "sage-grpo: x\n"), (2, ""))
    for rank, told in (("1", ""), ("0", "sage-grpo: x\n")):
        monkeypatch.setenv("RANK", rank)
        cli.say("x")
        assert capsys.readouterr().err == told


def test_a_printed_configuration_means_the_same_when_it_is_read(tmp_path: Path, capsys) -> None:
    def printed(*words: str) -> str:
        with pytest.raises(SystemExit):
            main(["train", *words, "--print_config"])
        return capsys.readouterr().out

    (tmp_path / "printed.yaml").write_text(first := printed("--recipe", "shapes/mix_grpo", "--seed", "3"))
    assert printed("--config", str(tmp_path / "printed.yaml")) == first


@pytest.mark.slow
def test_a_reward_in_the_current_folder_is_found_by_the_console_script(tmp_path: Path) -> None:
    """The console script's sys.path starts with its own folder, not with the current one; what is installed is not hidden."""
    (tmp_path / "my_reward.py").write_text("import helper_beside_it\ndef bright(videos, prompts, fps): ...\n")
    (tmp_path / "helper_beside_it.py").write_text("")
    (tmp_path / "yaml.py").write_text("raise SystemExit('the wrong yaml')\n")
    script = """
import os, sys
from sage_grpo.rewards.spec import RewardSpec, load_reward
assert os.getcwd() not in sys.path and "" not in sys.path
names = load_reward(RewardSpec(name="my_reward:bright")).names
import yaml
print(names, yaml.safe_load("[1]"))
"""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "console_script.py").write_text(script)
    words = [sys.executable, str(tmp_path / "bin" / "console_script.py")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "('bright',) [1]", done.stderr


def test_a_command_without_a_recipe_says_that_it_takes_the_miniature(monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setattr("sage_grpo.cli.plan.run", lambda options: 0)
    (tmp_path / "cps.yaml").write_text("recipe: cps\n")
    named = [["shapes/cps"], [str(tmp_path / "cps.yaml")], ["--help"]]
    for words, told in (([], True), *((words, False) for words in named)):
        assert main(["plan", *words]) == 0
        errors = capsys.readouterr().err
        assert [text in errors for text in ("no recipe is named", "this is shapes/sage")] == [told, told]


def listed(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> list[dict[str, Any]]:
    assert main(["rewards", *words, "--json", "true"]) == status
    return json.loads(capsys.readouterr().out)["rewards"]


def test_a_configuration_is_looked_at_file_by_file(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (tmp_path / "head.safetensors").write_bytes(b"x")
    rewards = [
        {"name": "aesthetic", "options": {"model": "nobody/not-there", "head": str(tmp_path / "head.safetensors")}},
        {"name": "clip", "metric_only": True, "label": "mine", "options": {"model": str(tmp_path / "absent")}},
        {"name": "nowhere_to_be_found:reward"},
    ]
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"recipe": "shapes/sage", "rewards": rewards}))
    aesthetic, clip, own = listed(capsys, str(file), status=1)
    assert aesthetic["ready"]
    assert aesthetic["downloads"] == ["nobody/not-there"]
    assert (clip["label"], clip["ready"]) == ("mine", False)
    assert str(tmp_path / "absent") in clip["missing"][0]
    assert "own code" in own["state"]
    assert "nowhere_to_be_found" not in sys.modules
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "nobody/not-there is missing" in listed(capsys, str(file), status=1)[0]["missing"][0]
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("recipe: shapes/sage\n")
    assert [row["name"] for row in listed(capsys, str(run))] == ["shapes"]
