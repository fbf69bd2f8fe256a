"""Make the scenes world's model, an ordinary WanPipeline folder; `pretraining/pretrain.py` has the order of the stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from research.pretraining.pretrain import Maker
from research.pretraining.scenes.imperfect import CLIPS
from research.pretraining.scenes.networks import build_text_encoder, build_tokenizer, build_transformer, build_vae
from research.pretraining.scenes.options import Sizes
from research.pretraining.scenes.stages import encode_pool, train_flow, train_vae
from research.pretraining.scenes.whole_clips import WholeClips
from research.scenes.scene import words
from research.scenes.world import MODEL, SCENES

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

A complete `WanPipeline` of diffusers' classes, small enough for a CPU. It draws only clips of one to three textured
objects that move through a meadow, a desert, snow or a city at night, while the camera may pan. It was
trained from scratch on rendered clips with deliberate flaws: wrong words in captions, shaking motion, blur and noise.
Reinforcement learning can remove these.

    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(FOLDER)
    pipe("two striped red balls bounce in a meadow while the camera pans left", num_frames=17, height=64, width=64,
         num_inference_steps=20, guidance_scale=1.0, max_sequence_length=512)

## How it was made

    {command}

{listing}

## How it scores

Held-out combinations, ODE, no guidance; the judge is `research.scenes.judge.ScenesJudge`.

{table}
"""


def networks(sizes: Sizes, tokenizer: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    """A fresh transformer and a fresh text encoder."""
    return build_transformer(sizes), build_text_encoder(sizes, len(tokenizer))


def assemble(
    vae: AutoencoderKLWan,
    transformer: WanTransformer3DModel,
    text_encoder: UMT5EncoderModel,
    tokenizer: PreTrainedTokenizerFast,
    shift: float,
) -> WanPipeline:
    """The pipeline, which runs as diffusers' do."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    transformer.set_attn_processor(WanAttnProcessor())
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        transformer=transformer,
    )


MAKER = Maker(
    world=SCENES,
    model=lambda: MODEL,
    clips=CLIPS,
    card=CARD,
    pipeline="WanPipeline",
    vae="AutoencoderKLWan",
    build_vae=build_vae,
    codec=WholeClips,
    train_vae=train_vae,
    tokenizer=lambda: build_tokenizer(words()),
    networks=networks,
    encode_pool=encode_pool,
    train_flow=train_flow,
    assemble=assemble,
)
"""The stages of the scenes world's model."""
