"""HunyuanVideo-1.5, text-to-video and image-to-video."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sage_grpo.distributed.context import SequenceParallel
from sage_grpo.models import ModelError
from sage_grpo.models.base import Abilities
from sage_grpo.models.checkpoints.checkpoint import check_components, read_config
from sage_grpo.models.codec import Codec
from sage_grpo.models.family import FamilyModel
from sage_grpo.models.network.attention import PackedAttention, split_rotary
from sage_grpo.models.network.decoding import hunyuan15_pixels
from sage_grpo.models.network.inputs import LatentGrid, empty, grid_of_clips
from sage_grpo.models.traits import JOINT_ATTENTION, LAST_QUERIES, Traits
from sage_grpo.types import VideoSpec

LAYERS_TO_SKIP = 2  # the text embedding is the hidden state this many layers before the last


class PackedTransformer(nn.Module):
    """The stock transformer's modules on valid tokens only. The stock forward reorders padding in a Python loop over the batch and then masks it.
    Here a batch has text of one length and no padding, so tokens are concatenated and nothing is masked; results agree to float32 round-off. With
    `valid` the text has padding after all, which nothing attends to: prompts of several lengths are then one batch."""

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self.transformer = transformer
        self.sequence: SequenceParallel | None = None

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        text: Tensor,
        glyphs: Tensor | None = None,
        image: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Tensor:
        """x: latents, condition and mask, B x C x F x H x W; text, glyphs, image: B x tokens x channels; valid: B x text tokens."""
        model = self.transformer
        frequencies = model.rope(x)
        # The sinusoid in float32, as the model was trained; only its projection in the network's dtype.
        temb = model.time_embed.timestep_embedder(model.time_embed.time_proj(timestep).to(x.dtype))
        context = [
            refined(model.context_embedder, text, timestep, valid) + model.cond_type_embed.weight[0].to(text.dtype)
        ]
        if glyphs is not None:
            context.insert(0, model.context_embedder_2(glyphs) + model.cond_type_embed.weight[1].to(text.dtype))
        if image is not None:
            context.insert(0, model.image_embedder(image) + model.cond_type_embed.weight[2].to(text.dtype))
        tokens, context_tokens = model.x_embedder(x), torch.cat(context, dim=1)
        total = tokens.shape[1]
        if self.sequence is not None:
            frequencies = split_rotary(self.sequence, frequencies, dim=0, extra=context_tokens.shape[1])
            tokens, context_tokens = self.sequence.split(tokens), self.sequence.split(context_tokens)
        seen = None if valid is None else seen_keys(valid, total + context_tokens.shape[1])
        for block in model.transformer_blocks:
            tokens, context_tokens = block(tokens, context_tokens, temb, seen, frequencies)
        tokens = model.proj_out(model.norm_out(tokens, temb))
        if self.sequence is not None:
            tokens = self.sequence.merge(tokens, total)
        p_t, p = model.config.patch_size_t, model.config.patch_size
        frames, height, width = x.shape[2] // p_t, x.shape[3] // p, x.shape[4] // p
        patches = tokens.reshape(len(x), frames, height, width, -1, p_t, p, p)
        return patches.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(len(x), -1, *x.shape[2:])


class Hunyuan15Codec(Codec):
    """Decodes chunks of frames."""

    def chunks(self, z: Tensor) -> Iterable[Tensor]:
        chunk = self.model.options["decode_chunk"]
        if self.vae.use_tiling:
            return super().chunks(z)
        return hunyuan15_pixels(self.vae, z, None if chunk is None else int(chunk))


class Hunyuan15(FamilyModel):
    """HunyuanVideo-1.5 as a VelocityModel."""

    traits = Traits(
        pipelines=("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"),
        components=("guider", "tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2"),
        video=VideoSpec(frames=81, height=480, width=848, fps=24.0),
        guidance_scale=6.0,
        blocks={"transformer_blocks": "num_layers"},
        lora_targets=(*JOINT_ATTENTION, "ff.net.*", "ff_context.net.*"),
        encoders=("text_encoder", "text_encoder_2", "image_encoder"),
        inputs={"text": "text_embed_dim"},
        unread=("context_embedder_2.", *LAST_QUERIES, "LAST.attn.to_add_out.", "LAST.ff_context."),
        text_tokens=256,
        ragged=(("encoder_hidden_states", 1),),
        even_sigmas=True,
        codec=Hunyuan15Codec,
        options={"pad_text": 0.0, "decode_chunk": None},
        whole={"pad_text": (0, math.inf), "decode_chunk": (1, math.inf)},
    )

    @classmethod
    def _check(cls, folder: Path, index: Mapping[str, Any]) -> None:
        if "ImageToVideo" in index["_class_name"]:
            check_components(folder, index, ["image_encoder", "feature_extractor"], [])
        if read_config(folder, "transformer").get("use_meanflow"):
            raise ModelError(
                f'"{folder}" is a MeanFlow model (use_meanflow in transformer/config.json, as in step-distilled checkpoints): it predicts the mean '
                "velocity of a step, and exploration needs the velocity at its beginning. Use the base checkpoint, or ..._distilled without step."
            )

    def _prepare(self) -> None:
        self.unused = ("image_embedder.",) if 0 in self.pictures else ()
        for block in vae_attention(self.pipe.vae):
            block.prepare_causal_attention_mask = causal_mask

    def _adapted(self, transformer: Any) -> nn.Module:
        for block in transformer.transformer_blocks:
            block.attn.set_processor(PackedAttention())
        return PackedTransformer(transformer)

    def _trial_inputs(self, text: int = 2) -> dict[str, Tensor]:
        inputs, (channels, *size) = super()._trial_inputs(text), self.latent_shape()
        if 0 not in self.pictures:
            image = empty(2, self.transformer.config.image_embed_dim)
            inputs |= {"image": image, "condition": empty(channels + 1, *size)}
        return inputs

    def batchable(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """With model.options pad_text, text up to so many tokens is padded and masked, so that a batch may have several lengths. For small networks,
        which wait for the GPU's next kernel rather than for its arithmetic. Longer text is a batch of its own."""
        text, length = inputs["text"], int(self.options["pad_text"] or 0)
        if len(text) > length:
            return inputs
        valid = (torch.arange(length, device=text.device) < len(text)).float()
        return {**inputs, "text": F.pad(text, (0, 0, 0, length - len(text))), "valid": valid}

    def _grid(self) -> LatentGrid:
        return grid_of_clips(self.pipe, self.transformer.config, self.pipe.vae.config.latent_channels)

    @property
    def abilities(self) -> Abilities:
        return replace(super().abilities, split_sequence=self._split)

    def _split(self, sequence: SequenceParallel) -> None:
        if self.options["pad_text"]:
            raise ModelError("parallel.sp > 1 takes no padding: leave model.options pad_text out.")
        sequence.check(self.transformer.config.num_attention_heads)
        self.network.sequence = sequence
        for block in self.transformer.transformer_blocks:
            block.attn.processor.sequence = sequence

    def _encode(self, prompt: str, image: Tensor | None) -> dict[str, Tensor]:
        from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts

        inputs = {"text": self._text(prompt)}
        quoted = extract_glyph_texts(prompt)
        if quoted is not None:
            tokens = self.pipe.tokenizer_2(
                quoted, truncation=True, max_length=self.pipe.tokenizer_2_max_length, return_tensors="pt"
            ).to(self.places["text"])
            encoder = self.encoder("text_encoder_2")
            states = encoder(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask.float())[0]
            inputs["glyphs"] = states[0].to(self.dtype)
        if image is not None:
            inputs |= self._image(image)
        return inputs

    def _text(self, prompt: str) -> Tensor:
        from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import format_text_input

        crop = self.pipe.prompt_template_encode_start_idx
        tokens = self.pipe.tokenizer.apply_chat_template(
            format_text_input([prompt], self.pipe.system_message),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            truncation=True,
            max_length=self.pipe.tokenizer_max_length + crop,
            return_tensors="pt",
        ).to(self.places["text"])
        # The stock pipeline pads to 1108 tokens; a causal encoder gives valid tokens the same states without.
        states = self.encoder("text_encoder")(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, output_hidden_states=True
        ).hidden_states[-(LAYERS_TO_SKIP + 1)]
        text = states[0, crop:]
        if not len(text):
            raise ModelError(
                f"The tokenizer turns {prompt!r} with its template into {states.shape[1]} tokens, of which the pipeline "
                f"crops {crop}: nothing is left. The checkpoint's chat template does not fit this pipeline."
            )
        return text.to(self.dtype)

    def _image(self, image: Tensor) -> dict[str, Tensor]:
        from PIL import Image

        height, width = self.video.height, self.video.width
        picture = Image.fromarray(image.cpu().numpy())
        picture = self.pipe.video_processor.resize(picture, height=height, width=width, resize_mode="crop")
        self.encoder("image_encoder")
        tokens = self.pipe.encode_image(picture, batch_size=1, device=self.places["text"], dtype=self.dtype)
        condition, mask = self.pipe.prepare_cond_latents_and_mask(
            torch.empty((1, *self.latent_shape())), picture, 1, height, width, self.dtype, self.places["vae"]
        )
        return {"image": tokens[0], "condition": torch.cat([condition[0], mask[0]])}

    def _forward(self, x: Tensor, sigma: Tensor, timestep: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        inputs = {name: tensor.to(self._input_dtype) for name, tensor in inputs.items()}
        condition = inputs.pop("condition", None)
        if condition is None:  # text-to-video: an empty condition and a mask of zeros
            condition = x.new_zeros((len(x), x.shape[1] + 1, *x.shape[2:]), dtype=self._input_dtype)
        x = torch.cat([x.to(self._input_dtype), condition], dim=1)
        return self.network(x, timestep, **inputs)


def refined(embedder: Any, text: Tensor, timestep: Tensor, valid: Tensor | None) -> Tensor:
    """The stock token refiner. Its own mask leaves padding without any key, which some kernels answer with NaN; here it sees the text."""
    if valid is None:
        return embedder(text, timestep)
    weight = valid[..., None].to(text.dtype)
    temb = embedder.time_text_embed(timestep, (text * weight).sum(dim=1) / weight.sum(dim=1))
    tokens = embedder.proj_in(text)
    for block in embedder.token_refiner.refiner_blocks:
        tokens = block(tokens, temb, seen_keys(valid, text.shape[1]))
    return tokens


def seen_keys(valid: Tensor, tokens: int) -> Tensor:
    """The keys that every token attends to, for all heads and queries alike: video tokens, then context, text last."""
    seen = valid.new_ones(len(valid), tokens, dtype=torch.bool)
    seen[:, tokens - valid.shape[1] :] = valid > 0
    return seen[:, None, None]


def causal_mask(
    n_frame: int, n_hw: int, dtype: torch.dtype, device: torch.device, batch_size: int | None = None
) -> Tensor:
    """The VAE's frame-causal attention mask in one operation, for any batch. The stock method fills it row by row in Python (seconds at video sizes)
    and gives it a shape that crashes for batches."""
    frame = torch.arange(n_frame, device=device).repeat_interleave(n_hw)
    mask = torch.zeros(len(frame), len(frame), dtype=dtype, device=device)
    return mask.masked_fill_(frame[None, :] > frame[:, None], float("-inf"))


def vae_attention(vae: nn.Module) -> list[Any]:
    from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock

    return [module for module in vae.modules() if isinstance(module, HunyuanVideo15AttnBlock)]


load = Hunyuan15.load
