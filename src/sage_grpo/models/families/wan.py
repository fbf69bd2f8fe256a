"""Wan 2.1 and 2.2: text-to-video, image-to-video and video-to-video."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sage_grpo.distributed.context import SequenceParallel
from sage_grpo.models.base import Abilities
from sage_grpo.models.checkpoints.checkpoint import check_components, read_config
from sage_grpo.models.codec import WanCodec
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.network.attention import PlainAttention, split_rotary
from sage_grpo.models.network.inputs import LatentGrid, after_first_frame, empty, grid_of_clips
from sage_grpo.models.traits import CROSS_ATTENTION, Traits
from sage_grpo.types import VideoSpec

TEXT_TOKENS = 512  # length to which the pipelines pad text; also hard-coded in the transformer's image attention


class Wan(FamilyModel):
    """Wan as a VelocityModel. With two experts the spec's `expert` is trained, or both are, and both are used."""

    traits = Traits(
        pipelines=("WanPipeline", "WanImageToVideoPipeline"),
        components=("tokenizer", "text_encoder"),
        video=VideoSpec(frames=81, height=480, width=832, fps=16.0),
        guidance_scale=5.0,
        blocks={"blocks": "num_layers"},
        lora_targets=(*CROSS_ATTENTION, "ffn.net.*"),
        encoders=("text_encoder", "image_encoder"),
        inputs={"text": "text_dim"},
        text_tokens=TEXT_TOKENS,
        codec=WanCodec,
    )

    @classmethod
    def _check(cls, folder: Path, index: Mapping[str, Any]) -> None:
        config = read_config(folder, "transformer")
        if index.get("boundary_ratio") is not None:
            check_components(folder, index, ["transformer_2"], ["transformer_2"])
        if index["_class_name"] == "WanImageToVideoPipeline" and config.get("image_dim"):
            check_components(folder, index, ["image_encoder", "image_processor"], [])  # 2.2 does without both

    @classmethod
    def _pipeline(cls, index: Mapping[str, Any]) -> str:
        # The 5B model makes clips from text and from an image with the same weights; this pipeline can do both.
        return "WanImageToVideoPipeline" if index.get("expand_timesteps") else super()._pipeline(index)

    def _prepare(self) -> None:
        self.expand_timesteps = bool(self.index.get("expand_timesteps"))
        self._sequence: SequenceParallel | None = None
        config = self.transformer.config
        if config.pos_embed_seq_len is not None:  # 2.1 FLF2V needs both frames
            self.pictures = {2}
        elif self.expand_timesteps:
            self.pictures |= {1}
        elif 0 not in self.pictures and config.image_dim is None:
            self.pictures = {1, 2}  # 2.2 attends to no picture's CLIP tokens, and takes a last one where there is one

    def _adapted(self, transformer: Any) -> nn.Module:
        for block in transformer.blocks:
            block.attn1.set_processor(PlainAttention())
            block.attn2.set_processor(PlainAttention())
        return transformer

    def _trial_inputs(self, text: int = 2) -> dict[str, Tensor]:
        inputs, config, (channels, *size) = super()._trial_inputs(text), self.transformer.config, self.latent_shape()
        if config.image_dim is not None:
            length = config.pos_embed_seq_len
            inputs["image"] = empty(2, config.image_dim) if length is None else empty(2, length // 2, config.image_dim)
        if config.in_channels > channels:
            inputs["condition"] = empty(config.in_channels - channels, *size)
        return inputs

    def _grid(self) -> LatentGrid:
        return grid_of_clips(self.pipe, self.transformer.config, self.pipe.vae.config.z_dim)

    @property
    def abilities(self) -> Abilities:
        return replace(super().abilities, split_sequence=self._split)

    def _split(self, sequence: SequenceParallel) -> None:
        """Text is whole everywhere."""
        self._sequence = sequence
        networks: tuple[Any, ...] = (self.network, *self.others)
        for network in networks:
            sequence.check(network.config.num_attention_heads)
            split_network(network, sequence, self.latent_shape())

    def _encode(self, prompt: str, image: Tensor | None) -> dict[str, Tensor]:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        tokens = self.pipe.tokenizer(
            prompt_clean(prompt),
            truncation=True,
            max_length=TEXT_TOKENS,
            return_attention_mask=True,
            return_tensors="pt",
        ).to(self.places["text"])
        encoder = self.encoder("text_encoder")
        if tokens.input_ids.numel():
            text = encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state[0]
        else:  # an empty prompt and a tokenizer that marks no end: as in the pipelines, all of the text is padding
            text = torch.zeros(0, encoder.config.d_model)
        inputs = {"text": text.to(self.dtype)}
        if image is not None:
            inputs |= self._image(image)
        return inputs

    def _image(self, image: Tensor) -> dict[str, Tensor]:
        from PIL import Image

        pictures = [Image.fromarray(one) for one in (image if image.ndim == 4 else image[None]).cpu().numpy()]
        height, width, device = self.video.height, self.video.width, self.places["vae"]
        pixels, *last = (
            self.pipe.video_processor.preprocess(picture, height=height, width=width).to(device, torch.float32)
            for picture in pictures
        )
        condition = self.pipe.prepare_latents(
            pixels,
            1,
            height=height,
            width=width,
            num_frames=self.video.frames,
            dtype=torch.float32,
            device=device,
            latents=torch.empty((1, *self.latent_shape())),
            **({"last_image": last[0]} if last else {}),
        )[1]
        inputs = {"condition": condition[0]}
        if self.transformer.config.image_dim is not None:  # Wan 2.1 also attends to the picture's CLIP tokens
            self.encoder("image_encoder")
            seen = self.pipe.encode_image(pictures, self.places["text"]).to(self.dtype)
            inputs["image"] = seen if last else seen[0]
        return inputs

    def batchable(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        # Wan attends to its zero padding without a mask, and was trained so: here padding is part of the model. It is
        # added at the last moment, so that the cache holds valid tokens only.
        text = inputs["text"]
        return {**inputs, "text": F.pad(text, (0, 0, 0, TEXT_TOKENS - len(text)))}

    def _forward(self, x: Tensor, sigma: Tensor, timestep: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        if self.expand_timesteps:
            return self._forward_expanded(x, sigma, timestep, inputs)
        if "condition" in inputs:
            x = torch.cat([x, inputs["condition"].to(x.dtype)], dim=1)
        return self._run(x, sigma, timestep, inputs)

    def _forward_expanded(self, x: Tensor, sigma: Tensor, timestep: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Wan 2.2 5B: a timestep per token. An image is the first latent frame, free of noise, at timestep 0."""
        frame = inputs.get("condition")
        tokens = (x.shape[3] // 2) * (x.shape[4] // 2)
        timestep = timestep[:, None].expand(-1, x.shape[2] * tokens)
        if frame is None:
            return self._run(x, sigma, timestep, inputs)
        timestep = torch.cat([torch.zeros_like(timestep[:, :tokens]), timestep[:, tokens:]], dim=1)
        frame = frame.to(x.dtype)
        v = self._run(torch.cat([frame, x[:, :, 1:]], dim=2), sigma, timestep, inputs)
        return after_first_frame(x, frame, sigma, v)

    def _running(self, sigma: Tensor) -> Any:
        first = self.experts.all[self.experts.at(sigma)] == self.experts.components[0]
        return self.network if first else self.others[0]

    def _run(self, x: Tensor, sigma: Tensor, timestep: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        if timestep.ndim == 2 and self._sequence is not None:
            timestep = self._sequence.split(timestep)
        image = inputs.get("image")
        if image is not None and image.ndim == 4:  # of two pictures; the network puts their tokens together again
            image = image.flatten(0, 1)
        return self._running(sigma)(
            hidden_states=x.to(self._input_dtype),
            timestep=timestep,
            encoder_hidden_states=inputs["text"].to(self._input_dtype),
            encoder_hidden_states_image=None if image is None else image.to(self._input_dtype),
            return_dict=False,
        )[0]


def split_network(network: Any, sequence: SequenceParallel, latents: tuple[int, ...]) -> None:
    """Split tokens before the first block and put them together after the last projection, around the stock forward."""
    total = math.prod(size // patch for size, patch in zip(latents[1:], network.config.patch_size))

    network.rope.register_forward_hook(lambda module, arguments, rotary: split_rotary(sequence, rotary, dim=1))
    network.blocks[0].register_forward_pre_hook(lambda block, given: (sequence.split(given[0]), *given[1:]))
    network.proj_out.register_forward_hook(lambda module, arguments, tokens: sequence.merge(tokens, total))
    for block in network.blocks:
        block.attn1.processor.sequence = sequence


load = Wan.load
