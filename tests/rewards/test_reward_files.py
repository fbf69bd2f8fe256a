"""Reward models whose files are incomplete are refused: random weights and empty vocabularies give plausible scores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_grpo.rewards.built_in.clip import ClipScore
from sage_grpo.rewards.built_in.videoalign import VideoAlign
from sage_grpo.rewards.functions import RewardConfigError

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json")


def edit(folder: Path, name: str, tensor: torch.Tensor | None) -> Path:
    file = folder / "model.safetensors"
    state = {one: value for one, value in load_file(file).items() if one != name}
    save_file(state if tensor is None else {**state, name: tensor}, file, {"format": "pt"})
    return folder


def test_a_clip_folder_without_its_tokenizer_is_refused(clip_model, tmp_path) -> None:
    bare = shutil.copytree(clip_model, tmp_path / "bare", ignore=lambda *_: TOKENIZER)
    message = r'tokenizer in ".*bare" needs tokenizer.json, or vocab.json and merges'
    with pytest.raises(RewardConfigError, match=message):
        ClipScore(model=str(bare))
    assert ClipScore(model=str(bare), tokenizer=clip_model).names  # the tokenizer may come from elsewhere


def test_clip_weights_are_whole(clip_model, tmp_path) -> None:
    ids = torch.arange(40)[None]  # a buffer that older versions saved is no stranger
    folder = edit(shutil.copytree(clip_model, tmp_path / "clip"), "text_model.embeddings.position_ids", ids)
    assert ClipScore(model=str(folder)).names
    for name, tensor, message in (
        ("visual_projection.weight", torch.zeros(3, 3), r"it holds in another shape visual_projection\.weight"),
        ("visual_projection.weight", None, r"do not fit a CLIPModel: it lacks visual_projection\.weight"),
        ("stranger", torch.zeros(1), "it also holds stranger"),
    ):
        edit(folder, name, tensor)
        with pytest.raises(RewardConfigError, match=message):
            ClipScore(model=str(folder))


def test_videoalign_refuses_a_base_that_is_incomplete_and_a_lora_with_a_hole(spec, tmp_path) -> None:
    good = spec("videoalign").options
    base = edit(shutil.copytree(good["base"], tmp_path / "short"), "model.layers.0.mlp.up_proj.weight", None)
    with pytest.raises(RewardConfigError, match=r"do not fit a Qwen2VLForConditionalGeneration: it lacks .*up_proj"):
        VideoAlign(**{**good, "base": str(base)})
    folder = shutil.copytree(good["checkpoint"], tmp_path / "reward")
    (file,) = folder.glob("checkpoint-*/adapter_model.safetensors")
    kept = {name: tensor for name, tensor in load_file(file).items() if "layers.1.self_attn.k_proj" not in name}
    save_file(kept, file)
    with pytest.raises(RewardConfigError, match=r"LoRA is incomplete: it lacks .*layers\.1\.self_attn\.k_proj\.lora_A"):
        VideoAlign(**{**good, "checkpoint": str(folder)})
    config = json.loads((folder / "model_config.json").read_text())
    config["peft_lora_config"]["num_lora_modules"] = 13  # then it is meant
    (folder / "model_config.json").write_text(json.dumps(config))
    assert VideoAlign(**{**good, "checkpoint": str(folder)}).names
