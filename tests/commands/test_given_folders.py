"""Folders and files that come from somebody else: they never decide what runs here."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from sage_grpo.cli import main
from sage_grpo.commands import evaluate
from sage_grpo.commands.starting import trusted
from sage_grpo.configure import ConfigError
from sage_grpo.folder.saved import read_config
from sage_grpo.report.run_data import noise_picture, read_run
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.spec import RewardSpec, load_reward


@pytest.fixture
def given(tmp_path: Path):
    """Writes the folder of a run with some configuration."""

    def write(config: object) -> Path:
        folder = tmp_path / "given"
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text(config if isinstance(config, str) else yaml.safe_dump(config))
        return folder

    return write


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module on the Python path that leaves a mark when it is imported; returns the mark."""
    mark = tmp_path / "imported"
    (tmp_path / "evil.py").write_text(
        f"open({str(mark)!r}, 'w').close()\n"
        "def bright(videos, prompts, fps):\n    return videos.float().mean(dim=(1, 2, 3, 4))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    return mark


def test_a_command_named_as_a_reward_is_not_run(given, tmp_path, capsys) -> None:
    mark = tmp_path / "mark"
    reward = {"name": "subprocess:Popen", "options": {"args": ["touch", str(mark)]}, "weights": {"x": 1.0}}
    run = given({"rewards": [reward], "data": {"eval_prompts": "shapes"}})
    assert main(["evaluate", "--run", str(run), "--weights", "base", "--trust_run", "true"]) == 2
    assert "subprocess:Popen" in capsys.readouterr().err
    assert not mark.exists()


@pytest.mark.parametrize("name", ["subprocess:run", "builtins:exec", "functools:partial"])
def test_what_is_not_written_as_a_reward_is_refused_before_it_is_called(name: str) -> None:
    with pytest.raises(RewardConfigError, match=r"is not a reward|has no"):
        load_reward(RewardSpec(name=name, options={"per_frame": False}))


def test_code_of_a_given_run_is_imported_only_when_asked_for(given, evil, capsys) -> None:
    folder = given({"rewards": [{"name": "evil:bright"}], "evaluate": {"prompts": 1, "steps": 1}})
    words = ["evaluate", "--run", str(folder), "--weights", "base", "--settings.prompts", "1", "--settings.steps", "1"]
    assert main(words) == 2
    assert "--trust_run true" in capsys.readouterr().err
    assert not evil.exists()
    assert main([*words, "--trust_run", "true"]) == 0
    assert evil.exists()
    assert "bright" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "answer"),
    [([], False), (["--trust_run"], True), (["--trust_run", "--json"], True), (["--trust_run=true"], True)]
    + [(["--trust_run", word], False) for word in ("false", "maybe")],
)
def test_the_flag_is_read_as_the_parser_reads_it(words, answer) -> None:
    assert trusted(words) is answer


def test_a_model_family_of_a_given_run_is_imported_only_when_asked_for(given, evil, capsys) -> None:
    folder = given({"model": {"family": "evil.family"}})
    for command in ("export", "generate"):
        assert main([command, "--run", str(folder)]) == 2
        assert "evil.family" in capsys.readouterr().err
    assert not evil.exists()
    assert read_config(folder, trust=True).model.family == "evil.family"


def test_a_kernel_of_a_given_run_is_imported_only_when_asked_for(given, evil, capsys) -> None:
    folder = given({"kernel": {"name": "evil:Kernel"}})
    assert main(["probe", "--run", str(folder), "--rewards", '[{"name": "shapes"}]']) == 2
    assert "the code evil:Kernel (kernel.name)" in capsys.readouterr().err
    schedule = {"sigmas": [1.0, 0.5, 0.0], "stochastic": [True, False]}
    assert noise_picture(replace(read_run(folder), schedule=schedule)) is None
    assert not evil.exists()


def test_a_given_run_does_not_choose_where_secrets_are_sent(given) -> None:
    remote = {"urls": ["http://elsewhere:1"], "token_env": "AWS_SECRET_ACCESS_KEY"}
    judge = {"url": "https://elsewhere/v1", "model": "m", "key_env": "AWS_SECRET_ACCESS_KEY"}
    for name, options in (("remote", remote), ("vlm_judge", judge)):
        with pytest.raises(ValueError, match=r"elsewhere.*--trust_run"):
            read_config(given({"rewards": [{"name": name, "options": options, "weights": {"x": 1.0}}]}))


@pytest.mark.parametrize("config", [{"model": "{other}"}, {"model": {"lora": "{other}"}}])
def test_a_given_run_does_not_open_other_files(given, tmp_path, config) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("rank: 3\n")
    text = yaml.safe_dump(config).replace("{other}", str(other)).replace("'", "")
    with pytest.raises(ConfigError, match="must be a group of options"):
        read_config(given(text))


def test_rewards_that_the_user_names_are_theirs_and_export_loads_none(given, evil) -> None:
    folder = given({"rewards": [{"name": "elsewhere:reward"}]})
    with pytest.raises(ValueError, match="--trust_run true"):
        evaluate.defaults(["--run", str(folder)])
    for words in (["--rewards", '[{"name": "evil:bright"}]'], ["--trust_run"]):
        options, _ = evaluate.defaults(["--run", str(folder), *words])
        assert options is not None
        assert (options.run, options.rewards[0].name) == (str(folder), "elsewhere:reward")
    assert read_config(folder, rewards=False).rewards[0].name == "elsewhere:reward"
    assert not evil.exists()
