"""What `launch` tries again, and what several processes say once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from sage_grpo.cli import launch, main
from sage_grpo.config.parsing import parse
from sage_grpo.distributed import elastic


@pytest.mark.parametrize(
    ("exits", "ignored", "status", "said"),
    [
        ([2, 0], False, 2, []),
        ([1, 0], True, 0, ["(exit status 1)|All start again (2 more)."]),
        ([-9, 1, 1], False, 1, ["(signal 9)|All start again (2 more).", "(exit status 1)|All start again (1 more).", "(exit status 1)|The same command continues from the last checkpoint."]),
        ([1, 2, 0], False, 2, ["(exit status 1)|All start again (2 more)."]),
        ([signal.SIGTERM], False, 143, []),
    ],
)  # fmt: skip
def test_what_failed_is_tried_again_and_what_was_refused_is_not(
    exits: list[int], ignored: bool, status: int, said: list[str], monkeypatch, capsys
) -> None:
    configs = []

    def launch(config: Any, program: str) -> Callable[..., None]:
        configs.append(config)
        exitcode = exits[len(configs) - 1]

        def run(*words: str) -> None:
            assert (program, words) == (sys.executable, ("-u", "-m", "module", "train"))
            if isinstance(exitcode, signal.Signals):
                raise SignalException("stopped", exitcode)
            if exitcode:
                raise ChildFailedError("python", {0: ProcessFailure(1, 77, exitcode, "")})

        return run

    monkeypatch.setattr(elastic, "elastic_launch", launch)
    monkeypatch.setattr(elastic.os, "cpu_count", lambda: 7)
    monkeypatch.setattr(signal, "getsignal", lambda one: signal.SIG_IGN if ignored else signal.SIG_DFL)
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    assert elastic.run_module("module", ["train"], processes=2, max_restarts=2) == status
    assert (os.environ["OMP_NUM_THREADS"], os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == ("3", "120")
    assert len(configs) == len(said) + (status != 1)
    assert {(one.min_nodes, one.max_nodes, one.nproc_per_node, one.max_restarts) for one in configs} == {(1, 1, 2, 0)}
    assert {one.signals_to_handle for one in configs} == {f"SIGTERM,SIGINT,{'' if ignored else 'SIGHUP,'}SIGQUIT"}
    assert len({one.run_id for one in configs}) == len(configs)
    why = "; its output above says why. "
    lines = [f"sage-grpo launch: rank 1 failed first {one.replace('|', why)}" for one in said]
    assert capsys.readouterr().err.splitlines() == lines


def test_what_follows_the_command_is_left_alone() -> None:
    argv = ["--nproc", "2", "--max_restarts", "1", "train", "--config", "a.yaml", "--optimizer.lr", "1e-5"]
    options = parse(launch.Options, launch.arguments(argv, {"train", "evaluate"}), prog="launch")
    assert (options.nproc, options.max_restarts) == (2, 1)
    assert options.command == ["train", "--config", "a.yaml", "--optimizer.lr", "1e-5"]
    with pytest.raises(ValueError, match="needs a command"):
        launch.run(launch.Options(nproc=2))


def test_processes_of_one_run_say_the_same_once(monkeypatch, capsys) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for name, value in (("MASTER_ADDR", "localhost"), ("MASTER_PORT", str(store.port)), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert [main.main(["trian"]) for _ in range(2)] == [2, 2]
    assert capsys.readouterr().err.count("There is no command 'trian'.") == 1
    assert main.main(["evaluat"]) == 2
    assert "There is no command 'evaluat'." in capsys.readouterr().err
    monkeypatch.delenv("MASTER_PORT")
    assert elastic.is_first_to_say("nobody to ask")
