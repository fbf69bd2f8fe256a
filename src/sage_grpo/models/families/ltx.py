"""LTX-Video, text-to-video and image-to-video."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints.checkpoint import read_config
from sage_grpo.models.codec import Codec
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.guidance import Guidance
from sage_grpo.models.network.inputs import LatentGrid, after_first_frame, grid_of_clips, pack, seen_tokens, unpack
from sage_grpo.models.traits import CROSS_ATTENTION, Traits
from sage_grpo.types import VideoSpec

MIXED = 0  # seed of the noise that decoding mixes into latents (decode_noise_scale)


class LtxCodec(Codec):
    """Some of its VAEs take a timestep, or add noise."""

    def to_vae(self, latents: Tensor) -> Tensor:
        vae = self.vae
        return self.pipe._denormalize_latents(latents, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)

    def chunks(self, z: Tensor) -> Iterable[Tensor]:
        # The same noise for every clip: a clip decodes to the same pixels each time and beside any others.
        given = self._decoder_inputs(z) if self.vae.config.timestep_conditioning else (z,)
        return [self.vae.decode(*given, return_dict=False)[0]]

    def _decoder_inputs(self, z: Tensor) -> tuple[Tensor, Tensor]:
        timestep = self.model.options["decode_timestep"] or 0.0
        given = self.model.options["decode_noise_scale"]
        scale = timestep if given is None else given
        noise = torch.randn(z.shape[1:], generator=torch.Generator().manual_seed(MIXED)).to(z)
        times = torch.full((len(z),), timestep, device=z.device, dtype=z.dtype)
        return (1 - scale) * z + scale * noise, times


class Ltx(FamilyModel):
    """LTX-Video as a VelocityModel."""

    traits = Traits(
        pipelines=("LTXPipeline", "LTXImageToVideoPipeline"),
        components=("tokenizer", "text_encoder"),
        video=VideoSpec(frames=161, height=512, width=704, fps=25.0),
        guidance_scale=3.0,
        blocks={"transformer_blocks": "num_layers"},
        lora_targets=(*CROSS_ATTENTION, "ff.net.*"),
        encoders=("text_encoder",),
        inputs={"text": "caption_channels"},
        text_tokens=128,
        ragged=(("encoder_hidden_states", 1),),
        even_sigmas=True,
        dynamic_shift=True,
        codec=LtxCodec,
        # As the pipeline's arguments; no noise scale is the timestep.
        options={"guidance_rescale": 0.0, "decode_timestep": 0.0, "decode_noise_scale": None},
    )

    @classmethod
    def _check(cls, folder: Path, index: Mapping[str, Any]) -> None:
        refuse_noise(folder, "decoder_inject_noise")

    def _prepare(self) -> None:
        self.pictures |= {1}  # the same weights make clips from text and from an image
        if not self.pipe.vae.config.timestep_conditioning and any(
            name.startswith("decode") for name in self.spec.options
        ):
            raise ModelError(
                f'model.options: the VAE of "{self.folder}" takes no timestep, so decode_timestep and decode_noise_scale have no effect '
                "on it. Leave them out."
            )

    def _grid(self) -> LatentGrid:
        return grid_of_clips(self.pipe, self.transformer.config, self.transformer.config.in_channels)

    def _guidance_style(self) -> Guidance:
        return Guidance(rescale=self.options["guidance_rescale"] or 0.0)

    def _encode(self, prompt: str, image: Tensor | None) -> dict[str, Tensor]:
        self.encoder("text_encoder")
        # The encoder sees its padding; the network does not.
        text, mask, _, _ = self.pipe.encode_prompt(
            prompt, do_classifier_free_guidance=False, device=self.places["text"]
        )
        inputs = {"text": seen_tokens(text[0], mask[0]).to(self.dtype)}
        return inputs if image is None else {**inputs, "condition": self._first_latents(image)}

    def _first_latents(self, image: Tensor) -> Tensor:
        """The latents of the first frame: always the mean of the VAE's distribution, from which the pipelines draw them."""
        from diffusers import LTXImageToVideoPipeline
        from PIL import Image

        if self.guidance.rescale:
            raise ModelError(
                "model.options guidance_rescale is for clips from text: over a frame that is given it would mean something else. Leave it out."
            )
        vae, picture = self.pipe.vae, Image.fromarray(image.cpu().numpy())
        pixels = self.pipe.video_processor.preprocess_video([picture], height=self.video.height, width=self.video.width)
        latents = vae.encode(pixels.to(self.places["vae"], vae.dtype)).latent_dist.mode().to(torch.float32)
        return LTXImageToVideoPipeline._normalize_latents(latents, vae.latents_mean, vae.latents_std)[0]

    def _forward(self, x: Tensor, sigma: Tensor, timestep: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        frame, (frames, height, width), stride = inputs.get("condition"), x.shape[2:], self.grid.spatial
        shown = x
        if frame is not None:  # a timestep for each token: the picture's are free of noise
            frame = frame.to(x.dtype)
            shown = torch.cat([frame, x[:, :, 1:]], dim=2)
            timestep = timestep[:, None].repeat(1, frames * height * width)
            timestep[:, : height * width] = 0
        tokens = self.network(
            hidden_states=pack(shown.to(self._input_dtype)),
            encoder_hidden_states=inputs["text"].to(self._input_dtype),
            timestep=timestep,
            encoder_attention_mask=None,
            num_frames=frames,
            height=height,
            width=width,
            rope_interpolation_scale=((self.grid.temporal or 1) / self.video.fps, stride, stride),
            return_dict=False,
        )[0]
        v = unpack(tokens, x)
        return v if frame is None else after_first_frame(x, frame, sigma, v)


def refuse_noise(folder: Path, *settings: str) -> None:
    """Refuse a VAE whose decoder would draw noise of its own, other noise for every call."""
    vae = read_config(folder, "vae")
    for setting in settings:
        value = vae.get(setting)
        if any(value) if isinstance(value, list) else value:
            raise ModelError(
                f'vae/config.json of "{folder}" sets {setting} to {value!r}: its decoder would add noise of its own, which is not supported. '
                "Use another checkpoint: LTX-Video 0.9.5 or later; LTX-2's do not set it."
            )


load = Ltx.load
