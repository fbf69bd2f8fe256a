"""Rewards that compute elsewhere begin with the first clips while the next ones are still being decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sage_grpo.rewards.frames import check_clips
from sage_grpo.rewards.member import Clips, Member, Outcome


class Early:
    """Clips on their way through such rewards. Each reward has a thread of its own, in which clips go one after another."""

    def __init__(self, members: Sequence[Member], fps: float) -> None:
        self.fps = fps
        self._lines = [(member, ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward")) for member in members]
        self._coming: dict[str, list[Future[Outcome]]] = {}

    def __enter__(self) -> Early:
        return self

    def __exit__(self, *error: object) -> None:
        for _, thread in self._lines:
            thread.shutdown(wait=False, cancel_futures=True)  # an error does not wait for a slow server

    def add(self, videos: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> None:
        """Clips that are decoded; they are scored from now on."""
        check_clips(videos, prompts, self.fps)
        clips = Clips(videos, list(prompts), self.fps, list(metadata))
        for member, thread in self._lines:
            self._coming.setdefault(member.spec.title, []).append(thread.submit(member.score, clips))

    def outcomes(self) -> dict[str, Callable[[], Outcome]]:
        """For every reward that has got clips, by its title, what waits for all their scores."""
        return {title: partial(_joined, coming) for title, coming in self._coming.items()}


def _joined(coming: Sequence[Future[Outcome]]) -> Outcome:
    """Outcomes of consecutive clips as one."""
    outcomes = [one.result() for one in coming]
    values: dict[str, list[Tensor]] = {part: [] for part in outcomes[0].values}
    failures, remarks, count = [], [], 0
    for outcome in outcomes:
        failures += [replace(one, index=one.index + count) for one in outcome.failures]
        remarks += [replace(one, index=one.index + count) for one in outcome.remarks]
        for part, value in outcome.values.items():
            values[part].append(value)
        count += len(next(iter(outcome.values.values())))
    seconds = sum(outcome.seconds for outcome in outcomes)
    return Outcome({part: torch.cat(pieces) for part, pieces in values.items()}, failures, remarks, seconds)
