"""LTX-Video, text-to-video."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sage_grpo.models.errors import ModelError
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.gradients import without_gradient
from sage_grpo.models.guidance import Guidance
from sage_grpo.models.opening import open_folder, open_pipeline
from sage_grpo.models.packing import pack, unpack
from sage_grpo.models.sizes import Grid
from sage_grpo.models.spec import ModelSpec
from sage_grpo.models.traits import CROSS_ATTENTION, Traits
from sage_grpo.types import VideoSpec


def load(spec: ModelSpec, device: str | torch.device | None = None) -> Ltx:
    """Load the checkpoint of a spec."""
    folder, index = open_folder(spec, Ltx.traits, ["LTXPipeline"], ["tokenizer", "text_encoder"])
    return Ltx(spec, folder, index, open_pipeline(spec, Ltx.traits, folder, index, device), device)


class Ltx(FamilyModel):
    """LTX-Video as a VelocityModel."""

    traits = Traits(
        video=VideoSpec(frames=161, height=512, width=704, fps=25.0),
        guidance_scale=3.0,
        blocks={"transformer_blocks": "num_layers"},
        lora_targets=(*CROSS_ATTENTION, "ff.net.*"),
        encoders=("text_encoder",),
        ragged=(("encoder_hidden_states", 1),),
        even_sigmas=True,
        dynamic_shift=True,
        # As the pipeline's arguments; no noise scale is the timestep.
        options={"guidance_rescale": 0.0, "decode_timestep": 0.0, "decode_noise_scale": None},
    )

    def __init__(
        self, spec: ModelSpec, folder: Path, index: dict[str, Any], pipe: Any, device: str | torch.device | None
    ) -> None:
        self.takes_timestep = bool(pipe.vae.config.timestep_conditioning)
        if not self.takes_timestep and any(name.startswith("decode") for name in spec.options):
            raise ModelError(
                f'model.options: the VAE of "{folder}" takes no timestep, so decode_timestep and decode_noise_scale mean nothing to '
                "it. Leave them out."
            )
        super().__init__(spec, folder, index, pipe, device=device)

    def _unread(self) -> set[str]:
        return _dead(self.transformer)

    def _grid(self) -> Grid:
        pipe = self.pipe
        return Grid(
            channels=self.transformer.config.in_channels,
            temporal=pipe.vae_temporal_compression_ratio,
            spatial=pipe.vae_spatial_compression_ratio,
        )

    def _guidance_style(self) -> Guidance:
        return Guidance(rescale=self.options["guidance_rescale"] or 0.0)

    def _encode(self, prompt: str, image: Tensor | None) -> dict[str, Tensor]:
        self._encoder("text_encoder")
        # The encoder sees its padding; the network does not.
        text, mask, _, _ = self.pipe.encode_prompt(
            prompt, do_classifier_free_guidance=False, device=self._places["text"]
        )
        return {"text": text[0][mask[0].bool()].to(self.dtype)}

    def _forward(self, x: Tensor, sigma: Tensor, timestep: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        frames, height, width = x.shape[2:]
        stride = self.grid.spatial
        tokens = self.network(
            hidden_states=pack(x.to(self._input_dtype)),
            encoder_hidden_states=inputs["text"].to(self._input_dtype),
            timestep=timestep,
            encoder_attention_mask=None,
            num_frames=frames,
            height=height,
            width=width,
            rope_interpolation_scale=((self.grid.temporal or 1) / self.video.fps, stride, stride),
            return_dict=False,
        )[0]
        return unpack(tokens, x)

    def _to_vae(self, latents: Tensor) -> Tensor:
        vae = self.pipe.vae
        return self.pipe._denormalize_latents(latents, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)

    def _pixels(self, z: Tensor) -> Iterable[Tensor]:
        if not self.takes_timestep:
            return super()._pixels(z)
        timestep = self.options["decode_timestep"] or 0.0
        given = self.options["decode_noise_scale"]
        scale = timestep if given is None else given
        # The same noise for every clip: a clip decodes to the same pixels each time and beside any others.
        noise = torch.randn(z.shape[1:], generator=torch.Generator().manual_seed(0)).to(z)
        times = torch.full((len(z),), timestep, device=z.device, dtype=z.dtype)
        return [self.pipe.vae.decode((1 - scale) * z + scale * noise, times, return_dict=False)[0]]


def _dead(transformer: Any) -> set[str]:
    config = transformer.config

    def run(network: nn.Module) -> Tensor:
        return network(
            hidden_states=torch.empty(1, 2, config.in_channels, device="meta"),
            encoder_hidden_states=torch.empty(1, 2, config.caption_channels, device="meta"),
            timestep=torch.empty(1, device="meta"),
            encoder_attention_mask=None,
            num_frames=1,
            height=1,
            width=2,
            rope_interpolation_scale=(1.0, 1, 1),
            return_dict=False,
        )[0]

    return without_gradient(transformer, Ltx.traits.blocks, run, inputs="ltx")
