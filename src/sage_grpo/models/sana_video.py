"""SANA-Video, text-to-video."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from sage_grpo.models.checkpoint import read_config
from sage_grpo.models.decoding import wan_latents, wan_pixels
from sage_grpo.models.errors import ModelError
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.gradients import without_gradient
from sage_grpo.models.opening import open_folder, open_pipeline
from sage_grpo.models.sizes import Grid
from sage_grpo.models.spec import ModelSpec
from sage_grpo.models.traits import CROSS_ATTENTION, Traits
from sage_grpo.types import VideoSpec


def load(spec: ModelSpec, device: str | torch.device | None = None) -> SanaVideo:
    """Load the checkpoint of a spec."""
    folder, index = open_folder(spec, SanaVideo.traits, ["SanaVideoPipeline"], ["tokenizer", "text_encoder"])
    config = read_config(folder, "transformer")
    if index["vae"][1] != "AutoencoderKLWan":
        raise ModelError(
            f'The VAE of "{folder}" is a {index["vae"][1]}; supported is AutoencoderKLWan (the 480p model\'s).'
        )
    if config.get("guidance_embeds") or config.get("out_channels", 16) != config.get("in_channels", 16):
        raise ModelError(
            f'"{folder}" has a guidance input or predicts variances, which its pipeline does not use here.'
        )
    return SanaVideo(spec, folder, index, open_pipeline(spec, SanaVideo.traits, folder, index, device), device=device)


class SanaVideo(FamilyModel):
    """SANA-Video as a VelocityModel. Sizes are taken as given: the pipeline's snapping to known aspect ratios is left out."""

    traits = Traits(
        video=VideoSpec(frames=81, height=480, width=832, fps=16.0),
        guidance_scale=6.0,
        blocks={"transformer_blocks": "num_layers"},
        lora_targets=CROSS_ATTENTION,
        encoders=("text_encoder",),
        ragged=(("encoder_hidden_states", 1),),
    )

    def _unread(self) -> set[str]:
        return _dead(self.transformer)

    def _grid(self) -> Grid:
        return Grid(
            channels=self.transformer.config.in_channels,
            temporal=self.pipe.vae_scale_factor_temporal,
            spatial=self.pipe.vae_scale_factor_spatial,
            patch=tuple(self.transformer.config.patch_size),
        )

    @cached_property
    def _instruction(self) -> list[str]:
        """What the pipeline puts before every prompt."""
        return list(inspect.signature(type(self.pipe).__call__).parameters["complex_human_instruction"].default)

    def _instruct(self, prompt: str) -> str:
        return "\n".join(self._instruction) + prompt

    def _encode(self, prompt: str, image: Tensor | None) -> dict[str, Tensor]:
        self._encoder("text_encoder")
        before = "\n".join(self._instruction)
        instructed = prompt.startswith(before)
        # A causal encoder: valid tokens do not see the padding after them.
        text, mask, _, _ = self.pipe.encode_prompt(
            prompt.removeprefix(before),
            do_classifier_free_guidance=False,
            device=self._places["text"],
            complex_human_instruction=self._instruction if instructed else None,
        )
        return {"text": text[0][mask[0].bool()].to(self.dtype)}

    def _forward(self, x: Tensor, sigma: Tensor, timestep: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        return self.network(
            x.to(self._input_dtype),
            encoder_hidden_states=inputs["text"].to(self._input_dtype),
            timestep=timestep,
            return_dict=False,
        )[0]

    def _to_vae(self, latents: Tensor) -> Tensor:
        return wan_latents(self.pipe.vae, latents)

    def _pixels(self, z: Tensor) -> Iterable[Tensor]:
        vae = self.pipe.vae
        return super()._pixels(z) if vae.use_tiling else wan_pixels(vae, z)


def _dead(transformer: Any) -> set[str]:
    config = transformer.config

    def run(network: nn.Module) -> Tensor:
        return network(
            torch.empty(1, config.in_channels, *config.patch_size, device="meta"),
            encoder_hidden_states=torch.empty(1, 2, config.caption_channels, device="meta"),
            timestep=torch.empty(1, device="meta"),
            return_dict=False,
        )[0]

    return without_gradient(transformer, SanaVideo.traits.blocks, run, inputs="sana_video")
