"""The protocol of a model, and the abilities that it may have beyond it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from sage_grpo.distributed.context import SequenceParallel
from sage_grpo.models import ModelError
from sage_grpo.samplers.solvers import Solver
from sage_grpo.types import Conditioning, Keep, Sound, VideoSpec

T = TypeVar("T")
Part = Literal["network", "text", "vae"]
Progress = Callable[[int, int], None]  # called with (done, total)


@runtime_checkable
class VelocityModel(Protocol):
    """A flow-matching video generator. Properties are only read, so attributes will do, also of a narrower type. No base class is needed."""

    @property
    def spec(self) -> Any:
        """The ModelSpec that the model was made from."""

    @property
    def video(self) -> VideoSpec:
        """Format of its clips."""

    @property
    def device(self) -> torch.device:
        """Device of its network."""

    @property
    def guidance_scale(self) -> float:
        """Default scale of classifier-free guidance in `velocity`; 1 is none."""

    @property
    def network(self) -> nn.Module:
        """The module that is trained, sharded and checkpointed."""

    @property
    def others(self) -> Sequence[nn.Module]:
        """Modules that predict velocities at other noise levels (the other expert of Wan 2.2), frozen or trained too; mostly empty."""

    def encode(self, prompts: Sequence[str], images: Sequence[Tensor | None] | None = None) -> list[Conditioning]:
        """One conditioning per prompt; equal prompts (with equal images, uint8 H x W x 3) share one object."""

    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one sample's latents."""

    def sigmas(self, num_steps: int, shift: float | None = None) -> Tensor:
        """The grid that the model is sampled on: num_steps + 1 values from at most 1 down to 0; None is its own shift."""

    def velocity(
        self, x: Tensor, sigma: Tensor, conditions: Sequence[Conditioning], *, guidance: float | None = None
    ) -> Tensor:
        """dx/dsigma at x, float32 in and out, for one sigma and one condition per sample. `guidance` overrides `guidance_scale`. The same x, sigma
        and conditions in the same batch give the same bits, with and without gradients: rollout and replay rely on it."""

    def trains(self, sigma: Tensor | float) -> bool:
        """True if the velocity at sigma depends on the trainable parameters."""

    def decode(self, latents: Tensor, progress: Progress | None = None) -> Tensor:
        """Latents to uint8 clips B x F x H x W x 3 on the CPU."""

    def blocks(self) -> list[nn.Module]:
        """The repeated blocks of the network, in order: the units of sharding."""

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that training changes, by stable names in a stable order."""

    def keep(self, levels: Sequence[Keep]) -> None:
        """Set the activations that each block keeps for its backward pass: "input", "attention" or "all"; the others are computed again."""

    def place(self, part: Part, device: str | torch.device) -> None:
        """Move a part between phases of training."""

    def unload_text(self) -> None:
        """Drop the text and image encoders; cached prompts stay, a new prompt loads them again."""

    def load_lora(self, folder: str | Path) -> None:
        """Add a saved LoRA to the network, frozen."""

    def save(self, folder: str | Path, *, weights: Mapping[str, Tensor] | None = None, merged: bool = False) -> None:
        """Write files that diffusers loads: a LoRA, or a whole folder (`merged` folds a LoRA into it)."""


@dataclass(frozen=True)
class StateParts:
    """Shapes and places of the parts of a state, in order. The parts of a clip are denoised together and on one grid, so elementwise operations
    (noise, kernels, solvers, storage) work on the whole row; only the network's inputs and outputs, the decoders, and losses of one part alone split
    it."""

    shapes: Mapping[str, tuple[int, ...]]  # shapes of one sample's parts, by name

    @property
    def size(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    def places(self) -> dict[str, slice]:
        places, start = {}, 0
        for name, shape in self.shapes.items():
            places[name] = slice(start, start := start + math.prod(shape))
        return places

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        return {name: rows[:, place].unflatten(1, self.shapes[name]) for name, place in self.places().items()}

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([parts[name].flatten(1) for name in self.shapes], dim=1)

    def check(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.shapes:
                raise ModelError(f'There is no part "{name}" here: the model has {", ".join(self.shapes)}.')


class ClipEncoder(Protocol):
    """Encodes clips into latents, as training on given clips needs."""

    def to_latents(self, clips: Tensor) -> Tensor:
        """uint8 clips B x F x H x W x 3 of the model's format to latents: the inverse of `decode`, up to the VAE's loss."""

    def key(self) -> str:
        """A key, equal where equal clips give equal latents; cached latents are stored by it."""


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """Everything that a model may be able to do beyond VelocityModel, as its attribute `abilities`; None is not at all."""

    choices: dict[str, str] = field(default_factory=dict)
    """Decisions while loading, with their reasons."""
    parts: StateParts | None = None
    """The parts of its states where they have several; `latent_shape()` is then (parts.size,)."""
    network_at: Callable[[Tensor | float], int] | None = None
    """Index of the network that predicts the velocity at a noise level: 0 the one for the highest noise, 1 the other."""
    branches: Callable[[float, float | None], int] | None = None
    """Forward passes of one velocity at (sigma, guidance): two where guidance runs the negative prompt as well. None: always one."""
    solver: Callable[[int, float | None], Solver] | None = None
    """(number of steps, shift) to the checkpoint's own solver, fresh for one sampling."""
    pixels: Callable[[Tensor, Sequence[int] | None], Tensor] | None = None
    """(latents, frames) to float clips B x F x H x W x 3 in [0, 255] with a graph, right in these frames (None: all); `decode` rounds them."""
    sound: Callable[[Tensor], Sound] | None = None
    """Latents to the sound of their clips."""
    encoder: ClipEncoder | None = None
    """The encoder of clips."""
    split_sequence: Callable[[SequenceParallel], None] | None = None
    """From now on run only this rank's part of every clip's tokens."""


def abilities(model: object) -> Abilities:
    """A model's abilities; none where it has no such attribute."""
    return getattr(model, "abilities", None) or Abilities()


def network_of(model: VelocityModel) -> Callable[[float], int]:
    """The function from a noise level to the index of the network that runs there. Ranks that share sharded networks run the same one at a time."""
    return abilities(model).network_at or (lambda sigma: int(model.trains(sigma) != model.trains(1.0)))


def pixels_of(model: VelocityModel) -> Callable[[Tensor, Sequence[int] | None], Tensor]:
    need = "objective.kind gradient needs a model whose clips have a gradient"
    return _needed(model, abilities(model).pixels, "pixels(latents, frames)", need)


def encoder_of(model: VelocityModel) -> ClipEncoder:
    return _needed(model, abilities(model).encoder, "encoder", "data.clips needs a model that makes latents of clips")


def _needed(model: VelocityModel, ability: T | None, name: str, need: str) -> T:
    if ability is None:
        raise ModelError(f"{need}, and {type(model).__name__} has no ability `{name}` (docs/extending.md).")
    return ability


def sound_of(model: VelocityModel, latents: Tensor) -> Sound | None:
    sound = abilities(model).sound
    return None if sound is None else sound(latents)
