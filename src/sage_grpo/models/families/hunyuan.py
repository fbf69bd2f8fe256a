"""HunyuanVideo (1.0), text-to-video."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from torch import Tensor, nn

from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints.checkpoint import read_config
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.network.inputs import LatentGrid, grid_of_clips
from sage_grpo.models.trained import blocks_of
from sage_grpo.models.traits import JOINT_ATTENTION, Traits
from sage_grpo.types import VideoSpec


class Unmasked(HunyuanVideoAttnProcessor2_0):
    """The stock attention for text without padding: its mask masks nothing, but rules out the fast kernels."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        return super().__call__(attn, hidden_states, encoder_hidden_states, None, image_rotary_emb)


class Hunyuan(FamilyModel):
    """HunyuanVideo as a VelocityModel."""

    traits = Traits(
        pipelines=("HunyuanVideoPipeline",),
        components=("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2"),
        video=VideoSpec(frames=129, height=720, width=1280, fps=24.0),
        guidance_scale=6.0,
        blocks={"transformer_blocks": "num_layers", "single_transformer_blocks": "num_single_layers"},
        lora_targets=(*JOINT_ATTENTION, "ff.net.*", "ff_context.net.*", "proj_mlp", "proj_out"),
        encoders=("text_encoder", "text_encoder_2"),
        inputs={"text": "text_embed_dim", "pooled": "pooled_projection_dim"},
        text_tokens=256,
        ragged=(("encoder_hidden_states", 1),),
        even_sigmas=True,
        embeds_guidance=True,
    )

    @classmethod
    def _check(cls, folder: Path, index: Mapping[str, Any]) -> None:
        if read_config(folder, "transformer").get("image_condition_type") is not None:
            raise ModelError(
                f'"{folder}" is an image-to-video HunyuanVideo, which is not supported. Use the text-to-video one.'
            )

    def _adapted(self, transformer: Any) -> nn.Module:
        block: Any
        for block in blocks_of(transformer, self.traits):
            block.attn.set_processor(Unmasked())
        return transformer

    def _grid(self) -> LatentGrid:
        return grid_of_clips(self.pipe, self.transformer.config, self.transformer.config.in_channels)

    def _encode(self, prompt: str, image: Tensor | None) -> dict[str, Tensor]:
        for name in self.traits.encoders:
            self.encoder(name)
        text, pooled, mask = self.pipe.encode_prompt(prompt, device=self.places["text"])
        text = text[0][mask[0].bool()]  # a causal encoder: valid tokens do not see the padding after them
        if not len(text):
            raise ModelError(
                f"Nothing of {prompt!r} is left after the pipeline's template: the tokenizer does not fit it."
            )
        return {"text": text.to(self.dtype), "pooled": pooled[0].to(self.dtype)}

    def _forward(self, x: Tensor, sigma: Tensor, timestep: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        text, scale = inputs["text"].to(self._input_dtype), inputs.get("guidance")
        return self.network(
            hidden_states=x.to(self._input_dtype),
            timestep=timestep,
            encoder_hidden_states=text,
            encoder_attention_mask=torch.ones(text.shape[:2], dtype=torch.int64, device=text.device),
            pooled_projections=inputs["pooled"].to(self._input_dtype),
            guidance=None if scale is None else 1000.0 * scale.to(self._input_dtype),  # rounded, as the pipeline's
            return_dict=False,
        )[0]


load = Hunyuan.load
