"""SANA-Video, text-to-video."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints.checkpoint import read_config
from sage_grpo.models.codec import Codec, WanCodec
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.network.inputs import LatentGrid, grid_of_clips, seen_tokens
from sage_grpo.models.traits import CROSS_ATTENTION, Traits
from sage_grpo.types import VideoSpec

VAES = ("AutoencoderKLWan", "AutoencoderKLLTX2Video")
"""VAEs of the published 480p and 720p checkpoints."""
SCORED = re.compile(r"motion score: \d+\.?\s*$", re.IGNORECASE)
"""A prompt that ends in a motion score already."""


def _check_vae(folder: Path, name: str) -> None:
    if name not in VAES:
        raise ModelError(
            f'The VAE of "{folder}" is a {name}; supported are {" and ".join(VAES)}. (DC-AE-V, which the first 720p weights were trained '
            "with, has no class in diffusers.) Use SANA-Video_2B_480p_diffusers or SANA-Video_2B_720p_diffusers."
        )
    config = read_config(folder, "vae")
    if name != "AutoencoderKLLTX2Video":
        return
    noise = config.get("decoder_inject_noise", False)
    if config.get("timestep_conditioning") or (any(noise) if isinstance(noise, list) else noise):
        raise ModelError(
            f'vae/config.json of "{folder}" sets timestep_conditioning or decoder_inject_noise, as LTX-2\'s does not: the pipeline gives its '
            "decoder neither a timestep nor noise. Use the VAE of SANA-Video_2B_720p_diffusers."
        )
    for ratio in ("spatial_compression_ratio", "temporal_compression_ratio"):
        if not config.get(ratio):
            raise ModelError(f'vae/config.json of "{folder}" names no {ratio}, which the pipeline reads there. Add it.')


class SanaCodec(WanCodec):
    """Wan's VAE, or that of LTX-2."""

    def to_vae(self, latents: Tensor) -> Tensor:
        if type(self.vae).__name__ == VAES[0]:
            return super().to_vae(latents)
        stats = (self.vae.latents_mean, self.vae.latents_std)
        mean, std = (values.view(1, -1, 1, 1, 1).to(latents) for values in stats)
        return latents / (1.0 / std) + mean

    def chunks(self, z: Tensor) -> Iterable[Tensor]:
        return super().chunks(z) if type(self.vae).__name__ == VAES[0] else Codec.chunks(self, z)


class SanaVideo(FamilyModel):
    """SANA-Video as a VelocityModel. Sizes are taken as given: the pipeline's snapping to known aspect ratios is left out."""

    traits = Traits(
        pipelines=("SanaVideoPipeline",),
        components=("tokenizer", "text_encoder"),
        video=VideoSpec(frames=81, height=480, width=832, fps=16.0),
        guidance_scale=6.0,
        blocks={"transformer_blocks": "num_layers"},
        lora_targets=CROSS_ATTENTION,
        encoders=("text_encoder",),
        inputs={"text": "caption_channels"},
        text_tokens=300,
        ragged=(("encoder_hidden_states", 1),),
        codec=SanaCodec,
        options={"motion_score": None},  # the pipeline adds none; its published examples do
        whole={"motion_score": (1, math.inf)},
    )

    @classmethod
    def _check(cls, folder: Path, index: Mapping[str, Any]) -> None:
        config = read_config(folder, "transformer")
        _check_vae(folder, index["vae"][1])
        if config.get("guidance_embeds") or config.get("out_channels", 16) != config.get("in_channels", 16):
            raise ModelError(
                f'"{folder}" has a guidance input or predicts variances, which its pipeline does not use here.'
            )

    def _prepare(self) -> None:
        score = self.options["motion_score"]
        self.choices["motion score"] = (
            'none, as the pipeline; published prompts end in " motion score: 30." (model.options motion_score)'
            if score is None
            else f"prompts end in{_motion(score)!r}"
        )

    def _grid(self) -> LatentGrid:
        # The pipeline wants multiples of 32 with both VAEs, though Wan's needs 16 only.
        return grid_of_clips(self.pipe, self.transformer.config, self.transformer.config.in_channels, sides=32)

    @cached_property
    def _instruction(self) -> list[str]:
        """The instruction that the pipeline puts before every prompt."""
        return list(inspect.signature(type(self.pipe).__call__).parameters["complex_human_instruction"].default)

    def _instruct(self, prompt: str) -> str:
        score = self.options["motion_score"]
        if score is not None and SCORED.search(prompt) is None:  # a prompt of the published form keeps its own
            prompt = prompt.rstrip() + _motion(score)
        return "\n".join(self._instruction) + prompt

    def _encode(self, prompt: str, image: Tensor | None) -> dict[str, Tensor]:
        self.encoder("text_encoder")
        before = "\n".join(self._instruction)
        instructed = prompt.startswith(before)
        # A causal encoder: valid tokens do not see the padding after them.
        text, mask, _, _ = self.pipe.encode_prompt(
            prompt.removeprefix(before),
            do_classifier_free_guidance=False,
            device=self.places["text"],
            complex_human_instruction=self._instruction if instructed else None,
        )
        return {"text": seen_tokens(text[0], mask[0]).to(self.dtype)}

    def _forward(self, x: Tensor, sigma: Tensor, timestep: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        return self.network(
            x.to(self._input_dtype),
            encoder_hidden_states=inputs["text"].to(self._input_dtype),
            timestep=timestep,
            return_dict=False,
        )[0]


def _motion(score: float) -> str:
    """The end of published prompts; the network was trained with it."""
    return f" motion score: {int(score)}."


load = SanaVideo.load
