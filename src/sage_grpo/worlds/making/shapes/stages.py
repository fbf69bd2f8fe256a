"""The two stages of pretraining: the VAE, then the flow on its latents."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sage_grpo.models.families.hunyuan15 import PackedTransformer
from sage_grpo.video import contact_sheet
from sage_grpo.worlds.making.shapes.imperfect import clean_clips, decoder_clips, imperfect_captions, imperfect_clips
from sage_grpo.worlds.making.shapes.networks import (
    encode_text,
    packed,
    portion,
    prefix_ids,
    prompt_ids,
    used_parameters,
    velocity,
)
from sage_grpo.worlds.making.shapes.options import Flaws, PretrainOptions
from sage_grpo.worlds.making.training import Inputs, Trainer
from sage_grpo.worlds.shapes.scene import FRAMES, SIDE, random_scenes

if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
    from transformers import Qwen2_5_VLTextModel, Qwen2Tokenizer

AT_ONCE = 2048
"""Clips that are rendered together."""
OBJECT_WEIGHT = 4.0
"""How much more a pixel counts that differs from the background."""


def train_vae(vae: AutoencoderKLHunyuanVideo15, options: PretrainOptions) -> float:
    """Train in place, leave averaged weights and a scaling factor; return the PSNR on clean unseen clips.

    Mostly empty frames make "all background" a strong optimum, so the loss weighs what differs from the background, and
    training starts as a plain autoencoder. Later, noise on the latents makes the decoder smooth: near latents decode to
    near clips, which the flow's errors and RL's exploration rely on.
    """
    device = vae.device
    picture = options.out / "reconstructions.png"
    generator = torch.Generator().manual_seed(options.seed)
    unseen = clean_clips(256 if device.type == "cuda" else 4, generator, device)
    sizes = [min(AT_ONCE, options.vae_clips - start) for start in range(0, options.vae_clips, AT_ONCE)]
    bank = torch.cat([decoder_clips(size, generator, device) for size in sizes])
    channels = vae.config.latent_channels
    latent = (channels, 1 + (FRAMES - 1) // vae.temporal_compression_ratio, SIDE // 8, SIDE // 8)

    def batches(progress: float) -> Inputs:
        index = torch.randint(len(bank), (options.vae_batch,), device=device)
        # A plain autoencoder for a tenth of the time, then more noise up to a third.
        level = options.latent_noise * min(1.0, max(0.0, (progress - 0.1) / 0.23))
        return {"clips": bank[index], "noise": torch.randn(options.vae_batch, *latent, device=device) * level}

    def report() -> None:
        print(f"[vae] PSNR on unseen clean clips {psnr(vae, unseen[:64]):.2f} dB", flush=True)
        _show(vae, unseen, picture)

    trainer = Trainer(
        "vae",
        options,
        parameters=dict(vae.named_parameters()),
        loss=lambda inputs: vae_loss(vae, inputs),
        batches=batches,
        minutes=options.vae_minutes,
        steps=options.vae_steps,
        peak_lr=options.vae_lr,
        weight_decay=0.0,
        average=0.995,
    )
    trainer.run(report)
    scale_latents(vae, bank[: 4096 if device.type == "cuda" else 64])
    _show(vae, unseen, picture)
    return psnr(vae, unseen)


def vae_loss(vae: AutoencoderKLHunyuanVideo15, inputs: Inputs) -> Inputs:
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
    weight = 1 + OBJECT_WEIGHT * (1.5 * distance).clamp(max=1)
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
    """Encode to the mean and decode, uint8 to uint8."""
    return decode(vae, encode(vae, clips))


@torch.no_grad()
def decode(vae: AutoencoderKLHunyuanVideo15, latents: Tensor) -> Tensor:
    """Unscaled latents to uint8 clips."""
    return to_clips(torch.cat([vae.decoder(part) for part in latents.split(portion(latents.device))]))


def psnr(vae: AutoencoderKLHunyuanVideo15, clips: Tensor) -> float:
    """Mean over clips of the peak signal-to-noise ratio of reconstructions, dB."""
    difference = (reconstruct(vae, clips).float() - clips.float()) / 255
    mse = difference.square().mean(dim=(1, 2, 3, 4)).clamp_min(1e-8)
    return float((-10 * mse.log10()).mean())


@torch.no_grad()
def encode(vae: AutoencoderKLHunyuanVideo15, clips: Tensor) -> Tensor:
    """Means of uint8 clips, not scaled."""
    parts = clips.split(portion(clips.device))
    return torch.cat([vae.encoder(to_model(part)).chunk(2, dim=1)[0] for part in parts])


@torch.no_grad()
def scale_latents(vae: AutoencoderKLHunyuanVideo15, clips: Tensor) -> None:
    """Set the factor by which the pipeline's latents have unit standard deviation."""
    latents = encode(vae, clips)
    vae.register_to_config(scaling_factor=round(1 / float(latents.std()), 5))
    centres, spreads = latents.mean(dim=(0, 2, 3, 4)), latents.std(dim=(0, 2, 3, 4))
    print(
        f"[vae] scaling factor {vae.config.scaling_factor}; channel means within {float(centres.abs().max()):.2f}, "
        f"spreads {float(spreads.min()):.2f} to {float(spreads.max()):.2f}",
        flush=True,
    )


def _show(vae: AutoencoderKLHunyuanVideo15, clips: Tensor, picture: Path) -> None:
    some = clips[:8]
    rows = torch.stack([some, reconstruct(vae, some)], dim=1).flatten(0, 1)
    contact_sheet(picture, list(rows), columns=rows.shape[1], cell=96)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Encoded clips and their captions, grouped by the length of the caption."""

    latents: list[Tensor]
    """For every length: n x C x F x H x W, in the pipeline's scale, half precision."""
    ids: list[Tensor]
    """For every length: n x length token ids."""


@torch.no_grad()
def encode_pool(
    vae: AutoencoderKLHunyuanVideo15,
    tokenizer: Qwen2Tokenizer,
    flaws: Flaws,
    n: int,
    generator: torch.Generator,
) -> Pool:
    """Render, caption and encode n clips of training combinations, once: a step of the flow only draws from this pool."""
    device, scale = vae.device, vae.config.scaling_factor
    latents, ids = [], []
    known: dict[str, list[int]] = {}  # there are far fewer captions than clips
    for start in range(0, n, AT_ONCE):
        scenes = random_scenes(min(AT_ONCE, n - start), generator, split="train")
        clips = imperfect_clips(scenes, flaws, generator, device)
        latents.append((encode(vae, clips) * scale).half())
        captions = imperfect_captions(scenes, flaws, generator)
        new = sorted(set(captions) - known.keys())
        known |= zip(new, prompt_ids(tokenizer, new) if new else [])
        ids += [known[caption] for caption in captions]
    encoded = torch.cat(latents)
    lengths = torch.tensor([len(row) for row in ids])
    groups = [(lengths == length).nonzero().squeeze(1) for length in sorted(set(lengths.tolist()))]
    # A group smaller than a few clips would be drawn over and over within a batch.
    groups = [group for group in groups if len(group) > 8] or groups
    return Pool(
        latents=[encoded[group.to(device)] for group in groups],
        ids=[torch.tensor([ids[i] for i in group.tolist()], device=device) for group in groups],
    )


def draw_sigma(n: int, shift: float, device: torch.device) -> Tensor:
    """Noise levels for training: half logit-normal and shifted as in sampling, half uniform, so that all occur."""
    sigma = torch.sigmoid(torch.randn(n, device=device))
    sigma = shift * sigma / (1 + (shift - 1) * sigma)
    uniform = torch.rand(n, device=device)
    return torch.where(torch.rand(n, device=device) < 0.5, sigma, uniform).clamp(1e-3, 1.0)


def train_flow(
    transformer: HunyuanVideo15Transformer3DModel,
    text_encoder: Qwen2_5_VLTextModel,
    tokenizer: Qwen2Tokenizer,
    pool: Pool,
    options: PretrainOptions,
) -> None:
    """Train both networks in place and leave averaged weights: v = eps - x0 on x = (1 - sigma) x0 + sigma eps."""
    device, network = transformer.device, packed(transformer)
    prefix = torch.tensor(prefix_ids(tokenizer), device=device)
    empty = torch.tensor(prompt_ids(tokenizer, [""]), device=device)
    sizes = torch.tensor([len(group) for group in pool.ids], dtype=torch.float32)
    weights = sizes / sizes.sum()

    def batches(progress: float) -> Inputs:
        group = int(torch.multinomial(weights, 1))
        ids, latents = pool.ids[group], pool.latents[group]
        index = torch.randint(len(ids), (options.flow_batch,), device=device)
        x0 = latents[index].float()
        captions = ids[index]
        if float(torch.rand(())) < options.caption_dropout:
            captions = empty.expand(options.flow_batch, -1).contiguous()
        return {
            "x0": x0,
            "eps": torch.randn_like(x0),
            "sigma": draw_sigma(options.flow_batch, options.shift, device),
            "ids": captions,
        }

    Trainer(
        "flow",
        options,
        parameters=used_parameters(transformer, text_encoder),
        loss=lambda inputs: flow_loss(network, text_encoder, prefix, inputs),
        batches=batches,
        minutes=options.flow_minutes,
        steps=options.flow_steps,
        peak_lr=options.flow_lr,
        weight_decay=0.01,
        average=0.999,
    ).run()


def flow_loss(
    network: PackedTransformer,
    text_encoder: Qwen2_5_VLTextModel,
    prefix: Tensor,
    inputs: Inputs,
) -> Inputs:
    """Mean squared error of the velocity."""
    x0, eps, sigma = inputs["x0"], inputs["eps"], inputs["sigma"]
    level = sigma[:, None, None, None, None]
    x = (1 - level) * x0 + level * eps
    v = velocity(network, x, sigma, encode_text(text_encoder, prefix, inputs["ids"]))
    return {"loss": (v - (eps - x0)).square().mean()}
