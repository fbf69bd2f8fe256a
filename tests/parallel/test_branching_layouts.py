"""Branching in every layout: groups that span ranks, ranks with different numbers of passes, two experts, split clips."""

from __future__ import annotations

import dataclasses

import dist_workers as workers
import processes
import pytest
from test_equal_runs import check_learning, check_same_run

from sage_grpo.flow.kernels import KernelSpec
from sage_grpo.flow.windows import Window
from sage_grpo.parallel.spec import ParallelSpec
from sage_grpo.training import config as c

pytestmark = pytest.mark.slow

RUNS = [
    # checkpoint, LoRA, guidance, processes, sp, expert
    ("hunyuan15_t2v", False, 1.0, 2, 2, "high"),
    ("wan_t2v", False, 2.0, 2, 1, "high"),
    ("wan22_t2v", True, 1.0, 2, 1, "high"),
    ("wan22_t2v", True, 1.0, 2, 1, "both"),
    ("wan22_t2v", False, 2.0, 2, 1, "both"),
]


def configure(
    checkpoint, folder, *, lora: bool, guidance: float, share: bool = True, expert: str = "high"
) -> c.TrainConfig:
    """Three prompts x 3: two ranks have 4 and 5 clips, one group spans both, and prompts branch at different steps (of both experts, where
    both are trained)."""
    window = Window(kind="drawn", at=[0, 1] if expert == "high" else [1, 2])
    config = workers.configure(
        checkpoint,
        folder,
        lora=lora,
        guidance=guidance,
        kernel=KernelSpec(name="sage_exact", eta=1.4),
        batch=c.BatchConfig(prompts=3, group_size=3, micro_batch=2),
        rollout=c.RolloutConfig(steps=4, same_noise=True, share=share, window=window),
        update=c.UpdateConfig(updates_per_rollout=2, repeat=True),
    )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, expert=expert))


@pytest.mark.parametrize(("kind", "lora", "guidance", "ranks", "sp", "expert"), RUNS)
def test_branching_is_the_same_run_in_every_layout(
    kind, lora, guidance, ranks, sp, expert, checkpoint, tmp_path
) -> None:
    config = configure(checkpoint(kind), tmp_path, lora=lora, guidance=guidance, expert=expert)
    alone = processes.alone(workers.train, config)
    plain = processes.alone(
        workers.train, configure(checkpoint(kind), tmp_path, lora=lora, guidance=guidance, share=False, expert=expert)
    )
    check_learning(alone, plain)
    spec = ParallelSpec(sp=sp, timeout=60)
    results = processes.run(workers.train, ranks, dataclasses.replace(config, parallel=spec), spec=spec)
    experts = {name.split(".")[0] for name in alone["state"]}
    assert len({name for name in experts if "transformer" in name}) >= (2 if expert == "both" else 0)
    check_same_run(results, alone)
