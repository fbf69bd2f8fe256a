"""VideoAlign: visual quality, motion quality and text alignment from Qwen2-VL with a reward head.

The three scores are read at three special tokens of the prompt. Scores change visibly unless these are the authors': an even number of frames, two
a second and at least four, from the first to the last; sides in multiples of 28 with 100,352 to 448 x 448 pixels, rounded to whole values before
normalizing; positions 0..L-1 on all three rope axes; padding on the right; an unmerged LoRA. The authors' released folder is read as it is; the
prompt template's text is theirs and is read from the user's copy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sage_grpo.rewards.built_in.pretrained import NetworkReward, load_whole, read_weights
from sage_grpo.rewards.built_in.qwen import FACTOR, TEMPORAL, Chat, read_template, target_size, transformers_names
from sage_grpo.rewards.frames import normalise, resize_uint8
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.types import FileSource, RewardFacts
from sage_grpo.utils.hub import pinned_folder
from sage_grpo.utils.json_schema import demand, read_object
from sage_grpo.utils.pretrained import load_config, lora_config_fault, weights_fault

PARTS = ("VQ", "MQ", "TA")
SPECIAL_TOKENS = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")
MIN_PIXELS = 128 * FACTOR * FACTOR
MAX_PIXELS = 448 * 448
_ADAPTER = re.compile(r"language_model\.layers\.(\d+)\.(.+\.lora_[AB]\.weight)")
_LORA_KEYS = {
    "lora_enable", "vision_lora", "lora_r", "lora_alpha", "use_rslora", "lora_dropout", "lora_task_type", "lora_target_modules",
    "lora_namespan_exclude", "lora_modules_to_save", "num_lora_modules",
}  # fmt: skip
"""Keys of the authors' LoRA settings; rank, alpha and use_rslora are used, and the names of the weights give the adapted layers."""
TEMPLATE = "DETAILED_PROMPT_WITH_SPECIAL_TOKEN"
"""The string of the authors' prompt_template.py that belongs to the template type `detailed_special`."""


@dataclass(frozen=True)
class VideoAlignConfig:
    """The settings in model_config.json."""

    output_dim: int  # 1: one head read at each special token; 3: the diagonal of token x output
    fps: float  # frames per second that the model reads, unless num_frames fixes their number
    num_frames: int | None
    max_pixels: int
    lora_scale: float | None  # alpha / r (alpha / sqrt(r) for rank-stabilised LoRA); None without LoRA
    normalization: Mapping[str, tuple[float, float]] | None  # mean and std of VQ, MQ and TA
    lora_everywhere: bool  # every layer is adapted alike; else only the last modules are


def read_config(folder: Path) -> VideoAlignConfig:
    path = folder / "model_config.json"
    if not path.is_file():
        raise RewardConfigError(f"{path} does not exist: give the folder that holds model_config.json.")
    raw = read_object(path)
    demand(raw, {"data_config": dict, "model_config": dict}, str(path))
    data, model, lora = raw["data_config"], raw["model_config"], raw.get("peft_lora_config") or {}
    demand(model, {"output_dim": int}, f"{path}: model_config")
    if model["output_dim"] not in (1, 3):
        raise RewardConfigError(f"output_dim must be 1 or 3, {path} says {model['output_dim']}.")
    for group, key, only in (
        (model, "use_special_tokens", True),
        (data, "sample_type", "uniform"),
        (data, "prompt_template_type", "detailed_special"),
    ):
        if group.get(key, only) != only:
            raise RewardConfigError(f"{path} has {key} {group[key]!r}: only {only!r} is supported.")
    scale = None
    if lora.get("lora_enable", False):
        demand(lora, {"lora_r": int, "lora_alpha": float}, f"{path}: peft_lora_config")
        unknown = sorted(lora.keys() - _LORA_KEYS)
        rank, alpha, stabilised = lora["lora_r"], lora["lora_alpha"], lora.get("use_rslora", False)
        fault = lora_config_fault({"r": rank, "lora_alpha": alpha, "use_rslora": stabilised})
        if unknown or fault is not None:
            fault = f'has the key "{unknown[0]}", which the authors\' code does not write' if unknown else fault
            raise RewardConfigError(f"{path}: peft_lora_config {fault}. Download the folder again.")
        scale = alpha / (math.sqrt(rank) if stabilised else rank)
    statistics = raw.get("inference_config")
    if statistics:
        known = {f"{part}_{kind}": float for part in PARTS for kind in ("mean", "std")}
        demand(statistics, known, f"{path}: inference_config")
    return VideoAlignConfig(
        output_dim=model["output_dim"],
        fps=data.get("fps") or 2.0,
        num_frames=data.get("num_frames"),
        max_pixels=data.get("max_frame_pixels") or MAX_PIXELS,
        lora_scale=scale,
        lora_everywhere=(lora.get("num_lora_modules") or -1) < 0,
        normalization=statistics and {part: (statistics[f"{part}_mean"], statistics[f"{part}_std"]) for part in PARTS},
    )


def find_checkpoint(folder: Path) -> Path:
    """The folder checkpoint-<number> with the highest number."""
    folders = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and path.is_dir()
    }
    if not folders:
        raise RewardConfigError(f"{folder} holds no checkpoint-<number> folder.")
    return folders[max(folders)]


def read_state(checkpoint: Path) -> tuple[dict[str, Tensor], bool]:
    """The tensors of a checkpoint under transformers 5 names, and whether they are the whole model.

    model.safetensors (the only kind in folders from the hub) wins over model.pth, and that over adapter_model.safetensors + non_lora_state_dict.pth.
    A .pth is read with weights_only: it cannot run code.
    """
    for name in ("model.safetensors", "model.pth"):
        if (checkpoint / name).is_file():
            return transformers_names(read_weights(checkpoint / name)), True
    adapter, rest = checkpoint / "adapter_model.safetensors", checkpoint / "non_lora_state_dict.pth"
    if not (adapter.is_file() and rest.is_file()):
        raise RewardConfigError(
            f"{checkpoint} needs model.pth, or adapter_model.safetensors + non_lora_state_dict.pth."
        )
    return transformers_names(read_weights(rest) | read_weights(adapter)), False


def frame_indices(frames: int, video_fps: float, *, fps: float, num_frames: int | None = None) -> list[int]:
    """The frames that VideoAlign reads: an even number, from the first to the last, evenly spread."""
    if num_frames is not None:
        count = min(round(num_frames / TEMPORAL) * TEMPORAL, frames)
    else:
        largest = min(768, frames) // TEMPORAL * TEMPORAL
        count = round(min(max(frames / video_fps * fps, 4), largest) / TEMPORAL) * TEMPORAL
    if count < TEMPORAL:
        raise ValueError(f"VideoAlign needs at least {TEMPORAL} frames, the clip has {frames}.")
    return torch.linspace(0, frames - 1, count).round().long().tolist()


class LoraLinear(nn.Module):
    """y = W x + scale B A x, unmerged: in bfloat16 a merged weight would round small updates away."""

    def __init__(self, base: nn.Linear, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.a, self.b = nn.Parameter(a.clone()), nn.Parameter(b.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) * self.scale


class VideoAlign(NetworkReward):
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
            "base": FileSource(text="hf download Qwen/Qwen2-VL-2B-Instruct, or this hub name", hub="config.json"),
            "template": FileSource(text="prompt_template.py of https://github.com/KwaiVGI/VideoAlign"),
        },
        parameters=2.2e9,
        gigabytes=4.4,
        licence="KwaiVGI/VideoReward: see its page; Qwen2-VL-2B: Apache-2.0",
    )
    names = (*PARTS, "Overall")

    def __init__(
        self,
        *,
        checkpoint: str,
        base: str,
        template: str,
        normalize: bool = True,
        dtype: str = "",
    ) -> None:
        """checkpoint: the released folder (model_config.json, checkpoint-N). base: folder or hub name of Qwen2-VL-2B-Instruct. template: the authors'
        prompt_template.py, or a text file. normalize: (score - mean) / std with the folder's
        statistics, as the authors do; False gives raw scores. dtype: default bfloat16 on CUDA (as released) and float32 elsewhere.
        """
        from transformers import AutoConfig

        folder = pinned_folder(checkpoint, option="videoalign checkpoint")
        self.config = read_config(folder)
        if normalize and self.config.normalization is None:
            raise RewardConfigError(f"{folder} has no inference_config to normalize with: set normalize to false.")
        source = "prompt_template.py from the VideoAlign repository"
        words = read_template(Path(template), [TEMPLATE], SPECIAL_TOKENS, source)
        self._statistics = self.config.normalization if normalize else None
        text = load_config(AutoConfig, base).get_text_config()
        self._chat = Chat(base, text.vocab_size, words, "video", SPECIAL_TOKENS)
        weights = find_checkpoint(folder)
        state, whole = read_state(weights)
        if "rm_head.weight" not in state:
            raise RewardConfigError(f"{weights} holds no reward head (rm_head.weight).")
        self._head = state.pop("rm_head.weight").float()
        # a layer without its adapter would act as the base's, and change the scores a little
        adapted = {match[2] for name in state if (match := _ADAPTER.fullmatch(name))}
        wanted = {f"language_model.layers.{n}.{name}" for n in range(text.num_hidden_layers) for name in adapted}
        fault = weights_fault(missing=wanted - state.keys())
        if fault is not None and self.config.lora_everywhere:
            raise RewardConfigError(f"The checkpoint's LoRA is incomplete: it {fault}. Download it again in full.")
        model = _load_model(base, len(self._chat.tokenizer), state, whole, self.config.lora_scale)
        outputs, declared = self._head.shape[0], self.config.output_dim
        if outputs != declared:
            raise RewardConfigError(f"rm_head has {outputs} outputs, model_config.json says {declared}.")
        super().__init__(model, dtype=dtype, sample_fps=self.config.fps)
        self._by_device = not dtype
        self.to(torch.device("cpu"))

    def to(self, device: torch.device) -> Self:
        """Move to a device; unless a dtype was given, bfloat16 on CUDA and float32 on a CPU (weights that were on CUDA stay bfloat16)."""
        if self._by_device:
            self._dtype = torch.bfloat16 if device.type == "cuda" else self._head.dtype
        self._head = self._head.to(device=device, dtype=self._dtype)
        return super().to(device)

    def differentiable(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        batch = self.prepare(videos, prompts, fps)
        hidden = self.model(use_cache=False, **batch).last_hidden_state
        scores = self._read_head(hidden, batch["input_ids"]).float().cpu()
        if self._statistics is not None:
            mean, std = torch.tensor([self._statistics[part] for part in PARTS]).unbind(dim=1)
            scores = (scores - mean) / std
        parts = {part: scores[:, index] for index, part in enumerate(PARTS)}
        return {**parts, "Overall": scores.sum(dim=1)}

    def frames_read(self, count: int, fps: float) -> list[int]:
        return frame_indices(count, fps, fps=self.config.fps, num_frames=self.config.num_frames)

    def prepare(self, videos: Tensor, prompts: Sequence[str], fps: float) -> dict[str, Tensor]:
        """The frames that are read, resized (rounded to uint8) and normalized, with their prompts in the chat."""
        indices, (height, width) = self.frames_read(videos.shape[1], fps), videos.shape[2:4]
        size = target_size(height, width, max_pixels=self.config.max_pixels, min_pixels=MIN_PIXELS)
        frames = [clip[list(indices)].permute(0, 3, 1, 2) for clip in videos.to(self.model.device)]
        clips = [normalise(resize_uint8(one, *size).float() / 255) for one in frames]
        return {name: value.to(self.model.device) for name, value in self._chat.batch(prompts, clips).items()}

    def _read_head(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """B x 3 scores at the special tokens, in the order of the sequence."""
        where = torch.isin(ids, self._chat.read_ids.to(ids.device))
        if not bool((where.sum(dim=1) == len(PARTS)).all()):
            raise ValueError("Every sample must hold exactly three special tokens.")
        read = hidden[where].view(ids.shape[0], len(PARTS), -1)
        outputs = F.linear(read, self._head)
        return outputs.diagonal(dim1=1, dim2=2) if self.config.output_dim == len(PARTS) else outputs.squeeze(-1)


def _load_model(base: str, tokens: int, state: dict[str, Tensor], whole: bool, scale: float | None) -> Any:
    from transformers import Qwen2VLForConditionalGeneration

    full = load_whole(Qwen2VLForConditionalGeneration, base)
    model = full.model
    rows = model.get_input_embeddings().weight
    if tokens > rows.shape[0] and "language_model.embed_tokens.weight" not in state:
        raise RewardConfigError(
            f"{base} has {rows.shape[0]} embeddings for {tokens} tokens, the checkpoint brings none."
        )
    embedding = nn.Embedding(tokens, rows.shape[1])
    embedding.weight.data[: min(tokens, rows.shape[0])] = rows.data[:tokens]
    model.set_input_embeddings(embedding)
    adapters = {name: state.pop(name) for name in list(state) if ".lora_" in name}
    state.pop("lm_head.weight", None)  # the scores do not need it
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected:
        raise RewardConfigError(f"The checkpoint holds weights that the base does not have: {unexpected[:5]}.")
    if whole and missing:
        raise RewardConfigError(f"model.pth lacks {len(missing)} weights of the base, such as {missing[:5]}.")
    visual = [name for name in missing if name.startswith("visual.")]
    if visual and len(visual) < sum(name.startswith("visual.") for name in model.state_dict()):
        raise RewardConfigError(f"The checkpoint's vision tower is incomplete, it lacks {visual[:5]}.")
    _add_adapters(model, adapters, scale)
    return model


def _add_adapters(model: nn.Module, adapters: dict[str, Tensor], scale: float | None) -> None:
    if adapters and scale is None:
        raise RewardConfigError("The checkpoint holds LoRA weights, but model_config.json has lora_enable: false.")
    if scale is not None and not adapters:
        raise RewardConfigError("model_config.json has lora_enable: true, but the checkpoint holds no LoRA weights.")
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
