"""The first stage of pretraining, the VAE, for any world and any architecture; and what a VAE does to clips."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from research.pretraining.imperfect import Clips
from research.pretraining.options import StageOptions
from research.pretraining.training import Inputs, Trainer
from sage_grpo.utils.video import contact_sheet

AT_ONCE = 2048
"""Clips that are rendered together."""


class Codec(Protocol):
    """A VAE as training uses it: whole clips at once."""

    @property
    def device(self) -> torch.device:
        """Where its weights are."""

    @property
    def encoder(self) -> Callable[[Tensor], Tensor]:
        """Clips B x 3 x F x H x W in [-1, 1] to means and log-variances, one after the other in the channels."""

    @property
    def decoder(self) -> Callable[[Tensor], Tensor]:
        """Latents to clips B x 3 x F x H x W, in [-1, 1] but for its errors."""


def train_vae(
    codec: Codec,
    options: StageOptions,
    clips: Clips,
    *,
    parameters: Mapping[str, nn.Parameter],
    latent: tuple[int, ...],
    weigh: Callable[[Tensor], Tensor],
    settle: Callable[[Tensor], None],
) -> float:
    """Train in place and leave averaged weights; return the PSNR on clean unseen clips.

    Training starts as a plain autoencoder. Later, noise on the latents makes the decoder smooth: near latents decode to near clips, which the
    flow's errors and RL's exploration rely on. `latent` is the shape of one clip's latents, `weigh` says how much every pixel counts, and
    `settle` is called in the end with some clips of the data, to set the scale of the latents.
    """
    device = codec.device
    picture = options.out / "reconstructions.png"
    generator = torch.Generator().manual_seed(options.seed)
    unseen = clips.clean(256 if device.type == "cuda" else 4, generator, device)
    sizes = [min(AT_ONCE, options.vae_clips - start) for start in range(0, options.vae_clips, AT_ONCE)]
    bank = torch.cat([clips.for_decoder(size, generator, device) for size in sizes])

    def batches(progress: float) -> Inputs:
        index = torch.randint(len(bank), (options.vae_batch,), device=device)
        # A plain autoencoder for a tenth of the time, then more noise up to a third.
        level = options.latent_noise * min(1.0, max(0.0, (progress - 0.1) / 0.23))
        coarse = options.coarse_share > 0 and float(torch.rand(())) < options.coarse_share
        shape = (*latent[:-2], latent[-2] // 2, latent[-1] // 2) if coarse else latent
        noise = torch.randn(options.vae_batch, *shape, device=device) * level
        if options.varied_noise:
            noise = noise * torch.rand(options.vae_batch, 1, 1, 1, 1, device=device)
        return {"clips": bank[index], "noise": noise}

    def report() -> None:
        print(f"[vae] PSNR on unseen clean clips {psnr(codec, unseen[:64]):.2f} dB", flush=True)
        show(codec, unseen, picture)

    trainer = Trainer(
        "vae",
        options,
        parameters=parameters,
        loss=lambda inputs: vae_loss(codec, inputs, weigh),
        batches=batches,
        minutes=options.vae_minutes,
        steps=options.vae_steps,
        peak_lr=options.vae_lr,
        weight_decay=0.0,
        average=0.995,
        compiled=options.compile,
    )
    trainer.run(report)
    settle(bank[: 4096 if device.type == "cuda" else 64])
    show(codec, unseen, picture)
    return psnr(codec, unseen)


def vae_loss(codec: Codec, inputs: Inputs, weigh: Callable[[Tensor], Tensor]) -> Inputs:
    """Weighted L1 + MSE, and a pull of every latent channel to mean 0 and variance 1.

    The pull gives the noise on the latents a fixed meaning (an encoder cannot outgrow it) and the flow the unit
    Gaussian-like data that it expects. Noise of half the height and width asks for that of both: the latents' means
    over 2 x 2 shall decode to the clip's.
    """
    x, noise = to_model(inputs["clips"]), inputs["noise"]
    mean, log_variance = codec.encoder(x).chunk(2, dim=1)
    latents = mean
    if noise.shape[-1] < mean.shape[-1]:
        x, latents = (F.avg_pool3d(full, (1, 2, 2)) for full in (x, mean))
    y = codec.decoder(latents + noise)
    difference = y - x
    weight = weigh(x)
    weight = weight / weight.mean()
    picture = (weight * (difference.abs() + 2 * difference.square())).mean()
    variance, centre = torch.var_mean(mean, dim=(0, 2, 3, 4), correction=0)
    moments = centre.square().mean() + (variance - 1).square().mean()
    # The posterior's width is not used in training; this keeps `sample()` near the mean for those who call it.
    width = (log_variance - 2 * math.log(0.1)).square().mean()
    mse = difference.detach().square().mean() / 4
    return {"loss": picture + 0.02 * moments + 1e-4 * width, "mse": mse, "spread": variance.detach().mean().sqrt()}


def to_model(clips: Tensor) -> Tensor:
    """uint8 B x F x H x W x 3 to float32 B x 3 x F x H x W in [-1, 1]."""
    return clips.permute(0, 4, 1, 2, 3).float() / 127.5 - 1


def to_clips(x: Tensor) -> Tensor:
    """float B x 3 x F x H x W in [-1, 1] to uint8 B x F x H x W x 3."""
    return ((x.float().permute(0, 2, 3, 4, 1) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def portion(device: torch.device) -> int:
    """Clips that a VAE takes at once without gradients: many on a GPU; on a CPU one at a time is twice as fast."""
    return 256 if device.type == "cuda" else 1


@torch.no_grad()
def encode(codec: Codec, clips: Tensor) -> Tensor:
    """Means of uint8 clips, not scaled."""
    parts = clips.split(portion(clips.device))
    return torch.cat([codec.encoder(to_model(part)).chunk(2, dim=1)[0] for part in parts])


@torch.no_grad()
def decode(codec: Codec, latents: Tensor) -> Tensor:
    """Unscaled latents to uint8 clips."""
    return to_clips(torch.cat([codec.decoder(part) for part in latents.split(portion(latents.device))]))


@torch.no_grad()
def reconstruct(codec: Codec, clips: Tensor) -> Tensor:
    """Encode to the mean and decode, uint8 to uint8."""
    return decode(codec, encode(codec, clips))


def psnr(codec: Codec, clips: Tensor) -> float:
    """Mean over clips of the peak signal-to-noise ratio of reconstructions, dB."""
    difference = (reconstruct(codec, clips).float() - clips.float()) / 255
    mse = difference.square().mean(dim=(1, 2, 3, 4)).clamp_min(1e-8)
    return float((-10 * mse.log10()).mean())


def show(codec: Codec, clips: Tensor, picture: Path) -> None:
    """A picture of a few clips, each above what the VAE makes of it."""
    some = clips[:8]
    rows = torch.stack([some, reconstruct(codec, some)], dim=1).flatten(0, 1)
    contact_sheet(picture, list(rows), columns=rows.shape[1], cell=96)
