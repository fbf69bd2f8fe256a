"""Make the miniature: VAE, then latents, then flow, then an ordinary pipeline folder, then its scores.

`python -m sage_grpo.shapes.making.pretrain --out DIR` needs only torch, diffusers, transformers and Pillow.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

import torch

from sage_grpo.inside import replace_text
from sage_grpo.shapes.making.networks import build_text_encoder, build_transformer, build_vae
from sage_grpo.shapes.making.options import PretrainOptions
from sage_grpo.shapes.making.tokenizer import PAD, build_tokenizer
from sage_grpo.shapes.scene import FPS, FRAMES, SIDE, words
from sage_grpo.video import contact_sheet

if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo15


def pretrain(options: PretrainOptions) -> int:
    """Run all stages; return 0."""
    torch.manual_seed(options.seed)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    vae, quality = _vae_stage(options, device)
    _say(started, f"the VAE reaches {quality:.2f} dB on unseen clean clips")
    _flow_stage(options, device, vae)
    _say(started, f"wrote {options.out / 'pipeline'}")
    if options.score_prompts:
        if device.type == "cuda":  # score in true single precision, as a CPU would
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cudnn.allow_tf32 = False
        score(
            options.out / "pipeline",
            prompts=options.score_prompts,
            steps=options.score_steps,
            pictures=options.out,
            device=device,
            card=(
                _command(options),
                {
                    "VAE reconstruction of clean held-out clips": f"{quality:.2f} dB PSNR",
                    "training data": options.flaws(),
                    "sizes": options.sizes(),
                    "seed": options.seed,
                },
            ),
        )
        _say(started, f"scores in {options.out / 'scores.json'}")
    return 0


def _vae_stage(options: PretrainOptions, device: torch.device) -> tuple[AutoencoderKLHunyuanVideo15, float]:
    from sage_grpo.shapes.making.assemble import load_vae, save_vae
    from sage_grpo.shapes.making.imperfect import clean_clips
    from sage_grpo.shapes.making.networks import batched_vae
    from sage_grpo.shapes.making.vae_train import psnr, train_vae

    own = options.out / "vae"
    # With a state, a resumed stage trains on for what is left of its (perhaps longer) budget.
    finished = options.resume and (own / "config.json").is_file() and not (options.states / "vae.safetensors").exists()
    ready = options.vae or (own if finished else None)
    if ready is not None:
        vae = load_vae(ready, device)
        with batched_vae(), torch.no_grad():
            generator = torch.Generator().manual_seed(options.seed)
            return vae, psnr(vae, clean_clips(256 if device.type == "cuda" else 8, FRAMES, SIDE, generator, device))
    vae = build_vae(options.sizes()).to(device) if options.vae_start is None else load_vae(options.vae_start, device)
    vae.requires_grad_(True).train()
    quality = train_vae(vae, options)
    save_vae(vae, own)
    return vae, quality


def _flow_stage(options: PretrainOptions, device: torch.device, vae: AutoencoderKLHunyuanVideo15) -> None:
    from sage_grpo.shapes.making.assemble import load_pipeline, save_pipeline
    from sage_grpo.shapes.making.flow_train import encode_pool, train_flow

    tokenizer = build_tokenizer(words())
    if options.start is not None:
        pipe = load_pipeline(options.start, device)
        transformer, text_encoder = pipe.transformer, pipe.text_encoder
    else:
        sizes = options.sizes()
        transformer = build_transformer(sizes).to(device)
        text_encoder = build_text_encoder(sizes, len(tokenizer), tokenizer.convert_tokens_to_ids(PAD)).to(device)
    transformer.requires_grad_(True).train()
    text_encoder.requires_grad_(True).train()
    pool_started = time.perf_counter()
    generator = torch.Generator().manual_seed(options.seed + 1)
    pool = encode_pool(
        vae, tokenizer, options.flaws(), n=options.flow_clips, frames=FRAMES, side=SIDE, generator=generator
    )
    lengths = [ids.shape[1] for ids in pool.ids]
    _say(pool_started, f"encoded {options.flow_clips} clips; captions of {lengths} tokens")
    train_flow(transformer, text_encoder, tokenizer, pool, options)
    save_pipeline(
        options.out / "pipeline",
        vae=vae,
        transformer=transformer,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        shift=options.shift,
        video={"frames": FRAMES, "height": SIDE, "width": SIDE, "fps": FPS},
    )


def score(
    folder: Path,
    *,
    prompts: int,
    steps: int,
    pictures: Path,
    device: torch.device,
    card: tuple[str, dict[str, object]] | None = None,
) -> dict[str, float]:
    """Sample and judge a pipeline folder on held-out prompts; write pictures and scores.json.

    card: the command and the facts for a model card, which is then written into the folder.
    """
    from sage_grpo.shapes.making.assemble import folder_megabytes, load_pipeline, write_card
    from sage_grpo.shapes.making.score import (
        ceiling,
        check_against_stock,
        heldout_prompts,
        judge_clips,
        sample,
        score_table,
    )

    pipe = load_pipeline(folder, device)
    texts = heldout_prompts(prompts, seed=1)
    print(f"fast and stock velocities differ by {check_against_stock(pipe, texts[0]):.1e}", flush=True)
    clock = time.perf_counter()
    clips = sample(pipe, texts, steps=steps, frames=FRAMES, side=SIDE, seed=2)
    seconds = time.perf_counter() - clock
    contact_sheet(pictures / "samples.png", list(clips[:24]), texts[:24], columns=FRAMES, cell=96)
    replace_text(pictures / "samples.txt", "\n".join(texts[:24]) + "\n")
    found, best = judge_clips(clips, texts, FPS), ceiling(prompts, FRAMES, SIDE, FPS, seed=1)
    table = score_table(found, best)
    print(table, flush=True)
    if card is not None:
        command, facts = card
        facts = {
            "format": f"{FRAMES} frames of {SIDE}x{SIDE} at {FPS:g} frames a second",
            **facts,
            "scored on": f"{prompts} held-out prompts, {steps} ODE steps, shift {pipe.scheduler.config.shift}",
        }
        write_card(folder, table=table, facts=facts, command=command)
    scores = {"model": found, "ceiling": best, "seconds": seconds}
    replace_text(pictures / "scores.json", json.dumps(scores, indent=2) + "\n")
    print(f"{prompts} clips in {seconds:.1f} s; the folder has {folder_megabytes(folder):.1f} MB", flush=True)
    return found


def _say(since: float, text: str) -> None:
    print(f"[{time.perf_counter() - since:6.1f} s] {text}", flush=True)


def _command(options: PretrainOptions) -> str:
    """The command that reproduces a run: every option that is not at its default and not a path."""
    changed = [
        f"--{field.name.replace('_', '-')} {getattr(options, field.name)}"
        for field in fields(options)
        if getattr(options, field.name) != field.default
        and field.name not in ("out", "state", "vae", "vae_start", "start", "resume", "device", "report_seconds")
    ]
    return " ".join(["python -m sage_grpo.shapes.making.pretrain --out DIR", *changed])


def parse(arguments: Sequence[str] | None = None) -> PretrainOptions:
    """Options from a command line, with the standard library alone."""
    parser = argparse.ArgumentParser(
        prog="python -m sage_grpo.shapes.making.pretrain", description="Pretrain the shapes miniature."
    )
    kinds = get_type_hints(PretrainOptions)
    for field in fields(PretrainOptions):
        flag = f"--{field.name.replace('_', '-')}"
        default = None if field.default is MISSING else field.default
        if kinds[field.name] is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
        else:
            kind = Path if kinds[field.name] == Path | None else kinds[field.name]
            parser.add_argument(flag, type=kind, default=default, help=f"default {default}")
    return PretrainOptions(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(pretrain(parse()))
