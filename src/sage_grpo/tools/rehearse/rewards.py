"""Rewards with random weights of their published sizes, written in the layouts that the rewards load: for rehearsals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sage_grpo.rewards.built_in.videoalign import PARTS, SPECIAL_TOKENS, TEMPLATE
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.spec import BUILT_IN, RewardSpec, facts_of
from sage_grpo.tools.rehearse.weights import RandomNumbers, RandomPart, make_tokenizer

Sizes = Mapping[str, Any]
MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
RANK = 64  # of VideoAlign's LoRA
WORDS = "Judge sharpness {}, motion {}, and whether the clip shows this sentence, {{text_prompt}} {}.\n"
ADAPTED = r"model\.language_model\.layers\.\d+\.(?:self_attn\.[qkvo]|mlp\.(?:gate|up|down))_proj"
QWEN2_VL: Sizes = {
    "text_config": {
        **{"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28},
        **{"num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
        "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
    },
    "vision_config": {"depth": 32, "embed_dim": 1280, "num_heads": 16, "hidden_size": 1536},
}
SMALL_QWEN2_VL: Sizes = {
    "text_config": {
        **{"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
    },
    "vision_config": {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 2},
}


def _clip(text: tuple[int, int, int], vision: tuple[int, int, int], width: int, image: int, rows: int) -> Sizes:
    """A CLIP model by the widths, layers and heads of both encoders."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    sizes = [
        {**dict(zip(names, one)), "intermediate_size": 4 * one[0], "projection_dim": width} for one in (text, vision)
    ]
    ends = {"bos_token_id": rows - 2, "eos_token_id": rows - 1, "pad_token_id": rows - 1}
    return {
        "text_config": {**sizes[0], "vocab_size": rows, **ends},
        "vision_config": {**sizes[1], "image_size": image, "patch_size": 14},
        "projection_dim": width,
    }


LARGE = _clip((768, 12, 12), (1024, 24, 16), 768, 224, 49408)  # ViT-L/14
HUGE = _clip((1024, 24, 16), (1280, 32, 16), 1024, 224, 49408)  # ViT-H/14
SMALL_CLIP = _clip((16, 1, 2), (16, 1, 2), 16, 28, 640)
SMALL_CLAP: Sizes = {
    "text_config": {
        **{"vocab_size": 400, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"intermediate_size": 16, "projection_dim": 16},
    },
    "audio_config": {
        **{"patch_embeds_hidden_size": 16, "depths": [1, 1], "num_attention_heads": [2, 2], "num_hidden_layers": 2},
        **{"hidden_size": 32, "spec_size": 64, "num_mel_bins": 16, "window_size": 4, "patch_size": 4},
        **{"patch_stride": [4, 4], "projection_dim": 16},
    },
    "projection_dim": 16,
}


def random_reward(spec: RewardSpec, folder: Path, *, small: bool) -> tuple[RewardSpec, list[RandomPart]]:
    """The reward with the files that it will find in `folder`, and these as parts to write; one without weights stays as it is."""
    if spec.name in MAKERS:
        files, parts = MAKERS[spec.name](folder, small)
        return replace(spec, options={**spec.options, **{name: str(file) for name, file in files.items()}}), parts
    facts = facts_of(spec.name) if spec.name in BUILT_IN else None
    if facts is not None and (facts.files or facts.network):
        raise RewardConfigError(
            f"rewards {spec.title}: {spec.name} cannot be rehearsed with random weights. Give --rewards without it; "
            f"{', '.join(MAKERS)}, rewards without weights and your own functions can be."
        )
    return spec, []


Made = tuple[Mapping[str, Path], list[RandomPart]]


def _transformers_part(
    folder: Path, model: str, config: Any, beside: Callable[[Path], object], kind: type[RandomPart] = RandomPart
) -> RandomPart:
    import transformers

    def describe(target: Path) -> None:
        config.save_pretrained(target)
        beside(target)

    with torch.device("meta"):
        network = getattr(transformers, model)(config)
    return kind(folder, network, "model", describe)


def _clip_like(sizes: Sizes) -> Callable[[Path, bool], Made]:
    def make(folder: Path, small: bool) -> Made:
        from transformers import CLIPConfig

        config = CLIPConfig(**(SMALL_CLIP if small else sizes))
        tokenizer = make_tokenizer("CLIPTokenizer", config.text_config.vocab_size)
        return {"model": folder}, [_transformers_part(folder, "CLIPModel", config, tokenizer.save_pretrained)]

    return make


def _clap(folder: Path, small: bool) -> Made:
    from transformers import ClapConfig, ClapFeatureExtractor

    config = ClapConfig(**(SMALL_CLAP if small else {}))
    tokenizer = make_tokenizer("RobertaTokenizer", config.text_config.vocab_size)
    more = {"feature_size": 16, "max_length_s": 1} if small else {}
    features = ClapFeatureExtractor(truncation="rand_trunc", padding="repeatpad", **more)

    def beside(target: Path) -> None:
        tokenizer.save_pretrained(target)
        features.save_pretrained(target)

    return {"model": folder}, [_transformers_part(folder, "ClapModel", config, beside)]


def _videoalign(folder: Path, small: bool) -> Made:
    from transformers import Qwen2VLConfig

    sizes = SMALL_QWEN2_VL if small else QWEN2_VL
    tokenizer = make_tokenizer("Qwen2Tokenizer", sizes["text_config"]["vocab_size"])
    tokenizer.add_tokens(list(MARKS), special_tokens=True)
    keys = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    marks = dict(zip(keys, tokenizer.convert_tokens_to_ids(list(MARKS[2:]))))
    config = Qwen2VLConfig(**sizes, **marks, tie_word_embeddings=True)
    words = folder / "prompt_template.py"

    def describe(target: Path) -> None:
        words.write_text(f"{TEMPLATE} = {WORDS.format(*SPECIAL_TOKENS)!r}\n")
        settings = {
            "data_config": {"fps": 2.0, "sample_type": "uniform", "prompt_template_type": "detailed_special"},
            "model_config": {"output_dim": 1, "use_special_tokens": True},
            "peft_lora_config": {"lora_enable": True, "lora_r": RANK, "lora_alpha": 2 * RANK},
            "inference_config": {f"{part}_{key}": float(key == "std") for part in PARTS for key in ("mean", "std")},
        }
        (target / "model_config.json").write_text(json.dumps(settings))

    base = _transformers_part(folder / "base", "Qwen2VLForConditionalGeneration", config, tokenizer.save_pretrained)
    rows = len(tokenizer) + len(SPECIAL_TOKENS)
    reward = _Released(folder / "VideoReward", base.network, "model", describe, rows)
    return {"checkpoint": reward.folder, "base": base.folder, "template": words}, [base, reward]


@dataclass(frozen=True)
class _Released(RandomPart):
    """VideoAlign's release: the whole state of a model in peft as model.pth, with `rows` embeddings and a reward head."""

    rows: int

    def write(self, numbers: RandomNumbers) -> None:
        step = self.folder / "checkpoint-1"
        step.mkdir(parents=True, exist_ok=True)
        self.describe(self.folder)
        state = {}
        for name, like in self.tensors().items():
            values, (layer, _, kind) = numbers.weights(name, like), name.rpartition(".")
            if name.endswith("embed_tokens.weight"):
                values = values[: self.rows].clone()
                state["rm_head.weight"] = numbers.weights("head.weight", values[:1])
            if re.fullmatch(ADAPTED, layer):
                name = f"{layer}.base_layer.{kind}"
                if kind == "weight":
                    for half, shape in (("A", (RANK, like.shape[1])), ("B", (like.shape[0], RANK))):
                        state[f"{layer}.lora_{half}.default.weight"] = numbers.weights("half", like.new_empty(shape))
            state[name] = values
        torch.save({f"base_model.model.{name}": values for name, values in state.items()}, step / "model.pth")


MAKERS: Mapping[str, Callable[[Path, bool], Made]] = {
    "videoalign": _videoalign,
    "clip": _clip_like(LARGE),
    "pickscore": _clip_like(HUGE),
    "hpsv2": _clip_like(HUGE),
    "clap": _clap,
}
"""Rewards that can be written, by name: the options with their files, and the parts."""
