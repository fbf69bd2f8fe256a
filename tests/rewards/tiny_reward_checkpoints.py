"""Tiny random checkpoints, built in code and written in their authors' layouts."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import torch
from safetensors.torch import save_file

from sage_grpo.rewards.frames import CLIP_PIXELS

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"]
SPECIALS += ["<|image_pad|>", "<|video_pad|>"]
REWARD_TOKENS = ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"]
INSTRUCTION = "\nJudge the picture.\nTextual prompt - {text_prompt}\n\n\n"
ENDING = "\nThe rating: <|Reward|>\n\nEND\n"
TEMPLATE = "\nJudge it. Look: <|VQ_reward|>\nMove: <|MQ_reward|>\nText {text_prompt} <|TA_reward|>\nEND\n"
NORMS = {"VQ": (3.6757, 2.2476), "MQ": (1.1646, 1.3811), "TA": (2.8105, 2.5121)}


def byte_symbols() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def qwen_tokenizer():
    """A byte-level Qwen2 tokenizer: 256 bytes and the special tokens of Qwen2-VL; it pads left, like the real one."""
    from transformers import Qwen2Tokenizer

    vocab = {symbol: index for index, symbol in enumerate(byte_symbols())}
    vocab["<|endoftext|>"] = len(vocab)
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], padding_side="left")
    tokenizer.add_tokens(SPECIALS, special_tokens=True)
    return tokenizer


def write_qwen_base(folder: Path) -> Path:
    """A random Qwen2-VL of a few thousand parameters, with more embedding rows than tokens."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    tokenizer = qwen_tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIALS}
    text = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": None}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = Qwen2VLConfig(
        text_config=text,
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    spread(Qwen2VLForConditionalGeneration(config), 0.25).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def spread(model, width: float = 0.3):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, width)
    return model


def reference_model(base: Path, *, lora: bool, output_dim: int):
    """The trained model as peft sees it, and its head: the reference for the scores."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2VLForConditionalGeneration

    tokenizer = qwen_tokenizer()
    tokenizer.add_tokens(REWARD_TOKENS, special_tokens=True)
    model = Qwen2VLForConditionalGeneration.from_pretrained(base, dtype=torch.float32).eval()
    model.resize_token_embeddings(len(tokenizer))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in (model.model.visual if lora else model.model).parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    if lora:
        where = r"model\.language_model\.layers\.\d+\..*_proj"
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, target_modules=where, bias="none")).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.1)
    head = torch.randn(output_dim, 32)
    return model, head, tokenizer


def _authors_name(name: str) -> str:
    name = re.sub(r"^(base_model\.model\.)?model\.language_model\.", r"\1model.", name)
    return re.sub(r"^(base_model\.model\.)?model\.visual\.", r"\1visual.", name)


def hpsv3_model(base: Path):
    from transformers import Qwen2VLForConditionalGeneration

    tokenizer = qwen_tokenizer()
    tokenizer.add_tokens(["<|Reward|>"], special_tokens=True)
    model = Qwen2VLForConditionalGeneration.from_pretrained(base, dtype=torch.float32).eval()
    model.resize_token_embeddings(len(tokenizer))
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    sizes = (torch.nn.Linear(32, 24), torch.nn.ReLU(), torch.nn.Dropout(0.05), torch.nn.Linear(24, 16), torch.nn.ReLU())
    return model, spread(torch.nn.Sequential(*sizes, torch.nn.Linear(16, 2)), 0.5).eval(), tokenizer


def write_hpsv3(folder: Path, model, head) -> dict[str, torch.Tensor]:
    """hpsv3.safetensors in the authors' names, those of transformers 4.45, and template.py."""
    state = {_authors_name(name): value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    state |= {f"rm_head.{name}": value.detach().clone() for name, value in head.state_dict().items()}
    save_file(state, folder / "hpsv3.safetensors")
    source = f"raise SystemExit('never executed')\nINSTRUCTION = {INSTRUCTION!r}\n"
    (folder / "template.py").write_text(f"{source}prompt_with_special_token = {ENDING!r}\nother = f'{{x}}'\n")
    return state


def read_by_qwen(inner, tokenizer, frames: torch.Tensor, text: str, tokens: list[str], **given) -> list[torch.Tensor]:
    """The hidden states at these tokens of one text with a video (an even number of frames in 0..1), or with a picture that is shown
    twice: plain patches and, unless given, flat positions."""
    video = len(frames) > 1
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in CLIP_PIXELS)
    frames = (frames if video else frames.expand(2, -1, -1, -1)).sub(mean).div(std)
    grid = (len(frames) // 2, frames.shape[2] // 14, frames.shape[3] // 14)
    pad = "<|video_pad|>" if video else "<|image_pad|>"
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
        f"{pad * (math.prod(grid) // 4)}<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    patches = {"pixel_values_videos" if video else "pixel_values": naive_patches(frames)}
    patches["video_grid_thw" if video else "image_grid_thw"] = torch.tensor([grid])
    flat = torch.arange(ids.shape[1]).view(1, 1, -1).expand(3, 1, -1)
    kinds = (ids == tokenizer.convert_tokens_to_ids(pad)).int() * (1 + video)
    with torch.no_grad():
        read = inner(
            input_ids=ids, mm_token_type_ids=kinds, **{"position_ids": flat, **patches, **given}, use_cache=False
        )
    return [read.last_hidden_state[0, ids[0].tolist().index(tokenizer.convert_tokens_to_ids(one))] for one in tokens]


def write_videoalign(folder: Path, model, head: torch.Tensor, *, kind: str) -> Path:
    """Write a folder in the authors' layout. kind: adapter, whole_lora (model.pth, unmerged) or whole (no LoRA)."""
    checkpoint = folder / "checkpoint-11"
    checkpoint.mkdir(parents=True, exist_ok=True)
    state = {_authors_name(name): value.clone() for name, value in model.state_dict().items()}
    prefix = "base_model.model." if kind != "whole" else ""
    if kind == "adapter":
        lora = {name.replace(".default", ""): value for name, value in state.items() if ".lora_" in name}
        save_file(lora, checkpoint / "adapter_model.safetensors")
        rest = {name: value for name, value in state.items() if name.startswith(f"{prefix}visual.")}
        torch.save({**rest, f"{prefix}rm_head.weight": head}, checkpoint / "non_lora_state_dict.pth")
    else:
        torch.save({**state, f"{prefix}rm_head.weight": head}, checkpoint / "model.pth")
    config = {
        "data_config": {"fps": 2, "num_frames": None, "max_frame_pixels": 200704, "eval_dim": ["VQ", "MQ", "TA"]}
        | {"prompt_template_type": "detailed_special", "sample_type": "uniform"},
        "model_config": {"output_dim": head.shape[0], "use_special_tokens": True, "reward_token": "special"},
        "peft_lora_config": {"lora_enable": kind != "whole", "lora_r": 4, "lora_alpha": 12, "use_rslora": False},
        "inference_config": {
            f"{part}_{key}": value for part, pair in NORMS.items() for key, value in zip(("mean", "std"), pair)
        },
    }
    (folder / "model_config.json").write_text(json.dumps(config))
    return folder


def write_clip(folder: Path) -> Path:
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    symbols = byte_symbols()
    vocab = {symbol: index for index, symbol in enumerate(symbols + [symbol + "</w>" for symbol in symbols])}
    vocab["<|startoftext|>"], vocab["<|endoftext|>"] = len(vocab), len(vocab) + 1
    tokenizer = CLIPTokenizer(vocab=vocab, merges=[])
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes["projection_dim"] = 16
    text = {**sizes, "vocab_size": len(vocab), "max_position_embeddings": 40}
    text |= {"bos_token_id": len(vocab) - 2, "eos_token_id": len(vocab) - 1}
    vision = {**sizes, "image_size": 30, "patch_size": 10}
    torch.manual_seed(5)  # cosines are positive: CLIPScore cuts the others to 0
    spread(CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def naive_patches(frames: torch.Tensor) -> torch.Tensor:
    """Qwen2-VL's patch order with plain loops: pairs of frames, 2 x 2 blocks, then pixels."""
    rows = []
    time, _, height, width = frames.shape
    for t in range(0, time, 2):
        for top in range(0, height, 28):
            for left in range(0, width, 28):
                for y in (top, top + 14):
                    for x in (left, left + 14):
                        block = frames[t : t + 2, :, y : y + 14, x : x + 14]
                        rows.append(block.permute(1, 0, 2, 3).reshape(-1))
    return torch.stack(rows)
