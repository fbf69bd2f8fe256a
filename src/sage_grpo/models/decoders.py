"""A small decoder in place of the VAE for clips that only the rewards of training read: `model.decoder`.

diffusers has a class for one kind, AutoencoderTiny, which decodes single pictures. Any other is a function of the user's own module: no code
is loaded from a folder of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.models import ModelError
from sage_grpo.models.base import VelocityModel
from sage_grpo.models.checkpoints.files import read_if_there
from sage_grpo.models.network.decoding import to_uint8
from sage_grpo.types import VideoSpec
from sage_grpo.utils.imports import NoSuchModule, import_object
from sage_grpo.utils.pretrained import from_pretrained

Decode = Callable[[Tensor], Tensor]
TINY = "AutoencoderTiny"


def load_decoder(name: str, model: VelocityModel) -> Decode:
    """The function from a model's latents to uint8 clips B x F x H x W x 3 on the CPU: `module:function`, or a folder with an AutoencoderTiny."""
    pixels = find_decoder(name) if ":" in name else _tiny(Path(name).expanduser(), model)

    @torch.no_grad()
    def decode(latents: Tensor) -> Tensor:
        made = pixels(latents.to(model.device, torch.float32))
        _check(name, made, len(latents), model.video)
        return to_uint8([made])

    decode(torch.zeros(1, *model.latent_shape()))  # a wrong decoder fails before a rollout
    return decode


def find_decoder(name: str) -> Callable[[Tensor], Tensor]:
    """The function that an import path names."""
    try:
        function = import_object(name, "model.decoder")
    except NoSuchModule as error:
        raise ModelError(str(error)) from error
    if not callable(function) or isinstance(function, type):
        raise ModelError(
            f"model.decoder {name!r} is not a function: write one that takes latents and returns pixels (docs/speed.md)."
        )
    return function


def _tiny(folder: Path, model: VelocityModel) -> Callable[[Tensor], Tensor]:
    """diffusers' AutoencoderTiny for the model's latents; it was trained on scaled ones."""
    kind = read_if_there(folder / "config.json").get("_class_name")
    if kind != TINY:
        fault = f"holds a {kind}" if kind else "has no config.json of a diffusers model"
        raise ModelError(
            f"model.decoder {folder}: it {fault}. Give a folder with an {TINY} (models of images), or module:function for a decoder of your "
            "own."
        )
    from diffusers import AutoencoderTiny

    vae: Any = (
        from_pretrained(AutoencoderTiny, folder, use_safetensors=True).to(model.device).eval().requires_grad_(False)
    )
    channels, frames, *_ = model.latent_shape()
    if frames != 1 or vae.config.latent_channels != channels:
        raise ModelError(
            f"model.decoder {folder}: an {TINY} of {vae.config.latent_channels} channels decodes single pictures, but the model's latents have "
            f"{channels} channels and {frames} frame(s). Use one that was made for this model, or module:function."
        )
    return lambda latents: vae.decode(latents[:, :, 0], return_dict=False)[0][:, :, None]


def _check(name: str, pixels: object, count: int, video: VideoSpec) -> None:
    wanted = (count, 3, video.frames, video.height, video.width)
    got = tuple(pixels.shape) if isinstance(pixels, Tensor) else f"a {type(pixels).__name__}"
    if got != wanted:
        raise ModelError(
            f"model.decoder {name}: pixels B x 3 x frames x height x width in [-1, 1] are wanted, here {wanted}, but it made {got}."
        )
