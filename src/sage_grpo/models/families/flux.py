"""FLUX.1, text-to-image: the dev checkpoints, whose guidance is an input, and schnell."""

from __future__ import annotations

import torch
from torch import Tensor

from sage_grpo.models.codec import ImageCodec
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.network.inputs import SIDE, LatentGrid, pack, packed_grid, unpack
from sage_grpo.models.traits import IMAGE, JOINT_ATTENTION, Traits

TEXT_TOKENS = 512  # T5 tokens to which the pipeline pads a prompt; the network attends to the padding
SCHNELL_TEXT_TOKENS = 256
"""The same for schnell, from its authors' code and diffusers' documentation; no file of the checkpoint has it."""


class Flux(FamilyModel):
    """FLUX.1 as a VelocityModel of one-frame clips."""

    traits = Traits(
        pipelines=("FluxPipeline",),
        components=("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2"),
        video=IMAGE,
        guidance_scale=3.5,
        blocks={"transformer_blocks": "num_layers", "single_transformer_blocks": "num_single_layers"},
        lora_targets=(
            *JOINT_ATTENTION,
            "ff.net.*",
            "ff_context.net.*",
            "proj_mlp",
            "single_transformer_blocks.*.proj_out",
        ),
        encoders=("text_encoder", "text_encoder_2"),
        inputs={"text": "joint_attention_dim", "pooled": "pooled_projection_dim"},
        text_tokens=TEXT_TOKENS,
        padded=True,
        even_sigmas=True,
        embeds_guidance=True,
        dynamic_shift=True,
        codec=ImageCodec,
        options={"text_tokens": None},
        whole={"text_tokens": (1, TEXT_TOKENS)},
    )

    def _prepare(self) -> None:
        given = self.options["text_tokens"]
        # Both: dev without its guidance input (a "de-distilled" one) keeps dev's scheduler.
        known = not self.transformer.config.guidance_embeds and not self.pipe.scheduler.config.use_dynamic_shifting
        self.text_tokens = int(given or (SCHNELL_TEXT_TOKENS if known else TEXT_TOKENS))
        why = "as asked" if given else "schnell: no guidance input, a fixed shift" if known else "not schnell"
        self.choices["text tokens"] = f"{self.text_tokens} ({why})"
        self.reading = f"{self.text_tokens} text tokens"

    def _grid(self) -> LatentGrid:
        return packed_grid(self.transformer.config.in_channels, self.pipe.vae_scale_factor)

    def _encode(self, prompt: str, image: Tensor | None) -> dict[str, Tensor]:
        for name in self.traits.encoders:
            self.encoder(name)
        # The network attends to the text's padding, which is part of the model.
        text, pooled, _ = self.pipe.encode_prompt(
            prompt, device=self.places["text"], max_sequence_length=self.text_tokens
        )
        return {"text": text[0].to(self.dtype), "pooled": pooled[0].to(self.dtype)}

    def _forward(self, x: Tensor, sigma: Tensor, timestep: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        text, dtype = inputs["text"].to(self._input_dtype), self._input_dtype
        height, width = x.shape[3] // SIDE, x.shape[4] // SIDE
        tokens = self.network(
            hidden_states=pack(x.to(dtype), SIDE),
            timestep=timestep.to(dtype) / 1000,  # rounded where the pipeline rounds it
            guidance=inputs.get("guidance"),
            pooled_projections=inputs["pooled"].to(dtype),
            encoder_hidden_states=text,
            txt_ids=torch.zeros(text.shape[1], 3, device=x.device),
            img_ids=self.pipe._prepare_latent_image_ids(len(x), height, width, x.device, torch.float32),
            return_dict=False,
        )[0]
        return unpack(tokens, x, SIDE)


load = Flux.load
