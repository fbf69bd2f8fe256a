"""Subject and background consistency of a clip, by VBench's formula (Huang et al., 2024).

Every frame becomes a unit vector f_t; a clip's score is the mean over t >= 2 of (max(0, f_t . f_{t-1}) + max(0, f_t . f_1)) / 2. The subject is read
by DINO, the background by CLIP's image encoder, as in VBench: nothing is cut out. A still picture scores 1: pair them with `motion`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_grpo.rewards.built_in.clip import CLIP_FOLDER
from sage_grpo.rewards.built_in.pretrained import NetworkReward, in_passes, load_whole
from sage_grpo.rewards.frames import IMAGENET_PIXELS, centre_offset, normalise, short_edge_size
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.types import FileSource, PartScores, RewardFacts
from sage_grpo.utils.pretrained import load_config


def consistency(features: Tensor) -> Tensor:
    """B x F x dim to B: the mean of the cosines to the first and to the previous frame, none of them below 0."""
    unit = F.normalize(features, dim=-1)
    previous = (unit[:, 1:] * unit[:, :-1]).sum(dim=-1).clamp(min=0)
    first = (unit[:, 1:] * unit[:, :1]).sum(dim=-1).clamp(min=0)
    return ((previous + first) / 2).mean(dim=1)


def short_edge(frames: Tensor, size: int, mode: str) -> Tensor:
    """uint8 N x H x W x 3 to floats N x 3 x rows x columns near 0..255, the short edge `size`; not antialiased, as VBench's.

    Nothing is rounded or cut to 0..255 either: VBench's loader makes float32 of the frames (`torch.Tensor(frames)`, though its
    comment says uint8), and torchvision rounds bytes only.
    """
    images = frames.permute(0, 3, 1, 2).float()
    target = short_edge_size(frames.shape[1], frames.shape[2], size)
    return F.interpolate(images, target, mode=mode, align_corners=False)


def dino_positions(table: Tensor, rows: int, columns: int) -> Tensor:
    """1 x (1 + n * n) x dim position embeddings for a picture of rows x columns patches, as DINO's own code interpolates them.

    It stretches by (rows + 0.1) / n, not by rows / n, so that no rounding loses a row; transformers stretches by the exact ratio,
    which moves the last positions by up to a tenth of a patch.
    """
    side = math.isqrt(table.shape[1] - 1)
    if rows == columns == side:
        return table
    grid = table[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
    stretch = ((rows + 0.1) / side, (columns + 0.1) / side)
    stretched = F.interpolate(grid, scale_factor=stretch, mode="bicubic", align_corners=False)
    return torch.cat([table[:, :1], stretched.flatten(2).transpose(1, 2)], dim=1)


class _Consistency(NetworkReward):
    """An image encoder on all frames of the clips, and the formula; subclasses define `_features`."""

    _features: Callable[[Tensor], Tensor]

    def __init__(self, model: Any, sample_fps: float, dtype: str) -> None:
        if sample_fps < 0:
            raise RewardConfigError(
                f"sample_fps of {self.facts.parts} must be 0 (every frame) or more, got {sample_fps}."
            )
        super().__init__(model, dtype=dtype, sample_fps=sample_fps)
        self._model = model

    def frames_read(self, count: int, fps: float) -> list[int]:
        """The frames at `sample_fps`; every frame if it is 0."""
        return super().frames_read(count, fps) if self._sample_fps > 0 else list(range(count))

    def differentiable(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        part, (count, total) = self.facts.parts, videos.shape[:2]
        chosen = self.frames_read(total, fps)
        if len(chosen) < 2:
            why = f"{part} compares frames, and {len(chosen)} of the clip's {total} is looked at"
            return PartScores({part: torch.full((count,), torch.nan)}, dict.fromkeys(range(count), why))
        device = next(self._model.parameters()).device
        frames = videos[:, chosen].flatten(0, 1)
        features = in_passes(lambda piece: self._features(piece.to(device)).float(), self.frames_a_pass, frames)
        return {part: consistency(features.view(count, len(chosen), -1))}


class SubjectConsistency(_Consistency):
    """DINO's class token of every frame (VBench: DINO ViT-B/16); DINOv2 models work too, on a scale of their own."""

    facts = RewardFacts(
        what="VBench's formula on DINO: does the subject stay the same?",
        parts="subject_consistency",
        files={
            "model": FileSource(
                text="a DINO or DINOv2 model in transformers' format, a folder or a hub name (facebook/dino-vitb16 is VBench's)",
                hub="config.json",
            )
        },
        parameters=0.09e9,
        gigabytes=0.4,
        licence="DINO: Apache-2.0",
    )

    def __init__(self, *, model: str, size: int = 224, sample_fps: float = 0.0, dtype: str = "") -> None:
        """size: short edge of the frames. sample_fps: frames per second that are read; 0 is every frame, as VBench."""
        from transformers import AutoConfig, AutoModel

        config = load_config(AutoConfig, model)
        kind = config.model_type
        if kind not in ("vit", "dinov2", "dinov2_with_registers"):
            raise RewardConfigError(
                f'subject_consistency takes a DINO or DINOv2 model, "{model}" is a {kind}: facebook/dino-vitb16 is VBench\'s.'
            )
        # DINO's files hold no pooler: the class token is the feature
        options: dict[str, Any] = {"add_pooling_layer": False} if kind == "vit" else {}
        super().__init__(load_whole(AutoModel, model, config=config, **options), sample_fps, dtype)
        self._size, self._options = size, ({"interpolate_pos_encoding": True} if kind == "vit" else {})
        if kind == "vit":
            self._model.embeddings.interpolate_pos_encoding = self._positions

    def _positions(self, embeddings: Tensor, height: int, width: int) -> Tensor:
        """DINO's position embeddings, in place of transformers' own."""
        patch = self._model.config.patch_size
        return dino_positions(self._model.embeddings.position_embeddings, height // patch, width // patch)

    def _features(self, frames: Tensor) -> Tensor:
        pixels = normalise(short_edge(frames, self._size, "bilinear") / 255, IMAGENET_PIXELS)
        return self._model(pixel_values=pixels.to(self._model.dtype), **self._options).last_hidden_state[:, 0]


class BackgroundConsistency(_Consistency):
    """CLIP's image embedding of every frame (VBench: CLIP ViT-B/32)."""

    facts = RewardFacts(
        what="VBench's formula on CLIP: does the scene stay the same?",
        parts="background_consistency",
        files={"model": replace(CLIP_FOLDER, text=f"{CLIP_FOLDER.text}; openai/clip-vit-base-patch32 is VBench's")},
        parameters=0.15e9,
        gigabytes=0.6,
        licence="OpenAI's CLIP: MIT",
    )

    def __init__(self, *, model: str, sample_fps: float = 0.0, dtype: str = "") -> None:
        """sample_fps: frames per second that are read; 0 is every frame, as VBench."""
        from transformers import CLIPModel

        super().__init__(load_whole(CLIPModel, model), sample_fps, dtype)
        self._size = self._model.config.vision_config.image_size

    def _features(self, frames: Tensor) -> Tensor:
        images = short_edge(frames, self._size, "bicubic")
        top, left = (centre_offset(side, self._size) for side in images.shape[-2:])
        pixels = normalise(images[..., top : top + self._size, left : left + self._size] / 255)
        return self._model.get_image_features(pixel_values=pixels.to(self._model.dtype)).pooler_output
