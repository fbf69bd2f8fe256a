"""Sample a pipeline folder on held-out prompts and judge the clips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sage_grpo.shapes.judge import WEIGHTS, ShapesJudge
from sage_grpo.shapes.making.assemble import load_vae
from sage_grpo.shapes.making.networks import batched_vae, encode_text, portion, velocity
from sage_grpo.shapes.making.tokenizer import prefix_ids, prompt_ids
from sage_grpo.shapes.making.vae_train import reconstruct, to_clips
from sage_grpo.shapes.render import render, to_uint8
from sage_grpo.shapes.scene import ATTRIBUTES, batch_of, from_text, random_scenes, to_text

if TYPE_CHECKING:
    from diffusers import HunyuanVideo15Pipeline


def heldout_prompts(n: int, seed: int) -> list[str]:
    """n prompts of combinations that pretraining never saw, over all templates."""
    scenes = random_scenes(n, torch.Generator().manual_seed(seed), split="heldout").scenes()
    return [to_text(scene, index) for index, scene in enumerate(scenes)]


def sampling_sigmas(steps: int, shift: float) -> list[float]:
    """The levels of the pipeline's schedule, from 1 to 0: uniform, then shifted."""
    return [shift * s / (1 + (shift - 1) * s) for s in (1 - i / steps for i in range(steps + 1))]


@torch.no_grad()
def sample(
    pipe: HunyuanVideo15Pipeline, prompts: Sequence[str], *, steps: int, frames: int, side: int, seed: int
) -> Tensor:
    """Clips for these prompts by the ODE without guidance, uint8 B x F x H x W x 3 on the host."""
    device = pipe.transformer.device
    prefix = torch.tensor(prefix_ids(pipe.tokenizer), device=device)
    ids = prompt_ids(pipe.tokenizer, prompts)
    shape = (pipe.vae.config.latent_channels, 1 + (frames - 1) // 4, side // 8, side // 8)
    start = torch.randn(len(prompts), *shape, generator=torch.Generator().manual_seed(seed))
    sigmas = sampling_sigmas(steps, pipe.scheduler.config.shift)
    latents = torch.empty_like(start)
    for length in sorted({len(row) for row in ids}):
        members = [i for i, row in enumerate(ids) if len(row) == length]
        text = encode_text(pipe.text_encoder, prefix, torch.tensor([ids[i] for i in members], device=device))
        x = start[members].to(device)
        for sigma, sigma_next in pairwise(sigmas):
            v = velocity(pipe.transformer, x, torch.full((len(x),), sigma, device=device), text)
            x = x + (sigma_next - sigma) * v
        latents[members] = x.cpu()
    latents = latents.to(device) / pipe.vae.config.scaling_factor
    with batched_vae():
        clips = [pipe.vae.decoder(part) for part in latents.split(portion(device))]
    return to_clips(torch.cat(clips)).cpu()


@torch.no_grad()
def check_against_stock(pipe: HunyuanVideo15Pipeline, prompt: str) -> float:
    """Largest difference between the fast velocity and the stock pipeline's, for one prompt at one level."""
    device = pipe.transformer.device
    text, mask, text_2, mask_2 = pipe.encode_prompt([prompt], device=device, dtype=torch.float32)
    channels = pipe.vae.config.latent_channels
    x = torch.randn(1, channels, 3, 4, 4, generator=torch.Generator().manual_seed(0)).to(device)
    sigma = torch.full((1,), 0.7, device=device)
    stock = pipe.transformer(
        torch.cat([x, torch.zeros_like(x), torch.zeros_like(x[:, :1])], dim=1),
        sigma * 1000,
        text,
        mask,
        encoder_hidden_states_2=text_2,
        encoder_attention_mask_2=mask_2,
        image_embeds=torch.zeros(1, 729, pipe.transformer.config.image_embed_dim, device=device),
    ).sample
    prefix = torch.tensor(prefix_ids(pipe.tokenizer), device=device)
    ids = torch.tensor(prompt_ids(pipe.tokenizer, [prompt]), device=device)
    fast = velocity(pipe.transformer, x, sigma, encode_text(pipe.text_encoder, prefix, ids))
    return float((fast - stock).abs().max())


def judge_clips(clips: Tensor, prompts: Sequence[str], fps: float) -> dict[str, float]:
    """Mean of every part of the judge's scores."""
    scores = ShapesJudge()(clips, prompts, fps)
    return {name: float(values.mean()) for name, values in scores.items()}


def ceiling(n: int, frames: int, side: int, fps: float, seed: int) -> dict[str, float]:
    """Scores of perfect clips of held-out scenes: what a perfect model would get."""
    scenes = random_scenes(n, torch.Generator().manual_seed(seed), split="heldout")
    clips = to_uint8(render(scenes, frames, side, side))
    return judge_clips(clips, scenes.texts(), fps)


def clean_clips(
    folder: Path | None, prompts: Sequence[str], *, frames: int, side: int, seed: int, device: torch.device
) -> dict[str, Tensor]:
    """Perfect clips of these prompts, as they are and after a folder's VAE (None: the embedded one).

    No weights of the network can do better than the second: everything that it makes goes through the VAE.
    """
    scenes = batch_of([from_text(prompt) for prompt in prompts], torch.Generator().manual_seed(seed))
    clips = to_uint8(render(scenes, frames, side, side))
    vae = load_vae(folder or Path(str(files("sage_grpo") / "shapes" / "assets")), device)
    with batched_vae():
        after = torch.cat([reconstruct(vae, part.to(device)).cpu() for part in clips.split(128)])
    return {"clean": clips, "after_vae": after}


def score_table(model: Mapping[str, float], best: Mapping[str, float]) -> str:
    """A Markdown table: the model, the ceiling, and for the attributes the score of guessing."""
    lines = ["| part | base model | clean renders | chance |", "|---|---|---|---|"]
    chance = {f"TA/{name}": 1 / len(values) for name, values in ATTRIBUTES.items()}
    chance["TA"] = sum(WEIGHTS[name] * chance[f"TA/{name}"] for name in ATTRIBUTES)
    for name in model:
        guess = f"{chance[name]:.3f}" if name in chance else ""
        lines.append(f"| {name} | {model[name]:.3f} | {best[name]:.3f} | {guess} |")
    lines.append(f"| Overall / ceiling | {model['Overall'] / best['Overall']:.1%} | 100% | |")
    return "\n".join(lines)
