"""Second stage: the flow. The transformer learns v = eps - x0 on x = (1 - sigma) x0 + sigma eps, with its text encoder.

All clips are rendered, captioned and encoded once; a step then only draws from that pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sage_grpo.shapes.making.imperfect import Flaws, imperfect_captions, imperfect_clips
from sage_grpo.shapes.making.networks import batched_vae, encode_text, used_parameters, velocity
from sage_grpo.shapes.making.options import PretrainOptions
from sage_grpo.shapes.making.tokenizer import prefix_ids, prompt_ids
from sage_grpo.shapes.making.training import Inputs, Trainer
from sage_grpo.shapes.making.vae_train import encode
from sage_grpo.shapes.scene import random_scenes

if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
    from transformers import Qwen2_5_VLTextModel, Qwen2Tokenizer


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Encoded clips and their captions, grouped by the length of the caption."""

    latents: list[Tensor]
    """For every length: n x C x F x H x W, in the pipeline's scale, half precision."""
    ids: list[Tensor]
    """For every length: n x length token ids."""

    def weights(self) -> Tensor:
        """Share of the clips in each group."""
        sizes = torch.tensor([len(group) for group in self.ids], dtype=torch.float32)
        return sizes / sizes.sum()


@torch.no_grad()
def encode_pool(
    vae: AutoencoderKLHunyuanVideo15,
    tokenizer: Qwen2Tokenizer,
    flaws: Flaws,
    *,
    n: int,
    frames: int,
    side: int,
    generator: torch.Generator,
) -> Pool:
    """Render, caption and encode n clips of training combinations."""
    device, scale = vae.device, vae.config.scaling_factor
    latents, ids = [], []
    known: dict[str, list[int]] = {}  # there are far fewer captions than clips
    with batched_vae():
        for start in range(0, n, 2048):
            scenes = random_scenes(min(2048, n - start), generator, split="train")
            clips = imperfect_clips(scenes, frames, side, flaws, generator, device)
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
) -> list[float]:
    """Train both networks in place, leave averaged weights; return the reported losses."""
    device = transformer.device
    prefix = torch.tensor(prefix_ids(tokenizer), device=device)
    empty = torch.tensor(prompt_ids(tokenizer, [""]), device=device)
    weights = pool.weights()

    def loss(inputs: Inputs) -> Inputs:
        return flow_loss(transformer, text_encoder, prefix, inputs)

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

    trainer = Trainer(
        name="flow",
        parameters=used_parameters(transformer, text_encoder),
        loss=loss,
        batches=batches,
        budget=options.budget(options.flow_minutes, options.flow_steps),
        peak_lr=options.flow_lr,
        weight_decay=0.01,
        average=0.999,
        state_dir=options.states,
        graphs=options.graphs,
    )
    if options.resume:
        trainer.load()
    losses = [float(outputs["loss"]) for _, outputs in trainer.run()]
    trainer.use_average()
    return losses


def flow_loss(
    transformer: HunyuanVideo15Transformer3DModel,
    text_encoder: Qwen2_5_VLTextModel,
    prefix: Tensor,
    inputs: Inputs,
) -> Inputs:
    """Mean squared error of the velocity."""
    x0, eps, sigma = inputs["x0"], inputs["eps"], inputs["sigma"]
    level = sigma[:, None, None, None, None]
    x = (1 - level) * x0 + level * eps
    v = velocity(transformer, x, sigma, encode_text(text_encoder, prefix, inputs["ids"]))
    return {"loss": (v - (eps - x0)).square().mean()}
