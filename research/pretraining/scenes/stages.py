"""The two stages of pretraining: the VAE, then the flow on its latents."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from research.pretraining import autoencoder
from research.pretraining.autoencoder import decode, encode
from research.pretraining.flow import draw_sigma, flow_loss, flow_trainer
from research.pretraining.scenes.imperfect import CLIPS, imperfect_captions
from research.pretraining.scenes.networks import DOWN, FastTransformer, encode_text, prompt_ids
from research.pretraining.scenes.options import PretrainOptions
from research.pretraining.scenes.whole_clips import WholeClips
from research.pretraining.training import Inputs
from research.scenes.scene import FRAMES, SIDE, random_scenes, some_scenes, to_text
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.utils.video import contact_sheet

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

AT_ONCE = 1024
"""Clips of the pool that are rendered together."""
OBJECT_WEIGHT = 4.0
"""Extra weight of a pixel of an object."""
GREY, VIVID = 0.38, 0.65
"""Saturation up to which a pixel belongs to a place, and from which it belongs to an object; no place reaches the first."""
SHOWN, SHOW_SECONDS = 8, 60.0
"""Clips in the picture of what the flow can do so far, and seconds between two pictures."""
CAPTION = 32
"""Tokens of a caption with its end and its padding; the longest sentence has 27."""


def train_vae(vae: AutoencoderKLWan, options: PretrainOptions) -> float:
    """Train in place, leave averaged weights and the scale of latents; return the PSNR on clean unseen clips."""
    codec = WholeClips(vae, options.bfloat16)
    return autoencoder.train_vae(
        codec,
        options,
        CLIPS,
        parameters=dict(vae.named_parameters()),
        latent=(vae.config.z_dim, 1 + (FRAMES - 1) // DOWN, SIDE // DOWN, SIDE // DOWN),
        weigh=object_weight,
        settle=lambda clips: scale_latents(codec, clips),
    )


def object_weight(x: Tensor) -> Tensor:
    """More on and around what is vivid: objects are small, and only they are; the white of their patterns is next to their color."""
    saturation = (x.amax(dim=1) - x.amin(dim=1)) / 2
    vivid = ((saturation - GREY) / (VIVID - GREY)).clamp(0, 1)
    return 1 + OBJECT_WEIGHT * F.max_pool2d(vivid, 5, stride=1, padding=2)[:, None]


@torch.no_grad()
def scale_latents(codec: WholeClips, clips: Tensor) -> None:
    """Set the mean and the spread of every channel by which the pipeline's latents have unit scale."""
    latents = encode(codec, clips)
    centres, spreads = latents.mean(dim=(0, 2, 3, 4)), latents.std(dim=(0, 2, 3, 4))
    codec.vae.register_to_config(
        latents_mean=[round(value, 5) for value in centres.tolist()],
        latents_std=[round(value, 5) for value in spreads.tolist()],
    )
    print(
        f"[vae] channel means within {float(centres.abs().max()):.2f}, spreads {float(spreads.min()):.2f} to "
        f"{float(spreads.max()):.2f}",
        flush=True,
    )


def to_flow(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Means of the encoder in the scale of the flow; the pipeline undoes it before it decodes."""
    mean, std = _scale(vae, latents)
    return (latents - mean) / std


def _scale(vae: AutoencoderKLWan, like: Tensor) -> tuple[Tensor, Tensor]:
    config = vae.config
    mean, std = (torch.tensor(values, device=like.device) for values in (config.latents_mean, config.latents_std))
    return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Encoded clips and their captions."""

    latents: Tensor
    """n x C x F x H x W, in the scale of the flow, half precision."""
    ids: Tensor
    """n x CAPTION token ids."""


@torch.no_grad()
def encode_pool(
    vae: AutoencoderKLWan, tokenizer: PreTrainedTokenizerFast, options: PretrainOptions, generator: torch.Generator
) -> Pool:
    """Render, caption and encode clips of training combinations, once: a step of the flow only draws from this pool."""
    codec, n, device = WholeClips(vae, options.bfloat16), options.flow_clips, vae.device
    latents, ids = [], []
    for start in range(0, n, AT_ONCE):
        scenes = random_scenes(min(AT_ONCE, n - start), generator, split="train")
        clips = CLIPS.imperfect(scenes, options, generator, device)
        latents.append(to_flow(vae, encode(codec, clips)).half())
        ids.append(prompt_ids(tokenizer, imperfect_captions(scenes, options, generator), CAPTION))
    return Pool(latents=torch.cat(latents), ids=torch.cat(ids).to(device))


def train_flow(
    vae: AutoencoderKLWan,
    transformer: WanTransformer3DModel,
    text_encoder: UMT5EncoderModel,
    tokenizer: PreTrainedTokenizerFast,
    pool: Pool,
    options: PretrainOptions,
) -> None:
    """Train both networks in place and leave averaged weights; samples.png shows what they can do so far."""
    device, network = transformer.device, FastTransformer(transformer)
    empty = prompt_ids(tokenizer, [""], CAPTION).to(device)
    half = options.bfloat16 and device.type == "cuda"
    if options.compile and device.type == "cuda":
        transformer.compile_repeated_blocks(dynamic=False)  # blocks are alike: one is compiled, in seconds

    whole = pool.latents.shape[2]

    def batches(progress: float) -> Inputs:
        # Pictures first: five times as many of them for the same work teach what things look like and what words mean.
        frames = 1 if progress < options.pictures else whole
        n = options.flow_batch * whole // frames
        index = torch.randint(len(pool.ids), (n,), device=device)
        x0 = pool.latents[index, :, :frames].float()
        silent = torch.rand(n, 1, device=device) < options.caption_dropout
        return {
            "x0": x0,
            "eps": torch.randn_like(x0),
            "sigma": draw_sigma(n, options.shift, device),
            "ids": torch.where(silent, empty, pool.ids[index]),
        }

    def loss(inputs: Inputs) -> Inputs:
        # Without autocast's cache, which a captured graph must not have.
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if half else nullcontext():
            ids = inputs["ids"]
            text = encode_text(text_encoder, ids)
            return flow_loss(lambda x, sigma: network(x, sigma, text, ids).float(), inputs)

    texts = [to_text(scene, index) for index, scene in enumerate(some_scenes("heldout", SHOWN, 0))]
    shown = time.perf_counter()

    def report() -> None:
        nonlocal shown
        if time.perf_counter() - shown >= SHOW_SECONDS:
            ids = prompt_ids(tokenizer, texts, CAPTION).to(device)
            clips = samples(vae, network, text_encoder, ids, options.shift)
            contact_sheet(options.out / "samples.png", list(clips), texts, columns=FRAMES, cell=96)
            shown = time.perf_counter()

    parameters = {f"transformer.{name}": parameter for name, parameter in transformer.named_parameters()}
    parameters |= {f"text_encoder.{name}": parameter for name, parameter in text_encoder.named_parameters()}
    flow_trainer(options, parameters=parameters, loss=loss, batches=batches).run(report)


@torch.no_grad()
def samples(
    vae: AutoencoderKLWan,
    network: FastTransformer,
    text_encoder: UMT5EncoderModel,
    ids: Tensor,
    shift: float,
    steps: int = 12,
) -> Tensor:
    """Clips of these captions by Euler's method from fixed noise, uint8; the numbers that training draws stay as they are."""
    shape = (len(ids), vae.config.z_dim, 1 + (FRAMES - 1) // DOWN, SIDE // DOWN, SIDE // DOWN)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(ids.device)
    text = encode_text(text_encoder, ids)
    for sigma, after in pairwise(Schedule.shifted(steps, shift).sigmas.tolist()):
        x = x + (after - sigma) * network(x, torch.full((len(x),), sigma, device=x.device), text, ids)
    mean, std = _scale(vae, x)
    return decode(WholeClips(vae), x * std + mean)
