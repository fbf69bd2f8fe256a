"""VideoAlign: visual quality, motion quality and text alignment from Qwen2-VL with a reward head.

The three scores are read at three special tokens of the prompt. What must be exact (sampling, rounding, positions,
padding, names) is listed in docs/rewards.md; the files are read in videoalign_io.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sage_grpo.hub import pinned_folder
from sage_grpo.rewards.built_in.pretrained import load_whole
from sage_grpo.rewards.built_in.qwen import batched_ids, chat_ids, qwen_tokenizer
from sage_grpo.rewards.built_in.videoalign_io import (
    MERGE,
    PARTS,
    SPECIAL_TOKENS,
    check_adapters,
    find_checkpoint,
    patchify,
    pixel_frames,
    read_config,
    read_state,
    read_template,
)
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.types import FileSource, RewardFacts

VIDEO_TOKEN = "<|video_pad|>"


class LoraLinear(nn.Module):
    """y = W x + scale B A x, unmerged: in bfloat16 a merged weight would round small updates away."""

    def __init__(self, base: nn.Linear, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.a, self.b = nn.Parameter(a.clone()), nn.Parameter(b.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Apply the adapted layer."""
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) * self.scale


class VideoAlign:
    """VQ, MQ, TA and their sum Overall, from the authors' released folder and the Qwen2-VL base."""

    facts = RewardFacts(
        what="visual quality, motion quality and text alignment of whole clips (VideoAlign)",
        parts="VQ, MQ, TA, Overall",
        files={
            "checkpoint": FileSource(
                text="the authors' release: hf download KwaiVGI/VideoReward --local-dir {value}, or sage-grpo download",
                hub="model_config.json",
                repo="KwaiVGI/VideoReward",
            ),
            "base": FileSource(
                text="Qwen2-VL-2B-Instruct: hf download Qwen/Qwen2-VL-2B-Instruct, or its hub name", hub="config.json"
            ),
            "template": FileSource(text="prompt_template.py of https://github.com/KwaiVGI/VideoAlign"),
        },
        parameters=2.2e9,
        gigabytes=4.4,
        licence="KwaiVGI/VideoReward: see its page; Qwen2-VL-2B: Apache-2.0",
    )

    def __init__(
        self,
        *,
        checkpoint: str,
        base: str,
        template: str,
        step: int | None = None,
        normalize: bool = True,
        dtype: str = "",
        device: str = "cpu",
    ) -> None:
        """Load.

        checkpoint: the released folder (model_config.json, checkpoint-N). base: folder or hub name of
        Qwen2-VL-2B-Instruct. template: the authors' prompt_template.py, or a text file. step: which checkpoint-N,
        default the highest. normalize: (score - mean) / std with the folder's statistics, as the authors do; False
        gives raw scores. dtype: default bfloat16 on CUDA (as released) and float32 elsewhere.
        """
        from transformers import AutoConfig

        folder = pinned_folder(checkpoint, option="videoalign checkpoint")
        self.config = read_config(folder)
        if normalize and self.config.normalization is None:
            raise RewardConfigError(f"{folder} has no inference_config to normalise with: set normalize to false.")
        self._template = read_template(Path(template), self.config.template)
        self._statistics = self.config.normalization if normalize else None
        self._dtype = getattr(torch, dtype) if dtype else None
        text = AutoConfig.from_pretrained(base).get_text_config()
        self._tokenizer = qwen_tokenizer(base, text.vocab_size, seen=VIDEO_TOKEN, read=SPECIAL_TOKENS)
        ids = self._tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
        self._special_ids = torch.tensor(ids)
        state, whole = read_state(find_checkpoint(folder, step))
        if "rm_head.weight" not in state:
            raise RewardConfigError(f"{find_checkpoint(folder, step)} holds no reward head (rm_head.weight).")
        self._head = state.pop("rm_head.weight").float()
        check_adapters(state, text.num_hidden_layers, self.config)
        self.model = _load_model(base, len(self._tokenizer), state, whole, self.config.lora_scale)
        if self._head.shape[0] != self.config.output_dim:
            raise RewardConfigError(
                f"rm_head has {self._head.shape[0]} outputs, model_config.json says {self.config.output_dim}."
            )
        self.to(torch.device(device))

    @property
    def names(self) -> tuple[str, ...]:
        """VQ, MQ, TA and Overall."""
        return (*PARTS, "Overall")

    def to(self, device: torch.device) -> VideoAlign:
        """Move to a device; unless a dtype was given, bfloat16 on CUDA and float32 on a CPU.

        What was on CUDA stays bfloat16 when it is offloaded: converting back and forth would cost time and memory.
        """
        dtype = self._dtype or (torch.bfloat16 if torch.device(device).type == "cuda" else self._head.dtype)
        self.model.to(device=device, dtype=dtype)
        self._head = self._head.to(device=device, dtype=dtype)
        self.device = torch.device(device)
        return self

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        """Score the clips; `fps` is their own frame rate, the model's sampling rate is in its configuration."""
        batch = self.prepare(videos, prompts, fps)
        hidden = self.model(use_cache=False, **batch).last_hidden_state
        scores = self._read_head(hidden, batch["input_ids"]).float().cpu()
        if self._statistics is not None:
            mean, std = torch.tensor([self._statistics[part] for part in PARTS]).unbind(dim=1)
            scores = (scores - mean) / std
        parts = {part: scores[:, index] for index, part in enumerate(PARTS)}
        return {**parts, "Overall": scores.sum(dim=1)}

    def prepare(self, videos: Tensor, prompts: Sequence[str], fps: float) -> dict[str, Tensor]:
        """Token ids padded on the right, mask, positions, patches and grid of a batch."""
        pairs = [patchify(pixel_frames(clip, fps, self.config)) for clip in videos.to(self.device)]
        grids = [grid for _, grid in pairs]
        tokens = [self.tokenize(prompt, t * h * w // MERGE**2) for prompt, (t, h, w) in zip(prompts, grids)]
        batch = {
            **batched_ids(self._tokenizer, tokens),
            "pixel_values_videos": torch.cat([patches for patches, _ in pairs]),
            "video_grid_thw": torch.tensor(grids),
        }
        return {name: value.to(self.device) for name, value in batch.items()}

    def tokenize(self, prompt: str, video_tokens: int) -> list[int]:
        """Token ids of one sample; a prompt that holds a special token is refused."""
        return chat_ids(self._tokenizer, self._template, prompt, VIDEO_TOKEN, video_tokens)

    def _read_head(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """B x 3 scores at the special tokens, in the order of the sequence."""
        where = torch.isin(ids, self._special_ids.to(ids.device))
        if not bool((where.sum(dim=1) == len(PARTS)).all()):
            raise ValueError("Every sample must hold exactly three special tokens.")
        read = hidden[where].view(ids.shape[0], len(PARTS), -1)
        outputs = F.linear(read, self._head)
        return outputs.diagonal(dim1=1, dim2=2) if self.config.output_dim == len(PARTS) else outputs.squeeze(-1)


def _load_model(base: str, tokens: int, state: dict[str, Tensor], whole: bool, scale: float | None) -> nn.Module:
    """Qwen2VLModel with the checkpoint's weights, and LoRA layers where it has any."""
    from transformers import Qwen2VLForConditionalGeneration

    full = load_whole(Qwen2VLForConditionalGeneration, base)
    model = full.model.eval().requires_grad_(False)
    rows = model.get_input_embeddings().weight
    if tokens > rows.shape[0] and "language_model.embed_tokens.weight" not in state:
        raise RewardConfigError(
            f"{base} has {rows.shape[0]} embeddings for {tokens} tokens, and the checkpoint brings none."
        )
    embedding = nn.Embedding(tokens, rows.shape[1])
    embedding.weight.data[: min(tokens, rows.shape[0])] = rows.data[:tokens]
    model.set_input_embeddings(embedding.requires_grad_(False))
    adapters = {name: state.pop(name) for name in list(state) if ".lora_" in name}
    state.pop("lm_head.weight", None)  # the scores do not need it
    _load_weights(model, state, whole)
    _add_adapters(model, adapters, scale)
    return model


def _load_weights(model: nn.Module, state: dict[str, Tensor], whole: bool) -> None:
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected:
        raise RewardConfigError(f"The checkpoint holds weights that the base does not have: {unexpected[:5]}.")
    if whole and missing:
        raise RewardConfigError(f"model.pth lacks {len(missing)} weights of the base, such as {missing[:5]}.")
    visual = [name for name in missing if name.startswith("visual.")]
    if visual and len(visual) < sum(name.startswith("visual.") for name in model.state_dict()):
        raise RewardConfigError(f"The checkpoint's vision tower is incomplete, it lacks {visual[:5]}.")


def _add_adapters(model: nn.Module, adapters: dict[str, Tensor], scale: float | None) -> None:
    if adapters and scale is None:
        raise RewardConfigError("The checkpoint holds LoRA weights, but model_config.json says lora_enable: false.")
    if scale is not None and not adapters:
        raise RewardConfigError("model_config.json says lora_enable, but the checkpoint holds no LoRA weights.")
    layers = {name.rsplit(".lora_", 1)[0] for name in adapters}
    for layer in sorted(layers):
        try:
            a, b = (adapters.pop(f"{layer}.lora_{letter}.weight") for letter in "AB")
            parent, _, child = layer.rpartition(".")
            base = getattr(model.get_submodule(parent), child)
        except (KeyError, AttributeError) as error:
            raise RewardConfigError(f"The LoRA of {layer} does not fit the base: {error}.") from error
        setattr(model.get_submodule(parent), child, LoraLinear(base, a.float(), b.float(), float(scale or 0)))
    if adapters:
        raise RewardConfigError(f"LoRA weights that are not understood: {sorted(adapters)[:5]}.")
