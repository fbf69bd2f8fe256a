"""Help by group, from the dataclasses; and completion from the same."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import needs
from sage_grpo.cli import COMMANDS, main
from sage_grpo.hints import leaves
from sage_grpo.manual import entries, manual
from sage_grpo.recipes import meanings as recipe_meanings
from sage_grpo.recipes.methods import METHODS
from sage_grpo.recipes.targets import TARGETS
from sage_grpo.training.config import TrainConfig


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen_or_two(name: str, capsys) -> None:
    lines = said(capsys, name, "--help").splitlines()
    assert lines[0].startswith(f"usage: sage-grpo {name}")
    assert len(lines) <= 142
    assert max(map(len, lines)) <= 80


def test_help_of_train_lists_recipes_and_groups_with_their_meaning(capsys) -> None:
    text = said(capsys, "train", "--help")
    for name in (*TARGETS, *METHODS):
        assert any(line.split()[:1] == [name] and len(line.split()) > 3 for line in text.splitlines())
    for name in ("model", "model.lora", "optimizer", "rollout.window", "log"):
        assert any(line.split()[:1] == [name] for line in text.splitlines())
    assert "--optimizer.lr" not in text  # it opens by group


@pytest.mark.parametrize("words", [["--help", "model"], ["--help=model"], ["-h", "model"], ["--model.help"]])
def test_help_opens_a_group(words: list[str], capsys) -> None:
    text = said(capsys, "train", *words)
    groups = ("model.lora", "model.adapters")
    assert all(
        f"--{key} " in text for key, kind in leaves(TrainConfig) if key.startswith("model.") and key not in groups
    )
    assert "--model.lora.rank" in text
    assert "--model.adapters[].scale" in text
    assert "--optimizer.lr" not in text
    assert said(capsys, "help", "train", "model") == text


def test_help_shows_the_recipes_values_and_finds_what_is_misspelt(capsys) -> None:
    assert "--model.lora.rank INT (32)" in said(capsys, "train", "--recipe=wan", "--help", "lora")
    assert "--optimizer.lr NUMBER (0.0001)" in said(capsys, "train", "--help", "optimizer.lr", "--recipe", "wan")
    assert main(["train", "--help", "optmizer"]) == 2
    assert "Did you mean --help optimizer?" in capsys.readouterr().err


def test_help_says_null_where_null_is_what_is_written_and_cuts_no_meaning(capsys) -> None:
    text = said(capsys, "train", "--help", "all")
    assert "null" in text
    assert "None" not in text
    flat = " ".join(said(capsys, "train", "--help").split())
    for meanings in recipe_meanings().values():
        assert all(" ".join(meaning.split()) in flat for meaning in meanings.values())


def test_help_all_has_every_option_with_its_text() -> None:
    text = manual(TrainConfig, "all", prog="", about="")
    found = [entry for entry in entries(TrainConfig) if entry.group is None]
    assert len(found) > 100
    for entry in found:
        assert f"--{entry.key} " in text
        assert entry.text, f"{entry.key} has no docstring under it"
    assert max(map(len, text.splitlines())) <= 80


def test_bash_completes_commands_options_values_and_recipes(tmp_path: Path, capsys) -> None:
    needs.program("bash")
    file = tmp_path / "completion.bash"
    file.write_text(said(capsys, "completion", "bash"))
    script = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _sage_grpo; echo "${COMPREPLY[*]}"'

    def complete(*words: str) -> list[str]:
        done = subprocess.run(
            ["bash", "-c", script, "bash", str(file), "sage-grpo", *words],
            capture_output=True, text=True, check=True, cwd=tmp_path,
        )  # fmt: skip
        assert not done.stderr
        return done.stdout.split()

    assert complete("") == list(COMMANDS)
    assert complete("tr") == ["train"]
    assert complete("train", "--optimizer.l") == ["--optimizer.lr"]
    assert complete("train", "--kernel.name", "sage") == ["sage", "sage_exact"]
    assert "hunyuan15/flow_grpo" in complete("train", "--recipe", "hunyuan15/")
    assert complete("launch", "--nproc", "2", "train", "--resume", "m") == ["must"]
    assert complete("export", "--optimizer.l") == []
    assert complete("train", "--config", "comp") == ["completion.bash"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_every_option(shell: str, capsys) -> None:
    text = said(capsys, "completion", shell)
    for key, _ in leaves(TrainConfig):
        assert f"--{key}" in text or f"-l {key} " in text


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_it(shell: str, capsys) -> None:
    text = said(capsys, "completion", shell)
    subprocess.run([needs.program(shell), "-n", "/dev/stdin"], input=text, text=True, check=True)
