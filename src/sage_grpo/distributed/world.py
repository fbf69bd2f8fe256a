"""The processes of a run, seen from one of them. One process is the same code with nothing to exchange."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from sage_grpo.distributed.heartbeat import Heartbeat, end_with_parent
from sage_grpo.distributed.spec import Layout, ParallelSpec, lay_out


class RankLost(RuntimeError):
    """Another process died or hangs; the message names it."""


@dataclass(frozen=True)
class World:
    """This process's ranks, groups and device. Every method is called by all processes or by none.

    The exchanged values are small and live on the CPU, so they go over gloo also where the network uses NCCL: no device waits for them, and a missing
    rank is named.
    """

    rank: int = 0
    """Data-parallel rank; it decides this process's clips."""
    size: int = 1
    """Data-parallel size."""
    sequence_rank: int = 0
    """Sequence-parallel rank; it decides this process's part of every clip's tokens."""
    layout: Layout = Layout()
    device: torch.device | None = None
    """Device of this process; None leaves it to the model's spec."""
    control: dist.ProcessGroup | None = None
    """All processes, over gloo; None in a run of one process."""
    sequence_group: dist.ProcessGroup | None = None
    """The processes that share this process's clips."""
    heartbeat: Heartbeat | None = None
    timeout: float = 1800.0

    @property
    def processes(self) -> int:
        return self.layout.processes

    @property
    def number(self) -> int:
        return self.rank * self.layout.sequence + self.sequence_rank

    @property
    def is_main(self) -> bool:
        return self.number == 0

    def mine(self, count: int) -> range:
        """This rank's share of `count` items that its sequence-parallel ranks all have: each is handled once."""
        return range(self.sequence_rank, count, self.layout.sequence)

    def gather(self, values: Tensor) -> Tensor:
        """Concatenate a tensor of rows (of any number per process) over all processes, in their order."""
        group = self.control
        if group is None:
            return values
        self.barrier()
        rows = values.detach().cpu().contiguous()
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.processes)]
        dist.all_gather(counts, torch.tensor([len(rows)]), group=group)
        most = int(max(counts))
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[: int(count)] for part, count in zip(parts, counts)])

    def sum(self, values: Tensor) -> Tensor:
        """Add a tensor up over data-parallel ranks, in their order: the same bits everywhere."""
        if self.control is None:
            return values
        return self.gather(values[None])[:: self.layout.sequence].sum(0).to(values.device)

    def any(self, flag: bool) -> bool:
        return bool(self.gather(torch.tensor([float(flag)])).any())

    def texts(self, text: str) -> list[str]:
        if self.control is None:
            return [text]
        content = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
        return [part.decode() for part in bytes(self.gather(content).tolist()).split(b"\0")[:-1]]

    def from_main(self, text: str) -> str:
        """The main process's text: for decisions that depend on the disk."""
        return self.texts(text if self.is_main else "")[0]

    def barrier(self) -> None:
        if self.control is not None:
            dist.monitored_barrier(self.control, timedelta(seconds=self.timeout), wait_all_ranks=True)

    def note(self, where: str) -> None:
        """Note this process's activity, for the message of another that misses it."""
        if self.heartbeat is not None:
            self.heartbeat.where = where

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Turn the engine's error about a lost connection or a timeout into one that names the missing rank."""
        try:
            yield
        except RuntimeError as error:
            if self.heartbeat is None or not _is_connection(error):
                raise
            first = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            raise RankLost(f"{self.heartbeat.missing()}\nThis process (rank {self.number}) got: {first}") from error

    def close(self) -> None:
        if self.heartbeat is not None:
            self.heartbeat.stop()
            self.heartbeat.farewell()
        if self.control is not None:
            dist.destroy_process_group()


def start(spec: ParallelSpec, device: str = "auto") -> World:
    """Join the processes that torchrun started, and form the groups of the layout; one process where nothing did."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    layout = lay_out(spec, processes)
    if "RANK" not in os.environ:
        return World()
    end_with_parent()
    number, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available() and not device.startswith("cpu")
    place = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(place)
    limit = timedelta(seconds=spec.timeout)
    # A restarted run meets the store of the try before, with the addresses of dead processes in it: use a prefix of its own.
    store, _, _ = next(rendezvous("env://", timeout=limit))
    page = dist.PrefixStore(f"sage_grpo/try/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=limit, store=page, rank=number, world_size=processes)
    control = dist.new_group(backend="gloo", timeout=limit)
    sequence_group = None
    if layout.sequence > 1:
        for first in range(0, layout.processes, layout.sequence):
            members = list(range(first, first + layout.sequence))
            group = dist.new_group(members, timeout=limit)
            sequence_group = group if number in members else sequence_group
    rank, sequence_rank = divmod(number, layout.sequence)
    heartbeat = Heartbeat.start(number, layout.processes, patience=min(5.0, spec.timeout))
    return World(rank, layout.data, sequence_rank, layout, place, control, sequence_group, heartbeat, spec.timeout)


def _is_connection(error: RuntimeError) -> bool:
    """True for an error of the network between processes; gloo and NCCL raise plain RuntimeErrors for some."""
    words = ("gloo", "nccl", "connection closed", "connection reset", "timed out", "monitoredbarrier", "broken pipe")
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)
