"""What can be chosen in pretraining the shapes world's model; light, so that the command's help need not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sage_grpo.ranges import Count, checked
from sage_grpo.worlds.making.options import StageOptions


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the miniature is."""

    latent_channels: int = 16
    """Channels of a latent."""
    vae_channels: tuple[int, ...] = (8, 16, 32, 64)
    """Channels of the VAE from full to lowest resolution; the last is a multiple of 2 x latent_channels."""
    vae_layers: int = 1
    """Residual blocks a resolution in the encoder; the decoder has one more."""
    heads: int = 4
    """Attention heads of the transformer."""
    head_dim: int = 32
    """Channels a head; a multiple of 8."""
    blocks: int = 4
    """Dual-stream blocks."""
    refiner_layers: int = 1
    """Blocks of the token refiner; they run at every step, so they are not free."""
    text_width: int = 96
    """Width of the text encoder; a multiple of 24."""
    text_layers: int = 2
    """Layers of the text encoder that are used; two more exist only to be skipped by the pipeline."""


@checked
class PretrainOptions(StageOptions):
    """Options of pretraining; the flaws of the data are among them."""

    out: Path = Path("shapes-pretrained")
    """Folder for the results: pipeline/, vae/, pictures, scores.json."""
    latent_channels: Count = Sizes.latent_channels
    """Channels of the latents."""
    vae_channels: str = ",".join(map(str, Sizes.vae_channels))
    """Channels of the VAE from full to lowest resolution, with commas."""
    heads: Count = Sizes.heads
    """Attention heads of the transformer, of 32 channels each."""
    blocks: Count = Sizes.blocks
    """Blocks of the transformer."""

    def sizes(self) -> Sizes:
        """The sizes of the networks."""
        channels = tuple(int(part) for part in self.vae_channels.split(","))
        return Sizes(latent_channels=self.latent_channels, vae_channels=channels, heads=self.heads, blocks=self.blocks)
