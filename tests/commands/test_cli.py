"""The command line: help, mistakes, and the small commands on a finished run."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from sage_grpo.cli import COMMANDS, main
from sage_grpo.manual import entries
from sage_grpo.models.spec import LoraSpec, ModelSpec
from sage_grpo.printing import number
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.session import run as train
from sage_grpo.training.config import (
    BatchConfig,
    DataConfig,
    EvalConfig,
    KeepConfig,
    LogConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
)

REWARD = [RewardSpec(name="video_stats", weights={"brightness": 1.0})]


@pytest.fixture(scope="module")
def finished(checkpoint, tmp_path_factory) -> Path:
    """A finished run of a LoRA on a tiny checkpoint, with kept videos."""
    folder = tmp_path_factory.mktemp("runs")
    prompts = folder / "prompts.txt"
    prompts.write_text("a cat\na red dog\n")
    config = TrainConfig(
        out=str(folder / "run"),
        iterations=2,
        model=ModelSpec(path=str(checkpoint("hunyuan15_t2v")), lora=LoraSpec(rank=2), guidance_scale=1.0, cache=None),
        rewards=REWARD,
        data=DataConfig(prompts=str(prompts), eval_prompts=str(prompts)),
        batch=BatchConfig(prompts=2, group_size=2, micro_batch=2),
        rollout=RolloutConfig(steps=4, deterministic_last=True),
        optimizer=OptimizerConfig(lr=0.3),  # far enough that trained and base weights cannot be mistaken
        evaluate=EvalConfig(every=0, prompts=2, steps=2, show=2),
        keep=KeepConfig(checkpoint_every=1, videos_every=1, videos=1),
        log=LogConfig(tensorboard=False, progress=False),
    )
    train(config)
    return folder / "run"


def test_help_names_every_command(capsys) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys) -> None:
    assert main([name, "--help"]) == 0
    assert f"usage: sage-grpo {name}" in capsys.readouterr().out


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


@pytest.mark.parametrize(
    ("argv", "answer"),
    [
        (["tran"], "Did you mean 'train'?"),
        (["train", "--recipe", "shapes/sag"], "Did you mean 'shapes/sage'?"),
        (["train", "--kernel.nam", "sage"], "Did you mean 'kernel.name'?"),
        (["export", "--run", "nowhere"], "is not the folder of a run"),
        (["evaluate", "--videos", "nowhere"], "needs --prompts FILE"),
        (
            ["train", "--rewards", "video_stats"],
            """got 'video_stats'. Each is a mapping: --rewards '[{"name": ...}]'.""",
        ),
        (["train", "--rewards", '[{"name": "clip", "weight": {"a": 1}}]'], "Did you mean 'rewards.weights'?"),
        (["train", "--rewards", '[{"nam": "clip"}]'], "Did you mean 'rewards.name'?"),
        (["generate", "--prompts", "  "], "Prompt 1 of 1 is empty"),
        (["generate", "--prompts", '["a cat", ""]'], "Prompt 2 of 2 is empty"),
        (["launch"], "needs a command to run"),
        (
            ["launch", "--nproc", "2", "trian", "--out", "x"],
            "There is no command 'trian' to launch. Did you mean 'train'?",
        ),
        (["study"], "--action is needed: one of create, links, serve, results, export."),
        (["convert", "nowhere"], "There is no file or folder nowhere to convert."),
    ],
)
def test_mistakes_exit_with_2_and_an_answer(argv, answer, capsys) -> None:
    assert main(argv) == 2
    assert answer in capsys.readouterr().err


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


def test_written_config_reads_back_as_the_same_run(finished: Path) -> None:
    from sage_grpo.folder.saved import read_config

    written = yaml.safe_load((finished / "config.yaml").read_text())
    assert json.loads(json.dumps(asdict(read_config(finished)))) == written
    assert written["model"]["lora"]["rank"] == 2


def test_evaluate_a_run_repeats_its_last_evaluation(finished: Path, tmp_path: Path, capsys) -> None:
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert abs(rows[-1]["eval/brightness"] - rows[0]["eval/brightness"]) > 1e-3
    settings = ["--settings.prompts", "2", "--settings.steps", "2", "--micro_batch", "2"]
    for weights, row in (("final", rows[-1]), ("base", rows[0])):
        assert main(["evaluate", "--run", str(finished), "--weights", weights, *settings, "--json"]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert found["brightness"] == pytest.approx(row["eval/brightness"], abs=1e-5)
    assert main(["evaluate", "--run", str(finished), *settings, "--out", str(tmp_path / "scores")]) == 0
    assert (tmp_path / "scores" / "clips.png").is_file()


def test_evaluate_scores_existing_files(finished: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    files = sorted((finished / "videos").glob("*.mp4"))
    prompts.write_text("a cat\n" * len(files))
    reward = json.dumps([{"name": "video_stats", "weights": {"brightness": 1.0}}])
    arguments = ["--videos", str(finished / "videos"), "--prompts", str(prompts), "--rewards", reward]
    assert main(["evaluate", *arguments, "--out", str(tmp_path / "out")]) == 0
    assert len((tmp_path / "out" / "scores.csv").read_text().splitlines()) == len(files) + 1


def test_export_writes_a_lora_and_a_merged_model(finished: Path, tmp_path: Path) -> None:
    assert main(["export", "--run", str(finished), "--out", str(tmp_path / "lora")]) == 0
    name = "pytorch_lora_weights.safetensors"
    exported, trained = load_file(tmp_path / "lora" / name), load_file(finished / "final" / name)
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[key], trained[key]) for key in trained)
    assert any(tensor.any() for key, tensor in exported.items() if ".lora_B." in key)
    assert main(["export", "--run", str(finished), "--merged", "--out", str(tmp_path / "merged")]) == 0
    assert (tmp_path / "merged" / "model_index.json").is_file()
    assert main(["export", "--run", str(finished), "--checkpoint", "77", "--out", str(tmp_path / "none")]) == 2


def test_export_lists_what_it_sends_and_says_what_was_trained(
    finished: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    monkeypatch.setattr("sage_grpo.hub.upload", lambda *args, **kwargs: sent.append((args, kwargs)) or "a page")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "somebody")
    out = tmp_path / "lora"
    words = ["export", "--run", str(finished), "--out", str(out), "--push_to", "me/mine"]
    assert main([*words, "--dry_run"]) == 0
    said = capsys.readouterr().out
    assert not sent
    assert "Would send to the private repository me/mine" in said
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert {"README.md", "pytorch_lora_weights.safetensors"} < files
    assert any(name.startswith("clips/heldout-") for name in files)
    assert all(name in said for name in files)
    card = (out / "README.md").read_text()
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    before, after = rows[0]["eval/brightness"], rows[-1]["eval/brightness"]
    assert f"| brightness | {number(before)} | {number(after)} |" in card
    assert 'video_stats {"brightness": 1.0}' in card
    assert 'src="clips/heldout-' in card
    assert str(tmp_path) not in card
    assert str(finished) not in card  # names of places stay here
    assert main(words) == 0  # into the same folder: nothing is there twice
    (((folder, repo, listed), options),) = sent
    assert (folder, repo) == (out, "me/mine")
    assert {file.name for file in listed} == files
    assert options["private"] is True
    assert (out / "README.md").read_text().count("## Recipe") == 1
    (out / "notes.yaml").write_text("mine")
    assert main(words) == 2
    assert "also holds notes.yaml" in capsys.readouterr().err
    assert len(sent) == 1


def test_a_run_is_drawn(finished: Path, tmp_path: Path) -> None:
    from sage_grpo.report.picture import draw_run

    assert draw_run(finished, tmp_path / "picture.png").stat().st_size > 10_000
