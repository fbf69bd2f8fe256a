"""HPSv2 and HPSv2.1 (Wu et al., 2023): the cosine of a fine-tuned CLIP ViT-H/14, from weights in the authors' (open_clip's) names.

Pictures are resized as floats, in one pass and antialiased: the authors' lines under torchvision 0.17 or newer (`clip_pixels`, pad).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sage_grpo.rewards.built_in.clip import ClipEncoder
from sage_grpo.rewards.built_in.pretrained import NetworkReward, fill, read_safetensors
from sage_grpo.types import FileSource, RewardFacts

CONVERT = "Make it from HPS_v2.1_compressed.pt once, as docs/rewards.md (HPSv2) shows."
_TOWERS = {"visual.": "vision_model", "": "text_model"}
_BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)")
_LAYERS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_WHOLE = {
    "logit_scale": "logit_scale",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
}
_TURNED = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}
"""Projections that open_clip multiplies from the right."""


def from_open_clip(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """open_clip's weights under transformers' names; what is not known keeps its name, so that it is refused."""
    result = {}
    for name, value in state.items():
        block = _BLOCK.fullmatch(name)
        if name in _TURNED:
            result[_TURNED[name]] = value.T.contiguous()
        elif block is None:
            result[_WHOLE.get(name, name)] = value
        else:
            layer = f"{_TOWERS[block[1] or '']}.encoder.layers.{block[2]}"
            place, _, kind = block[3].rpartition(".")
            if place == "attn" and kind in ("in_proj_weight", "in_proj_bias"):
                for letter, third in zip("qkv", value.chunk(3)):
                    result[f"{layer}.self_attn.{letter}_proj.{kind.removeprefix('in_proj_')}"] = third.contiguous()
            else:
                result[f"{layer}.{_LAYERS.get(place, place)}.{kind}"] = value
    return result


class Hpsv2(NetworkReward):
    """The plain cosine of the whole picture (black where it is not square) and the prompt, mean over frames; about 0.2 to 0.35."""

    facts = RewardFacts(
        what="HPSv2 or HPSv2.1, human preference of frames given the prompt",
        parts="HPSv2",
        files={
            "checkpoint": FileSource(
                text="HPS_v2.1_compressed.pt of xswu/HPSv2 as safetensors: docs/rewards.md says how"
            ),
            "base": FileSource(
                text="configuration and tokenizer: hub name laion/CLIP-ViT-H-14-laion2B-s32B-b79K, or a folder",
                hub="config.json",
            ),
        },
        parameters=0.99e9,
        gigabytes=3.9,
        licence="xswu/HPSv2: Apache-2.0",
    )

    def __init__(
        self, *, checkpoint: str, base: str, sample_fps: float = 2.0, num_frames: int = 16, dtype: str = ""
    ) -> None:
        """checkpoint: the weights as safetensors. base: configuration and tokenizer of the CLIP that was fine-tuned."""
        from transformers import CLIPConfig, CLIPModel

        state = from_open_clip(
            read_safetensors(checkpoint, CONVERT)
        )  # half precision becomes float32 when it is copied
        model = CLIPModel(CLIPConfig.from_pretrained(base))
        fill(model, state, f"The HPSv2 checkpoint {checkpoint} for a {base}")
        self._encoder = ClipEncoder(base, "", sample_fps, num_frames, "pad", loaded=model)
        super().__init__(model, dtype=dtype)

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        """Score the clips."""
        return {"HPSv2": self._encoder.cosines(videos, prompts, fps).mean(dim=1)}
