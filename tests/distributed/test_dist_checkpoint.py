"""A checkpoint of two ranks continues on one and on four, and the exported weights are whole."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import dist_workers as workers
import numpy as np
import processes
import pytest
from safetensors.torch import load_file

from double import CLOSE
from sage_grpo.distributed.checkpoint import find_fault
from sage_grpo.distributed.spec import ParallelSpec

pytestmark = pytest.mark.slow


def test_a_run_of_two_ranks_continues_on_one_and_on_four(checkpoint, tmp_path) -> None:
    config = workers.configure(checkpoint("hunyuan15_t2v"), tmp_path, guidance=1.0)
    alone = processes.alone(workers.train, replace(config, out=str(tmp_path / "alone")))
    spec = ParallelSpec(timeout=60)
    first = processes.run(workers.train, 2, replace(config, iterations=1, parallel=spec), False, True, spec=spec)[0]
    assert isinstance(first, dict), first
    check_files(Path(config.out) / "checkpoints" / "000001")
    check_export(Path(config.out) / "final", Path(config.model.path), first["state"])

    four = ParallelSpec(sp=2, timeout=60)
    for ranks, spec in ((1, ParallelSpec()), (4, four)):
        out = shutil.copytree(config.out, tmp_path / f"on {ranks}")
        moved = replace(config, out=str(out), parallel=spec)
        if ranks == 1:
            result = processes.alone(workers.train, moved, True)
        else:
            result = processes.run(workers.train, ranks, moved, True, spec=spec)[0]
        assert isinstance(result, dict), result
        assert len(result["rows"]) == 1
        assert np.array_equal(result["rewards"][-1], alone["rewards"][-1])
        for name, expected in alone["state"].items():
            assert np.abs(result["state"][name] - expected).max() < CLOSE, name


def check_files(folder: Path) -> None:
    names = sorted(file.name for file in folder.iterdir())
    assert sum(name.endswith(".safetensors") for name in names) == 2
    assert set(names) - {"state.json", "manifest.json"} == {name for name in names if name.endswith(".safetensors")}
    assert set(json.loads((folder / "manifest.json").read_text())) == set(names) - {"manifest.json"}


def check_export(folder: Path, base: Path, state) -> None:
    saved = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    averages = {name: value for name, value in state.items() if name.startswith("ema/")}
    assert averages
    for name, value in averages.items():
        assert np.array_equal(saved[name.removeprefix("ema/")].numpy(), value), name
    assert saved.keys() == load_file(base / "transformer" / "diffusion_pytorch_model.safetensors").keys()


@pytest.mark.parametrize(("where", "rank"), [("tensors", 1), ("state", 0)])
def test_a_save_that_fails_on_one_rank_fails_on_all(where: str, rank: int, tmp_path) -> None:
    results = processes.run(workers.failing_save, 2, where, tmp_path)
    for result in results:
        assert isinstance(result, dict), result
        assert "Checkpoint 2 could not be written" in result["failed"]
        assert f"rank {rank}: OSError: [Errno 28] No space left on device" in result["failed"]
    assert [folder.name for folder in tmp_path.iterdir()] == ["000001"]
    assert find_fault(tmp_path / "000001") is None
