"""Several processes for a test: forked from a server that has imported torch and diffusers once."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

import matrix_plugin
import needs
from sage_grpo.distributed import world as ranks
from sage_grpo.distributed.spec import ParallelSpec
from sage_grpo.distributed.world import World, start

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "sage_grpo.training.trainer",
        "sage_grpo.models.families.hunyuan15",
        "sage_grpo.models.families.wan",
        "sage_grpo.rewards.built_in.video_stats",
        "diffusers.models.transformers.transformer_hunyuan_video15",
        "diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5",
        "diffusers.pipelines.wan.pipeline_wan",
        "peft",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
    ]
)

Worker = Callable[..., Any]


def run(
    worker: Worker, processes: int, *arguments: Any, spec: ParallelSpec | None = None, limit: float = 400
) -> list[Any]:
    """Call `worker(world, *arguments)` on every rank; returns what they return. An exception on a rank comes back as a string of
    its traceback, a rank that died as one of its exit code."""
    spec = spec or ParallelSpec(timeout=60)
    port = needs.free_port()
    members = []
    for rank in range(processes):
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        here, there = _context.Pipe()
        process = _context.Process(target=_main, args=(there, environment, spec, worker, arguments), daemon=True)
        process.start()
        there.close()
        members.append((process, here))
    results = [_receive(process, pipe, limit) for process, pipe in members]
    for process, _ in members:
        process.join(timeout=20)
        alive, _ = process.is_alive(), process.kill()
        assert not alive, "a rank did not end"
    return results


def _receive(process: BaseProcess, pipe: Connection, limit: float) -> Any:
    try:
        return pipe.recv() if pipe.poll(limit) else "timeout of the test"
    except EOFError:
        process.join(timeout=20)
        return f"died with exit code {process.exitcode}"


def _main(pipe: Connection, environment: dict[str, str], spec: ParallelSpec, worker: Worker, arguments: tuple) -> None:
    os.environ.update(environment)
    ranks.end_with_parent = lambda: None  # the fork server is no launcher: where it ends, its forks go on
    torch.set_num_threads(1)
    matrix_plugin.apply()
    world = None
    try:
        world = start(spec, "cpu")
        pipe.send(worker(world, *arguments))
        world.close()
    except Exception:  # noqa: BLE001 - whatever it is, the test must see it
        pipe.send(traceback.format_exc())
        pipe.close()
        os._exit(1)  # a process group with a dead member may never let go


def alone(worker: Worker, *arguments: Any) -> Any:
    return worker(World(), *arguments)
