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
    """Layout of a run on several processes: data parallel (replicated x sharded) x sequence parallel. One process ignores it."""

    affects: ClassVar[Effect] = "machine"
    dp_replicate: Count = 1
    """Copies of the sharded weights (HSDP): 1 shards over all ranks; on slow networks, use the number of nodes."""
    dp_shard: Count | None = None
    """Data-parallel ranks that share one copy of the weights; None is what the number of processes leaves over."""
    sp: Count = 1
    """Ranks that share the tokens of one clip (Ulysses); must divide the attention heads. Use it when one clip's activations do
    not fit, or to shorten a rollout."""
    reshard: bool = True
    """Free a block's gathered weights after its forward pass and gather them again in the backward pass: less memory, more
    traffic."""
    cpu_offload: bool = False
    """Keep sharded weights, gradients and optimizer state in CPU memory."""
    sync_every_pass: bool = False
    """Reduce gradients after every backward pass, not once per update: more traffic, but no rank keeps whole gradients (4 bytes
    per trainable parameter)."""
    timeout: Seconds = 1800.0
    """Seconds that ranks wait for one another before the run stops and names the missing one."""


@checked
class RaySpec:
    """Workers on Ray that sample and score clips for the trainer (docs/scale.md#sample-on-other-gpus-with-ray)."""

    affects: ClassVar[Effect] = "machine"
    address: str | None = None
    """A cluster that is there: "auto" on one of its nodes, or HOST:PORT. None starts one for the run, which only this machine can reach."""
    workers: Count = 2
    """Workers at most. One that the cluster has no room for starts as soon as it has; one that dies is replaced."""
    gpus: NotNegative | None = None
    """GPUs of a worker; 0.25 lets four share one. None is 1 where the trainer computes on one, else 0."""
    cpus: Positive = 1.0
    """CPUs that Ray reserves for a worker."""
    limit: Positive = 0.25
    """A worker whose log-probabilities differ from those of the trainer's replay by more than this share of the clip range ends the run (without a ratio:
    of the range that `surrogate.clip_scale` gives)."""
    patience: Seconds = 600.0
    """Seconds without any worker after which the run stops."""


@dataclass(frozen=True)
class Layout:
    """Processes as a grid replicate x shard x sequence; ranks of one clip are neighbours."""

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
