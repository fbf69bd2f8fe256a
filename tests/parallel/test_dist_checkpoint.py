"""A checkpoint of two ranks continues on one and on four, and the exported weights are whole."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import dist_workers as workers
import numpy as np
import processes
import pytest
from safetensors.torch import load_file

from double import CLOSE
from sage_grpo.parallel.checkpoint import find_fault
from sage_grpo.parallel.spec import ParallelSpec
from sage_grpo.parallel.world import World

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(checkpoint, tmp_path_factory):
    """One uninterrupted process, and two ranks that stopped after the first of two iterations."""
    folder = tmp_path_factory.mktemp("resume")
    config = workers.configure(checkpoint("hunyuan15_t2v"), folder, guidance=1.0)
    alone = processes.alone(workers.train, dataclasses.replace(config, out=str(folder / "alone")))
    spec = ParallelSpec(async_checkpoint=True, timeout=60)
    first = dataclasses.replace(config, iterations=1, parallel=spec)
    results = processes.run(workers.train, 2, first, False, True, spec=spec)
    assert all(isinstance(result, dict) for result in results), results
    return config, alone, results[0]


def check(result, alone) -> None:
    assert len(result["rows"]) == 1
    assert np.array_equal(result["rewards"][-1], alone["rewards"][-1])
    for name, expected in alone["state"].items():
        assert np.abs(result["state"][name] - expected).max() < CLOSE, name


def test_two_ranks_write_two_files_and_no_pickle(runs) -> None:
    config, _, _ = runs
    folder = Path(config.out) / "checkpoints" / "000001"
    names = sorted(file.name for file in folder.iterdir())
    assert sum(name.endswith(".safetensors") for name in names) == 2
    assert set(names) - {"state.json", "manifest.json"} == {name for name in names if name.endswith(".safetensors")}
    assert set(json.loads((folder / "manifest.json").read_text())) == set(names) - {"manifest.json"}


def test_save_on_two_resume_on_one(runs, tmp_path) -> None:
    config, alone, _ = runs
    check(processes.alone(workers.train, elsewhere(config, tmp_path), True), alone)


def test_save_on_two_resume_on_four(runs, tmp_path) -> None:
    config, alone, _ = runs
    spec = ParallelSpec(sp=2, timeout=60)
    moved = dataclasses.replace(elsewhere(config, tmp_path), parallel=spec)
    result = processes.run(workers.train, 4, moved, True, spec=spec)[0]
    assert isinstance(result, dict), result
    check(result, alone)


def test_save_on_one_resume_on_two(runs, tmp_path) -> None:
    config, alone, _ = runs
    own = dataclasses.replace(config, out=str(tmp_path / "run"))
    workers.train(World(), dataclasses.replace(own, iterations=1), False, True)
    result = processes.run(workers.train, 2, own, True)[0]
    assert isinstance(result, dict), result
    check(result, alone)


def test_exported_weights_are_the_average_and_whole(runs) -> None:
    config, _, first = runs
    saved = load_file(Path(config.out) / "final" / "transformer" / "diffusion_pytorch_model.safetensors")
    averages = {name: value for name, value in first["state"].items() if name.startswith("ema/")}
    assert averages
    for name, value in averages.items():
        assert np.array_equal(saved[name.removeprefix("ema/")].numpy(), value), name
    original = load_file(Path(config.model.path) / "transformer" / "diffusion_pytorch_model.safetensors")
    assert saved.keys() == original.keys()


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize(("where", "rank"), [("tensors", 1), ("state", 0)])
def test_a_save_that_fails_on_one_rank_fails_on_all(where: str, rank: int, background: bool, tmp_path) -> None:
    results = processes.run(workers.failing_save, 2, where, background, tmp_path)
    for result in results:
        assert isinstance(result, dict), result
        assert "Checkpoint 2 could not be written" in result["failed"]
        assert f"rank {rank}: OSError: [Errno 28] No space left on device" in result["failed"]
    assert [folder.name for folder in tmp_path.iterdir()] == ["000001"]
    assert find_fault(tmp_path / "000001") is None


def elsewhere(config, folder: Path):
    """The same run in a copy of its folder."""
    shutil.copytree(config.out, folder / "run")
    return dataclasses.replace(config, out=str(folder / "run"))
