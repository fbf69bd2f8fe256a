"""Specs of the built-in rewards on tiny random networks, made once where they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from authors_layouts import open_clip_state, write_bert_tokenizer, write_imagereward
from safetensors.torch import save_file
from tiny_reward_checkpoints import (
    TEMPLATE,
    qwen_tokenizer,
    reference_model,
    write_clip,
    write_dino,
    write_qwen_base,
    write_videoalign,
)

from sage_grpo.rewards.spec import RewardSpec

Make = Callable[[str], RewardSpec]


def clip_reward(name: str, folder: Path, **options: object) -> RewardSpec:
    return RewardSpec(name=name, options={"model": str(write_clip(folder)), **options})


def aesthetic(folder: Path) -> RewardSpec:
    torch.manual_seed(1)
    save_file({"0.weight": torch.randn(8, 16), "1.weight": torch.randn(1, 8)}, folder / "head.safetensors")
    return clip_reward("aesthetic", folder / "clip", head=str(folder / "head.safetensors"))


def hpsv2(folder: Path) -> RewardSpec:
    save_file(open_clip_state(), folder / "hps.safetensors")
    base = write_clip(folder / "base")
    return RewardSpec(name="hpsv2", options={"checkpoint": str(folder / "hps.safetensors"), "base": str(base)})


def imagereward(folder: Path) -> RewardSpec:
    write_imagereward(folder)
    write_bert_tokenizer(folder / "bert")
    names = {"checkpoint": "imagereward.safetensors", "config": "med_config.json", "tokenizer": "bert"}
    return RewardSpec(name="imagereward", options={option: str(folder / name) for option, name in names.items()})


def videoalign(folder: Path) -> RewardSpec:
    base = write_qwen_base(folder / "base")
    model, head, _ = reference_model(base, lora=True, output_dim=3)
    write_videoalign(folder / "reward", model, head, kind="adapter")
    (folder / "template.txt").write_text(TEMPLATE)
    names = {"checkpoint": "reward", "base": "base", "template": "template.txt"}
    options = {option: str(folder / name) for option, name in names.items()}
    return RewardSpec(name="videoalign", weights={"VQ": 0.5, "TA": 1.0}, options=options)


def hpsv3(folder: Path) -> RewardSpec:
    from transformers import Qwen2VLForConditionalGeneration

    base, tokenizer = write_qwen_base(folder / "base"), qwen_tokenizer()
    tokenizer.add_tokens(["<|Reward|>"], special_tokens=True)
    model = Qwen2VLForConditionalGeneration.from_pretrained(base, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer))
    state = {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    torch.manual_seed(2)
    head = {"0.weight": torch.randn(8, 32), "0.bias": torch.zeros(8), "2.weight": torch.randn(2, 8)}
    head["2.bias"] = torch.zeros(2)
    save_file(state | {f"rm_head.{name}": value for name, value in head.items()}, folder / "hpsv3.safetensors")
    (folder / "template.txt").write_text("Judge {text_prompt} <|Reward|> END")
    names = {"checkpoint": "hpsv3.safetensors", "base": "base", "template": "template.txt"}
    options = {option: str(folder / name) for option, name in names.items()}
    return RewardSpec(name="hpsv3", options={**options, "dtype": "float32"})


def subject(folder: Path) -> RewardSpec:
    return RewardSpec(name="subject_consistency", options={"model": str(write_dino(folder)), "size": 32})


NETWORKS: dict[str, tuple[Callable[[Path], RewardSpec], tuple[int, int]]] = {
    "clip": (lambda folder: clip_reward("clip", folder, clamp=False), (30, 30)),
    "pickscore": (lambda folder: clip_reward("pickscore", folder), (30, 30)),
    "aesthetic": (aesthetic, (30, 30)),
    "background_consistency": (lambda folder: clip_reward("background_consistency", folder), (30, 30)),
    "subject_consistency": (subject, (32, 32)),
    "hpsv2": (hpsv2, (30, 30)),
    "imagereward": (imagereward, (24, 24)),
    "videoalign": (videoalign, (308, 336)),
    "hpsv3": (hpsv3, (112, 112)),
}
"""How a spec with tiny weights is made, and a size of frames that is the network's own: nothing is resized, and so nothing rounded
(HPSv3's with `SMALL_PIXELS`)."""
SMALL_PIXELS = 16 * 28 * 28
"""Instead of HPSv3's PIXELS, to be quick."""


def maker(folder_of: Callable[[str], Path]) -> Make:
    """Makes each spec once; `folder_of` gives an empty folder."""
    made: dict[str, RewardSpec] = {}

    def of(name: str) -> RewardSpec:
        if name not in made:
            made[name] = NETWORKS[name][0](folder_of(name))
        return made[name]

    return of
