"""Qwen-Image, text-to-image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints.checkpoint import read_config
from sage_grpo.models.codec import WanCodec
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.guidance import Guidance
from sage_grpo.models.network.inputs import SIDE, LatentGrid, pack, packed_grid, unpack
from sage_grpo.models.traits import IMAGE, JOINT_ATTENTION, LAST_QUERIES, Traits

TEXT_TOKENS = 512  # tokens to which the pipeline cuts a prompt


class QwenImage(FamilyModel):
    """Qwen-Image as a VelocityModel of one-frame clips."""

    traits = Traits(
        pipelines=("QwenImagePipeline",),
        components=("tokenizer", "text_encoder"),
        video=IMAGE,
        guidance_scale=4.0,
        blocks={"transformer_blocks": "num_layers"},
        lora_targets=(*JOINT_ATTENTION, "img_mlp.net.*", "txt_mlp.net.*"),
        encoders=("text_encoder",),
        inputs={"text": "joint_attention_dim"},
        unread=(*LAST_QUERIES, "LAST.attn.to_add_out.", "LAST.txt_mlp."),
        text_tokens=256,
        ragged=(("encoder_hidden_states", 1),),
        even_sigmas=True,
        dynamic_shift=True,
        codec=WanCodec,
    )

    @classmethod
    def _check(cls, folder: Path, index: Mapping[str, Any]) -> None:
        config = read_config(folder, "transformer")
        for name in ("guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope"):
            if config.get(name):
                raise ModelError(f'transformer/config.json of "{folder}" sets {name}, which is not supported.')

    def _grid(self) -> LatentGrid:
        return packed_grid(self.transformer.config.in_channels, self.pipe.vae_scale_factor)

    def _guidance_style(self) -> Guidance:
        return Guidance(renormalize=SIDE)

    def _encode(self, prompt: str, image: Tensor | None) -> dict[str, Tensor]:
        whole = len(self.pipe.tokenizer(self.pipe.prompt_template_encode.format(prompt)).input_ids)
        crop = self.pipe.prompt_template_encode_start_idx
        if whole <= crop:
            raise ModelError(
                f"The tokenizer turns {prompt!r} with the pipeline's template into {whole} tokens, of which the pipeline crops {crop}: "
                "nothing is left. The checkpoint's tokenizer does not fit this pipeline."
            )
        self.encoder("text_encoder")
        text, _ = self.pipe.encode_prompt(prompt, device=self.places["text"], max_sequence_length=TEXT_TOKENS)
        return {"text": text[0].to(self.dtype)}

    def _forward(self, x: Tensor, sigma: Tensor, timestep: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        pictures = [x, *([inputs["condition"]] if "condition" in inputs else [])]  # the second is the edited picture
        shapes = [(1, one.shape[3] // SIDE, one.shape[4] // SIDE) for one in pictures]
        tokens = self.network(
            hidden_states=torch.cat([pack(one.to(self._input_dtype), SIDE) for one in pictures], dim=1),
            timestep=timestep.to(self._input_dtype) / 1000,  # rounded where the pipeline rounds it
            encoder_hidden_states=inputs["text"].to(self._input_dtype),
            encoder_hidden_states_mask=None,
            img_shapes=[shapes] * len(x),
            return_dict=False,
        )[0]
        return unpack(tokens[:, : self.tokens], x, SIDE)


load = QwenImage.load
