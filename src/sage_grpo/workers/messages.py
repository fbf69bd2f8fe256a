"""Messages between a trainer and its workers: tasks, results and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from sage_grpo.data.groups import MicroBatch
from sage_grpo.data.prompts import Prompt
from sage_grpo.distributed.fsdp import whole
from sage_grpo.models.policy import Policy
from sage_grpo.training.offload import to_device, to_storage
from sage_grpo.training.plan import Plan, Replay
from sage_grpo.training.rollout import Record, Rollout
from sage_grpo.training.scoring import ScoredClips, Scores
from sage_grpo.types import Conditioning, Sound


class WorkerError(ValueError):
    """A request that workers cannot fulfill; the message has the reason and the remedy."""


class WorkerLost(Exception):
    """A worker that no longer exists."""


@dataclass(frozen=True)
class RolloutTask:
    """One task of an iteration's plan (`Plan.tasks`): the worker makes the plan itself, so that messages are small."""

    iteration: int
    rank: int  # rank that the task belongs to
    part: int  # index among the tasks of that rank
    version: int  # version of the weights that sample
    prompts: tuple[Prompt, ...]  # prompts of the whole iteration
    conditions: Mapping[int, Conditioning] = field(repr=False)
    """Conditionings of this part's groups: text encoders run in the trainer alone."""
    whole: bool  # true if an observer needs full clips


class SavedRecord(NamedTuple):
    """The parts of a record that cannot be recomputed, in CPU memory."""

    x: Tensor
    x_next: Tensor
    v_old: Tensor | None
    log_prob_old: Tensor | None

    @classmethod
    def of(cls, record: Record) -> SavedRecord:
        rows = (getattr(record, name) for name in cls._fields)
        return cls(*(None if row is None else to_storage(row, torch.device("cpu")) for row in rows))  # type: ignore[arg-type]


@dataclass(frozen=True)
class TaskResult:
    """A finished task."""

    records: dict[Replay, SavedRecord]
    log_prob: Tensor | None
    """The log-probability of the checked step (`checked`) under the worker's weights, if its record has none."""
    latents: list[tuple[MicroBatch, Tensor]]  # latents, if the trainer differentiates
    clips: ScoredClips
    seconds: float


def moved(conditions: Mapping[int, Conditioning], device: torch.device) -> dict[int, Conditioning]:
    """Conditionings on another device. Shared objects stay shared: models recognize equal conditionings by identity."""
    tensors: dict[int, Tensor] = {}
    objects: dict[int, Conditioning] = {}

    def there(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensors.setdefault(id(one), one.to(device)) for name, one in named.items()}

    for one in conditions.values():
        if id(one) not in objects:
            negative = None if one.negative is None else there(one.negative)
            objects[id(one)] = Conditioning(there(one.tensors), negative)
    return {group: objects[id(one)] for group, one in conditions.items()}


def checked(plan: Plan, records: Mapping[Replay, object]) -> Replay:
    """The step of a part that is replayed to check its worker: another one in every iteration."""
    return list(records)[plan.iteration % len(records)]


@torch.no_grad()
def log_prob(record: Record, step: int) -> Tensor:
    """Log-probability of a recorded step under the model's current weights; at a fresh noise level, of the learned
    target."""
    device = record.policy.model.device
    law = record.policy.step(step, to_device(record.x, device, torch.float32), record.conditions).gaussian
    x_next = to_device(record.x_next, device, torch.float32)
    return law.expand(len(x_next)).log_prob(x_next)


def packed(params: Mapping[str, Tensor]) -> bytes:
    return save({name: whole(p).cpu().contiguous() for name, p in params.items()})


@torch.no_grad()
def unpack(weights: bytes, params: Mapping[str, nn.Parameter]) -> None:
    loaded = load(weights)
    if different := sorted(loaded.keys() ^ params.keys()):
        raise WorkerError(
            f"The trainer's weights are not those of this worker's model: {different[0]} is only in one of them. Use the same checkpoint and the "
            "same version of sage-grpo on all nodes."
        )
    for name, p in params.items():
        p.copy_(loaded[name])


def rollout_of(
    plan: Plan,
    rank: int,
    results: Sequence[TaskResult],
    replayed: Callable[[Replay], tuple[Policy, tuple[Conditioning, ...]]],
    device: torch.device,
) -> Rollout:
    """Assemble a rank's rollout from the results of its parts, in the order of its own sampling; `replayed` returns the
    policy of a replay and the conditionings of its rows."""
    records = {}
    for replay, saved in (pair for result in results for pair in result.records.items()):
        policy, rows = replayed(replay)
        records[replay] = Record(policy, rows, *saved)
    latents = {batch: clips.to(device) for result in results for batch, clips in result.latents}
    sampled = [member for task in plan.tasks(rank) for batch in task.batches(0) for member in batch.members]
    row = {member: index for index, member in enumerate(sampled)}
    order = [row[member] for batch in plan.batches(rank) for member in batch.members]
    return Rollout(
        [(batch, latents[batch]) for batch in plan.batches(rank) if latents],
        records,
        _joined([result.clips for result in results], order),
    )


def _joined(clips: Sequence[ScoredClips], order: Sequence[int]) -> ScoredClips:
    """Concatenate the workers' scored clips; `order` has the rows of the whole."""

    def together(pieces: Sequence[Tensor | None]) -> Tensor | None:
        there = [piece for piece in pieces if piece is not None and len(piece)]
        return torch.cat(there)[list(order)] if there else None

    videos, sounds = together([one.videos for one in clips]), [one.sound for one in clips if one.sound is not None]
    waves = together([one.waves for one in sounds])
    return ScoredClips(
        videos=clips[0].videos if videos is None else videos,
        scores=Scores.joined([one.scores for one in clips if one.scores is not None]),
        thumbnails=together([one.thumbnails for one in clips]),
        sound=None if waves is None else Sound(waves, sounds[0].rate),
    )
