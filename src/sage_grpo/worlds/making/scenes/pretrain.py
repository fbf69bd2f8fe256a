"""Make the scenes world's model, an ordinary WanPipeline folder; `making/pretrain.py` has the order of the stages."""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sage_grpo.worlds.making import pretrain as any_world
from sage_grpo.worlds.making.autoencoder import Codec
from sage_grpo.worlds.making.pretrain import Maker, say
from sage_grpo.worlds.making.saving import save_pipeline
from sage_grpo.worlds.making.scenes.imperfect import CLIPS
from sage_grpo.worlds.making.scenes.networks import (
    build_text_encoder,
    build_tokenizer,
    build_transformer,
    build_vae,
    load_vae,
)
from sage_grpo.worlds.making.scenes.options import PretrainOptions, Sizes
from sage_grpo.worlds.making.scenes.stages import encode_pool, train_flow, train_vae
from sage_grpo.worlds.making.scenes.whole_clips import WholeClips
from sage_grpo.worlds.scenes.scene import words
from sage_grpo.worlds.world import SCENES

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
    from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

CARD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-video
tags: [wan, miniature, synthetic]
---

# Scenes: a small Wan

A complete `WanPipeline` of diffusers' own classes, small enough for a CPU. It draws clips of one to three textured
objects that move through a meadow, a desert, snow or a city at night before a camera that may pan, and was trained
from scratch on rendered clips only. Its training data are imperfect on purpose - wrong words in captions, shaking
motion, blur, noise - so that reinforcement learning has something to improve. It knows nothing else.

    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(FOLDER)
    pipe("two striped red balls bounce in a meadow while the camera pans left", num_frames=17, height=64, width=64,
         num_inference_steps=20, guidance_scale=1.0, max_sequence_length=512)

## How it was made

    {command}

{listing}

## How it scores

Held-out combinations, ODE, no guidance; the judge is `sage_grpo.worlds.scenes.judge.ScenesJudge`.

{table}
"""


def pretrain(options: PretrainOptions) -> int:
    """Run all stages; return 0."""
    return any_world.pretrain(options, ScenesMaker(options))


@dataclass(frozen=True)
class ScenesMaker(Maker):
    """How the scenes world's model is made."""

    options: PretrainOptions
    world = SCENES
    clips = CLIPS
    card = CARD

    def build_vae(self) -> AutoencoderKLWan:
        """A fresh VAE."""
        return build_vae(self.options.sizes())

    def load_vae(self, folder: Path, device: torch.device) -> AutoencoderKLWan:
        """A VAE from its own folder or from a pipeline's."""
        return load_vae(folder, device)

    def codec(self, vae: AutoencoderKLWan) -> Codec:
        """The VAE on whole clips."""
        return WholeClips(vae)

    def train_vae(self, vae: AutoencoderKLWan, until: float) -> float:
        """Train in place; return the PSNR on clean unseen clips."""
        return train_vae(vae, self.options, until)

    def make_flow(self, vae: AutoencoderKLWan, folder: Path, device: torch.device, until: float) -> None:
        """Encode the data, train the flow on it and write the pipeline."""
        options, tokenizer = self.options, build_tokenizer(words())
        if options.start is not None:
            from diffusers import WanPipeline

            pipe = WanPipeline.from_pretrained(options.start, local_files_only=True).to(device, torch.float32)
            transformer, text_encoder = pipe.transformer, pipe.text_encoder
        else:
            sizes = options.sizes()
            transformer = build_transformer(sizes).to(device)
            text_encoder = build_text_encoder(sizes, len(tokenizer)).to(device)
        transformer.requires_grad_(True).train()
        text_encoder.requires_grad_(True).train()
        started = time.perf_counter()
        pool = encode_pool(vae, tokenizer, options, torch.Generator().manual_seed(options.seed + 1))
        millions = sum(parameter.numel() for parameter in transformer.parameters()) / 1e6
        say(started, f"encoded {len(pool.ids)} clips; the transformer has {millions:.1f} million parameters")
        train_flow(vae, transformer, text_encoder, tokenizer, pool, options, until)
        save_pipeline(assemble(vae, transformer, text_encoder, tokenizer, options.shift), folder, SCENES, options.shift)

    def sizes(self) -> Sizes:
        """The sizes of the networks, for the card."""
        return self.options.sizes()


def assemble(
    vae: AutoencoderKLWan,
    transformer: WanTransformer3DModel,
    text_encoder: UMT5EncoderModel,
    tokenizer: PreTrainedTokenizerFast,
    shift: float,
) -> WanPipeline:
    """The pipeline, a copy in half precision, which runs as diffusers' do."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    vae, transformer, text_encoder = (deepcopy(one).cpu().half().eval() for one in (vae, transformer, text_encoder))
    transformer.set_attn_processor(WanAttnProcessor())
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        transformer=transformer,
    )
