"""The VAE of a family: latents to clips and back, with the scaling of its pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_grpo.models import ModelError
from sage_grpo.models.base import Progress
from sage_grpo.models.checkpoints.cache import digest
from sage_grpo.models.checkpoints.checkpoint import fingerprint
from sage_grpo.models.network.decoding import to_floats, to_uint8, wan_latents, wan_pixels


class Codec:
    """A view of a FamilyModel, without state of its own. A family replaces `to_vae`, and what else its VAE does otherwise."""

    def __init__(self, model: Any) -> None:
        self.model, self.pipe, self.vae = model, model.pipe, model.pipe.vae

    def to_vae(self, latents: Tensor) -> Tensor:
        """Latents as the VAE's decoder expects them: its own scaling, exactly once."""
        return latents / self.vae.config.scaling_factor

    def from_vae(self, z: Tensor) -> Tensor:
        """The inverse of `to_vae`. Scaling is affine in every element, so its values at 0 and 1 define it."""
        zero, one = (self.to_vae(torch.full_like(z, value)) for value in (0.0, 1.0))
        return (z - zero) / (one - zero)

    def chunks(self, z: Tensor) -> Iterable[Tensor]:
        """Decoded pixels B x 3 x frames x H x W, in chunks of frames where the decoder can work in chunks; here all at once."""
        return [self.vae.decode(z, return_dict=False)[0]]

    def modes(self, pixels: Tensor) -> Tensor:
        """The VAE's encoding of pixels B x 3 x frames x H x W in [-1, 1]: the mode of its distribution, before any scaling."""
        return self.vae.encode(pixels).latent_dist.mode()

    def decode(self, latents: Tensor, progress: Progress | None = None) -> Tensor:
        self.model.check_latents(latents)
        clips = []
        with torch.no_grad():
            for part in latents.split(1 if self.model.spec.vae_slicing else max(1, len(latents))):
                z = self.to_vae(part.to(device=self.model.places["vae"], dtype=self.vae.dtype))
                clips.append(to_uint8(self.chunks(z), self.model.modules("vae")))
                if progress is not None:
                    progress(sum(map(len, clips)), len(latents))
        return torch.cat(clips)

    def pixels(self, latents: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        model, vae = self.model, self.vae
        model.check_latents(latents, part=True)
        if vae._supports_gradient_checkpointing:  # decoders that are not cut into chunks here checkpoint themselves
            vae.enable_gradient_checkpointing()
        z = self.to_vae(latents.to(device=model.places["vae"], dtype=vae.dtype))
        stride = (model.video.frames - 1) // max(1, model.grid.latents(model.video)[1] - 1)
        return to_floats(self.chunks(z), 1 + stride * (z.shape[2] - 1), frames)

    def to_latents(self, clips: Tensor) -> Tensor:
        video, latents = self.model.video, []
        expected = (video.frames, video.height, video.width, 3)
        if tuple(clips.shape[1:]) != expected:
            raise ModelError(f"Clips have shape {tuple(clips.shape)}, but the model's have {expected} after the batch.")
        with torch.no_grad():
            for clip in clips.split(1):
                pixels = (clip.to(self.model.places["vae"], torch.float32) / 127.5 - 1.0).permute(0, 4, 1, 2, 3)
                latents.append(self.from_vae(self.modes(pixels.to(self.vae.dtype)).to(torch.float32)).cpu())
        return torch.cat(latents)

    def key(self) -> str:
        """The key of latents: the VAE's files, precision and tiling, the class and the format."""
        model, tiled = self.model, f"{self.vae.dtype}/{self.model.spec.vae_tiling}"
        return digest(fingerprint(model.folder, ["vae"]), type(model).__name__, str(model.video), tiled)


class ImageCodec(Codec):
    """Stable Diffusion's VAE, which has no frames, and whose config has the scale and shift of latents."""

    def to_vae(self, latents: Tensor) -> Tensor:
        config = self.vae.config
        return (latents / config.scaling_factor) + config.shift_factor

    def chunks(self, z: Tensor) -> Iterable[Tensor]:
        return [pixels[:, :, None] for pixels in super().chunks(z[:, :, 0])]

    def modes(self, pixels: Tensor) -> Tensor:
        return super().modes(pixels[:, :, 0])[:, :, None]


class WanCodec(Codec):
    """Wan's VAE, whose config has the mean and std of latents; also Qwen-Image's, which makes one frame."""

    def to_vae(self, latents: Tensor) -> Tensor:
        return wan_latents(self.vae, latents)

    def chunks(self, z: Tensor) -> Iterable[Tensor]:
        in_turn = type(self.vae).__name__ == "AutoencoderKLWan" and not self.vae.use_tiling
        return wan_pixels(self.vae, z) if in_turn else super().chunks(z)
