"""Stable Diffusion 3 and 3.5, text-to-image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sage_grpo.models.checkpoints.checkpoint import check_components, has_component
from sage_grpo.models.codec import ImageCodec
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.network.inputs import LatentGrid
from sage_grpo.models.traits import IMAGE, JOINT_ATTENTION, LAST_QUERIES, Traits


class Sd3(FamilyModel):
    """Stable Diffusion 3.5 as a VelocityModel of one-frame clips."""

    traits = Traits(
        pipelines=("StableDiffusion3Pipeline",),
        # The third encoder may be left out, as in the pipeline, which then has zeros in its place.
        components=("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2"),
        video=IMAGE,
        guidance_scale=7.0,
        blocks={"transformer_blocks": "num_layers"},
        lora_targets=(*JOINT_ATTENTION, "ff.net.*", "ff_context.net.*"),
        encoders=("text_encoder", "text_encoder_2", "text_encoder_3"),
        inputs={"text": "joint_attention_dim", "pooled": "pooled_projection_dim"},
        unread=LAST_QUERIES,
        text_tokens=77 + 256,
        padded=True,
        dynamic_shift=True,
        codec=ImageCodec,
    )

    @classmethod
    def _check(cls, folder: Path, index: Mapping[str, Any]) -> None:
        if has_component(index, "text_encoder_3"):
            check_components(folder, index, ["tokenizer_3"], [])

    def _grid(self) -> LatentGrid:
        config = self.transformer.config
        patch = (1, config.patch_size, config.patch_size)
        return LatentGrid(channels=config.in_channels, temporal=None, spatial=self.pipe.vae_scale_factor, patch=patch)

    def _encode(self, prompt: str, image: Tensor | None) -> dict[str, Tensor]:
        for name in self.traits.encoders:
            if has_component(self.index, name):
                self.encoder(name)
        # The network attends to the text's padding, which is part of the model.
        text, _, pooled, _ = self.pipe.encode_prompt(
            prompt, None, None, device=self.places["text"], do_classifier_free_guidance=False
        )
        return {"text": text[0].to(self.dtype), "pooled": pooled[0].to(self.dtype)}

    def _forward(self, x: Tensor, sigma: Tensor, timestep: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        v = self.network(
            hidden_states=x[:, :, 0].to(self._input_dtype),
            timestep=timestep,
            encoder_hidden_states=inputs["text"].to(self._input_dtype),
            pooled_projections=inputs["pooled"].to(self._input_dtype),
            return_dict=False,
        )[0]
        return v[:, :, None]


load = Sd3.load
