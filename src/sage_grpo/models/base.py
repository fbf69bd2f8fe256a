"""The protocol of a model, and the optional protocols of models that can do more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from sage_grpo.models import ModelError
from sage_grpo.samplers.solvers import Solver
from sage_grpo.types import Conditioning, Keep, Placed, VideoSpec

Part = Literal["network", "text", "vae"]
Progress = Callable[[int, int], None]
"""Called with (done, total)."""


class Settings(Protocol):
    """The fields of a model's ModelSpec that its callers read."""

    @property
    def dtype(self) -> str:
        """Precision of the network's computation."""

    @property
    def lora(self) -> object | None:
        """The adapter that is trained; None where all weights are."""

    @property
    def packed(self) -> bool:
        """True if padding is dropped."""


@runtime_checkable
class VelocityModel(Protocol):
    """A flow-matching video generator: encodes prompts, predicts velocities, decodes latents, saves its weights.

    Properties are only read, so attributes will do, also of a narrower type. No base class is needed.
    """

    @property
    def spec(self) -> Settings:
        """The ModelSpec that the model was made from."""

    @property
    def video(self) -> VideoSpec:
        """Format of its clips."""

    @property
    def device(self) -> torch.device:
        """Device of its network."""

    @property
    def shift(self) -> float:
        """Shift of the noise schedule that the checkpoint was made for."""

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
        """dx/dsigma at x, float32 in and out, for one sigma and one condition per sample.

        `guidance` overrides `guidance_scale`. The same x, sigma and conditions in the same batch give the same bits,
        with and without gradients: rollout and replay rely on it.
        """

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


@runtime_checkable
class HasExperts(Protocol):
    """A model that may train two networks, one for high and one for low noise."""

    def network_at(self, sigma: Tensor | float) -> int:
        """Index of the network that predicts the velocity at sigma: 0 the one for the highest noise, 1 the other."""


def network_of(model: VelocityModel) -> Callable[[float], int]:
    """The function from a noise level to the index of the network that runs there. Ranks that share sharded networks run the same one at a time."""
    if isinstance(model, HasExperts):
        return model.network_at
    return lambda sigma: int(model.trains(sigma) != model.trains(1.0))


@runtime_checkable
class Explains(Protocol):
    """A model that records its decisions while loading."""

    choices: dict[str, str]


@runtime_checkable
class Differentiable(Protocol):
    """A model whose clips have a gradient."""

    def pixels(self, latents: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        """Latents (or some neighbouring frames of them) to float clips B x F x H x W x 3 in [0, 255], with a graph; `decode` rounds them.

        Only `frames`, in order, need be right; others may be black.
        """
        ...


def differentiable(model: object) -> Differentiable:
    """The model as a Differentiable; ModelError if it is not one."""
    if not isinstance(model, Differentiable):
        raise ModelError(
            f"objective.kind gradient needs a model whose clips have a gradient, and {type(model).__name__} has no method `pixels(latents, frames)` "
            "(docs/extending.md)."
        )
    return model


@runtime_checkable
class EncodesClips(Protocol):
    """A model that encodes clips into latents, as training on given clips needs."""

    def to_latents(self, clips: Tensor) -> Tensor:
        """uint8 clips B x F x H x W x 3 of the model's format to latents: the inverse of `decode`, up to the VAE's loss."""
        ...

    def latents_key(self) -> str:
        """A key, equal where equal clips give equal latents; cached latents are stored by it."""
        ...


def encodes_clips(model: object) -> EncodesClips:
    """The model as an EncodesClips; ModelError if it is not one."""
    if not isinstance(model, EncodesClips):
        raise ModelError(
            f"data.clips needs a model that makes latents of clips, and {type(model).__name__} has no methods `to_latents(clips)` and "
            "`latents_key()` (docs/extending.md)."
        )
    return model


@runtime_checkable
class TakesPlaced(Protocol):
    """A model that accepts given pictures and clips at any place of its clip; it refuses those that it cannot use."""

    def encode_placed(self, prompt: str, given: Sequence[Placed]) -> Conditioning:
        """The conditioning of a prompt and given frames."""
        ...


@runtime_checkable
class StartsFromClips(Protocol):
    """A model that may start from a clip instead of pure noise; its grid then begins at the level that the clip is noised to."""

    @property
    def video(self) -> VideoSpec:
        """Format of its clips."""

    @property
    def strength(self) -> float | None:
        """Share of the steps from pure noise that its grids keep, their last ones; None starts from noise."""
        ...

    def source(self, key: str, clip: Callable[[], Tensor]) -> Tensor:
        """The latents, on the CPU, of a clip to start from: uint8 F x H x W x 3 of the model's format, called only if no
        latents of this key are cached."""
        ...


@runtime_checkable
class TakesFormats(Protocol):
    """A model that can learn clips of other formats than its own."""

    def in_format(self, video: VideoSpec) -> VelocityModel:
        """The same model, with the same weights, for clips of another format; ModelError if it cannot make them."""
        ...


def in_format(model: VelocityModel, video: VideoSpec | None) -> VelocityModel:
    """The model for clips of a format; None is its own."""
    if video is None:
        return model
    if not isinstance(model, TakesFormats):
        raise ModelError(
            f"data.formats needs a model with the method `in_format(video)` (docs/extending.md), and {type(model).__name__} has none. Leave it out."
        )
    return model.in_format(video)


@runtime_checkable
class DecodesFrames(Protocol):
    """A model that can decode some frames of a clip for less than all of them; others decode whole clips."""

    def decode_frames(self, latents: Tensor, frames: Sequence[int]) -> Tensor:
        """`decode(latents)[:, frames]`, to the bit, for frames in order."""


@runtime_checkable
class BringsSolver(Protocol):
    """A model whose checkpoint has a solver of its own; others are sampled with ours."""

    def solver(self, num_steps: int, shift: float | None = None) -> Solver:
        """The checkpoint's solver, fresh for one sampling."""


@runtime_checkable
class RunsCheaply(Protocol):
    """A model that can approximate steps that are not trained (rollout.cheap); others run every step exactly."""

    def branches(self, sigma: Tensor | float, guidance: float | None = None) -> int:
        """Forward passes of one velocity: two where guidance runs the negative prompt as well."""

    def both(
        self, x: Tensor, sigma: Tensor, conditions: Sequence[Conditioning], *, guidance: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """`velocity`, to the bit, and the velocity of the prompt alone."""


class SequenceSplit(Protocol):
    """One rank's part of the tokens (implemented by `sage_grpo.distributed.context.SequenceParallel`)."""

    def check(self, heads: int) -> None:
        """Raise unless the ranks can divide the heads."""

    def counts(self, total: int) -> list[int]:
        """Tokens of every rank."""

    def split(self, tokens: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of all."""

    def merge(self, tokens: Tensor, total: int) -> Tensor:
        """All tokens (batch x tokens x channels) from every rank's."""

    def attend(
        self,
        attention: Callable[[Tensor, Tensor, Tensor], Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        counts: list[int],
        key_counts: list[int] | None = None,
    ) -> Tensor:
        """Attention over all ranks' tokens for this rank's; batch x tokens x heads x channels. `key_counts` where the keys are other tokens than the queries."""


@runtime_checkable
class SplitsSequence(Protocol):
    """A model that can run on a part of a clip's tokens; others have no sequence parallelism."""

    def split_sequence(self, sequence: SequenceSplit) -> None:
        """From now on run only this rank's part of every clip's tokens."""
