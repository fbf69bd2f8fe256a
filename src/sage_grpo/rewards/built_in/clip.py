"""CLIPScore, PickScore, aesthetic heads and HPSv2: image models, averaged over frames sampled by time.

Preprocessing is done on tensors, in the steps that each score's authors take, so clips never become
image files and no image library is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_grpo.rewards.built_in.pretrained import NetworkReward, linear_layers, load_tokenizer, load_whole, read_weights
from sage_grpo.rewards.frames import Halves, centre_offset, normalise, resize_as_pillow, short_edge_size
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.types import FileSource, RewardFacts

Fit = Literal["crop", "pad"]
CLIP_FOLDER = FileSource(
    text="a CLIP model in transformers' format, a folder or a hub name (openai/clip-vit-large-patch14)",
    hub="config.json",
)


def clip_pixels(frames: Tensor, size: int, fit: Fit = "crop", *, halves: Halves = "even") -> Tensor:
    """uint8 N x H x W x 3 to CLIP's input, `size` x `size`, scaled and normalized.

    crop: the shortest edge becomes `size` (by Pillow's resize of bytes), and the center is cut out, as CLIP's authors do; `halves` is as in
    `centre_offset`. pad: the longest edge becomes `size`, and black is added on both sides, as HPSv2's authors do.
    """
    images, (height, width) = frames.permute(0, 3, 1, 2), frames.shape[1:3]
    if fit == "crop":
        rows, columns = short_edge_size(height, width, size)
        top, left = (centre_offset(side, size, halves=halves) for side in (rows, columns))
        return normalise(resize_as_pillow(images, rows, columns)[:, :, top : top + size, left : left + size] / 255)
    scale = size / max(height, width)
    rows, columns = max(1, round(height * scale)), max(1, round(width * scale))
    pixels = images.float() / 255
    if (rows, columns) != (height, width):  # in one pass, neither rounded nor cut to 0..1
        pixels = F.interpolate(pixels, (rows, columns), mode="bicubic", antialias=True, align_corners=False)
    above, before = (size - rows) // 2, (size - columns) // 2
    return normalise(F.pad(pixels, (before, size - columns - before, above, size - rows - above)))


class ClipReward(NetworkReward):
    """Unit embeddings of sampled frames and of prompts, from a CLIP model that transformers can load; most scores are a mean of their cosines."""

    halves: ClassVar[Halves] = "even"
    """As in `clip_pixels`, and likewise the default of the option `fit`."""
    fit: ClassVar[Fit] = "crop"

    def __init__(
        self,
        *,
        model: str,
        tokenizer: str | None = "",
        fit: Fit | None = None,
        sample_fps: float = 2.0,
        num_frames: int = 16,
        dtype: str = "",
    ) -> None:
        """tokenizer: a folder or hub name, "" the model's own, None for frames only."""
        from transformers import CLIPModel

        self._fit = fit or self.fit
        if self._fit not in get_args(Fit):
            raise RewardConfigError(f"fit must be crop or pad, got {fit!r}.")
        super().__init__(load_whole(CLIPModel, model), dtype=dtype, sample_fps=sample_fps, num_frames=num_frames)
        text, self._size = self.model.config.text_config, self.model.config.vision_config.image_size
        self._tokenizer = None if tokenizer is None else load_tokenizer(tokenizer or model, text.vocab_size)
        self._length = text.max_position_embeddings

    def frames(self, videos: Tensor, fps: float) -> Tensor:
        """Unit embeddings of the frames that are read, B x frames x dim."""
        chosen = videos[:, self.frames_read(videos.shape[1], fps)].to(self.model.device)
        pixels = clip_pixels(chosen.flatten(0, 1), self._size, self._fit, halves=self.halves).to(self.model.dtype)
        features = self.model.get_image_features(pixel_values=pixels).pooler_output.float()
        return F.normalize(features, dim=-1).view(*chosen.shape[:2], -1)

    def cosines(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
        """Of frames and prompts, B x frames; prompts beyond the model's context are cut, as its authors do."""
        assert self._tokenizer is not None
        tokens = self._tokenizer(
            list(prompts), padding=True, truncation=True, max_length=self._length, return_tensors="pt"
        ).to(self.model.device)
        texts = F.normalize(self.model.get_text_features(**tokens).pooler_output.float(), dim=-1)
        return torch.einsum("bfd,bd->bf", self.frames(videos, fps), texts)


class ClipScore(ClipReward):
    """CLIPScore (Hessel et al., 2021): 2.5 max(cos(image, "A photo depicts " + prompt), 0), mean over frames."""

    facts = RewardFacts(
        what="CLIPScore of frames and prompt",
        parts="CLIPScore",
        files={"model": CLIP_FOLDER, "tokenizer": CLIP_FOLDER},
        parameters=0.43e9,
        gigabytes=1.7,
        licence="OpenAI's CLIP: MIT",
    )

    def differentiable(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        cosine = self.cosines(videos, [f"A photo depicts {prompt}" for prompt in prompts], fps)
        return {"CLIPScore": 2.5 * cosine.clamp(min=0).mean(dim=1)}


class Hpsv2(ClipReward):
    """HPSv2 (Wu et al., 2023): cosine of the whole picture (padded with black to a square) and the prompt, mean over frames; about 0.2 to 0.35."""

    facts = RewardFacts(
        what="HPSv2, human preference of frames given the prompt",
        parts="HPSv2",
        files={
            "model": FileSource(
                text="HPSv2 in transformers' format, a folder or adams-story/HPSv2-hf", hub="config.json"
            ),
            "tokenizer": CLIP_FOLDER,
        },
        parameters=0.99e9,
        gigabytes=3.9,
        licence="xswu/HPSv2: Apache-2.0",
    )

    fit = "pad"

    def differentiable(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        return {"HPSv2": self.cosines(videos, prompts, fps).mean(dim=1)}


class PickScore(ClipReward):
    """PickScore (Kirstain et al., 2023): exp(logit scale) cos(image, prompt), raw, mean over frames.

    About 20 on real pictures; some toolkits divide by 26. Pictures are prepared as transformers' processor
    does it, which its authors use: half a pixel of the center crop is dropped (the other CLIP scores go by torchvision's crop).
    """

    facts = RewardFacts(
        what="PickScore of frames and prompt",
        parts="PickScore",
        files={"model": FileSource(text="hub name yuvalkirstain/PickScore_v1, or a folder with it", hub="config.json")},
        parameters=0.99e9,
        gigabytes=3.9,
        licence="PickScore_v1: see its page",
    )

    halves = "down"

    def differentiable(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        scale = self.model.logit_scale.float().exp()
        return {"PickScore": scale * self.cosines(videos, prompts, fps).mean(dim=1)}


class Aesthetic(ClipReward):
    """An aesthetic head on CLIP's image embedding: the linear layers of a file, applied in order.

    Fits the LAION predictors (for example CLIP ViT-L/14 with layers 768-1024-128-64-16-1, no activations).
    """

    facts = RewardFacts(
        what="an aesthetic head on CLIP's embedding of frames",
        parts="Aesthetic",
        files={
            "model": CLIP_FOLDER,
            "head": FileSource(text="the layers of an aesthetic predictor, as safetensors or .pth"),
        },
        parameters=0.43e9,
        gigabytes=1.7,
        licence="OpenAI's CLIP: MIT; the head: see its page",
    )

    def __init__(
        self,
        *,
        model: str,
        head: str,
        fit: Fit | None = None,
        sample_fps: float = 2.0,
        num_frames: int = 16,
        dtype: str = "",
    ) -> None:
        super().__init__(
            model=model, tokenizer=None, fit=fit, sample_fps=sample_fps, num_frames=num_frames, dtype=dtype
        )
        self._layers, width = linear_layers(read_weights(Path(head)), head), self.model.config.projection_dim
        for weight, _ in self._layers:
            if weight.shape[1] != width:
                raise RewardConfigError(f"The head in {head} does not fit: a layer takes {weight.shape[1]} of {width}.")
            width = weight.shape[0]
        if width != 1:
            raise RewardConfigError(f"The head in {head} ends with {width} outputs, a score needs one.")

    def differentiable(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        values = self.frames(videos, fps)
        for weight, bias in self._layers:
            values = F.linear(values, weight, bias)
        return {"Aesthetic": values.squeeze(-1).mean(dim=1)}
