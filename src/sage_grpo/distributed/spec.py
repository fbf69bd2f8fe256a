"""The parallel layout in a configuration: pure arithmetic; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sage_grpo.config.metadata import Effect
from sage_grpo.config.ranges import Count, NotNegative, Positive, Seconds, checked


class ParallelError(ValueError):
    """Processes cannot be laid out as asked; the message names the layouts that work."""


@checked
class ParallelSpec:
    """Layout of several processes; one process ignores it."""

    affects: ClassVar[Effect] = "machine"
    dp_replicate: Count = 1
    """Copies of the sharded weights (HSDP); on slow networks, the number of nodes."""
    dp_shard: Count | None = None
    """Ranks that share one copy of the weights; None is all that remain."""
    sp: Count = 1
    """Ranks that share one clip (Ulysses sequence parallel); must divide the attention heads."""
    reshard: bool = True
    """Free gathered weights after each forward pass: less memory, more traffic."""
    cpu_offload: bool = False
    """Keep sharded weights, gradients and optimizer state in CPU memory."""
    sync_every_pass: bool = False
    """Reduce gradients after every backward pass: less memory, more traffic."""
    timeout: Seconds = 1800.0
    """Seconds to wait for a missing rank before the run stops."""


@checked
class RaySpec:
    """Ray workers that sample and score (docs/scale.md#sample-on-other-gpus-with-ray)."""

    affects: ClassVar[Effect] = "machine"
    address: str | None = None
    """A running cluster: auto on one of its nodes, or HOST:PORT. None starts a local one."""
    workers: Count = 2
    """Most workers; they start as the cluster has room, and are replaced when they die."""
    gpus: NotNegative | None = None
    """GPUs per worker, such as 0.25; None is 1 if the trainer uses a GPU, else 0."""
    cpus: Positive = 1.0
    """CPUs that Ray reserves per worker."""
    limit: Positive = 0.25
    """Difference of a worker's log-probabilities from the trainer's, as a share of the ratio clip range, that ends the
    run."""
    patience: Seconds = 600.0
    """Seconds without any worker after which the run stops."""


@dataclass(frozen=True)
class Layout:
    """Processes as a grid replicate x shard x sequence; ranks of one clip are neighbors."""

    replicate: int = 1
    shard: int = 1
    sequence: int = 1

    @property
    def data(self) -> int:
        """Number of data-parallel ranks: each samples its own clips."""
        return self.replicate * self.shard

    @property
    def processes(self) -> int:
        return self.data * self.sequence

    @property
    def weight_shards(self) -> int:
        """Number of pieces of the weights: sequence-parallel ranks share them too."""
        return self.shard * self.sequence


def lay_out(spec: ParallelSpec, processes: int) -> Layout:
    """The grid of a number of processes, or an error that names the nearest numbers that work."""
    unit = spec.dp_replicate * spec.sp
    if spec.dp_shard is not None:
        need = unit * spec.dp_shard
        if processes != need:
            raise ParallelError(
                f"{processes} processes, but dp_replicate {spec.dp_replicate} x dp_shard {spec.dp_shard} x sp {spec.sp} = {need}. "
                f"Start {need}, or leave parallel.dp_shard out to use what there is."
            )
        return Layout(spec.dp_replicate, spec.dp_shard, spec.sp)
    if processes % unit:
        below = processes // unit * unit
        nearest = " or ".join(str(number) for number in (below, below + unit) if number)
        raise ParallelError(
            f"{processes} processes cannot be split into dp_replicate {spec.dp_replicate} x sp {spec.sp}: the nearest numbers that "
            f"can are {nearest}."
        )
    return Layout(spec.dp_replicate, processes // unit, spec.sp)
