"""HPSv3 (Ma et al., 2025): Qwen2-VL-7B with a small network read at the token <|Reward|>, for single frames.

The authors' code is based on VideoAlign's: pixel sampling, flat positions and patches are the same; the head, the picture's size and the template
differ. The template's text is the authors' and is read from the user's copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_grpo.rewards.built_in.pretrained import NetworkReward, linear_layers, load_whole, read_weights
from sage_grpo.rewards.built_in.qwen import Chat, read_template, target_size, transformers_names
from sage_grpo.rewards.frames import normalise, resize_as_pillow
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.types import FileSource, RewardFacts
from sage_grpo.utils.pretrained import load_config

SOURCE = " It is published as safetensors: hf download MizzenAI/HPSv3 HPSv3.safetensors."
REWARD_TOKEN = "<|Reward|>"
TEMPLATE = ("INSTRUCTION", "prompt_with_special_token")
"""Strings of the authors' file that form the template."""
PIXELS = 256 * 28 * 28
"""Pixels of a picture: small and large ones are resized to about this size."""


class Hpsv3(NetworkReward):
    """The head's predicted mean preference (its first output; the second is the spread), averaged over frames."""

    facts = RewardFacts(
        what="HPSv3, human preference of frames given the prompt",
        parts="HPSv3",
        files={
            "checkpoint": FileSource(text="HPSv3.safetensors: hf download MizzenAI/HPSv3 HPSv3.safetensors"),
            "base": FileSource(
                text="configuration and tokenizer: Qwen/Qwen2-VL-7B-Instruct, or a folder", hub="config.json"
            ),
            "template": FileSource(text="hpsv3/dataset/data_collator_qwen.py of https://github.com/MizzenAI/HPSv3"),
        },
        parameters=7.7e9,
        gigabytes=15.5,
        licence="MizzenAI/HPSv3: MIT; Qwen2-VL-7B: Apache-2.0",
    )
    frames_a_pass = 8
    """Frames per call of the network, so that memory does not grow with the clip."""

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

        source = "hpsv3/dataset/data_collator_qwen.py from the HPSv3 repository"
        words = read_template(Path(template).expanduser(), TEMPLATE, [REWARD_TOKEN], source)
        if not checkpoint.endswith(".safetensors"):
            raise RewardConfigError(f"{checkpoint} is not read: only safetensors cannot run code.{SOURCE}")
        state = transformers_names(read_weights(Path(checkpoint).expanduser(), SOURCE))
        head = {name.removeprefix("rm_head."): state.pop(name) for name in list(state) if name.startswith("rm_head.")}
        layers = linear_layers(head, checkpoint)
        state.pop("lm_head.weight", None)  # the scores do not need it
        config = load_config(AutoConfig, base)
        rows = config.get_text_config().vocab_size
        self._chat = Chat(base, rows, words, "image", [REWARD_TOKEN])
        # the authors cut the embeddings down to the tokens that there are
        config.get_text_config().vocab_size = len(self._chat.tokenizer)
        weights_dtype = getattr(torch, dtype)
        model = load_whole(Qwen2VLModel, checkpoint, dtype=weights_dtype, state=state, config=config)
        # loaded as it computes; its rope stays float32
        super().__init__(model, dtype=None, layers=layers, sample_fps=sample_fps, num_frames=num_frames)

    def differentiable(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        chosen = self.frames_read(videos.shape[1], fps)
        frames, texts = videos[:, chosen].flatten(0, 1), [prompt for prompt in prompts for _ in chosen]
        starts, size = range(0, len(texts), self.frames_a_pass), self.frames_a_pass
        scores = [self._score(frames[at : at + size], texts[at : at + size]) for at in starts]
        return {"HPSv3": torch.cat(scores).view(len(prompts), -1).mean(dim=1)}

    def _score(self, frames: Tensor, prompts: Sequence[str]) -> Tensor:
        batch = self.prepare(frames.permute(0, 3, 1, 2), prompts)
        hidden = self.model(use_cache=False, **batch).last_hidden_state
        values = hidden[batch["input_ids"] == self._chat.read_ids.to(hidden.device)].float()
        for number, (weight, bias) in enumerate(self._layers):
            values = F.linear(values.relu() if number else values, weight, bias)
        return values[:, 0]

    def prepare(self, frames: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Token ids padded on the right, mask, positions, patches and grids of uint8 frames N x 3 x H x W."""
        device = self.model.device
        rows, columns = target_size(frames.shape[2], frames.shape[3], max_pixels=PIXELS, min_pixels=PIXELS)
        # a picture, not a video: by Pillow
        pictures = normalise(resize_as_pillow(frames.to(device), rows, columns).float() / 255)
        # a picture counts as two equal frames
        batch = self._chat.batch(prompts, [picture.unsqueeze(0) for picture in pictures])
        batch["pixel_values"] = batch["pixel_values"].to(self.model.dtype)
        return {name: value.to(device) for name, value in batch.items()}
