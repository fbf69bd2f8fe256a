"""What the families of images share whose VAE is Stable Diffusion's."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from sage_grpo.models.family import FamilyModel


class ImageModel(FamilyModel):
    """A VelocityModel of one-frame clips: the VAE knows no frames, and states how its latents are scaled and shifted."""

    def _to_vae(self, latents: Tensor) -> Tensor:
        config = self.pipe.vae.config
        return (latents / config.scaling_factor) + config.shift_factor

    def _pixels(self, z: Tensor) -> Iterable[Tensor]:
        return [pixels[:, :, None] for pixels in super()._pixels(z[:, :, 0])]
