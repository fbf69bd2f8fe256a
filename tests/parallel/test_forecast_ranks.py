"""`sage-grpo plan` counts the passes of every rank: uneven shares, idle passes, fillers and split clips included."""

from __future__ import annotations

import dataclasses

import dist_workers as workers
import processes
import pytest
from test_branching_layouts import configure

from sage_grpo.forecast.costs import forecast
from sage_grpo.forecast.hardware import find
from sage_grpo.parallel.spec import ParallelSpec

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sp", [1, 2])
def test_passes_of_two_ranks(sp: int, checkpoint, tmp_path) -> None:
    config = configure(checkpoint("wan_t2v"), tmp_path, lora=True, guidance=2.0)
    spec = ParallelSpec(sp=sp, timeout=60)
    config = dataclasses.replace(config, parallel=spec, batch=dataclasses.replace(config.batch, micro_batch=1))
    said = forecast(config, find("cpu"), gpus=2, held_out=5)
    results = processes.run(workers.count_passes, 2, config, spec=spec)
    for number, result in enumerate(results):
        assert isinstance(result, dict), result
        rank = number // sp
        row, evaluation = said.passes[rank], said.evaluation[rank]
        plain = row["shared"] + row["sampling"] + row["idle"] + row["reference"] + row["gauge"]
        assert result["iteration plain"] == (plain.forwards, plain.clips)
        assert result["iteration graph"] == (row["replay"].forwards, row["replay"].clips)
        assert result["evaluation plain"] == (evaluation.forwards, evaluation.clips)
    if sp == 1:
        assert sum(row["idle"].clips for row in said.passes) > 0  # 4 and 5 clips: somebody waits
