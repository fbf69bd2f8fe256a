"""Many runs side by side on this machine: cores, GPUs, and NVIDIA's MPS, which lets processes share a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sage_grpo.tools.compare.engine import Process
from sage_grpo.training.config import TrainConfig
from sage_grpo.worlds.world import SHAPES, world_of_model

CONTROL = "nvidia-cuda-mps-control"
PER_GPU = 16
"""Runs of a world's model that one large GPU serves well (H200 under MPS); a real model has the GPU to itself."""
PATIENCE = 30
"""Seconds that MPS may take to start or to stop."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The engine of one machine: one process per run side by side."""

    share: bool = True
    """Let processes share a GPU by MPS."""

    @contextmanager
    def open(
        self, configs: Sequence[TrainConfig], out: Path, most: int | None
    ) -> Iterator[tuple[Sequence[Process], str]]:
        """Processes, with the GPUs in turn."""
        devices = gpus(configs)
        count = min(most or how_many(configs, devices), len(configs))
        with mps(bool(devices) and count > 1 and self.share) as (own, remark):
            workers = [Process(out, number, environment(devices, number) | own) for number in range(count)]
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
    """Cores that this process may use."""
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
    if _tell("get_server_list", {}):
        yield {}, "Processes share the GPU by the MPS that runs here."
        return
    with tempfile.TemporaryDirectory(prefix="sage-mps-", ignore_cleanup_errors=True) as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for place in own.values():
            Path(place).mkdir()
        fault = _start(own)
        if fault:
            yield {}, f"Processes take turns on the GPU: MPS does not start ({fault})."
            return
        try:
            yield own, "Processes share the GPU by MPS."
        finally:
            _tell("quit", own)


def _start(own: dict[str, str]) -> str:
    """Start the daemon; returns the error."""
    try:
        done = subprocess.run(
            [CONTROL, "-d"],
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the daemon keeps inherited streams: a pipe would never end
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else f"{CONTROL} -d ended with {done.returncode}"


def _tell(order: str, own: dict[str, str]) -> bool:
    """Send an order to the daemon; returns True if one accepted it."""
    try:
        done = subprocess.run(
            [CONTROL],
            input=f"{order}\n",
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "Cannot find" not in done.stdout + done.stderr
