"""What can be chosen in the pretraining of any world's model; light, so that the commands' help need not load torch."""

from __future__ import annotations

from pathlib import Path

from sage_grpo.config.ranges import Count, Natural, NotNegative, Positive, Seed, Share, checked


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


@checked
class StageOptions(Flaws):
    """Options of the two stages, VAE and flow; the flaws of the data are among them. A world adds the sizes of its networks."""

    out: Path = Path("pretrained")
    """Folder for the results: pipeline/, vae/, pictures, scores.json."""
    vae: Path | None = None
    """An existing VAE folder (or pipeline folder) to use instead of training one."""
    vae_start: Path | None = None
    """An existing VAE folder whose weights VAE training goes on from."""
    start: Path | None = None
    """An existing pipeline folder whose transformer and text encoder the flow starts from; of more blocks than this call asks for, every so many is taken."""
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
    varied_noise: bool = False
    """Draw a share of that noise for every clip, from none to all: a decoder that forgives much, and is sharp where nothing is to be forgiven."""
    coarse_share: Share = 0.0
    """Share of VAE steps in which latents of half the height and width shall decode to clips of half the size: latents that are
    smooth, from which a flow learns sooner (EQ-VAE, arXiv 2502.09509)."""
    shift: Positive = 3.0
    """Shift of the sampling schedule; half of the training sigmas follow it, half are uniform."""
    caption_dropout: Share = 0.1
    """Share of training without captions, so that classifier-free guidance works."""
    score_prompts: Natural = 64
    """Held-out prompts to sample and judge at the end; 0 leaves the scoring out."""
    score_steps: Count = 20
    """Steps of the ODE in scoring."""
    seed: Seed = 0
    """Seed of everything."""
    graphs: bool = True
    """Capture training steps as CUDA graphs (falls back to plain steps where that fails)."""
    compile: bool = False
    """Compile what a step computes, on a GPU: about a minute first, then faster steps (falls back to plain ones where that fails)."""
    report_seconds: NotNegative = 10.0
    """Seconds between two printed lines."""
    device: str = ""
    """Where to train; empty takes cuda where there is one, else cpu."""
