"""What `launch` tries again, and what several processes say once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from sage_grpo import cli
from sage_grpo.commands import launch
from sage_grpo.configure import parse
from sage_grpo.parallel import elastic


@pytest.mark.parametrize(
    ("exits", "starts", "status"),
    [([2, 0], 1, 2), ([1, 0], 2, 0), ([-9, 1, 0], 3, 0), ([1, 1, 1, 0], 3, 1), ([1, 2, 0], 2, 2)],
)
def test_what_failed_is_tried_again_and_what_was_refused_is_not(
    exits: list[int], starts: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = []

    def launch(config: Any, program: str) -> Callable[..., None]:
        configs.append(config)
        exitcode = exits[len(configs) - 1]

        def run(*words: str) -> None:
            if exitcode:
                raise ChildFailedError("python", {0: ProcessFailure(0, 1, exitcode, "")})

        return run

    monkeypatch.setattr(elastic, "elastic_launch", launch)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    assert elastic.run_module("module", ["train"], processes=2, max_restarts=2) == status
    assert len(configs) == starts
    assert {config.max_restarts for config in configs} == {0}
    said = capsys.readouterr().err
    assert said.count("All start again") == starts - 1
    assert ("continues from the last checkpoint" in said) == (status == 1)


def test_what_follows_the_command_is_left_alone() -> None:
    argv = ["--nproc", "2", "--max_restarts", "1", "train", "--config", "a.yaml", "--optimizer.lr", "1e-5"]
    options = parse(launch.Options, launch.arguments(argv, {"train", "evaluate"}), prog="launch")
    assert (options.nproc, options.max_restarts) == (2, 1)
    assert options.command == ["train", "--config", "a.yaml", "--optimizer.lr", "1e-5"]
    with pytest.raises(ValueError, match="needs a command"):
        launch.run(launch.Options(nproc=2))


def test_processes_of_one_run_say_the_same_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for name, value in (("MASTER_ADDR", "localhost"), ("MASTER_PORT", str(store.port)), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert [cli.main(["trian"]) for _ in range(2)] == [2, 2]
    assert capsys.readouterr().err.count("There is no command 'trian'.") == 1
    assert cli.main(["evaluat"]) == 2
    assert "There is no command 'evaluat'." in capsys.readouterr().err
    monkeypatch.delenv("MASTER_PORT")
    assert elastic.is_first_to_say("nobody to ask")
