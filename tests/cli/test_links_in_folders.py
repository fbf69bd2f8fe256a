"""Folders that somebody else made, whose links and names lead out of them: every command stays inside, and runs nothing of theirs."""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from filelock import FileLock

from report_zoo import fake_run
from sage_grpo.callbacks.terminal import Terminal
from sage_grpo.cli import evaluate
from sage_grpo.cli.main import main
from sage_grpo.cli.starting import trusted
from sage_grpo.config.parsing import ConfigError, read_yaml
from sage_grpo.distributed.checkpoint import read_meta
from sage_grpo.distributed.world import World
from sage_grpo.models.spec import ModelSpec
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.spec import RewardSpec, load_reward
from sage_grpo.run.lock import ENTRIES, locked, owned
from sage_grpo.run.saved import Choice, find_checkpoint, read_config
from sage_grpo.tools.report.page import leave_report, write_report
from sage_grpo.tools.report.run_data import noise_picture, read_run
from sage_grpo.training.evaluate import Evaluation
from sage_grpo.utils.safe_io import CONTROL, LeadsOut

SECRET = b"what nobody was to see or to lose " * 3


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_run(tmp_path_factory.mktemp("template") / "run")


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "run"))


@pytest.fixture
def private(tmp_path: Path) -> Path:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "secret").write_bytes(SECRET)
    return tmp_path / "private" / "secret"


def linked(run: Path, name: str, target: Path) -> None:
    """Put a link in the place of a file or folder of the run; a folder's content moves to the link's end."""
    place = run / name
    if place.is_dir():
        shutil.copytree(place, target, dirs_exist_ok=True)
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.symlink_to(target)


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_report_is_not_written_through_a_link(run: Path, private: Path) -> None:
    for name in (".report.html.tmp", "report.html"):
        (run / name).symlink_to(private)
    assert main(["report", str(run)]) == 0
    assert private.read_bytes() == SECRET
    assert b"sage-grpo report" in (run / "report.html").read_bytes()
    assert not (run / "report.html").is_symlink()


def test_a_linked_folder_gets_and_loses_no_clips(run: Path, private: Path, capsys) -> None:
    (private.parent / "00-heldout-000099-00.mp4").write_bytes(SECRET)
    (private.parent / "07-other.mp4").write_bytes(SECRET)
    before = content(private.parent)
    for name in ("report_clips", "before_after"):
        (run / name).symlink_to(private.parent)
    assert main(["report", str(run), "--embed_megabytes", "0"]) == 2
    assert "report_clips leads out" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="before_after leads out"):
        assert leave_report(run) == ""
    assert content(private.parent) == before


def test_a_clip_that_is_a_link_is_neither_embedded_nor_put_beside(run: Path, private: Path) -> None:
    name = "heldout-000004-01.mp4"
    linked(run / "videos", name, private)
    with pytest.warns(UserWarning, match=f"1 link.*{name}"):
        page = write_report([run], run / "report.html")
    with pytest.warns(UserWarning, match="not followed"):
        write_report([run], run / "beside.html", embed_megabytes=0)
    assert base64.b64encode(SECRET)[:60] not in page.read_bytes()
    assert not [file for file in (run / "beside_clips").iterdir() if file.read_bytes() == SECRET]
    assert len(list((run / "beside_clips").iterdir())) == 17  # of 18


@pytest.mark.parametrize(
    "name", ["config.yaml", "metrics.jsonl", "events.jsonl", "schedule.json", "videos", "videos/heldout-000004.json"]
)
def test_a_report_reads_nothing_elsewhere(run: Path, private: Path, name: str) -> None:
    target = private.parent / "moved"
    if not (run / name).is_dir():
        shutil.copy(run / name, target)
    linked(run, name, target)
    if name.startswith("videos/"):
        with pytest.warns(UserWarning, match="not followed"):
            assert read_run(run).clips[4][0].scores == {}  # by its list of prompts
        return
    with pytest.raises(LeadsOut, match=name):
        read_run(run)


def test_a_lock_that_is_a_link_empties_nothing(tmp_path: Path, private: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ".lock").symlink_to(private)
    with pytest.raises(ConfigError, match=r"\.lock is a link"), locked(out):
        pass
    assert private.read_bytes() == SECRET
    (out / ".lock").unlink()
    (out / ".lock").hardlink_to(private)
    with locked(out):
        assert json.loads((out / ".lock").read_text())["pid"]
    assert private.read_bytes() == SECRET


@pytest.mark.parametrize("name", ENTRIES)
def test_a_run_does_not_start_where_it_would_write_elsewhere(
    tmp_path: Path, private: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = FileLock(tmp_path / "out" / ".lock", timeout=0, thread_local=False)
    monkeypatch.setattr("sage_grpo.run.lock.FileLock", lambda file, **named: lock)
    out = tmp_path / "out"
    out.mkdir()
    (out / name).symlink_to(private if "." in name else private.parent)
    with pytest.raises(LeadsOut, match=name), owned(out, World()):
        pass
    assert not (out / ".lock").exists()
    assert not lock.is_locked, "the folder is free again"
    (out / name).unlink()
    with owned(out, World()):
        assert (out / ".lock").exists()


@pytest.mark.parametrize(
    "name", [*ENTRIES, ".lock", "checkpoints/.000003.partial", "checkpoints/.000003.partial/manifest.json"]
)
def test_a_run_does_not_start_beside_a_pipe(tmp_path: Path, name: str) -> None:
    place = tmp_path / "out" / name
    place.parent.mkdir(parents=True)
    os.mkfifo(place)
    with pytest.raises(LeadsOut, match=f"{place} is a pipe"), owned(tmp_path / "out", World()):
        pass


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl"])
def test_a_run_adds_to_no_file_that_has_another_name(tmp_path: Path, private: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).hardlink_to(private)
    with pytest.raises(LeadsOut, match=rf"{name} is a hard link.*cp -r"), owned(tmp_path / "out", World()):
        pass


def emptied(place: Path) -> None:
    """Put a pipe there that has nothing for its first reader, who would wait for ever without this."""
    place.unlink()
    os.mkfifo(place)
    threading.Thread(target=lambda: place.open("wb").close(), daemon=True).start()


def test_what_is_read_of_a_run_is_no_pipe(run: Path) -> None:
    folder = run / "checkpoints" / "000004"
    folder.mkdir(parents=True)
    for file in ("state.json", "manifest.json"):
        (folder / file).write_text('{"state.json": {}, "a.safetensors": {}}')
    reads = {run / "config.yaml": read_yaml, folder / "manifest.json": lambda file: find_checkpoint(run)}
    for place, read in {**reads, folder / "state.json": lambda file: read_meta(folder)}.items():
        emptied(place)
        with pytest.raises(LeadsOut, match=f"{place.name} is a pipe"):
            read(place)


def test_a_link_deep_in_what_a_run_keeps_is_found(tmp_path: Path, private: Path) -> None:
    (tmp_path / "out" / "final" / "vae").mkdir(parents=True)
    (tmp_path / "out" / "wandb").mkdir()
    (tmp_path / "out" / "wandb" / "debug.log").symlink_to(private)  # another program's, which we never open
    with owned(tmp_path / "out", World()):
        pass
    (tmp_path / "out" / "final" / "vae" / "config.json").symlink_to(private)
    with pytest.raises(LeadsOut, match=r"vae/config\.json"), owned(tmp_path / "out", World()):
        pass


@pytest.mark.parametrize(
    "name", ["config.yaml", "checkpoints", "checkpoints/000004", "checkpoints/000004/state.json", "final"]
)
def test_weights_and_settings_are_the_runs_own(run: Path, private: Path, name: str) -> None:
    (run / "checkpoints" / "000004").mkdir(parents=True)
    (run / "checkpoints" / "000004" / "state.json").write_text("{}")
    (run / "final").mkdir()
    if name == "final":
        shutil.rmtree(run / "checkpoints")
    linked(run, name, private if "." in name else private.parent)
    read = {"config.yaml": read_config, "final": lambda folder: Choice(run=str(folder)).find(ModelSpec())}
    with pytest.raises(LeadsOut, match="leads out"):
        read.get(name, lambda folder: find_checkpoint(folder, 4))(run)


def with_settings(run: Path, **settings: Any) -> Path:
    config = yaml.safe_load((run / "config.yaml").read_text())
    for key, value in settings.items():
        group, _, last = key.rpartition("__")
        (config[group] if group else config)[last] = value
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    return run


def test_a_given_run_does_not_decide_where_encoded_prompts_are_written(run: Path, private: Path) -> None:
    with_settings(run, model__cache=str(private.parent))
    for trust in (False, True):
        with pytest.warns(UserWarning, match=r"model\.cache .* is not used.*--model\.cache"):
            assert read_config(run, trust=trust).model.cache == "auto"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_config(with_settings(run, model__cache=None)).model.cache is None
        assert read_config(with_settings(run, model__cache="auto")).model.cache == "auto"


ESCAPE = "\x1b]0;owned\x07\x1b[2J"


@pytest.mark.parametrize("key", ["model__path", "optimizer__kind", f"optimizer__{ESCAPE}"])
def test_a_config_does_not_steer_the_terminal(run: Path, key: str, capsys) -> None:
    with_settings(run, **{key: f"x{ESCAPE}"})
    for words in (["report", str(run)], ["generate", "--run", str(run)], ["train", "--config", f"{run}/config.yaml"]):
        assert main(words) == 2
        told = capsys.readouterr()
        assert not CONTROL.search(told.out + told.err)
        assert "\\x1b]0;owned" in told.err


def test_names_in_a_run_do_not_steer_the_terminal(run: Path, capsys) -> None:
    folder = run / "checkpoints" / "000004"
    folder.mkdir(parents=True)
    manifest = {"state.json": {}, "a.safetensors": {}, f"b{ESCAPE}": {}}
    for name in manifest:
        (folder / name).write_text("{}")
    (folder / "manifest.json").write_text(json.dumps(dict(reversed(manifest.items()))))
    odd = run.rename(run.with_name(f"run{ESCAPE}"))
    with pytest.warns(UserWarning, match="is damaged"):
        assert main(["export", "--run", str(odd)]) == 2
    assert main(["export", "--run", str(odd), "--checkpoint", "4"]) == 2
    told = capsys.readouterr()
    assert "\\x1b" in told.err
    assert not CONTROL.search(told.out + told.err)


def test_warnings_of_a_command_are_shown_as_text(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    formatted = []

    def warn(options: Any) -> int:
        formatted.append(warnings.formatwarning(UserWarning(f"odd {ESCAPE}"), UserWarning, "file", 1, None))
        return 0

    monkeypatch.setattr("sage_grpo.cli.report.run", warn)
    before = warnings.formatwarning
    assert main(["report", str(run)]) == 0
    assert "odd \\x1b]0;owned\\x07" in formatted[0]
    assert warnings.formatwarning is before


def test_what_a_run_says_about_its_folder_is_text(capsys) -> None:
    Terminal(enabled=True, progress=False, total=1).say(f"note {ESCAPE}")
    assert "note \\x1b]0;owned\\x07\\x1b[2J" in capsys.readouterr().out


@pytest.fixture
def given(tmp_path: Path):
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
        load_reward(RewardSpec(name=name))


def test_code_of_a_given_run_is_imported_only_when_asked_for(given, evil, calls, capsys) -> None:
    calls("sage_grpo.models.spec.ModelSpec.load")
    calls("sage_grpo.training.evaluate.evaluate", Evaluation({"eval/bright": 0.5}, torch.zeros(0), [], "", []))
    folder = given({"rewards": [{"name": "evil:bright"}], "evaluate": {"prompts": 1, "steps": 1}})
    words = ["evaluate", "--run", str(folder), "--weights", "base"]
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
