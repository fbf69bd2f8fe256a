"""The two stages of pretraining: the VAE, then the flow on its latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from research.pretraining import autoencoder
from research.pretraining.autoencoder import AT_ONCE, encode
from research.pretraining.flow import draw_sigma, flow_loss, flow_trainer
from research.pretraining.shapes.imperfect import CLIPS, imperfect_captions
from research.pretraining.shapes.networks import (
    batched,
    encode_text,
    packed,
    prefix_ids,
    prompt_ids,
    used_parameters,
    velocity,
)
from research.pretraining.shapes.options import PretrainOptions
from research.pretraining.training import Inputs
from sage_grpo.worlds.shapes.scene import FRAMES, SIDE, random_scenes

if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
    from transformers import Qwen2_5_VLTextModel, Qwen2Tokenizer

OBJECT_WEIGHT = 4.0
"""How much more a pixel counts that differs from the background."""


def train_vae(vae: AutoencoderKLHunyuanVideo15, options: PretrainOptions) -> float:
    """Train in place, leave averaged weights and a scaling factor; return the PSNR on clean unseen clips."""
    frames = 1 + (FRAMES - 1) // vae.temporal_compression_ratio
    return autoencoder.train_vae(
        batched(vae),
        options,
        CLIPS,
        parameters=dict(vae.named_parameters()),
        latent=(vae.config.latent_channels, frames, SIDE // 8, SIDE // 8),
        weigh=object_weight,
        settle=lambda clips: scale_latents(vae, clips),
    )


def object_weight(x: Tensor) -> Tensor:
    """More where a pixel differs from the background: mostly empty frames make "all background" a strong optimum."""
    # The first column is background in every clip: objects keep away from the border.
    distance = (x - x[..., :1]).abs().amax(dim=1, keepdim=True)
    return 1 + OBJECT_WEIGHT * (1.5 * distance).clamp(max=1)


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


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Encoded clips and their captions, grouped by the length of the caption."""

    latents: list[Tensor]
    """For every length: n x C x F x H x W, in the pipeline's scale, half precision."""
    ids: list[Tensor]
    """For every length: n x length token ids."""


@torch.no_grad()
def encode_pool(
    vae: AutoencoderKLHunyuanVideo15, tokenizer: Qwen2Tokenizer, options: PretrainOptions, generator: torch.Generator
) -> Pool:
    """Render, caption and encode clips of training combinations, once: a step of the flow only draws from this pool."""
    codec, n, device, scale = batched(vae), options.flow_clips, vae.device, vae.config.scaling_factor
    latents, ids = [], []
    known: dict[str, list[int]] = {}  # there are far fewer captions than clips
    for start in range(0, n, AT_ONCE):
        scenes = random_scenes(min(AT_ONCE, n - start), generator, split="train")
        clips = CLIPS.imperfect(scenes, options, generator, device)
        latents.append((encode(codec, clips) * scale).half())
        captions = imperfect_captions(scenes, options, generator)
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


def train_flow(
    transformer: HunyuanVideo15Transformer3DModel,
    text_encoder: Qwen2_5_VLTextModel,
    tokenizer: Qwen2Tokenizer,
    pool: Pool,
    options: PretrainOptions,
) -> None:
    """Train both networks in place and leave averaged weights."""
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

    def loss(inputs: Inputs) -> Inputs:
        text = encode_text(text_encoder, prefix, inputs["ids"])
        return flow_loss(lambda x, sigma: velocity(network, x, sigma, text), inputs)

    flow_trainer(
        options,
        parameters=used_parameters(transformer, text_encoder),
        loss=loss,
        batches=batches,
        compiled=options.compile,
    ).run()
