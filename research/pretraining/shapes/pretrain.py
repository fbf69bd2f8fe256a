"""Make the miniature, an ordinary HunyuanVideo15Pipeline folder; `pretraining/pretrain.py` has the order of the stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from research.pretraining.pretrain import Maker
from research.pretraining.shapes.imperfect import CLIPS
from research.pretraining.shapes.networks import (
    PAD,
    batched,
    build_text_encoder,
    build_text_encoder_2,
    build_tokenizer,
    build_transformer,
    build_vae,
)
from research.pretraining.shapes.options import Sizes
from research.pretraining.shapes.stages import encode_pool, train_flow, train_vae
from sage_grpo.models.checkpoints.checkpoint import resolve
from sage_grpo.models.spec import ModelSpec
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

A complete `HunyuanVideo15Pipeline` of diffusers' classes, small enough for a CPU. It draws clips of one moving object
(shape, color, motion, speed, size, background) and nothing else. It was trained from scratch on rendered clips with
deliberate flaws: wrong words in captions, shaking motion, blur and noise. Reinforcement learning can remove these.

The weights of the transformer's ByT5 branch are zeros, because these prompts never use it. The chat template writes a
constant prefix of 108 tokens in place of the pipeline's system message.

## How it was made

    {command}

{listing}

## How it scores

Held-out combinations, ODE, no guidance; the judge is `sage_grpo.worlds.shapes.judge.ShapesJudge`.

{table}
"""


def networks(sizes: Sizes, tokenizer: Qwen2Tokenizer) -> tuple[Any, Any]:
    """A fresh transformer and a fresh text encoder."""
    pad = tokenizer.convert_tokens_to_ids(PAD)
    return build_transformer(sizes), build_text_encoder(sizes, len(tokenizer), pad)


def assemble(
    vae: AutoencoderKLHunyuanVideo15,
    transformer: HunyuanVideo15Transformer3DModel,
    text_encoder: Qwen2_5_VLTextModel,
    tokenizer: Qwen2Tokenizer,
    shift: float,
) -> HunyuanVideo15Pipeline:
    """The pipeline."""
    from diffusers import ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler, HunyuanVideo15Pipeline
    from transformers import ByT5Tokenizer

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


MAKER = Maker(
    world=SHAPES,
    model=lambda: resolve(ModelSpec()),
    clips=CLIPS,
    card=CARD,
    pipeline="HunyuanVideo15Pipeline",
    vae="AutoencoderKLHunyuanVideo15",
    build_vae=build_vae,
    codec=batched,
    train_vae=train_vae,
    tokenizer=lambda: build_tokenizer(words()),
    networks=networks,
    encode_pool=encode_pool,
    train_flow=lambda vae, *others: train_flow(*others),
    assemble=assemble,
)
"""The stages of the shapes world's model."""
