"""Naming a recipe, hints for what other programs call an option, and what is said before anything heavy happens."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import documents
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


def test_the_first_word_is_a_recipe_or_a_file(tmp_path: Path, capsys) -> None:
    """As for plan and doctor."""
    file = tmp_path / "run.yaml"
    file.write_text("recipe: shapes/cps\nseed: 7\n")
    assert printed(capsys, "shapes/branch", "--seed", "3") == printed(
        capsys, "--recipe", "shapes/branch", "--seed", "3"
    )
    assert printed(capsys, str(file)) == printed(capsys, "--config", str(file))
    (tmp_path / "config.yaml").write_text("seed: 7\n")
    for command in ("train", "probe"):
        assert main([command, str(tmp_path)]) == 2
        assert f"--config {tmp_path}/config.yaml has its settings" in capsys.readouterr().err


def test_a_file_without_a_recipe_says_what_it_stands_on(tmp_path: Path, capsys) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("seed: 7\n")
    with pytest.raises(SystemExit):
        main(["train", "--config", str(file), "--print_config"])
    assert f"what {file} leaves out has the paper's defaults" in capsys.readouterr().err
    plain = dataclasses.asdict(recipe("shapes/sage"))
    file.write_text(yaml.safe_dump({**plain, "optimizer": {**plain["optimizer"], "betas": [0.9, 0.99]}}))
    with pytest.raises(SystemExit):  # whole, as a run writes it: nothing is left out
        main(["train", "--config", str(file), "--print_config"])
    assert "no recipe is named" not in capsys.readouterr().err


def test_keys_of_files_are_hinted_too(tmp_path: Path, capsys) -> None:
    file = tmp_path / "mine.yaml"
    for text, hint in (
        ("optmizer: {lr: 1}", "optimizer.lr"),
        ("learning_rate: 1", "optimizer.lr"),
        ("Seed: 1", "seed"),
    ):
        file.write_text(f"recipe: sage\n{text}\n")
        assert main(["train", "--config", str(file)]) == 2
        assert f"Did you mean {hint!r}?" in capsys.readouterr().err


def test_a_missing_model_needs_all_its_files_named_at_once(tmp_path: Path, capsys, monkeypatch) -> None:
    """The README's first command, in an empty folder; nothing is fetched or loaded to find that out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("sage_grpo.models.spec.ModelSpec.load", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.setattr(
        "sage_grpo.models.checkpoints.checkpoint._download", lambda *_: pytest.fail("a model was downloaded")
    )
    block = next(block for block in documents.blocks("bash") if block.page == "README.md" and "train" in block.text)
    words = next(words for words in documents.commands(block) if words[:2] == ["sage-grpo", "train"])
    assert main(words[1:]) == 2
    said = capsys.readouterr().err
    for name in (
        "data.prompts prompts.txt",
        "data.eval_prompts eval.txt",
        "checkpoint ckpts/VideoReward",
        "base Qwen/Qwen2-VL-2B-Instruct",
        "template ckpts/prompt_template.py",
        "model.path hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
    ):
        assert name in said
    for source in ("hf download KwaiVGI/VideoReward", "https://github.com/KwaiVGI/VideoAlign"):
        assert source in said
    assert not (tmp_path / "runs").exists()


def test_something_is_said_before_anything_is_imported() -> None:
    """The first line comes while no library is loaded yet; torch and its friends take seconds."""
    script = """
import sys
class Ear:
    def write(self, text):
        if text.strip():
            sys.__stdout__.write(f"{text.strip()} {'torch' in sys.modules} {'jsonargparse' in sys.modules}\\n")
            sys.__stdout__.flush()
            raise SystemExit(0)
    def flush(self): pass
sys.stderr = Ear()
from sage_grpo.cli import main
main([sys.argv[1], "--iterations", "none"])
"""
    for command in ("train", "demo"):
        done = subprocess.run([sys.executable, "-c", script, command], capture_output=True, text=True, check=True)
        assert done.stdout.strip().endswith("starting ... False False")


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


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "shapes/sagee"],
        ["plan", "nosuch"],
        ["compare", "shapes/sage", "nosuch"],
        ["rewards", "nosuch"],
        ["train", "missing.yaml"],
        ["doctor", "--config", "missing.yaml"],
        ["evaluate", "--prompts", "missing.txt"],
        ["evaluate", "--run", "missing"],
        ["export", "--run", "missing"],
        ["report", "missing"],
    ],
)
def test_what_is_not_there_is_refused_before_anything_heavy_is_imported(argv: list[str], tmp_path: Path) -> None:
    script = (
        "import sys; from sage_grpo.cli import main; status = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert any(word in done.stderr for word in ("missing", "nosuch", "shapes/sagee"))


def test_every_recipe_gets_past_the_quick_look() -> None:
    from sage_grpo.cli import _refuse_unknown
    from sage_grpo.recipes import names
    from sage_grpo.recipes.methods import METHODS
    from sage_grpo.recipes.targets import SETTINGS, TARGETS

    for name in (*TARGETS, *METHODS, *names(), *(f"hunyuan15/sage/{setting}" for setting in SETTINGS)):
        _refuse_unknown(name)
    for name in ("sagee", "shapes/brunch", "shapes/sage/c", "none.yaml"):
        with pytest.raises((ValueError, FileNotFoundError), match="There is no"):
            _refuse_unknown(name)


def test_a_command_without_a_recipe_says_that_it_takes_the_miniature(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sage_grpo.commands.plan.run", lambda options: 0)
    for words, told in (([], True), (["shapes/cps"], False), (["--recipe=cps"], False), (["--help"], False)):
        assert main(["plan", *words]) == 0
        assert ("no recipe is named: this is shapes/sage" in capsys.readouterr().err) == told
