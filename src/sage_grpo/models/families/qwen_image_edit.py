"""Qwen-Image-Edit: a picture from a picture and an instruction."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.models.checkpoints.checkpoint import in_words
from sage_grpo.models.families.qwen_image import QwenImage
from sage_grpo.models.network.inputs import SIDE, empty
from sage_grpo.utils.pretrained import from_pretrained

PIXELS = 1024 * 1024  # pixels to which the pipeline resizes the given picture, whatever size it makes
PLACE = "<|image_pad|>"  # the picture's place in the pipeline's template


class Processor:
    """Qwen2-VL's inputs of a text and a picture, as transformers' Qwen2VLProcessor makes them, which needs torchvision for videos."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.tokenizer = tokenizer
        with in_words(folder, "processor"):
            self.pictures = from_pretrained(Qwen2VLImageProcessorPil, folder / "processor")

    def __call__(self, text: list[str], images: Any, **options: Any) -> Any:
        seen = self.pictures(images=images, return_tensors="pt")
        count = int(seen["image_grid_thw"][0].prod()) // self.pictures.merge_size**2
        seen.update(self.tokenizer([one.replace(PLACE, PLACE * count) for one in text], **options))
        return seen


class QwenImageEdit(QwenImage):
    """Qwen-Image-Edit as a VelocityModel of one-frame clips. The given picture's latents are tokens beside those of the one that is made."""

    traits = replace(
        QwenImage.traits,
        pipelines=("QwenImageEditPipeline",),
        components=("tokenizer", "text_encoder", "processor"),
        text_tokens=1400 + 256,  # the picture as the text encoder sees it, and a long prompt
        read_here=("processor",),
        options={"picture_pixels": PIXELS},
        whole={"picture_pixels": (32 * 32, math.inf)},
    )

    def _prepare(self) -> None:
        self.picture_pixels = int(self.options["picture_pixels"] or PIXELS)
        self.pictures, self.reading = {1}, f"{self.picture_pixels} pixels"
        if self.pipe.tokenizer is not None:
            self.pipe.processor = Processor(self.folder, self.pipe.tokenizer)

    @property
    def given_tokens(self) -> int:
        return (math.isqrt(self.picture_pixels) // (SIDE * self.grid.spatial)) ** 2

    def _encode(self, prompt: str, image: Tensor | None) -> dict[str, Tensor]:
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions
        from PIL import Image

        assert image is not None
        pipe, picture = self.pipe, Image.fromarray(image.cpu().numpy())
        width, height, _ = calculate_dimensions(self.picture_pixels, picture.width / picture.height)
        shown = pipe.image_processor.resize(picture, height, width)
        pixels = pipe.image_processor.preprocess(shown, height, width)[:, :, None]
        self.encoder("text_encoder")
        text, _ = pipe.encode_prompt(prompt, image=shown, device=self.places["text"])
        latents = pipe._encode_vae_image(pixels.to(self.places["vae"], pipe.vae.dtype), None)
        return {"text": text[0].to(self.dtype), "condition": latents[0].to(torch.float32)}

    def _trial_inputs(self, text: int = 2) -> dict[str, Tensor]:
        side = SIDE * math.isqrt(self.given_tokens)
        return super()._trial_inputs(text) | {"condition": empty(self.grid.channels, 1, side, side)}


load = QwenImageEdit.load
