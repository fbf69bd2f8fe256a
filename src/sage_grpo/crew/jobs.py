"""What travels between a trainer and its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from sage_grpo.data.groups import MicroBatch
from sage_grpo.data.prompts import Prompt
from sage_grpo.training.plan import Replay
from sage_grpo.training.scoring import Judged
from sage_grpo.types import Conditioning


class CrewError(ValueError):
    """Workers cannot do what is asked; the message says why, and what to do."""


@dataclass(frozen=True)
class Job:
    """One task of an iteration's plan (`Plan.tasks`): whoever does it makes the plan itself, so that little travels."""

    era: int
    """How often the run had gone back to a checkpoint."""
    iteration: int
    part: int
    """Among the plan's tasks."""
    version: int
    """Of the weights that sample."""
    prompts: tuple[Prompt, ...]
    """Of the whole iteration."""
    conditions: Mapping[int, Conditioning] = field(repr=False)
    """Of the groups of this part: text encoders run at the trainer alone."""
    whole: bool
    """Somebody looks at the clips."""

    @property
    def order(self) -> tuple[int, int]:
        """What it is a part of."""
        return self.era, self.iteration


@dataclass(frozen=True)
class Kept:
    """A record (training/rollout.py) without what the trainer knows itself, on the CPU."""

    x: Tensor
    x_next: Tensor
    v_old: Tensor | None
    log_prob_old: Tensor | None


@dataclass(frozen=True)
class Result:
    """A job that is done."""

    records: dict[Replay, Kept]
    latents: list[tuple[MicroBatch, Tensor]]
    """Where the trainer scores."""
    judged: Judged | None
    """Where the worker does."""
    seconds: float

    @property
    def bytes(self) -> int:
        """What travels."""
        tensors = [one for kept in self.records.values() for one in (kept.x, kept.x_next, kept.v_old)]
        tensors += [latents for _, latents in self.latents]
        tensors += [] if self.judged is None else [self.judged.videos]
        return sum(one.nbytes for one in tensors if one is not None)


def moved(conditions: Mapping[int, Conditioning], device: torch.device) -> dict[int, Conditioning]:
    """Conditions on another device. What was one object stays one: models recognise equal conditions by it."""
    tensors: dict[int, Tensor] = {}
    objects: dict[int, Conditioning] = {}

    def there(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensors.setdefault(id(one), one.to(device)) for name, one in named.items()}

    for one in conditions.values():
        if id(one) not in objects:
            negative = None if one.negative is None else there(one.negative)
            source = None if one.source is None else one.source.to(device)
            objects[id(one)] = Conditioning(there(one.tensors), negative, source)
    return {group: objects[id(one)] for group, one in conditions.items()}


def packed(params: Mapping[str, nn.Parameter]) -> bytes:
    """Trained weights as safetensors."""
    return save({name: p.detach().cpu().contiguous() for name, p in params.items()})


@torch.no_grad()
def unpack(weights: bytes, params: Mapping[str, nn.Parameter]) -> None:
    """Put packed weights into parameters of the same names."""
    found = load(weights)
    if different := sorted(found.keys() ^ params.keys()):
        raise CrewError(
            f"The trainer's weights are not those of this worker's model: {different[0]} is only in one of them. Use the same checkpoint and the "
            "same version of sage-grpo on all nodes."
        )
    for name, p in params.items():
        p.copy_(found[name])


def in_order(pieces: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    """Rows of several pieces in the order of the whole."""
    return torch.cat(list(pieces))[list(order)]
