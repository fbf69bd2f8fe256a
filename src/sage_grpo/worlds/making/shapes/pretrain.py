"""Make the miniature: VAE, then latents, then flow, then an ordinary HunyuanVideo15Pipeline folder, then its scores."""

from __future__ import annotations

import json
import os
import shutil
import time
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sage_grpo.inside import replace_text
from sage_grpo.worlds.making.shapes.imperfect import clean_clips
from sage_grpo.worlds.making.shapes.networks import (
    PAD,
    build_text_encoder,
    build_text_encoder_2,
    build_tokenizer,
    build_transformer,
    build_vae,
    load_vae,
)
from sage_grpo.worlds.making.shapes.options import Flaws, PretrainOptions
from sage_grpo.worlds.making.shapes.score import score
from sage_grpo.worlds.making.shapes.stages import encode_pool, psnr, train_flow, train_vae
from sage_grpo.worlds.shapes.scene import FPS, FRAMES, SIDE, words

if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
    from transformers import Qwen2_5_VLTextModel, Qwen2Tokenizer

SHARD = "10MB"
"""Largest weight file; larger networks are split, which the loaders understand."""


def pretrain(options: PretrainOptions) -> int:
    """Run all stages; return 0."""
    torch.manual_seed(options.seed)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    _single_precision(device, exact=False)
    torch.backends.cudnn.benchmark = device.type == "cuda"
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    vae, quality = _vae_stage(options, device)
    _say(started, f"the VAE reaches {quality:.2f} dB on unseen clean clips")
    folder = options.out / "pipeline"
    _flow_stage(options, device, vae, folder)
    _say(started, f"wrote {folder}")
    if options.score_prompts:
        _single_precision(device, exact=True)  # as a CPU would
        prompts, steps = options.score_prompts, options.score_steps
        table = score(folder, prompts=prompts, steps=steps, pictures=options.out, device=device)
        facts = {
            "format": f"{FRAMES} frames of {SIDE}x{SIDE} at {FPS:g} frames a second",
            "VAE reconstruction of clean held-out clips": f"{quality:.2f} dB PSNR",
            "training data": Flaws(**{field.name: getattr(options, field.name) for field in fields(Flaws)}),
            "sizes": options.sizes(),
            "seed": options.seed,
            "scored on": f"{prompts} held-out prompts, {steps} ODE steps, shift {options.shift}",
        }
        listing = "\n".join(f"- {name}: {value}" for name, value in facts.items())
        replace_text(folder / "README.md", CARD.format(table=table, listing=listing, command=_command(options)))
        _say(started, f"scores in {options.out / 'scores.json'}")
    return 0


def _single_precision(device: torch.device, *, exact: bool) -> None:
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not exact


def _vae_stage(options: PretrainOptions, device: torch.device) -> tuple[AutoencoderKLHunyuanVideo15, float]:
    own = options.out / "vae"
    # With a state, a resumed stage trains on for what is left of its (perhaps longer) budget.
    finished = options.resume and (own / "config.json").is_file() and not (options.states / "vae.safetensors").exists()
    ready = options.vae or (own if finished else None)
    if ready is not None:
        vae = load_vae(ready, device)
        generator = torch.Generator().manual_seed(options.seed)
        return vae, psnr(vae, clean_clips(256 if device.type == "cuda" else 8, generator, device))
    vae = build_vae(options.sizes()).to(device) if options.vae_start is None else load_vae(options.vae_start, device)
    vae.requires_grad_(True).train()
    quality = train_vae(vae, options)
    vae.save_pretrained(own)
    return vae, quality


def _flow_stage(options: PretrainOptions, device: torch.device, vae: AutoencoderKLHunyuanVideo15, folder: Path) -> None:
    tokenizer = build_tokenizer(words())
    if options.start is not None:
        from diffusers import HunyuanVideo15Pipeline

        pipe = HunyuanVideo15Pipeline.from_pretrained(options.start, local_files_only=True).to(device, torch.float32)
        transformer, text_encoder = pipe.transformer, pipe.text_encoder
    else:
        sizes = options.sizes()
        transformer = build_transformer(sizes).to(device)
        text_encoder = build_text_encoder(sizes, len(tokenizer), tokenizer.convert_tokens_to_ids(PAD)).to(device)
    transformer.requires_grad_(True).train()
    text_encoder.requires_grad_(True).train()
    pool_started = time.perf_counter()
    generator = torch.Generator().manual_seed(options.seed + 1)
    pool = encode_pool(vae, tokenizer, options, options.flow_clips, generator)
    lengths = [ids.shape[1] for ids in pool.ids]
    _say(pool_started, f"encoded {options.flow_clips} clips; captions of {lengths} tokens")
    train_flow(transformer, text_encoder, tokenizer, pool, options)
    save_pipeline(folder, vae, transformer, text_encoder, tokenizer, options.shift)


def _say(since: float, text: str) -> None:
    print(f"[{time.perf_counter() - since:6.1f} s] {text}", flush=True)


def _command(options: PretrainOptions) -> str:
    """The command that reproduces a run: every option that is not at its default and not a path."""
    changed = [
        f"--pretrain.{field.name} {getattr(options, field.name)}"
        for field in fields(options)
        if getattr(options, field.name) != field.default
        and field.name not in ("out", "state", "vae", "vae_start", "start", "resume", "device", "report_seconds")
    ]
    return " ".join(["sage-grpo shapes pretrain --pretrain.out DIR", *changed])


def save_pipeline(
    folder: Path,
    vae: AutoencoderKLHunyuanVideo15,
    transformer: HunyuanVideo15Transformer3DModel,
    text_encoder: Qwen2_5_VLTextModel,
    tokenizer: Qwen2Tokenizer,
    shift: float,
) -> None:
    """Write the pipeline in half precision; an earlier folder of that name is replaced."""
    from diffusers import ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler, HunyuanVideo15Pipeline
    from transformers import ByT5Tokenizer

    vae, transformer, text_encoder = (deepcopy(one).cpu().half().eval() for one in (vae, transformer, text_encoder))
    pipe = HunyuanVideo15Pipeline(
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        text_encoder_2=build_text_encoder_2().half(),
        tokenizer_2=ByT5Tokenizer(),
        guider=ClassifierFreeGuidance(guidance_scale=1.0),
    )
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    pipe.save_pretrained(temporary, max_shard_size=SHARD)
    _tidy_configs(temporary)
    video = {"frames": FRAMES, "height": SIDE, "width": SIDE, "fps": FPS, "shift": shift}
    (temporary / "video.json").write_text(json.dumps(video) + "\n")
    for path in temporary.rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes files that only their owner can read
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(temporary, folder)


def _tidy_configs(folder: Path) -> None:
    """Make the folder publishable: no paths of a workplace, and text encoders that load in single precision.

    Diffusers' networks load in single precision unless told otherwise; transformers' follow their configuration.
    """
    for path in folder.rglob("*.json"):
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            continue
        content.pop("_name_or_path", None)
        if "dtype" in content:
            content["dtype"] = "float32"
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


CARD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-video
tags: [hunyuanvideo-1.5, miniature, synthetic]
---

# Shapes: a miniature HunyuanVideo-1.5

A complete `HunyuanVideo15Pipeline` of diffusers' own classes, small enough for a CPU. It draws clips of one moving
object (shape, colour, motion, speed, size, background) and was trained from scratch on rendered clips only. Its
training data are imperfect on purpose - wrong words in captions, shaking motion, blur, noise - so that reinforcement
learning has something to improve. It knows nothing else.

The ByT5 branch of the transformer has a fixed size and is never used by these prompts: its weights are zeros. The
chat template writes a constant prefix of 108 tokens in place of the pipeline's system message.

## How it was made

    {command}

{listing}

## How it scores

Held-out combinations, ODE, no guidance; the judge is `sage_grpo.worlds.shapes.judge.ShapesJudge`.

{table}
"""
