"""Make the miniature, an ordinary HunyuanVideo15Pipeline folder; `making/pretrain.py` has the order of the stages."""

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
from sage_grpo.worlds.making.shapes.imperfect import CLIPS
from sage_grpo.worlds.making.shapes.networks import (
    PAD,
    build_text_encoder,
    build_text_encoder_2,
    build_tokenizer,
    build_transformer,
    build_vae,
    load_vae,
)
from sage_grpo.worlds.making.shapes.options import PretrainOptions, Sizes
from sage_grpo.worlds.making.shapes.stages import encode_pool, train_flow, train_vae
from sage_grpo.worlds.shapes.scene import words
from sage_grpo.worlds.world import SHAPES

if TYPE_CHECKING:
    from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Pipeline, HunyuanVideo15Transformer3DModel
    from transformers import Qwen2_5_VLTextModel, Qwen2Tokenizer

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


def pretrain(options: PretrainOptions) -> int:
    """Run all stages; return 0."""
    return any_world.pretrain(options, ShapesMaker(options))


@dataclass(frozen=True)
class ShapesMaker(Maker):
    """How the shapes world's model is made."""

    options: PretrainOptions
    world = SHAPES
    clips = CLIPS
    card = CARD

    def build_vae(self) -> AutoencoderKLHunyuanVideo15:
        """A fresh VAE."""
        return build_vae(self.options.sizes())

    def load_vae(self, folder: Path, device: torch.device) -> AutoencoderKLHunyuanVideo15:
        """A VAE from its own folder or from a pipeline's."""
        return load_vae(folder, device)

    def codec(self, vae: AutoencoderKLHunyuanVideo15) -> Codec:
        """The VAE as training uses it: its own modules take whole clips."""
        return vae

    def train_vae(self, vae: AutoencoderKLHunyuanVideo15, until: float) -> float:
        """Train in place; return the PSNR on clean unseen clips."""
        return train_vae(vae, self.options, until)

    def make_flow(self, vae: AutoencoderKLHunyuanVideo15, folder: Path, device: torch.device, until: float) -> None:
        """Encode the data, train the flow on it and write the pipeline."""
        options, tokenizer = self.options, build_tokenizer(words())
        if options.start is not None:
            from diffusers import HunyuanVideo15Pipeline

            pipe = HunyuanVideo15Pipeline.from_pretrained(options.start, local_files_only=True)
            pipe = pipe.to(device, torch.float32)
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
        say(pool_started, f"encoded {options.flow_clips} clips; captions of {lengths} tokens")
        train_flow(transformer, text_encoder, tokenizer, pool, options, until)
        save_pipeline(assemble(vae, transformer, text_encoder, tokenizer, options.shift), folder, SHAPES, options.shift)

    def sizes(self) -> Sizes:
        """The sizes of the networks, for the card."""
        return self.options.sizes()


def assemble(
    vae: AutoencoderKLHunyuanVideo15,
    transformer: HunyuanVideo15Transformer3DModel,
    text_encoder: Qwen2_5_VLTextModel,
    tokenizer: Qwen2Tokenizer,
    shift: float,
) -> HunyuanVideo15Pipeline:
    """The pipeline, a copy in half precision."""
    from diffusers import ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler, HunyuanVideo15Pipeline
    from transformers import ByT5Tokenizer

    vae, transformer, text_encoder = (deepcopy(one).cpu().half().eval() for one in (vae, transformer, text_encoder))
    return HunyuanVideo15Pipeline(
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        text_encoder_2=build_text_encoder_2().half(),
        tokenizer_2=ByT5Tokenizer(),
        guider=ClassifierFreeGuidance(guidance_scale=1.0),
    )
