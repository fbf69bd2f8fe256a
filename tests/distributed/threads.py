"""Ranks of a test as threads of one process: the collectives that the package uses, over a list that all of them see."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistError


class Ranks:
    DistError = DistError

    def __init__(self, count: int) -> None:
        self.count, self.waited = count, []
        self._here, self._sent, self._all = threading.local(), [None] * count, threading.Barrier(count, timeout=60)

    def run(self, work: Callable[[int], Any]) -> list[Any]:

        def one(rank: int) -> Any:
            self._here.rank = rank
            return work(rank)

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(one, range(self.count)))

    def _trade(self, value: Any) -> list[Any]:
        self._sent[self._here.rank] = value
        self._all.wait()
        found = list(self._sent)
        self._all.wait()
        return found

    def get_rank(self, group: object = None) -> int:
        return self._here.rank

    def get_world_size(self, group: object = None) -> int:
        return self.count

    def all_gather(self, parts: list[Tensor], own: Tensor, group: object) -> None:
        for part, sent in zip(parts, self._trade(own), strict=True):
            part.copy_(sent)

    def all_to_all_single(
        self, result: Tensor, rows: Tensor, received: list[int], sent: list[int], group: object
    ) -> None:
        parts = [pieces[self._here.rank] for pieces in self._trade(rows.split(sent))]
        assert [len(part) for part in parts] == received
        result.copy_(torch.cat(parts))

    def monitored_barrier(self, group: object, timeout: timedelta, wait_all_ranks: bool) -> None:
        self.waited.append((group, timeout.total_seconds(), wait_all_ranks))
        self._trade(None)
