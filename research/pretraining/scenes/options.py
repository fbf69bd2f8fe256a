"""Options of pretraining the scenes world's model; light, so that the command's help need not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from research.pretraining.options import StageOptions
from sage_grpo.config.ranges import Count, NotNegative, Positive, Share, checked


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the model."""

    latent_channels: int = 16
    """Channels of a latent."""
    vae_channels: tuple[int, ...] = (16, 48, 96)
    """Channels of the VAE from full to lowest resolution, each a multiple of the first."""
    vae_layers: int = 1
    """Residual blocks a resolution in the encoder; the decoder has one more."""
    heads: int = 4
    """Attention heads of the transformer."""
    head_dim: int = 64
    """Channels a head."""
    blocks: int = 11
    """Blocks of the transformer."""
    text_width: int = 128
    """Width of the text encoder; a multiple of 4."""
    text_layers: int = 2
    """Layers of the text encoder."""


@checked
class PretrainOptions(StageOptions):
    """Options of pretraining; the flaws of the data are among them."""

    out: Path = Path("scenes-pretrained")
    """Folder for the results: pipeline/, vae/, pictures, scores.json."""
    wrong_word: Share = 0.04
    """Probability, for each attribute of each caption on its own, that it names another value."""
    jitter_share: Share = 0.15
    """Share of clips whose object shakes."""
    blur_share: Share = 0.15
    """Share of clips that are blurred."""
    noise_share: Share = 0.1
    """Share of clips with pixel noise."""
    jitter: NotNegative = 0.05
    """Strongest shake, world units r.m.s. an axis (0.03125 is one pixel in a frame of 64)."""
    blur: NotNegative = 1.5
    """Strongest blur, pixels."""
    vae_minutes: NotNegative = 7.5
    """Minutes of VAE training."""
    flow_minutes: NotNegative = 12.0
    """Minutes of flow training."""
    vae_batch: Count = 32
    """Clips a VAE step."""
    vae_lr: Positive = 1e-3
    """Peak learning rate of the VAE."""
    flow_lr: Positive = 8e-4
    """Peak learning rate of the flow."""
    vae_clips: Count = 24576
    """Clips rendered for the VAE; each takes 0.2 MB."""
    flow_clips: Count = 131_072
    """Clips rendered, captioned and encoded for the flow; each takes 0.04 MB."""
    latent_noise: NotNegative = 0.3
    """Standard deviation of the noise on (unit) latents from a third of the VAE training on: what the flow gets wrong by less is not seen."""
    varied_noise: bool = True
    """Draw a share of that noise for every clip, from none to all: a decoder that forgives much, and is sharp where nothing is to be forgiven."""
    coarse_share: Share = 0.25
    """Share of VAE steps in which latents of half the height and width shall decode to clips of half the size: latents that are
    smooth, from which a flow learns sooner (EQ-VAE, arXiv 2502.09509)."""
    picture_share: Share | None = None
    """Share of the flow's training that sees first frames alone, as many more of them; as large video models are trained on images first. null: 0.3, and
    none with `start`, which knows pictures and would unlearn motion."""
    latent_channels: Count = Sizes.latent_channels
    """Channels of the latents."""
    vae_channels: str = ",".join(map(str, Sizes.vae_channels))
    """Channels of the VAE from full to lowest resolution, with commas; each a multiple of the first."""
    heads: Count = Sizes.heads
    """Attention heads of the transformer, of 64 channels each; 6 with 10 blocks are 25 million parameters."""
    blocks: Count = Sizes.blocks
    """Blocks of the transformer."""
    compile: bool = True
    """Compile what a step computes, on a GPU: about a minute first, then faster steps (falls back to plain ones where that fails)."""
    bfloat16: bool = True
    """Compute in bfloat16 on a GPU, on weights in single precision; without it in TF32. A CPU always computes in single precision."""

    @property
    def pictures(self) -> float:
        """The share of the flow's training that sees pictures."""
        if self.picture_share is not None:
            return self.picture_share
        return 0.3 if self.start is None else 0.0

    def sizes(self) -> Sizes:
        """The sizes of the networks."""
        channels = tuple(int(part) for part in self.vae_channels.split(","))
        return Sizes(latent_channels=self.latent_channels, vae_channels=channels, heads=self.heads, blocks=self.blocks)
