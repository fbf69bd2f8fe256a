"""What can be chosen in pretraining; light, so that the command's help need not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sage_grpo.ranges import Count, Natural, NotNegative, Positive, Seed, Share, checked


@checked
class Flaws:
    """How imperfect the data is. A share is a probability a clip; a strength is the largest amount drawn."""

    wrong_word: Share = 0.12
    """Probability, for each attribute of each caption on its own, that it names another value."""
    jitter_share: Share = 0.3
    """Share of clips whose object shakes."""
    jitter: NotNegative = 0.08
    """Strongest shake, world units r.m.s. an axis (0.0625 is one pixel in a frame of 32)."""
    blur_share: Share = 0.25
    """Share of clips that are blurred."""
    blur: NotNegative = 1.0
    """Strongest blur, pixels."""
    noise_share: Share = 0.2
    """Share of clips with pixel noise."""
    noise: NotNegative = 0.06
    """Strongest noise, standard deviation in [0, 1] pixels."""


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
class PretrainOptions(Flaws):
    """Options of pretraining; the flaws of the data are among them."""

    out: Path = Path("shapes-pretrained")
    """Folder for the results: pipeline/, vae/, pictures, scores.json."""
    state: Path | None = None
    """Folder for the states to resume from; by default OUT/state. They are larger than the results."""
    resume: bool = False
    """Go on from the saved states; where only a finished VAE is left in OUT, it is used as it is."""
    vae: Path | None = None
    """An existing VAE folder (or pipeline folder) to use instead of training one."""
    vae_start: Path | None = None
    """An existing VAE folder whose weights VAE training goes on from."""
    start: Path | None = None
    """An existing pipeline folder whose transformer and text encoder the flow starts from."""
    vae_minutes: NotNegative = 6.5
    """Minutes of VAE training."""
    flow_minutes: NotNegative = 4.3
    """Minutes of flow training."""
    vae_steps: Natural = 0
    """Steps of VAE training instead of minutes."""
    flow_steps: Natural = 0
    """Steps of flow training instead of minutes."""
    vae_batch: Count = 64
    """Clips a VAE step."""
    flow_batch: Count = 256
    """Latents a flow step."""
    vae_lr: Positive = 1.5e-3
    """Peak learning rate of the VAE."""
    flow_lr: Positive = 1e-3
    """Peak learning rate of the flow."""
    vae_clips: Count = 32768
    """Clips rendered for the VAE."""
    flow_clips: Count = 160_000
    """Clips rendered, captioned and encoded for the flow."""
    latent_noise: NotNegative = 0.05
    """Standard deviation of the noise on (unit) latents from a third of the VAE training on: a smoother decoder, at some cost in sharpness."""
    shift: Positive = 3.0
    """Shift of the sampling schedule; half of the training sigmas follow it, half are uniform."""
    caption_dropout: Share = 0.1
    """Share of flow steps without captions, so that classifier-free guidance works."""
    latent_channels: Count = Sizes.latent_channels
    """Channels of the latents."""
    vae_channels: str = ",".join(map(str, Sizes.vae_channels))
    """Channels of the VAE from full to lowest resolution, with commas."""
    heads: Count = Sizes.heads
    """Attention heads of the transformer, of 32 channels each."""
    blocks: Count = Sizes.blocks
    """Blocks of the transformer."""
    score_prompts: Natural = 64
    """Held-out prompts to sample and judge at the end; 0 leaves the scoring out."""
    score_steps: Count = 20
    """Steps of the ODE in scoring."""
    seed: Seed = 0
    """Seed of everything."""
    graphs: bool = True
    """Capture training steps as CUDA graphs (falls back to plain steps where that fails)."""
    report_seconds: NotNegative = 10.0
    """Seconds between two printed lines."""
    device: str = ""
    """Where to train; empty takes cuda where there is one, else cpu."""

    @property
    def states(self) -> Path:
        """Folder of the states to resume from."""
        return self.state or self.out / "state"

    def sizes(self) -> Sizes:
        """The sizes of the networks."""
        channels = tuple(int(part) for part in self.vae_channels.split(","))
        return Sizes(latent_channels=self.latent_channels, vae_channels=channels, heads=self.heads, blocks=self.blocks)
