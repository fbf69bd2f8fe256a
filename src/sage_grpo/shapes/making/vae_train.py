"""First stage: the VAE.

Mostly empty frames make "all background" a strong optimum, so the loss weighs what differs from the background, and
training starts as a plain autoencoder. Later, noise on the latents makes the decoder smooth: near latents decode to
near clips, which the flow's errors and RL's exploration rely on.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sage_grpo.shapes.making.imperfect import clean_clips, decoder_clips
from sage_grpo.shapes.making.networks import batched_vae, portion
from sage_grpo.shapes.making.options import PretrainOptions
from sage_grpo.shapes.making.training import Inputs, Trainer
from sage_grpo.shapes.scene import FRAMES, SIDE
from sage_grpo.video import contact_sheet

if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo15


OBJECT_WEIGHT = 4.0
"""How much more a pixel counts that differs from the background."""


def train_vae(vae: AutoencoderKLHunyuanVideo15, options: PretrainOptions) -> float:
    """Train in place, leave averaged weights and a scaling factor; return the PSNR on clean unseen clips."""
    device = vae.device
    picture = options.out / "reconstructions.png"
    generator = torch.Generator().manual_seed(options.seed)
    unseen = clean_clips(256 if device.type == "cuda" else 4, FRAMES, SIDE, generator, device)
    bank = _bank(options.vae_clips, generator, device)
    channels = vae.config.latent_channels
    latent = (channels, 1 + (FRAMES - 1) // vae.temporal_compression_ratio, SIDE // 8, SIDE // 8)

    def loss(inputs: Inputs) -> Inputs:
        return vae_loss(vae, inputs, OBJECT_WEIGHT)

    def batches(progress: float) -> Inputs:
        index = torch.randint(len(bank), (options.vae_batch,), device=device)
        # A plain autoencoder for a tenth of the time, then more noise up to a third.
        level = options.latent_noise * min(1.0, max(0.0, (progress - 0.1) / 0.23))
        return {"clips": bank[index], "noise": torch.randn(options.vae_batch, *latent, device=device) * level}

    trainer = Trainer(
        name="vae",
        parameters=dict(vae.named_parameters()),
        loss=loss,
        batches=batches,
        budget=options.budget(options.vae_minutes, options.vae_steps),
        peak_lr=options.vae_lr,
        weight_decay=0.0,
        average=0.995,
        state_dir=options.states,
        graphs=options.graphs,
    )
    if options.resume:
        trainer.load()
    with batched_vae():
        for _ in trainer.run():
            print(f"[vae] PSNR on unseen clean clips {psnr(vae, unseen[:64]):.2f} dB", flush=True)
            _show(vae, unseen, picture)
        trainer.use_average()
        scale_latents(vae, bank[: 4096 if device.type == "cuda" else 64])
        _show(vae, unseen, picture)
        return psnr(vae, unseen)


def vae_loss(vae: AutoencoderKLHunyuanVideo15, inputs: Inputs, object_weight: float) -> Inputs:
    """Weighted L1 + MSE, and a pull of every latent channel to mean 0 and variance 1.

    The pull gives the noise on the latents a fixed meaning (an encoder cannot outgrow it) and the flow the unit
    Gaussian-like data that it expects, with the one scaling factor that the pipeline has.
    """
    x = to_model(inputs["clips"])
    mean, log_variance = vae.encoder(x).chunk(2, dim=1)
    y = vae.decoder(mean + inputs["noise"])
    difference = y - x
    # The first column is background in every clip: objects keep away from the border.
    distance = (x - x[..., :1]).abs().amax(dim=1, keepdim=True)
    weight = 1 + object_weight * (1.5 * distance).clamp(max=1)
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


@torch.no_grad()
def reconstruct(vae: AutoencoderKLHunyuanVideo15, clips: Tensor) -> Tensor:
    """Encode to the mean and decode, uint8 to uint8; needs `batched_vae()`."""
    parts = clips.split(portion(clips.device))
    parts = [vae.decoder(vae.encoder(to_model(part)).chunk(2, dim=1)[0]) for part in parts]
    return to_clips(torch.cat(parts))


def psnr(vae: AutoencoderKLHunyuanVideo15, clips: Tensor) -> float:
    """Mean over clips of the peak signal-to-noise ratio of reconstructions, dB; needs `batched_vae()`."""
    difference = (reconstruct(vae, clips).float() - clips.float()) / 255
    mse = difference.square().mean(dim=(1, 2, 3, 4)).clamp_min(1e-8)
    return float((-10 * mse.log10()).mean())


@torch.no_grad()
def encode(vae: AutoencoderKLHunyuanVideo15, clips: Tensor) -> Tensor:
    """Means of uint8 clips, not scaled; needs `batched_vae()`."""
    parts = clips.split(portion(clips.device))
    return torch.cat([vae.encoder(to_model(part)).chunk(2, dim=1)[0] for part in parts])


@torch.no_grad()
def scale_latents(vae: AutoencoderKLHunyuanVideo15, clips: Tensor) -> None:
    """Set the factor by which the pipeline's latents have unit standard deviation; needs `batched_vae()`."""
    latents = encode(vae, clips)
    vae.register_to_config(scaling_factor=round(1 / float(latents.std()), 5))
    centres, spreads = latents.mean(dim=(0, 2, 3, 4)), latents.std(dim=(0, 2, 3, 4))
    print(
        f"[vae] scaling factor {vae.config.scaling_factor}; channel means within {float(centres.abs().max()):.2f}, "
        f"spreads {float(spreads.min()):.2f} to {float(spreads.max()):.2f}",
        flush=True,
    )


def _bank(n: int, generator: torch.Generator, device: torch.device) -> Tensor:
    portion = 2048
    sizes = [min(portion, n - start) for start in range(0, n, portion)]
    return torch.cat([decoder_clips(size, FRAMES, SIDE, generator, device) for size in sizes])


def _show(vae: AutoencoderKLHunyuanVideo15, clips: Tensor, picture: Path) -> None:
    some = clips[:8]
    rows = torch.stack([some, reconstruct(vae, some)], dim=1).flatten(0, 1)
    contact_sheet(picture, list(rows), columns=rows.shape[1], cell=96)
