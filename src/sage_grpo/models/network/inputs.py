"""Inputs of a network: the format of a clip, its latents and tokens, and batches of samples whose inputs have equal shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sage_grpo.models import ModelError
from sage_grpo.models.spec import ModelSpec
from sage_grpo.types import VideoSpec

SIDE = 2
"""Latents of a token along height and width where a pipeline of images packs them, whatever its network's own patch size."""
Inputs = Mapping[str, Tensor]
empty = partial(torch.empty, device="meta")  # a tensor without storage


@dataclass(frozen=True, kw_only=True)
class LatentGrid:
    """The division of a clip into latents by a VAE, and of the latents into tokens by a network."""

    channels: int  # channels of the latents
    temporal: int | None  # frames of a latent frame (the first frame has one of its own); None for a VAE of images
    spatial: int  # pixels of a latent, along height and width
    patch: tuple[int, int, int] = (1, 1, 1)  # latents of a token along frames, height and width

    def latents(self, video: VideoSpec) -> tuple[int, ...]:
        frames = 1 if self.temporal is None else (video.frames - 1) // self.temporal + 1
        return (self.channels, frames, video.height // self.spatial, video.width // self.spatial)

    def tokens(self, video: VideoSpec) -> int:
        return math.prod(size // step for size, step in zip(self.latents(video)[1:], self.patch))

    def check(self, video: VideoSpec) -> None:
        if self.temporal is None and video.frames != 1:
            raise ModelError(f"model.frames must be 1 for a model of images, got {video.frames}. Leave it out.")
        temporal, multiple = self.temporal or 1, self.spatial * self.patch[-1]
        if (video.frames - 1) % temporal:
            below = (video.frames - 1) // temporal * temporal + 1
            raise ModelError(
                f"model.frames must be {temporal}k + 1 for this VAE, got {video.frames}: use {below} or {below + temporal}."
            )
        for name in ("height", "width"):
            value = getattr(video, name)
            if value % multiple:
                low = value // multiple * multiple
                nearest = " or ".join(str(n) for n in (low, low + multiple) if n)
                raise ModelError(f"model.{name} must be a multiple of {multiple} here, got {value}: use {nearest}.")


def choose_video(spec: ModelSpec, checkpoint: Mapping[str, float], family: VideoSpec) -> VideoSpec:
    fields = {name: getattr(family, name) for name in ("frames", "height", "width", "fps")}
    return VideoSpec(**{name: first_given(getattr(spec, name), checkpoint.get(name), fields[name]) for name in fields})


def check_image(image: Tensor | None, pictures: Collection[int]) -> None:
    if image is None:
        if 0 not in pictures:
            raise ModelError("This is an image-to-video model: encode(prompts, images) needs one image per prompt.")
        return
    if not max(pictures):
        raise ModelError("This model starts from text: leave the images out, or load an image-to-video checkpoint.")
    pair = image.ndim == 4 and len(image) == 2
    if image.dtype != torch.uint8 or (image.ndim != 3 and not pair) or image.shape[-1] != 3:
        raise ModelError(
            f"An image is uint8 H x W x 3, or 2 x H x W x 3 (first and last frame), got {image.dtype} of shape {tuple(image.shape)}."
        )
    if pair and 2 not in pictures:
        raise ModelError(
            "This model starts from one picture and takes no last frame: leave last_image out, or load a checkpoint for first "
            "and last frames (Wan2.1-FLF2V, Wan2.2-I2V-A14B)."
        )
    if not pair and 1 not in pictures:
        raise ModelError(
            "This model goes from a first to a last frame: give the prompt a last_image beside its image, or load an image-to-video checkpoint."
        )


def after_first_frame(x: Tensor, frame: Tensor, sigma: Tensor, v: Tensor) -> Tensor:
    """The velocity v of a clip whose first latent frame is given: there it points at the image, without a gradient. Pipelines ignore the network's
    output for that frame and keep the image there, or put it there at the end."""
    return torch.cat([(x[:, :, :1] - frame) / sigma.to(x), v[:, :, 1:]], dim=2)


def first_given(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def grid_of_clips(pipe: Any, config: Any, channels: int) -> LatentGrid:
    """The grid of most video pipelines: the pipeline has the division by the VAE, the transformer's config the size of a token."""
    names = ("vae_scale_factor_temporal", "vae_scale_factor_spatial")
    if not hasattr(pipe, names[0]):  # LTX-Video's and LTX-2's
        names = ("vae_temporal_compression_ratio", "vae_spatial_compression_ratio")
    temporal, spatial, side = getattr(pipe, names[0]), getattr(pipe, names[1]), config.patch_size
    patch = (config.patch_size_t, side, side) if isinstance(side, int) else tuple(side)
    return LatentGrid(channels=channels, temporal=temporal, spatial=spatial, patch=patch)


def packed_grid(channels: int, spatial: int) -> LatentGrid:
    return LatentGrid(channels=channels // SIDE**2, temporal=None, spatial=spatial, patch=(1, SIDE, SIDE))


def pack(x: Tensor, side: int = 1) -> Tensor:
    """B x C x F x H x W as B x tokens x (C side side): a token is a square of one frame."""
    squares = x.unflatten(4, (-1, side)).unflatten(3, (-1, side))  # B C F h side w side
    return squares.permute(0, 2, 3, 5, 1, 4, 6).flatten(4, 6).flatten(1, 3)


def unpack(tokens: Tensor, x: Tensor, side: int = 1) -> Tensor:
    frames, height, width = x.shape[2], x.shape[3] // side, x.shape[4] // side
    squares = tokens.unflatten(2, (-1, side, side)).unflatten(1, (frames, height, width))  # B F h w C side side
    return squares.permute(0, 4, 1, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4)


def in_equal_batches(
    run: Callable[[Tensor, dict[str, Tensor]], Tensor], x: Tensor, inputs: Sequence[Inputs], device: torch.device
) -> Tensor:
    """Apply `run(x, inputs)` to sub-batches of equal input shapes and put the results back in order. The split depends on the shapes alone, hence
    replaying the same batch gives the same bits."""
    rows_by_shape: dict[tuple[object, ...], list[int]] = {}
    for row, tensors in enumerate(inputs):
        shape = tuple((name, tuple(tensor.shape)) for name, tensor in sorted(tensors.items()))
        rows_by_shape.setdefault(shape, []).append(row)
    if len(rows_by_shape) == 1:
        return run(x, stack(inputs, device))
    outputs = [run(x[rows], stack([inputs[row] for row in rows], device)) for rows in rows_by_shape.values()]
    order = torch.tensor([row for rows in rows_by_shape.values() for row in rows])
    return torch.cat(outputs)[order.argsort().to(x.device)]


def stack(inputs: Sequence[Inputs], device: torch.device) -> dict[str, Tensor]:
    """Inputs of equal shapes as one batch on the device; a tensor that all samples share travels there once."""
    batch = {}
    for name, first in inputs[0].items():
        if all(tensors[name] is first for tensors in inputs):
            batch[name] = first.to(device)[None].expand(len(inputs), *first.shape).contiguous()
        else:
            batch[name] = torch.stack([tensors[name] for tensors in inputs]).to(device)
    return batch


def seen_tokens(text: Tensor, mask: Tensor) -> Tensor:
    """The tokens of one text (tokens x channels) that a network with this mask attends to. Where the mask leaves none (an empty prompt), all of them:
    pipelines mask by adding one large negative number to scores, and a number added to every score changes no softmax."""
    valid = mask.bool()
    return text[valid] if bool(valid.any()) else text
