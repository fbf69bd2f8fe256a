"""LTX-2, 2.3 and 2.5: video and sound from text or a first frame, in one network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sage_grpo.models import ModelError
from sage_grpo.models.base import Abilities, StateParts
from sage_grpo.models.codec import Codec
from sage_grpo.models.families.ltx import refuse_noise
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.network.inputs import (
    LatentGrid,
    after_first_frame,
    empty,
    grid_of_clips,
    pack,
    seen_tokens,
    unpack,
)
from sage_grpo.models.traits import CROSS_ATTENTION, Traits
from sage_grpo.types import Conditioning, Sound, VideoSpec

AUDIO_ATTENTION = tuple(f"audio_{name}" for name in CROSS_ATTENTION)
BETWEEN = tuple(
    f"{name}.{layer}"
    for name in ("audio_to_video_attn", "video_to_audio_attn")
    for layer in ("to_q", "to_k", "to_v", "to_out.0")
)
"""Attention of the video to the sound, and of the sound to the video."""


class Ltx2Codec(Codec):
    """The VAEs of the picture and of the sound."""

    def to_vae(self, latents: Tensor) -> Tensor:
        vae, video = self.vae, self.model.parts.split(latents)["video"]
        return self.pipe._denormalize_latents(video, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)

    def sound(self, latents: Tensor) -> Sound:
        self.model.check_latents(latents)
        pipe, vae, waves = self.pipe, self.pipe.audio_vae, []
        with torch.no_grad():
            for row in latents.split(1):
                audio = self.model.parts.split(row)["audio"].to(self.model.places["vae"], vae.dtype)
                packed = pipe._denormalize_audio_latents(
                    audio.transpose(1, 2).flatten(2), vae.latents_mean, vae.latents_std
                )
                z = pipe._unpack_audio_latents(packed, audio.shape[2], num_mel_bins=audio.shape[3])
                waves.append(pipe.vocoder(vae.decode(z, return_dict=False)[0]).to(torch.float32).cpu())
        return Sound(torch.cat(waves).clamp(-1, 1), int(pipe.vocoder.config.output_sampling_rate))


class Ltx2(FamilyModel):
    """LTX-2 as a VelocityModel whose states have two parts, `video` and `audio`."""

    traits = Traits(
        pipelines=("LTX2Pipeline", "LTX2ImageToVideoPipeline"),
        components=("tokenizer", "text_encoder", "connectors", "audio_vae", "vocoder"),
        video=VideoSpec(frames=121, height=512, width=768, fps=24.0),
        guidance_scale=3.0,
        blocks={"transformer_blocks": "num_layers"},
        lora_targets=(*CROSS_ATTENTION, *AUDIO_ATTENTION, *BETWEEN, "ff.net.*", "audio_ff.net.*"),
        encoders=("text_encoder",),
        decoders=("vae", "audio_vae", "vocoder"),
        text_tokens=1024,
        even_sigmas=True,
        dynamic_shift=True,
        codec=Ltx2Codec,
        # As the pipelines' arguments. All but the last two are parts of guidance: a scale of 1 turns them off together.
        options={
            "audio_guidance_scale": 7.0,
            "guidance_rescale": 0.7,
            "audio_guidance_rescale": 0.7,
            "stg_scale": 1.0,
            "audio_stg_scale": 1.0,
            "stg_block": 28,
            "modality_scale": 3.0,
            "audio_modality_scale": 3.0,
            "cross_timestep": 1.0,
            "image_crf": None,
        },
        whole={"stg_block": (0, 1000), "cross_timestep": (0, 1), "image_crf": (0, 51)},
    )

    @classmethod
    def _check(cls, folder: Path, index: Mapping[str, Any]) -> None:
        refuse_noise(folder, "timestep_conditioning", "decoder_inject_noise")

    @classmethod
    def _pipeline(cls, index: Mapping[str, Any]) -> str:
        return "LTX2ImageToVideoPipeline"  # the same weights make clips from text, too; this one can read a picture

    def _prepare(self) -> None:
        # Where no attention can be perturbed, the perturbed pass would be the prompt's own, and its contribution zero.
        config = self.transformer.config
        self.pictures |= {1}  # the same weights make clips from text and from an image
        self.reading = f"image_crf {self.options['image_crf']}"
        self._perturbs = bool(config.perturbed_attn) and int(self.options["stg_block"] or 0) < config.num_layers

    def _grid(self) -> LatentGrid:
        config = self.transformer.config
        if (config.patch_size_t, config.patch_size) != (1, 1):
            raise ModelError(
                f'The network of "{self.folder}" has patches of {config.patch_size} latents; supported is 1.'
            )
        return grid_of_clips(self.pipe, config, config.in_channels)

    # ---- parts

    @property
    def abilities(self) -> Abilities:
        return replace(super().abilities, parts=self.parts, sound=Ltx2Codec(self).sound, encoder=None)

    @property
    def parts(self) -> StateParts:
        """The video's latents (channels, frames, height, width) and the sound's (channels, moments, bands)."""
        pipe, video = self.pipe, self.video
        per_second = pipe.audio_sampling_rate / pipe.audio_hop_length / float(pipe.audio_vae_temporal_compression_ratio)
        moments = round(video.frames / video.fps * per_second)
        sound = (self.transformer.config.audio_in_channels, moments, 1)  # in a plan, which has no sound decoder
        if pipe.audio_vae is not None:
            config = pipe.audio_vae.config
            sound = (config.latent_channels, moments, config.mel_bins // pipe.audio_vae_mel_compression_ratio)
        return StateParts({"video": self.grid.latents(video), "audio": sound})

    def latent_shape(self) -> tuple[int, ...]:
        return (self.parts.size,)

    # ---- prompts

    def _trial_inputs(self, text: int = 2) -> dict[str, Tensor]:
        config = self.transformer.config
        widths = (config.cross_attention_dim, config.audio_cross_attention_dim)
        widths = (config.caption_channels,) * 2 if config.use_prompt_embeddings else widths
        return {name: empty(text, width) for name, width in zip(("text", "audio_text"), widths)}

    def modules(self, part: str) -> list[nn.Module]:
        return [*super().modules(part), *([self.pipe.connectors] if part == "text" else [])]

    def _encode(self, prompt: str, image: Tensor | None) -> dict[str, Tensor]:
        self.encoder("text_encoder")
        pipe, device = self.pipe, self.places["text"]
        embeds, mask, _, _ = pipe.encode_prompt(prompt, do_classifier_free_guidance=False, device=device)
        text, audio_text, seen = pipe.connectors(embeds, mask, padding_side=pipe.tokenizer.padding_side)
        inputs = {
            "text": seen_tokens(text[0], seen[0]).to(self.dtype),
            "audio_text": seen_tokens(audio_text[0], seen[0]).to(self.dtype),
        }
        return inputs if image is None else {**inputs, "condition": self._first_latents(image)}

    def _first_latents(self, image: Tensor) -> Tensor:
        from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf, resolve_default_image_crf
        from PIL import Image

        vae, given = self.pipe.vae, self.options["image_crf"]
        crf = resolve_default_image_crf(self.pipe.text_encoder) if given is None else int(given)
        picture = Image.fromarray(apply_image_conditioning_crf(image.cpu().numpy(), crf))
        pixels = self.pipe.video_processor.preprocess(picture, height=self.video.height, width=self.video.width)
        pixels = pixels.to(self.places["vae"], vae.dtype)
        latents = vae.encode(pixels[:, :, None]).latent_dist.mode().to(torch.float32)
        return self.pipe._normalize_latents(latents, vae.latents_mean, vae.latents_std)[0]

    # ---- velocities

    def branches(self, sigma: Tensor | float, guidance: float | None = None) -> int:
        """Forward passes of one velocity: with guidance up to four."""
        return 1 if self._scale(sigma, guidance) == 1 else 2 + len(self._perturbed())

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Sequence[Conditioning], **options: Any) -> Tensor:
        """dx/dsigma, guided. A given first frame is in its place from the beginning, so that guidance measures
        the clip with it, and the velocity there points at it."""
        self.check_latents(x)
        given = {row: c.tensors["condition"] for row, c in enumerate(conditions[: len(x)]) if "condition" in c.tensors}
        if not given:
            return super().velocity(x, sigma, conditions, **options)
        shown = self.parts.split(x.clone())
        for row, frame in given.items():
            shown["video"][row, :, :1] = frame.to(x)
        v = super().velocity(self.parts.join(shown), sigma, conditions, **options)
        clips, parts = self.parts.split(x)["video"], self.parts.split(v)
        video = list(parts["video"].split(1))
        for row, frame in given.items():
            video[row] = after_first_frame(clips[row : row + 1], frame.to(x)[None], sigma, video[row])
        return self.parts.join({**parts, "video": torch.cat(video)})

    def _by_part(self, name: str, video: float | None = None) -> dict[str, float]:
        """The values of an option for picture and sound; as in the pipelines, 0 for the sound takes the picture's."""
        video = (self.options[name] or 0.0) if video is None else video
        return {"video": video, "audio": self.options[f"audio_{name}"] or video}

    def _perturbed(self) -> dict[str, tuple[dict[str, float], dict[str, Any]]]:
        """The perturbed passes that guidance leads away from: scales by part, and the network's arguments."""
        perturbed: dict[str, tuple[dict[str, float], dict[str, Any]]] = {}
        strengths, isolated = self._by_part("stg_scale"), self._by_part("modality_scale")
        if self._perturbs and max(strengths.values()) > 0:
            blocks = [int(self.options["stg_block"] or 0)]
            perturbed["perturbed"] = (strengths, {"spatio_temporal_guidance_blocks": blocks})
        if max(isolated.values()) > 1:
            further = {part: scale - 1 for part, scale in isolated.items()}
            perturbed["isolated"] = (further, {"isolate_modalities": True})
        return perturbed

    def _times(self, factors: Mapping[str, float], rows: Tensor) -> Tensor:
        return self.parts.join({part: factors[part] * one for part, one in self.parts.split(rows).items()})

    def _combine(
        self, x: Tensor, sigma: Tensor, v: Tensor, v_negative: Tensor, scale: float, again: Callable[[], Tensor]
    ) -> Tensor:
        further = {part: one - 1 for part, one in self._by_part("guidance_scale", scale).items()}
        guided = v + self._times(further, v - v_negative)
        for strengths, arguments in self._perturbed().values():
            self._arguments = arguments
            try:
                guided = guided + self._times(strengths, v - again())
            finally:
                self._arguments = {}
        return self._rescaled(x, sigma, guided, v)

    _arguments: Mapping[str, Any] = {}
    """Extra arguments of the current pass; empty in all but guidance's perturbed ones."""

    def _rescaled(self, x: Tensor, sigma: Tensor, guided: Tensor, v: Tensor) -> Tensor:
        """Each part of the predicted clip gets back a share of the std that it has without guidance."""
        shares, sigma = self._by_part("guidance_rescale"), sigma.to(x.device)
        if not any(shares.values()):
            return guided
        clips, plain = self.parts.split(x - sigma * guided), self.parts.split(x - sigma * v)
        for name, clip in clips.items():
            dims = list(range(1, clip.ndim))
            ratio = plain[name].std(dim=dims, keepdim=True) / clip.std(dim=dims, keepdim=True)
            clips[name] = shares[name] * (clip * ratio) + (1 - shares[name]) * clip
        return (x - self.parts.join(clips)) / sigma

    def _forward(self, x: Tensor, sigma: Tensor, timestep: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        parts = self.parts.split(x.to(self._input_dtype))
        video, audio = parts["video"], parts["audio"]
        frames, height, width = video.shape[2:]
        times = timestep
        if "condition" in inputs:  # a timestep for each token: the picture's are free of noise
            times = timestep[:, None].repeat(1, frames * height * width)
            times[:, : height * width] = 0
        tokens, audio_tokens = self.network(
            hidden_states=pack(video),
            audio_hidden_states=audio.transpose(1, 2).flatten(2),
            encoder_hidden_states=inputs["text"].to(self._input_dtype),
            audio_encoder_hidden_states=inputs["audio_text"].to(self._input_dtype),
            timestep=times,
            audio_timestep=timestep,
            sigma=timestep,
            num_frames=frames,
            height=height,
            width=width,
            fps=self.video.fps,
            audio_num_frames=audio.shape[2],
            use_cross_timestep=bool(self.options["cross_timestep"]),
            return_dict=False,
            **self._arguments,
        )
        sound = audio_tokens.unflatten(2, (audio.shape[1], audio.shape[3])).transpose(1, 2)
        return self.parts.join({"video": unpack(tokens, video), "audio": sound})


load = Ltx2.load
