"""Hands the tasks of iterations to workers, and makes one rollout of what comes back. It does not know where workers are.

Workers may come and go: a task that is lost is done by another, with the same noise and the same weights, so that nothing depends on who did it.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from threading import Event, RLock, Thread
from typing import Protocol

import torch
from torch import Tensor, nn

from sage_grpo.crew.jobs import CrewError, Job, Kept, Result, in_order, moved, packed
from sage_grpo.crew.studio import Studio
from sage_grpo.parallel.spec import RaySpec
from sage_grpo.training.anchor import Snapshot
from sage_grpo.training.placing import to_device
from sage_grpo.training.plan import Plan, Replay
from sage_grpo.training.rollout import Record, Rollout
from sage_grpo.training.scoring import Judged, joined
from sage_grpo.types import Conditioning, Sound

ATTEMPTS = 3
"""How often a job may fail before the run does; a worker that dies does not count."""
WAIT = 0.5
"""Seconds that one round of handing out and taking in waits at most."""


@dataclass(frozen=True)
class Told:
    """What became of a worker's job."""

    worker: str
    result: Result | None = None
    error: str = ""
    """Why there is none."""
    lost: bool = False
    """The worker is gone."""


class Hands(Protocol):
    """The workers, wherever they are."""

    def ready(self) -> Sequence[str]:
        """Those who can work, also those who do."""
        ...

    def publish(self, version: int, weights: bytes, oldest: int) -> None:
        """Weights for the jobs that name this version; those before the `oldest` are not needed any more."""
        ...

    def start(self, worker: str, job: Job) -> None:
        """Give a worker a job."""
        ...

    def wait(self, seconds: float) -> Sequence[Told]:
        """What became of jobs since the last call; waits for so long where there is nothing yet."""
        ...

    def dismiss(self, worker: str) -> None:
        """Send a worker away for good."""
        ...

    def hope(self) -> str:
        """Empty while more workers may come, else why none will."""
        ...

    def close(self) -> None:
        """Send all away."""
        ...


@dataclass
class Order:
    """An iteration that is being made."""

    plan: Plan
    jobs: list[Job]
    conditions: Mapping[int, Conditioning]
    """Where the trainer computes."""
    since: int
    """The iteration before which its weights were the newest."""
    weights: Snapshot | None
    """These weights, where they may be old by the time that the iteration is due."""
    results: dict[int, tuple[str, Result]] = field(default_factory=dict)
    """By part, with the worker."""

    @property
    def done(self) -> bool:
        """Whether every part is there."""
        return len(self.results) == len(self.jobs)

    def weighing(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights that sampled."""
        return nullcontext() if self.weights is None else self.weights.applied()


class Foreman:
    """Lets workers make the rollouts of a trainer."""

    def __init__(
        self, studio: Studio, params: Mapping[str, nn.Parameter], hands: Hands, spec: RaySpec, clip: float, ahead: int
    ) -> None:
        """clip: the clip range; ahead: iterations that are made before they are due (rollout.staleness)."""
        self.studio, self.params, self.hands, self.spec = studio, dict(params), hands, spec
        self.limit = spec.limit * clip
        self.row: dict[str, float] = {}
        """Metrics of the last iteration."""
        self.gaps: dict[str, float] = {}
        """Of every worker so far, how far its log-probability was from the trainer's when last seen."""
        self._orders: dict[tuple[int, int], Order] = {}
        self._queue: deque[Job] = deque()
        self._running: dict[str, Job] = {}
        self._free: dict[str, float] = {}
        """Since when workers have nothing to do."""
        self._failed: Counter[tuple[tuple[int, int], int]] = Counter()
        self._version, self._idle, self._lost, self._refused = -1, 0.0, 0, 0
        self._alive = time.monotonic()
        self._lock, self._closed, self._error = RLock(), Event(), ""
        self._thread = Thread(target=self._between, name="foreman", daemon=True) if ahead else None
        if self._thread is not None:
            self._thread.start()

    def roll_out(self, due: Plan, coming: Sequence[Plan], shows: Callable[[int], bool], era: int = 0) -> Rollout:
        """The rollout of an iteration that is due; those that are `coming` are begun with the weights of now.

        era: how often the run has gone back to a checkpoint: what was made by weights that are given up is given up as well.
        """
        with self._lock:
            for key in [key for key in self._orders if key[0] != era or key[1] < due.iteration]:
                del self._orders[key]
            self._queue = deque(job for job in self._queue if job.order in self._orders)
            fresh = [plan for plan in (due, *coming) if (era, plan.iteration) not in self._orders]
            if fresh:
                self._version += 1
                oldest = min((order.jobs[0].version for order in self._orders.values()), default=self._version)
                self.hands.publish(self._version, packed(self.params), oldest)
                old = Snapshot(self.params, offload=True) if coming else None
                for plan in fresh:
                    self._order(plan, due.iteration, old, era, whole=shows(plan.iteration))
        order = self._orders[era, due.iteration]
        queued, began = len(self._queue), time.monotonic()
        while True:
            self._until(order)
            if not self._refuse(order):
                break
        self._tell(order, queued, time.monotonic() - began)
        with self._lock:
            del self._orders[era, due.iteration]
        return self._whole(order)

    def close(self) -> None:
        """Send the workers away."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        self.hands.close()

    def _order(self, plan: Plan, since: int, weights: Snapshot | None, era: int, *, whole: bool) -> None:
        conditions = self.studio.conditions(plan)
        travelling, jobs = moved(conditions, torch.device("cpu")), []
        prompts = {group.number: group.prompt for group in plan.groups}
        for part, task in enumerate(plan.tasks()):
            own = {group: travelling[group] for group in task.members(0)}
            shown = tuple(prompts[number] for number in sorted(prompts))
            jobs.append(Job(era, plan.iteration, part, self._version, shown, own, whole))
        self._orders[era, plan.iteration] = Order(plan, jobs, conditions, since, weights)
        self._queue.extend(jobs)

    def _between(self) -> None:
        """While the trainer does something else, its workers go on."""
        while not self._closed.is_set() and not self._error:
            try:
                with self._lock:
                    self._round(WAIT / 10)
            except CrewError as error:
                self._error = str(error)
            time.sleep(WAIT / 100 if self._running else WAIT / 5)

    def _until(self, order: Order) -> None:
        tick, told = self.studio.clock.ticker(len(order.jobs)), 0
        while not order.done:
            with self._lock:
                if self._error:
                    raise CrewError(self._error)
                self._round(WAIT)
            for _ in range(told, len(order.results)):
                tick()
            told = max(told, len(order.results))

    def _round(self, seconds: float) -> None:
        """Give jobs to those who have none, and take in what is done."""
        ready, now = list(self.hands.ready()), time.monotonic()
        self._free = {worker: self._free.get(worker, now) for worker in ready if worker not in self._running}
        if ready or not self._queue:
            self._alive = now
        hope = self.hands.hope()
        if not ready and not self._running and (hope or now - self._alive > self.spec.patience):
            why = hope or f"none was there for {self.spec.patience:g} seconds (rollout.ray.patience)"
            raise CrewError(f"There is no worker to sample clips: {why}. A continued run begins where this one ends.")
        longest = sorted(self._free, key=lambda worker: self._free[worker])
        for worker in longest[: len(self._queue)]:
            job = self._queue.popleft()
            self._idle += now - self._free.pop(worker)
            self._running[worker] = job
            self.hands.start(worker, job)
        for told in self.hands.wait(seconds):
            if told.worker in self._running:
                self._take(told, self._running.pop(told.worker))

    def _take(self, told: Told, job: Job) -> None:
        order = self._orders.get(job.order)
        if order is None:  # given up meanwhile
            return
        if told.result is not None:
            order.results[job.part] = told.worker, told.result
            return
        self._queue.appendleft(job)
        self._lost += told.lost
        self._failed[job.order, job.part] += not told.lost
        if self._failed[job.order, job.part] == ATTEMPTS:
            raise CrewError(
                f"Part {job.part + 1} of iteration {job.iteration + 1} failed {ATTEMPTS} times on workers, the last time on {told.worker}:\n"
                f"{told.error}"
            )

    def _refuse(self, order: Order) -> bool:
        """Replay one step of every worker, and do without those whose log-probabilities are not the trainer's; whether there are any."""
        with order.weighing():
            parts = {worker: part for part, (worker, _) in sorted(order.results.items())}
            gaps = {worker: self._gap(order, part) for worker, part in parts.items()}
        self.gaps |= gaps
        wrong = [worker for worker, gap in gaps.items() if not gap <= self.limit]
        with self._lock:
            for worker in wrong:
                warnings.warn(
                    f"{worker} is refused: its log-probability of a step differs by {gaps[worker]:.2g} from that of the replay, and {self.limit:.2g} is "
                    "allowed (rollout.ray.limit). Others make its clips again.",
                    stacklevel=2,
                )
                self._refused += 1
                self.hands.dismiss(worker)
                running = self._running.pop(worker, None)
                again = [running] if running is not None and running.order in self._orders else []
                for other in self._orders.values():
                    own = [part for part, (by, _) in other.results.items() if by == worker]
                    again += [other.jobs[part] for part in own]
                    other.results = {part: made for part, made in other.results.items() if part not in own}
                self._queue.extendleft(again)
            if wrong and not self.hands.ready() and self.hands.hope():
                raise CrewError(
                    f"Every worker was refused: the log-probability of a step that {wrong[-1]} sampled differs by {gaps[wrong[-1]]:.2g} from that of "
                    f"its replay, and rollout.ray.limit allows {self.limit:.2g}. Workers need the trainer's checkpoint, model.dtype and version of "
                    "sage-grpo; `sage-grpo doctor` with the same options shows every worker."
                )
        return bool(wrong)

    @torch.no_grad()
    def _gap(self, order: Order, part: int) -> float:
        """How far the log-probability of a step that is stored is from that of its replay here; another step in every iteration."""
        kept = list(order.results[part][1].records.items())
        replay, record = kept[order.plan.iteration % len(kept)]
        whole = self._record(order, replay, record)
        assert whole.log_prob_old is not None
        device = self.studio.model.device
        step = whole.policy.step(replay.step, to_device(whole.x, device, torch.float32), whole.conditions)
        x_next = to_device(whole.x_next, device, torch.float32)
        return float((step.gaussian.expand(len(x_next)).log_prob(x_next) - whole.log_prob_old).abs().max())

    def _record(self, order: Order, replay: Replay, kept: Kept) -> Record:
        policy, conditions = self.studio.replayed(order.plan, replay, order.conditions)
        there, device = self.studio.storage.device, self.studio.model.device
        old = None if kept.log_prob_old is None else kept.log_prob_old.to(device)
        v_old = None if kept.v_old is None else kept.v_old.to(there)
        return Record(policy, conditions, kept.x.to(there), kept.x_next.to(there), v_old, old)

    def _whole(self, order: Order) -> Rollout:
        """One rollout of all parts, in the order in which this process would have made it."""
        made = [order.results[part][1] for part in range(len(order.jobs))]
        records = {replay: self._record(order, replay, kept) for one in made for replay, kept in one.records.items()}
        device = self.studio.model.device
        latents = {batch: rows.to(device) for one in made for batch, rows in one.latents}
        batches = order.plan.batches(0)
        sampled = [member for task in order.plan.tasks() for batch in task.batches(0) for member in batch.members]
        place = {member: at for at, member in enumerate(sampled)}
        rows = [place[member] for batch in batches for member in batch.members]
        judged = [one.judged for one in made if one.judged is not None]
        return Rollout(
            [(batch, latents[batch]) for batch in batches if latents],
            records,
            _joined(judged, rows) if judged else None,
        )

    def _tell(self, order: Order, queued: int, waited: float) -> None:
        results = [result for _, result in order.results.values()]
        self.row = {
            "crew/workers": float(len(self.hands.ready())),
            "crew/queue": float(queued),
            "crew/staleness": float(order.plan.iteration - order.since),
            "crew/waited_s": waited,
            "crew/busy_s": sum(result.seconds for result in results),
            "crew/idle_s": self._idle,
            "crew/megabytes": sum(result.bytes for result in results) / 1e6,
            "crew/gap": max(self.gaps[worker] for worker, _ in order.results.values()),
            "crew/lost": float(self._lost),
            "crew/refused": float(self._refused),
        }
        self._idle = 0.0


def _joined(judged: Sequence[Judged], rows: Sequence[int]) -> Judged:
    """What workers saw of their clips as one; `rows` is the order of the whole."""

    def whole(pieces: Sequence[Tensor | None]) -> Tensor | None:
        there = [piece for piece in pieces if piece is not None and len(piece)]
        return in_order(there, rows) if there else None

    videos, waves = whole([one.videos for one in judged]), [one.sound for one in judged if one.sound is not None]
    heard = whole([one.waves for one in waves])
    return replace(
        judged[0],
        videos=judged[0].videos if videos is None else videos,
        sheet=joined([one.sheet for one in judged]),
        thumbnails=whole([one.thumbnails for one in judged]),
        sound=None if heard is None else Sound(heard, waves[0].rate),
    )


class Lagging:
    """Samples in this process with weights that are some iterations old: what staleness does, without workers."""

    def __init__(self, studio: Studio, params: Mapping[str, nn.Parameter]) -> None:
        self.studio, self.params = studio, dict(params)
        self.row: dict[str, float] = {}
        self._orders: dict[tuple[int, int], tuple[int, Snapshot]] = {}

    def roll_out(self, due: Plan, coming: Sequence[Plan], shows: Callable[[int], bool], era: int = 0) -> Rollout:
        """As a foreman's."""
        now = Snapshot(self.params)
        self._orders = {key: order for key, order in self._orders.items() if key[0] == era and key[1] >= due.iteration}
        for plan in (due, *coming):
            self._orders.setdefault((era, plan.iteration), (due.iteration, now))
        since, weights = self._orders.pop((era, due.iteration))
        self.row = {"crew/staleness": float(due.iteration - since)}
        with weights.applied():
            return self.studio.sampler(due).run()

    def close(self) -> None:
        """Nothing is open."""
