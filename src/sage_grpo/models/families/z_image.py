"""Z-Image, text-to-image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sage_grpo.models.codec import ImageCodec
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.network.inputs import SIDE, LatentGrid
from sage_grpo.models.traits import IMAGE, Traits


class Batched(nn.Module):
    """The stock transformer, which takes and gives lists, for a batch whose texts have one length."""

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        """x: latents, B x C x F x H x W; time: from 0 at noise to 1 at data; text: B x tokens x channels."""
        return torch.stack(self.transformer(list(x), time, list(text), return_dict=False)[0])


class ZImage(FamilyModel):
    """Z-Image as a VelocityModel of one-frame clips."""

    traits = Traits(
        pipelines=("ZImagePipeline",),
        components=("tokenizer", "text_encoder"),
        video=IMAGE,
        guidance_scale=6.0,  # the pipeline's 5: its scale counts from the prompt's own velocity, ours from the negative one
        blocks={"layers": "n_layers"},
        lora_targets=("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0", "feed_forward.w*"),
        encoders=("text_encoder",),
        inputs={"text": "cap_feat_dim"},
        text_tokens=256,
        ragged=(("x", 1),),
        even_sigmas=True,
        dynamic_shift=True,
        codec=ImageCodec,
    )

    def _adapted(self, transformer: Any) -> nn.Module:
        return Batched(transformer)

    @property
    def heads(self) -> tuple[int, int]:
        config = self.transformer.config
        return config.n_heads, config.dim // config.n_heads

    def _grid(self) -> LatentGrid:
        from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF

        channels, spatial = self.transformer.config.in_channels, self.pipe.vae_scale_factor
        grid = LatentGrid(channels=channels, temporal=None, spatial=spatial, patch=(1, SIDE, SIDE))
        if not grid.tokens(self.video) % SEQ_MULTI_OF:  # nothing to fill up with pad tokens
            self.unused = ("x_pad_token",)
        return grid

    def _encode(self, prompt: str, image: Tensor | None) -> dict[str, Tensor]:
        self.encoder("text_encoder")
        (text,) = self.pipe._encode_prompt(prompt, device=self.places["text"])
        return {"text": text.to(self.dtype)}

    def _forward(self, x: Tensor, sigma: Tensor, timestep: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        # The network counts time from noise to data, and its velocity points there.
        return -self.network(x.to(self._input_dtype), (1000 - timestep) / 1000, inputs["text"].to(self._input_dtype))


load = ZImage.load
