"""ImageReward (Xu et al., 2023): BLIP reads prompt and picture together, and five linear layers make a score.

The published weights are in BLIP's own names (a timm vision transformer, a BERT with cross-attention). They are loaded into transformers' BLIP, from
a safetensors copy, because the published file is a pickle.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_grpo.rewards.built_in.clip import clip_pixels
from sage_grpo.rewards.built_in.pretrained import (
    FrameReward,
    check_head,
    fill,
    load_tokenizer,
    numbered_layers,
    read_safetensors,
    renamed,
    under,
)
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.types import FileSource, RewardFacts
from sage_grpo.utils.json_schema import read_json

CONVERT = "Make it from ImageReward.pt once, as docs/rewards.md (ImageReward) shows."
MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Mean and std of the raw scores over the authors' data; published scores are (score - mean) / std."""
LONGEST = 35
"""Tokens of a prompt that the authors keep."""
HEAD = 64
"""Width of an attention head in every vision transformer of BLIP."""
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")
_TIMM = (
    (r"^blocks\.", "encoder.layers."),
    (r"\.norm([12])\.", r".layer_norm\1."),
    (r"\.attn\.qkv\.", ".self_attn.qkv."),
    (r"\.attn\.proj\.", ".self_attn.projection."),
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^norm\.", "post_layernorm."),
)
_BUFFER = "embeddings.position_ids"
"""0, 1, 2, ...: older versions of BERT saved it."""


class ImageReward(FrameReward):
    """(score - mean) / std of the frames, mean over frames; about -2 to 2."""

    facts = RewardFacts(
        what="ImageReward, human preference of frames given the prompt",
        parts="ImageReward",
        files={
            "checkpoint": FileSource(
                text="ImageReward.pt of THUDM/ImageReward as safetensors: docs/rewards.md says how"
            ),
            "config": FileSource(text="med_config.json of THUDM/ImageReward"),
            "tokenizer": FileSource(
                text="BERT's: hub name google-bert/bert-base-uncased, or a folder", hub="tokenizer.json"
            ),
        },
        parameters=0.45e9,
        gigabytes=1.8,
        licence="THUDM/ImageReward: Apache-2.0",
    )

    def __init__(
        self,
        *,
        checkpoint: str,
        config: str,
        tokenizer: str = "google-bert/bert-base-uncased",
        sample_fps: float = 2.0,
        num_frames: int = 16,
        dtype: str = "",
    ) -> None:
        state = {name: value.float() for name, value in read_safetensors(checkpoint, CONVERT).items()}
        # BLIP's projections for retrieval, which no score uses, are under neither
        vision, text = under(state, "blip.visual_encoder."), under(state, "blip.text_encoder.")
        text.pop(_BUFFER, None)
        if "pos_embed" not in vision or "patch_embed.proj.weight" not in vision:
            raise RewardConfigError(f"{checkpoint} is not an ImageReward: it has no blip.visual_encoder.")
        self._vision = _vision_model(vision)
        fill(self._vision, renamed(vision, _TIMM), f"The vision tower in {checkpoint}")
        self._text = _text_model(Path(config).expanduser(), vision["cls_token"].shape[-1])
        fill(self._text, text, f"The text encoder in {checkpoint}")
        head = numbered_layers(under(state, "mlp.layers."), checkpoint)
        layers = check_head(head, self._text.config.hidden_size, checkpoint)
        super().__init__(
            self._vision, self._text, dtype=dtype, layers=layers, sample_fps=sample_fps, num_frames=num_frames
        )
        self._tokenizer = load_tokenizer(tokenizer, self._text.config.vocab_size)
        # BLIP's two extra tokens, so that a prompt that contains their text is read as by the authors
        self._tokenizer.add_special_tokens({"bos_token": "[DEC]"})
        self._tokenizer.add_tokens(["[ENC]"], special_tokens=True)

    def _score(self, frames: Tensor, prompts: Sequence[str]) -> Tensor:
        device, dtype = self._text.device, self._text.dtype
        tokens = self._tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=LONGEST, return_tensors="pt"
        ).to(device)
        pixels = clip_pixels(frames.to(device), self._vision.config.image_size).to(dtype)
        seen = self._vision(pixel_values=pixels).last_hidden_state
        read = self._text(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:-1], dtype=torch.long, device=device),
        )
        values = read.last_hidden_state[:, 0].float()
        for weight, bias in self._layers:  # no activations between them
            values = F.linear(values, weight, bias)
        return (values.squeeze(-1) - MEAN) / STD


def _vision_model(state: Mapping[str, Tensor]) -> Any:
    """The tower, its sizes read from the weights; BLIP's layer norms have an epsilon of 1e-6."""
    from transformers import BlipVisionConfig, BlipVisionModel

    width, patch = state["cls_token"].shape[-1], state["patch_embed.proj.weight"].shape[-1]
    depth = 1 + max((int(block[1]) for name in state if (block := _BLOCK.fullmatch(name))), default=-1)
    inner = state["blocks.0.mlp.fc1.weight"].shape[0] if "blocks.0.mlp.fc1.weight" in state else 4 * width
    config = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=depth,
        num_attention_heads=max(1, width // HEAD),
        image_size=math.isqrt(state["pos_embed"].shape[1] - 1) * patch,
        patch_size=patch,
        layer_norm_eps=1e-6,
    )
    return BlipVisionModel(config)


def _text_model(path: Path, width: int) -> Any:
    from transformers import BlipTextConfig
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    try:
        raw = read_json(path)
        names = (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "max_position_embeddings", "hidden_act", "layer_norm_eps",
        )  # fmt: skip
        config = BlipTextConfig(**{name: raw[name] for name in names}, encoder_hidden_size=width)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RewardConfigError(f"{path} is not a med_config.json ({type(error).__name__}: {error}).") from error
    return BlipTextModel(config, add_pooling_layer=False)
