"""What can be chosen in pretraining the shapes world's model; light, so that the command's help need not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from research.pretraining.options import StageOptions
from sage_grpo.config.ranges import Count, Natural, NotNegative, Positive, Seed, checked


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


@checked
class DistillOptions:
    """Options of distilling the world's model to few steps."""

    out: Path = Path("shapes-distilled")
    """Folder for the results: pipeline/ (weights in float32), pictures, scores.json."""
    start: Path | None = None
    """Pipeline folder that is distilled; None is the model that the package carries."""
    steps: Count = 4
    """Steps that it takes afterwards."""
    teacher_steps: Count = 20
    """Steps of the teacher's ODE, a multiple of `steps`."""
    clips: Count = 2048
    """Trajectories of the teacher."""
    updates: Count = 1500
    """Optimizer updates."""
    batch: Count = 32
    """Clips an update."""
    lr: Positive = 3e-4
    """Peak learning rate."""
    score_prompts: Natural = 64
    """Held-out prompts to sample and judge at the end; 0 leaves the scoring out."""
    seed: Seed = 0
    """Seed of everything."""
    report_seconds: NotNegative = 10.0
    """Seconds between two printed lines."""
    device: str = ""
    """Where to train; empty takes cuda where there is one, else cpu."""

    graphs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.teacher_steps % self.steps:
            raise ValueError(
                f"distill.teacher_steps {self.teacher_steps} must be a multiple of distill.steps {self.steps}: the teacher has to stop at the "
                "levels between which the few steps go."
            )

    @property
    def stride(self) -> int:
        """Steps of the teacher in one of the few."""
        return self.teacher_steps // self.steps
