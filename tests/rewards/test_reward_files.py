"""Reward models whose files are incomplete are refused: random weights and empty vocabularies give plausible scores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_reward_checkpoints import TEMPLATE, reference_model, write_clip, write_qwen_base, write_videoalign

from sage_grpo.rewards.built_in.clip import ClipScore
from sage_grpo.rewards.built_in.videoalign import VideoAlign
from sage_grpo.rewards.functions import RewardConfigError

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json")


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    return write_qwen_base(tmp_path_factory.mktemp("qwen") / "base", layers=2)


def strip(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).unlink(missing_ok=True)
    return folder


def edit(folder: Path, **changes: torch.Tensor | None) -> Path:
    """Replace, add or (None) remove tensors; `__` stands for a point."""
    file = folder / "model.safetensors"
    state = load_file(file)
    for name, tensor in ((name.replace("__", "."), tensor) for name, tensor in changes.items()):
        if tensor is None:
            del state[name]
        else:
            state[name] = tensor
    save_file(state, file, {"format": "pt"})
    return folder


def test_a_clip_folder_without_its_tokenizer_is_refused(clip, tmp_path) -> None:
    whole, bare = shutil.copytree(clip, tmp_path / "whole"), shutil.copytree(clip, tmp_path / "bare")
    strip(bare, *TOKENIZER)
    with pytest.raises(
        RewardConfigError, match=r'tokenizer in ".*bare" needs tokenizer.json, or vocab.json and merges'
    ):
        ClipScore(model=str(bare))
    assert ClipScore(model=str(bare), tokenizer=str(whole)).names  # the tokenizer may come from elsewhere


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_projection__weight": None}, r"do not fit a CLIPModel: it lacks text_projection\.weight"),
        ({"stranger": torch.zeros(1)}, "it also holds stranger"),
        ({"visual_projection__weight": torch.zeros(3, 3)}, r"it holds in another shape visual_projection\.weight"),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_clip_weights_are_whole(changes, message, clip, tmp_path) -> None:
    ids = torch.arange(40)[None]  # a buffer that older versions saved is no stranger
    folder = edit(shutil.copytree(clip, tmp_path / "clip"), text_model__embeddings__position_ids=ids)
    assert ClipScore(model=str(folder)).names
    edit(folder, **changes)
    with pytest.raises(RewardConfigError, match=message):
        ClipScore(model=str(folder))


@pytest.fixture(scope="module")
def videoalign(qwen, tmp_path_factory):
    """base and folder -> the reward; the folder is a good one unless given."""
    root = tmp_path_factory.mktemp("videoalign")
    model, head, _ = reference_model(qwen, lora=True, output_dim=1)
    good = write_videoalign(root / "reward", model, head, kind="adapter")
    (root / "template.txt").write_text(TEMPLATE)

    def build(base: Path, folder: Path = good) -> VideoAlign:
        return VideoAlign(checkpoint=str(folder), base=str(base), template=str(root / "template.txt"))

    build.good = good
    return build


def test_videoalign_refuses_a_base_that_is_incomplete(videoalign, qwen, tmp_path) -> None:
    assert videoalign(qwen).names
    short = edit(shutil.copytree(qwen, tmp_path / "short"), model__layers__0__mlp__up_proj__weight=None)
    with pytest.raises(RewardConfigError, match=r"do not fit a Qwen2VLForConditionalGeneration: it lacks .*up_proj"):
        videoalign(short)


def test_videoalign_refuses_a_lora_with_a_hole(videoalign, qwen, tmp_path) -> None:
    folder = shutil.copytree(videoalign.good, tmp_path / "reward")
    (file,) = folder.glob("checkpoint-*/adapter_model.safetensors")
    kept = {name: tensor for name, tensor in load_file(file).items() if "layers.1.self_attn.k_proj" not in name}
    save_file(kept, file)
    with pytest.raises(RewardConfigError, match=r"LoRA is incomplete: it lacks .*layers\.1\.self_attn\.k_proj\.lora_A"):
        videoalign(qwen, folder)
    config = json.loads((folder / "model_config.json").read_text())
    config["peft_lora_config"]["num_lora_modules"] = 13  # then it is meant
    (folder / "model_config.json").write_text(json.dumps(config))
    assert videoalign(qwen, folder).names
