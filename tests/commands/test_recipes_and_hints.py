"""Naming a recipe, hints for what other programs call an option, and what is said before anything heavy happens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sage_grpo.cli import main
from sage_grpo.recipes import recipe


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    with pytest.raises(SystemExit):
        main(["train", *argv, "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)


def test_a_file_names_its_recipe_and_the_command_line_wins(tmp_path: Path, capsys) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: shapes/cps\nseed: 7\n")
    of_file = printed(capsys, "--config", str(file))
    assert (of_file["recipe"], of_file["kernel"]["name"], of_file["seed"]) == ("shapes/cps", "cps", 7)
    assert of_file["optimizer"]["lr"] == recipe("shapes/cps").optimizer.lr
    for words in (["--recipe", "flow_grpo"], ["--recipe=flow_grpo"]):
        for order in ([*words, "--config", str(file)], ["--config", str(file), *words]):
            both = printed(capsys, *order)
            assert (both["recipe"], both["kernel"]["name"], both["seed"]) == ("flow_grpo", "flow", 7)


def test_a_printed_configuration_means_the_same_when_it_is_read(tmp_path: Path, capsys) -> None:
    first = printed(capsys, "--recipe", "shapes/mix_grpo", "--seed", "3")
    (tmp_path / "printed.yaml").write_text(yaml.safe_dump(first))
    assert printed(capsys, "--config", str(tmp_path / "printed.yaml")) == first
    (tmp_path / "short.yaml").write_text("seed: 7\n")  # with no recipe at all, too
    assert printed(capsys, "--config", str(tmp_path / "short.yaml"))["rewards"][0]["name"] == "shapes"


REWARD = """
from helper_beside_it import level

def bright(videos, prompts, fps):
    return videos.float().mean(dim=(1, 2, 3, 4)) / level
"""


@pytest.mark.slow
def test_a_reward_in_the_current_folder_is_found_by_the_console_script(tmp_path: Path) -> None:
    """The console script's sys.path starts with its own folder, not with the current one; what is installed is not hidden."""
    (tmp_path / "my_reward.py").write_text(REWARD)
    (tmp_path / "helper_beside_it.py").write_text("level = 255\n")
    (tmp_path / "yaml.py").write_text("raise SystemExit('the wrong yaml')\n")
    script = """
import os, sys
from sage_grpo.rewards.spec import RewardSpec, load_reward
assert os.getcwd() not in sys.path and "" not in sys.path
try:
    load_reward(RewardSpec(name="your_reward:bright"))
except ValueError as error:
    assert "there is no module your_reward" in str(error), error
assert os.getcwd() not in sys.path  # only for a name that is there
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
    monkeypatch.setattr("sage_grpo.commands.plan.run", lambda options: 0)
    (tmp_path / "cps.yaml").write_text("recipe: cps\n")
    named = [["shapes/cps"], ["--recipe=cps"], [str(tmp_path / "cps.yaml")], ["--help"]]
    for words, told in (([], True), *((words, False) for words in named)):
        assert main(["plan", *words]) == 0
        errors = capsys.readouterr().err
        assert [text in errors for text in ("no recipe is named", "this is shapes/sage")] == [told, told]


EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_no_example_is_told_that_it_names_no_recipe(file: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sage_grpo.commands.plan.run", lambda options: 0)
    for words in ([str(file)], ["--config", str(file)]):
        assert main(["plan", *words]) == 0
        errors = capsys.readouterr().err
        assert [text in errors for text in ("no recipe is named", "leaves out", "miniature")] == [False] * 3
