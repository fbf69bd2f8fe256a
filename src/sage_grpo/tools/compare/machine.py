"""Many runs side by side on this machine: cores, GPUs, and NVIDIA's MPS, which lets processes share a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sage_grpo.tools.compare.worker import Worker
from sage_grpo.training.config import TrainConfig
from sage_grpo.worlds.world import SHAPES, world_of_model

CONTROL = "nvidia-cuda-mps-control"
PER_GPU = 16
"""Runs of a world's model that one large GPU serves well (H200 under MPS); a real model has the GPU to itself."""
PATIENCE = 30
"""Seconds that MPS may take to start or to stop."""


@contextmanager
def opened(configs: Sequence[TrainConfig], out: Path, most: int | None) -> Iterator[tuple[list[Worker], str]]:
    """Workers for these runs, at most `most` (None: as many as are useful), with the GPUs in turn, and a description of them. Logs go to `out`."""
    devices = gpus(configs)
    count = min(most or how_many(configs, devices), len(configs))
    with mps(bool(devices) and count > 1) as (own, remark):
        workers = [Worker(out, number, environment(devices, number) | own) for number in range(count)]
        where = f"GPU {', '.join(devices)}" if devices else "the CPU"
        yield workers, f"{where}. {remark}".rstrip()


def gpus(configs: Sequence[TrainConfig]) -> list[str]:
    """The GPUs for these runs, as in CUDA_VISIBLE_DEVICES; none where they run on the CPU."""
    import torch

    if all(config.model.device == "cpu" for config in configs) or not torch.cuda.is_available():
        return []
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named or [str(number) for number in range(torch.cuda.device_count())]


def cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def per_gpu(configs: Sequence[TrainConfig]) -> int:
    """Runs that a GPU serves well."""
    return PER_GPU if all(world_of_model(config.model.path) is SHAPES for config in configs) else 1


def how_many(configs: Sequence[TrainConfig], devices: Sequence[str]) -> int:
    """The default of runs side by side."""
    return min(max(cores(), len(devices)), per_gpu(configs) * len(devices)) if devices else cores()


def environment(devices: Sequence[str], number: int) -> dict[str, str]:
    """Environment variables of a worker: one thread, one GPU in turn, and repeatable matrix products."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    one = {"CUDA_VISIBLE_DEVICES": devices[number % len(devices)]} if devices else {}
    return {**threads, **one, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TOKENIZERS_PARALLELISM": "false"}


@contextmanager
def mps(wanted: bool) -> Iterator[tuple[dict[str, str], str]]:
    """Run MPS while the context is open: its clients' environment, and a sentence for people. Stopped afterwards unless it ran before."""
    if not wanted or shutil.which(CONTROL) is None:
        yield {}, "" if not wanted else f"Processes take turns on the GPU: there is no {CONTROL}."
        return
    if not _control("get_server_list", {}):
        yield {}, "Processes share the GPU by the MPS that runs here."
        return
    with tempfile.TemporaryDirectory(prefix="sage-mps-", ignore_cleanup_errors=True) as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for place in own.values():
            Path(place).mkdir()
        if fault := _control("", own, "-d"):
            yield {}, f"Processes take turns on the GPU: MPS does not start ({fault})."
            return
        try:
            yield own, "Processes share the GPU by MPS."
        finally:
            _control("quit", own)


def _control(order: str, own: dict[str, str], *options: str) -> str:
    """Start the daemon (-d), or send it an order; returns the error."""
    try:
        with tempfile.TemporaryFile("w+") as said:  # the daemon keeps inherited streams: a pipe would never end
            done = subprocess.run(
                [CONTROL, *options],
                input=f"{order}\n",
                env={**os.environ, **own},
                stdout=said,
                stderr=said,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
            said.seek(0)
            answer = said.read()
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode != 0:
        return f"{CONTROL} {' '.join(options) or order} ended with {done.returncode}"
    return answer if "Cannot find" in answer else ""
