"""Estimate cost, memory and time of a run without loading weights: `sage-grpo plan RECIPE` (or FILE.yaml, or a run's folder).

Takes every option of `train`. Prints the batch arithmetic, the network evaluations of every phase, memory and time on a GPU of your
choice, and what to change if the run does not fit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sage_grpo.cli import starting
from sage_grpo.config.parsing import ConfigError
from sage_grpo.config.ranges import Count
from sage_grpo.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Options(TrainConfig):
    """A training configuration and a machine."""

    gpus: Count | None = None
    """Processes of the run, one per GPU; None is the product of the parallel options."""
    gpu: str | None = None
    """GPU type: h200, h100, a100-80, a100-40, l40s, rtx4090, ..., or cpu. None is this machine's, or h200."""
    worker_gpu: str | None = None
    """With rollout.on ray, the GPU type of the workers; None is the trainer's."""
    json: bool = False
    """Print JSON only."""


def run(options: Options) -> int:
    """Forecast and print; the exit status is 1 where the run does not fit."""
    from rich.console import Console

    from sage_grpo.plan import changes, hardware, show
    from sage_grpo.plan.architecture import find_architecture
    from sage_grpo.plan.costs import forecast

    parallel = options.parallel
    gpus = options.gpus or parallel.dp_replicate * (parallel.dp_shard or 1) * parallel.sp
    config = starting.plain(options)
    architecture = find_architecture(config.model)
    device = hardware.here(gpus) if options.gpu is None else hardware.find(options.gpu, gpus)
    if options.gpu is None and device.is_cpu and config.model.path not in (None, "shapes"):
        device = hardware.find("h200", gpus)
    found = forecast(config, device, gpus=gpus, architecture=architecture, held_out=_held_out(config))
    workers = found
    if options.worker_gpu is not None:
        if config.rollout.on != "ray":
            raise ConfigError(
                f"--worker_gpu {options.worker_gpu} is about workers: set --rollout.on ray, or leave it out."
            )
        other = hardware.find(options.worker_gpu)
        workers = forecast(config, other, gpus=1, architecture=architecture, held_out=found.held_out)
    useful, way = changes.changes(found), changes.way_to_fit(found)
    if options.json:
        print(json.dumps(show.document(found, useful, way, workers), indent=2, allow_nan=False))
    else:
        show.show(found, useful, way, Console(highlight=False), workers)
    return 0 if found.fits else 1


def _held_out(config: TrainConfig) -> int | None:
    """Number of held-out prompts; None where their file is not on this machine."""
    from sage_grpo.training.inputs import NAMES, prompts_from

    source = config.held_out
    if source is None or (source not in NAMES and not Path(source).exists()):
        return None
    return len(prompts_from(source))
