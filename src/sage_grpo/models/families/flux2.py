"""FLUX.2 klein, text-to-image."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sage_grpo.models import ModelError
from sage_grpo.models.codec import ImageCodec
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.guidance import Guidance
from sage_grpo.models.network.inputs import SIDE, LatentGrid, pack, unpack
from sage_grpo.models.traits import IMAGE, JOINT_ATTENTION, Traits


class Flux2Codec(ImageCodec):
    """Its latents are squares of the VAE's, normalized."""

    def to_vae(self, latents: Tensor) -> Tensor:
        mean, std = self._statistics(latents)
        return self.pipe._unpatchify_latents(latents[:, :, 0] * std + mean)[:, :, None]

    def from_vae(self, z: Tensor) -> Tensor:
        mean, std = self._statistics(z)
        return ((self.pipe._patchify_latents(z[:, :, 0]) - mean) / std)[:, :, None]

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        norm = self.vae.bn
        mean, variance = (stat.view(1, -1, 1, 1).to(like) for stat in (norm.running_mean, norm.running_var))
        return mean, torch.sqrt(variance + self.vae.config.batch_norm_eps)


class Flux2(FamilyModel):
    """FLUX.2 klein as a VelocityModel of one-frame clips. Its latents are the network's tokens: squares of the VAE's, normalized."""

    traits = Traits(
        pipelines=("Flux2KleinPipeline",),
        components=("tokenizer", "text_encoder"),
        video=IMAGE,
        guidance_scale=4.0,
        blocks={"transformer_blocks": "num_layers", "single_transformer_blocks": "num_single_layers"},
        lora_targets=(*JOINT_ATTENTION, "ff.linear_*", "ff_context.linear_*", "attn.to_qkv_mlp_proj", "attn.to_out"),
        encoders=("text_encoder",),
        inputs={"text": "joint_attention_dim"},
        text_tokens=512,
        padded=True,
        even_sigmas=True,
        dynamic_shift=True,
        codec=Flux2Codec,
    )

    def _prepare(self) -> None:
        self.distilled = bool(self.index.get("is_distilled"))
        scale = self.spec.guidance_scale
        if self.distilled and scale not in (None, 1):
            raise ModelError(
                f'model.guidance_scale is {scale:g}, but "{self.folder}" was distilled to do without guidance (is_distilled in '
                "model_index.json), and its pipeline gives it none. Leave it out, or use the base checkpoint."
            )

    def _guidance_style(self) -> Guidance:
        return Guidance(scale=1.0) if self.distilled else Guidance()

    def shift_of(self, num_steps: int) -> float:
        if self.given_shift is not None or not self.pipe.scheduler.config.use_dynamic_shifting:
            return self.shift
        from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

        return math.exp(compute_empirical_mu(self.tokens, num_steps))

    def _grid(self) -> LatentGrid:
        return LatentGrid(
            channels=self.transformer.config.in_channels, temporal=None, spatial=SIDE * self.pipe.vae_scale_factor
        )

    def _encode(self, prompt: str, image: Tensor | None) -> dict[str, Tensor]:
        self.encoder("text_encoder")
        # The network attends to the text's padding, which is part of the model.
        text, _ = self.pipe.encode_prompt(prompt, device=self.places["text"])
        return {"text": text[0].to(self.dtype)}

    def _forward(self, x: Tensor, sigma: Tensor, timestep: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        text, dtype = inputs["text"].to(self._input_dtype), self._input_dtype
        # Positions of every token: time, row, column and place in the text.
        rows, columns, words = (torch.arange(size, device=x.device) for size in (*x.shape[3:], text.shape[1]))
        nought = torch.zeros(1, device=x.device, dtype=torch.int64)
        tokens = self.network(
            hidden_states=pack(x.to(dtype)),
            timestep=timestep.to(dtype) / 1000,  # rounded where the pipeline rounds it
            guidance=None,
            encoder_hidden_states=text,
            txt_ids=torch.cartesian_prod(nought, nought, nought, words)[None],
            img_ids=torch.cartesian_prod(nought, rows, columns, nought)[None],
            return_dict=False,
        )[0]
        return unpack(tokens, x)


load = Flux2.load
