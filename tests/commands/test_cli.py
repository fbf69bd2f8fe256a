"""The command line: help, and what is said about mistakes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from sage_grpo.cli import main


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "it is empty"),
        (b"recipe: shapes/sage\nseed: 1\n  lr: 2\n", r"it is no YAML: .* in \"bad\.yaml\", line 3"),
        (b"out: r\xe9sum\xe9\n", "byte 0xe9 at 6 is no UTF-8"),
    ],
)
def test_a_file_that_is_no_configuration(content: bytes, fault: str, tmp_path: Path, capsys) -> None:
    """Named with its fault, and nothing is said of a recipe that it would have named."""
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    assert main(["train", "--config", str(file)]) == 2
    said = capsys.readouterr().err
    assert re.search(rf"sage-grpo: {re.escape(str(file))} is no configuration: {fault}", said)
    assert "no recipe is named" not in said


MISTAKES = [
    ("tran", "Did you mean 'train'?"),
    ("train --recipe=Shapes/Flow_GRPO", "Did you mean 'shapes/flow_grpo'?"),
    ("train --learning-rate 1e-4", "Did you mean 'optimizer.lr'?"),
    ("train --kernel.name SAGE", "Did you mean 'sage'?"),
    ("train --rewards video_stats", """got 'video_stats'. Each is a mapping: --rewards '[{"name": ...}]'."""),
    ("""train --rewards '[{"nam": "clip"}]'""", "Did you mean 'rewards.name'?"),
    ("evaluate --pairs true", "compares a tuned model with its base"),
    ("evaluate --pairs true --videos clips --prompts p.txt", "--pairs would change nothing"),
    ("generate --prompts 'a cat' --ema", "--ema chooses among the weights of a run: give --run"),
    ("""generate --prompts '["a cat", ""]'""", "Prompt 2 of 2 is empty"),
    ("generate --bench vbenhc --prompts p.txt", "Did you mean 'vbench'"),
    ("generate --rewrites x.txt --prompts a", "--rewrites goes with --bench"),
    ("report . --watch --out x.html", "leave out --out"),
    ("inspect --figure null --kernels [saeg]", "Did you mean 'sage'"),
    ("compare shapes/sage --baseline shapes/sagee", "Did you mean 'shapes/sage'"),
    ("compare --suite heat,nosuch", "There is no suite 'nosuch'"),
    ("study", "--action is needed: one of create, links, serve, results, export."),
]


@pytest.mark.parametrize(("words", "answer"), MISTAKES)
def test_mistakes_exit_with_2_and_an_answer(
    words: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("a cat\n")
    assert main(shlex.split(words)) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sage-grpo: ")]
    assert answer in said[-1]


@pytest.mark.parametrize(
    ("words", "at"),
    [
        ("--recipe wan/branch", [6]),
        ("--recipe wan/branch --rollout.steps 6", [2]),
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
    assert yaml.safe_load(capsys.readouterr().out)["rollout"]["window"]["at"] == at
