"""MPS is started where it is there and not running, and stopped by whom it was started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from sage_grpo.recipes import recipe
from sage_grpo.tools.compare import machine

CONTROL = """#!/bin/sh
if [ "$1" = "-d" ]; then echo "start $CUDA_MPS_PIPE_DIRECTORY" >> {log}; exit {starts}; fi
read order
echo "$order $CUDA_MPS_PIPE_DIRECTORY" >> {log}
[ "$order" != get_server_list ] || [ -n "{running}" ]
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What NVIDIA's program was told; no MPS runs yet."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    _install(tmp_path)
    return tmp_path / "log"


def _install(folder: Path, *, starts: int = 0, running: str = "") -> None:
    program = folder / machine.CONTROL
    program.write_text(CONTROL.format(log=folder / "log", starts=starts, running=running))
    program.chmod(0o755)


def test_mps_is_started_for_the_workers_and_stopped_afterwards_also_after_a_fault(log: Path) -> None:
    pipes = list[str]()

    def fails() -> None:
        with machine.mps(True) as (environment, remark):
            pipes.append(environment["CUDA_MPS_PIPE_DIRECTORY"])
            assert Path(pipes[0]).is_dir()
            assert "by MPS" in remark
            raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        fails()
    assert log.read_text().splitlines() == ["get_server_list ", f"start {pipes[0]}", f"quit {pipes[0]}"]
    assert not Path(pipes[0]).exists()


def test_runs_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    small = recipe("shapes/sage")
    large = replace(small, model=replace(small.model, path="somewhere/large"))
    monkeypatch.setattr(machine, "cores", lambda: 40)
    assert machine.how_many([small], []) == 40
    assert machine.how_many([small], ["0", "1"]) == 32
    assert machine.how_many([small, large], ["0", "1"]) == 2
    assert machine.how_many([small], list(map(str, range(50)))) == 50  # a core for each GPU at least
    places = [machine.environment(["0", "1"], number)["CUDA_VISIBLE_DEVICES"] for number in range(3)]
    assert places == ["0", "1", "0"]
    own = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    assert machine.environment([], 0).items() >= own.items()


@pytest.mark.parametrize(
    ("devices", "most", "count", "wanted"),
    [(["0", "1"], None, 5, True), (["0", "1"], 2, 2, True), (["0", "1"], 1, 1, False), ([], 3, 3, False)],
)
def test_workers_have_the_gpus_in_turn(devices, most, count, wanted, tmp_path, monkeypatch) -> None:
    asked: list[bool] = []

    @contextmanager
    def mps(wanted: bool) -> Iterator[tuple[dict[str, str], str]]:
        asked.append(wanted)
        yield {"OWN": "x"}, "Shared." if wanted else ""

    monkeypatch.setattr(machine, "mps", mps)
    monkeypatch.setattr(machine, "gpus", lambda configs: devices)
    monkeypatch.setattr(machine, "cores", lambda: 40)
    monkeypatch.setattr(machine, "Worker", lambda *words: words)
    with machine.opened([recipe("shapes/sage")] * 5, tmp_path, most) as (workers, where):
        own = [machine.environment(devices, number) | {"OWN": "x"} for number in range(count)]
        assert workers == [(tmp_path, number, environment) for number, environment in enumerate(own)]
    assert (asked, where) == ([wanted], f"{'GPU 0, 1' if devices else 'the CPU'}.{' Shared.' * wanted}")
