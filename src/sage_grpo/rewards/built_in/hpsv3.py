"""HPSv3 (Ma et al., 2025): Qwen2-VL-7B with a small network read at the token <|Reward|>, for single frames.

The sampling of pixels, the flat positions and the patches are those of VideoAlign, whose code the authors' comes from; what differs
is the head, the picture's size and the template. The template's text is the authors' and is read from the user's copy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_grpo.rewards.built_in.pretrained import Layers, NetworkReward, in_passes, load_whole, read_safetensors
from sage_grpo.rewards.built_in.qwen import batched_ids, chat_ids, qwen_tokenizer
from sage_grpo.rewards.built_in.videoalign import MERGE, patchify, renamed, string_constants, target_size
from sage_grpo.rewards.frames import normalise, resize_as_pillow, sample_indices
from sage_grpo.rewards.functions import RewardConfigError, nearest
from sage_grpo.types import FileSource, RewardFacts

CONVERT = "It is published as safetensors: hf download MizzenAI/HPSv3 HPSv3.safetensors."
REWARD_TOKEN, IMAGE_TOKEN = "<|Reward|>", "<|image_pad|>"
PIXELS = 256 * 28 * 28
"""Every picture is brought to about this size, small and large ones alike."""
FRAMES_A_PASS = 8
_HEAD = re.compile(r"rm_head\.(\d+)\.(weight|bias)")


class Hpsv3(NetworkReward):
    """The mean of the predicted preference (the head's first output; its second is the spread), mean over frames."""

    facts = RewardFacts(
        what="HPSv3, human preference of frames given the prompt",
        parts="HPSv3",
        files={
            "checkpoint": FileSource(text="HPSv3.safetensors: hf download MizzenAI/HPSv3 HPSv3.safetensors"),
            "base": FileSource(
                text="configuration and tokenizer: hub name Qwen/Qwen2-VL-7B-Instruct, or a folder", hub="config.json"
            ),
            "template": FileSource(text="hpsv3/dataset/data_collator_qwen.py of https://github.com/MizzenAI/HPSv3"),
        },
        parameters=7.7e9,
        gigabytes=15.5,
        licence="MizzenAI/HPSv3: MIT; Qwen2-VL-7B: Apache-2.0",
    )

    def __init__(
        self,
        *,
        checkpoint: str,
        base: str,
        template: str,
        sample_fps: float = 1.0,
        num_frames: int = 4,
        dtype: str = "bfloat16",
    ) -> None:
        """checkpoint: HPSv3.safetensors. base: folder or hub name of Qwen2-VL-7B-Instruct, for its configuration and tokenizer.

        template: the authors' data_collator_qwen.py, which is parsed, never run, or a text file with {text_prompt} and <|Reward|>.
        dtype: of the language model, as released; the head is float32.
        """
        from transformers import AutoConfig, Qwen2VLModel

        self._template = read_template(Path(template).expanduser())
        state = renamed(read_safetensors(checkpoint, CONVERT))
        layers = _head({name: state.pop(name) for name in list(state) if name.startswith("rm_head")}, checkpoint)
        state.pop("lm_head.weight", None)  # the scores do not need it
        config = AutoConfig.from_pretrained(base)
        rows = config.get_text_config().vocab_size
        self._tokenizer = qwen_tokenizer(base, rows, seen=IMAGE_TOKEN, read=[REWARD_TOKEN])
        # the authors cut the embeddings down to the tokens that there are
        config.get_text_config().vocab_size = len(self._tokenizer)
        weights_dtype = getattr(torch, dtype)
        self.model = load_whole(Qwen2VLModel, checkpoint, dtype=weights_dtype, state=state, config=config)
        super().__init__(self.model, dtype=None, layers=layers)  # loaded as it computes; its rope stays float32
        self._reward_id = self._tokenizer.convert_tokens_to_ids(REWARD_TOKEN)
        self._sample_fps, self._num_frames = sample_fps, num_frames

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        """Score the clips."""
        chosen = sample_indices(videos.shape[1], fps, sample_fps=self._sample_fps, max_frames=self._num_frames)
        frames = videos[:, chosen].flatten(0, 1).permute(0, 3, 1, 2)
        texts = [prompt for prompt in prompts for _ in chosen]
        scores = in_passes(self._score, FRAMES_A_PASS, frames, texts)
        return {"HPSv3": scores.view(len(prompts), -1).mean(dim=1)}

    def _score(self, frames: Tensor, prompts: Sequence[str]) -> Tensor:
        batch = self.prepare(frames, prompts)
        hidden = self.model(use_cache=False, **batch).last_hidden_state
        values = hidden[batch["input_ids"] == self._reward_id].float()
        for number, (weight, bias) in enumerate(self._layers):
            values = F.linear(values.relu() if number else values, weight, bias)
        return values[:, 0]

    def prepare(self, frames: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Token ids padded on the right, mask, positions, patches and grids of uint8 frames N x 3 x H x W."""
        device = self.model.device
        rows, columns = target_size(frames.shape[2], frames.shape[3], max_pixels=PIXELS, min_pixels=PIXELS)
        # a picture, not a video: by Pillow
        pictures = normalise(resize_as_pillow(frames.to(device), rows, columns).float() / 255)
        pairs = [patchify(picture.unsqueeze(0)) for picture in pictures]  # a picture counts as two equal frames
        tokens = [self.tokenize(prompt, h * w // MERGE**2) for prompt, (_, (_, h, w)) in zip(prompts, pairs)]
        batch = {
            **batched_ids(self._tokenizer, tokens),
            "pixel_values": torch.cat([patches for patches, _ in pairs]).to(self.model.dtype),
            "image_grid_thw": torch.tensor([grid for _, grid in pairs]),
        }
        return {name: value.to(device) for name, value in batch.items()}

    def tokenize(self, prompt: str, image_tokens: int) -> list[int]:
        """Token ids of one sample; a prompt that holds a special token is refused."""
        return chat_ids(self._tokenizer, self._template, prompt, IMAGE_TOKEN, image_tokens)


def read_template(path: Path) -> str:
    """The whole template: INSTRUCTION and prompt_with_special_token of the authors' file, or a text file."""
    if not path.is_file():
        raise RewardConfigError(
            f"The template {path} does not exist. Copy hpsv3/dataset/data_collator_qwen.py from the HPSv3 repository."
        )
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        constants = string_constants(text)
        for name in ("INSTRUCTION", "prompt_with_special_token"):
            if name not in constants:
                raise RewardConfigError(f"{path} has no string {name}.{nearest(name, constants)}")
        text = constants["INSTRUCTION"] + constants["prompt_with_special_token"]
    for token in (REWARD_TOKEN, "{text_prompt}"):
        if text.count(token) != 1:
            raise RewardConfigError(f"The template {path} must hold {token} once, it does {text.count(token)} times.")
    return text


def _head(state: Mapping[str, Any], where: str) -> Layers:
    """The layers of the head in order, in float32; the numbers between them are ReLU and dropout."""
    numbers = sorted({int(match[1]) for name in state if (match := _HEAD.fullmatch(name))})
    names = [f"rm_head.{number}.{kind}" for number in numbers for kind in ("weight", "bias")]
    if len(numbers) < 2 or sorted(names) != sorted(state):
        raise RewardConfigError(f"{where} has no head as HPSv3's (rm_head.0, .3 and .5): {sorted(state)[:6]}.")
    return [(state[f"rm_head.{n}.weight"].float(), state[f"rm_head.{n}.bias"].float()) for n in numbers]
