"""The command line: help, and what is said about mistakes."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
import yaml

from sage_grpo.cli import COMMANDS, main
from sage_grpo.manual import entries
from sage_grpo.version import __version__


def test_help_names_every_command_and_the_version_is_told(capsys) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    assert main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name: str) -> None:
    """Also those that a command's options inherit."""
    options = importlib.import_module(f"sage_grpo.commands.{COMMANDS[name].module}").Options
    assert not [entry.key for entry in entries(options) if not entry.text or entry.text.startswith("Must be")]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "it is empty"),
        (b"- a\n", r"it holds no options with values \(name: value\)"),
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


@pytest.mark.parametrize("command", ["evaluate", "export", "generate"])
def test_the_folder_of_a_run_without_its_option(command: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "config.yaml").write_text("")
    assert main([command, str(tmp_path)]) == 2
    assert f"Did you mean --run {tmp_path}?" in capsys.readouterr().err
    assert main([command, "--run", str(tmp_path)]) == 2
    assert "config.yaml is no configuration: it is empty." in capsys.readouterr().err


MISTAKES = [
    ("tran", "Did you mean 'train'?"),
    ("Train", "Did you mean 'train'?"),
    ("train --recipe shapes/sag", "Did you mean 'shapes/sage'?"),
    ("train --recipe SAGE", "Did you mean 'sage'?"),
    ("train --recipe=Shapes/Flow_GRPO", "Did you mean 'shapes/flow_grpo'?"),
    ("train shapes/brunch", "Did you mean 'shapes/branch'?"),
    ("train --learning_rate 1e-4", "Did you mean 'optimizer.lr'?"),
    ("train --learning-rate 1e-4", "Did you mean 'optimizer.lr'?"),
    ("train --optmizer.lr 1e-4", "Did you mean 'optimizer.lr'?"),
    ("train --Optimizer.LR 1e-4", "Did you mean 'optimizer.lr'?"),
    ("train --batch_size 4", "Did you mean 'batch.prompts'?"),
    ("train --num_generations 4", "Did you mean 'batch.group_size'?"),
    ("train --output_dir x", "Did you mean 'out'?"),
    ("train --lora_rank 8", "Did you mean 'model.lora.rank'?"),
    ("train --model.lora.rnk 8", "Did you mean 'model.lora.rank'?"),
    ("train --kernel.nam sage", "Did you mean 'kernel.name'?"),
    ("train --kernel.name SAGE", "Did you mean 'sage'?"),
    ("train --resume Never", "Did you mean 'never'?"),
    ("train --rewards video_stats", """got 'video_stats'. Each is a mapping: --rewards '[{"name": ...}]'."""),
    ("""train --rewards '[{"name": "clip", "weight": {"a": 1}}]'""", "Did you mean 'rewards.weights'?"),
    ("""train --rewards '[{"nam": "clip"}]'""", "Did you mean 'rewards.name'?"),
    ("export --run nowhere", "is not the folder of a run"),
    ("evaluate --videos nowhere", "needs --prompts FILE"),
    ("evaluate --pairs true", "compares a tuned model with its base"),
    ("evaluate --pairs true --videos clips --prompts p.txt", "--pairs would change nothing"),
    ("evaluate --weights best", "--weights chooses among the weights of a run: give --run"),
    ("evaluate --checkpoint 1", "--checkpoint chooses among the weights of a run: give --run"),
    ("evaluate --ema", "--ema chooses among the weights of a run: give --run"),
    ("generate --prompts 'a cat' --weights best", "--weights chooses among the weights of a run: give --run"),
    ("generate --prompts 'a cat' --checkpoint 1", "--checkpoint chooses among the weights of a run: give --run"),
    ("generate --prompts 'a cat' --ema", "--ema chooses among the weights of a run: give --run"),
    ("generate --prompts 'a cat' --model.lora.rank 3 --lora somewhere", "both name an adapter"),
    ("generate --prompts '  '", "Prompt 1 of 1 is empty"),
    ("""generate --prompts '["a cat", ""]'""", "Prompt 2 of 2 is empty"),
    ("generate --bench vbenhc --prompts p.txt", "Did you mean 'vbench'"),
    ("generate --bench vbench --per_prompt 2 --prompts p.txt", "the suite says how many clips"),
    ("generate --rewrites x.txt --prompts a", "--rewrites goes with --bench"),
    ("inspect --model missing --figure null", "missing"),
    ("report", "Name the folder of a run"),
    ("report nowhere", "There is no folder nowhere"),
    ("report . --watch --out x.html", "leave out --out"),
    ("report . --every 0", "every must be"),
    ("rewards shapes/sag", "Did you mean 'shapes/sage'"),
    ("rewards absent.yaml", "There is no file absent.yaml"),
    ("rewards .", "is not the folder of a run"),
    ("evaluate --micro_batch -3", "micro_batch must be at least 1, got -3"),
    ("evaluate --settings.steps 0", "settings.steps must be at least 1, got 0"),
    ("evaluate --out ''", "out is empty"),
    ("generate --prompts a --out ''", "out must be not empty"),
    ("""serve-reward --rewards '[{"name": "clip"}]' --port 70000""", "port must be in [0, 65535], got 70000"),
    ("""serve-reward --rewards '[{"name": "clip"}]' --limits.read_timeout_s -1""", "limits.read_timeout_s"),
    ("launch --nproc 2 --grace -1 train", "grace must be at least 0, got -1"),
    ("shapes render --prompts -2", "prompts must be at least 1, got -2"),
    ("inspect --figure null --kernels [saeg]", "Did you mean 'sage'"),
    ("inspect --figure null --kernels []", "kernels is empty"),
    ("inspect --figure null --eta 1.5", "leave cps out"),
    ("inspect --figure null --eta -1", "eta must be in [0, 10], got -1.0"),
    ("inspect --figure null --steps 0", "steps must be at least 1, got 0"),
    ("inspect --figure null --shift 0", "shift must be positive"),
    ("compare shapes/sage --vary optimizer.lr", "is no setting"),
    ("compare shapes/sage --suite table2", "or a --suite"),
    ("compare shapes/sage --baseline shapes/sagee", "Did you mean 'shapes/sage'"),
    ("compare shapes/sage --jobs 0", "jobs"),
    ("compare shapes/sage --sede 3", "Did you mean"),
    ("compare --suite heat,nosuch", "There is no suite 'nosuch'"),
    ("compare --suite heat,heat", "'heat' twice"),
    ("compare --suite heat,noise --vary optimizer.lr=1,2", "a suite has its own"),
    ("launch", "needs a command to run"),
    ("launch --nproc 2 trian --out x", "There is no command 'trian' to launch. Did you mean 'train'?"),
    ("study", "--action is needed: one of create, links, serve, results, export."),
    ("convert nowhere", "There is no file or folder nowhere to convert."),
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


def test_recipe_overrides_and_printed_config(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--recipe", "cps", "--kernel.eta", "0.3", "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["kernel"] == {"name": "cps", "eta": 0.3, "sigma_max": None}


def test_a_recipe_on_another_checkpoint_says_what_stayed(tmp_path: Path, capsys) -> None:
    (tmp_path / "mine.yaml").write_text("model: {path: ./nowhere}\n")
    for other in (["--model.path", "./nowhere"], ["--config", str(tmp_path / "mine.yaml")]):
        out = ["--out", str(tmp_path / "run"), "--log.progress", "false"]
        assert main(["train", "--recipe", "hunyuan15_lora", *other, *out]) == 2  # its files are not here
        errors = capsys.readouterr().err
        assert "model.height 352, model.width 624 are still the recipe's" in errors


def test_train_alone_means_the_embedded_world_and_a_model_means_the_papers_settings(capsys) -> None:
    from sage_grpo.commands.train import defaults
    from sage_grpo.recipes import recipe

    assert defaults(["--iterations", "2"]) == (recipe("shapes/sage"), ["--iterations", "2", "--recipe=shapes/sage"])
    assert defaults(["--model.path=mine"]) == (None, ["--model.path=mine"])
    assert "no recipe is named" in capsys.readouterr().err
    for words in (["--recipe", "cps"], ["--recipe=cps"]):
        assert defaults(["--seed", "1", *words]) == (recipe("shapes/cps"), ["--seed", "1", "--recipe=cps"])
