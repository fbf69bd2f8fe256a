"""Dynamic batching: requests that wait together are scored together, in one worker thread."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.serving.wire import ScoreRequest
from sage_grpo.types import PartScores

Scorer = Callable[[torch.Tensor, list[str], float], PartScores]


def composite_scorer(composite: CompositeReward) -> Scorer:
    """The parts of a composite reward, with a reason for every clip that has none."""

    def score(videos: torch.Tensor, prompts: list[str], fps: float) -> PartScores:
        scores, report = composite.score(videos, prompts, fps)
        reasons: dict[int, str] = {}
        for failure in report.failures:
            earlier = f"{reasons[failure.index]}; " if failure.index in reasons else ""
            reasons[failure.index] = f"{earlier}{failure.reward}: {failure.reason}"
        return PartScores(dict(scores.parts), reasons)

    return score


class Closing(RuntimeError):
    """The server stops; the request may be sent again."""


@dataclass
class Counters:
    """What /metrics shows."""

    clips: int = 0
    """Clips scored."""
    failed: int = 0
    """Clips without a score."""
    batches: int = 0
    """Calls of the reward."""
    abandoned: int = 0
    """Clips that were not scored because their client had gone."""
    seconds: float = 0.0
    """Time in the reward."""
    last_clips: int = 0
    """Clips of the last call of the reward."""
    last_failed: int = 0
    """How many of them got no score."""
    last_end: float | None = None
    """When it ended, by the monotonic clock."""
    running_since: float | None = None
    """When the call that is under way began."""
    responses: dict[int, int] = field(default_factory=dict)
    """Answers by status."""


@dataclass
class _Job:
    request: ScoreRequest
    future: asyncio.Future[PartScores]

    @property
    def key(self) -> tuple[object, ...]:
        """Only clips of the same format and fps can share a call."""
        return (*self.request.videos.shape[1:], self.request.fps)

    @property
    def count(self) -> int:
        return self.request.videos.shape[0]


class Batcher:
    """Collects requests up to `max_batch` clips or `max_wait` seconds; one thread runs the reward."""

    def __init__(self, score: Scorer, *, max_batch: int, max_wait: float, counters: Counters) -> None:
        self._score, self._max_batch, self._max_wait = score, max_batch, max_wait
        self._counters = counters
        self._queue: asyncio.Queue[_Job] = asyncio.Queue()
        self._waiting: deque[_Job] = deque()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward")
        self._task: asyncio.Task[None] | None = None
        self._running: asyncio.Task[None] | None = None

    @property
    def depth(self) -> int:
        """Requests that wait."""
        return self._queue.qsize() + len(self._waiting)

    def start(self) -> None:
        """Begin to serve, in the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def submit(self, request: ScoreRequest) -> PartScores:
        """The scores of one request; Closing when the server stops first."""
        if self._task is None or self._task.done():
            raise Closing("The server is stopping.")
        job = _Job(request, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(job)
        return await job.future  # when this is cancelled, so is the future, and the job is passed over

    async def close(self) -> None:
        """Let the running batch end, and refuse what still waits."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._running is not None:
            await asyncio.wait([self._running])
        while not self._queue.empty():
            self._waiting.append(self._queue.get_nowait())
        for job in self._waiting:
            if not job.future.done():
                job.future.set_exception(Closing("The server is stopping."))
        self._executor.shutdown(wait=True)

    async def _run(self) -> None:
        while True:
            jobs = self._wanted(await self._gather())
            self._running = asyncio.create_task(self._score_jobs(jobs))
            # the worker thread cannot be stopped, so neither is its batch: close() waits for it
            await asyncio.shield(self._running)

    def _wanted(self, jobs: Iterable[_Job]) -> list[_Job]:
        """The jobs whose clients still wait; the others are counted as abandoned."""
        jobs = list(jobs)
        wanted = [job for job in jobs if not job.future.done()]
        self._counters.abandoned += sum(job.count for job in jobs) - sum(job.count for job in wanted)
        return wanted

    async def _gather(self) -> list[_Job]:
        """The first waiting request, and those of its format that fit and come in time."""
        self._waiting = deque(self._wanted(self._waiting))
        first = self._waiting.popleft() if self._waiting else await self._queue.get()
        jobs, clips = [first], first.count
        others: deque[_Job] = deque()
        earlier, self._waiting = self._waiting, others
        for job in earlier:
            if job.key == first.key and clips + job.count <= self._max_batch:
                jobs.append(job)
                clips += job.count
            else:
                others.append(job)
        deadline = time.monotonic() + self._max_wait
        try:
            while clips < self._max_batch and (left := deadline - time.monotonic()) > 0:
                job = await asyncio.wait_for(self._queue.get(), left)
                if job.key == first.key and clips + job.count <= self._max_batch:
                    jobs.append(job)
                    clips += job.count
                else:
                    others.append(job)
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            others.extendleft(reversed(jobs))  # close() answers them
            raise
        return jobs

    async def _score_jobs(self, jobs: list[_Job]) -> None:
        if not jobs:
            return
        start = self._counters.running_since = time.monotonic()
        videos = torch.cat([job.request.videos for job in jobs]) if len(jobs) > 1 else jobs[0].request.videos
        prompts = [prompt for job in jobs for prompt in job.request.prompts]
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self._executor, self._score, videos, prompts, jobs[0].request.fps)
        await asyncio.wait([call])
        error = call.exception()
        offset = 0
        for job in jobs:
            if job.future.done():
                pass
            elif error is not None:
                job.future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
            else:
                job.future.set_result(_slice(call.result(), offset, job.count))
            offset += job.count
        failed = offset if error is not None else len(call.result().reasons)
        counters, now = self._counters, time.monotonic()
        counters.batches, counters.clips = counters.batches + 1, counters.clips + offset
        counters.failed, counters.seconds = counters.failed + failed, counters.seconds + now - start
        counters.last_clips, counters.last_failed, counters.last_end = offset, failed, now
        counters.running_since = None


def _slice(scores: PartScores, offset: int, count: int) -> PartScores:
    reasons = {index - offset: text for index, text in scores.reasons.items() if 0 <= index - offset < count}
    return PartScores({part: value[offset : offset + count] for part, value in scores.items()}, reasons)
