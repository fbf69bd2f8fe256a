"""Files that are incomplete, or another model's, are refused by name before anything is computed with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints.checkpoint import read_defaults
from sage_grpo.models.checkpoints.files import check_lengths
from sage_grpo.models.spec import ModelSpec

State = dict[str, torch.Tensor]


def load(folder: Path, **fields):
    return ModelSpec(path=str(folder), cache=None, **{"train": False, "guidance_scale": 1.0, **fields}).load("cpu")


def change(file: Path, edit: Callable[[State], object]) -> None:
    state = load_file(file)
    edit(state)
    save_file(state, file, {"format": "pt"})


@pytest.fixture
def copy(checkpoint, tmp_path):
    return lambda kind: shutil.copytree(checkpoint(kind), tmp_path / kind)


@pytest.mark.parametrize(
    ("kind", "component", "name"),
    [
        ("wan22_t2v", "transformer_2", "proj_out.bias"),
        ("hunyuan15_t2v", "vae", "decoder.conv_in.conv.weight"),
        ("hunyuan15_t2v", "text_encoder_2", "encoder.final_layer_norm.weight"),
        ("wan_t2v", "text_encoder", "shared.weight"),
        ("wan_i2v", "image_encoder", "encoder.layers.0.mlp.fc1.bias"),
    ],
)
def test_weights_that_a_component_lacks_are_never_random(kind: str, component: str, name: str, copy) -> None:
    folder = copy(kind)
    (file,) = (folder / component).glob("*.safetensors")
    kept, encoder = load_file(file)[name], "encoder" in component

    def refused(words: str) -> None:
        with pytest.raises(ModelError, match=rf'Component "{component}" of .*it {words}'):
            load(folder).encode(['a cat says "miau"'], [tiny.image()] if kind.endswith("i2v") else None)

    change(file, lambda state: state.pop(name))
    refused(rf"lacks .*{name.split('.')[-2]}")
    change(file, lambda state: state.update({name: torch.zeros(7)}))
    refused("(lacks|holds in another shape) " if encoder else f"holds in another shape {name}")
    if not encoder:
        change(file, lambda state: state.update({name: kept, "stranger.weight": torch.zeros(1)}))
        refused(r"also holds stranger\.weight")
        file.rename(file.with_name("diffusion_pytorch_model.fp16.safetensors"))
        with pytest.raises(ModelError, match=r"diffusion_pytorch_model.safetensors is missing \(found: .*fp16"):
            load(folder)


def test_what_diffusers_ignores_is_no_stranger(copy) -> None:
    folder = copy("wan_t2v")
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    change(file, lambda state: state.update({"blocks.0.attn2.norm_added_q.weight": torch.zeros(1)}))
    load(folder)
    encoder = folder / "text_encoder" / "model.safetensors"  # which loads when a prompt asks for it
    encoder.write_bytes(encoder.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model\.safetensors was cut short"):
        load(folder)


def test_tokenizers_that_do_not_fit_their_text_encoder(copy) -> None:
    folder = copy("hunyuan15_t2v")
    for component, count, message in (
        ("text_encoder", 200, r"knows 257 tokens.*200 embeddings: they do not belong together"),
        ("text_encoder_2", 1510, r'"tokenizer_2" of .*knows 384 tokens.*1510 embeddings'),
    ):
        file = folder / component / "config.json"
        whole = file.read_text()
        file.write_text(json.dumps({**json.loads(whole), "vocab_size": count}))
        with pytest.raises(ModelError, match=message):
            load(folder)
        file.write_text(whole)
    (folder / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r'"tokenizer" of .*needs tokenizer.json, or vocab.json and merges.txt'):
        load(folder)


def test_wan_encodes_cleaned_prompts(model) -> None:
    wide, plain = model("wan_t2v", guidance_scale=1.0).encode(["色调艳丽，过曝", "色调艳丽,过曝"])
    assert torch.equal(wide.tensors["text"], plain.tensors["text"])  # ftfy makes the wide comma a plain one


@pytest.mark.parametrize(
    ("kind", "says", "known"),
    [
        ("wan22_5b_t2v", {}, {"frames": 121, "height": 704, "width": 1280, "fps": 24.0}),
        ("hunyuan15_t2v", {"target_size": 960}, {"height": 720, "width": 1280}),
        ("hunyuan15_t2v", {"target_size": 640}, {}),
    ],
)
def test_checkpoints_that_are_made_for_other_clips(kind: str, says, known: dict[str, float], copy) -> None:
    folder = copy(kind)
    (folder / "video.json").unlink()
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **says}))
    assert read_defaults(folder) == known
    (folder / "video.json").write_text('{"fps": 8.0}')
    assert read_defaults(folder)["fps"] == 8.0


def test_a_file_of_the_wrong_length_is_told_by_its_header(tmp_path: Path) -> None:
    file = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    file.parent.mkdir()
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(5)}, file, {"format": "pt"})
    check_lengths(tmp_path)
    content = file.read_bytes()
    for damaged in (content[:-1], content + b"\0", content[:4], b""):
        file.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"model.safetensors was cut short .*bytes\). Download .* 'vae/\*'"):
            check_lengths(tmp_path)


def test_every_file_that_is_read_must_be_whole(tmp_path: Path) -> None:
    parts = [tmp_path / name for name in ("text_encoder_2", "transformer", "vae")]
    for part in parts:
        part.mkdir()
        save_file({"a": torch.zeros(3)}, part / "diffusion_pytorch_model.safetensors")
    save_file({"a": torch.zeros(3)}, parts[0] / "model-1.safetensors")
    save_file({"b": torch.zeros(3)}, parts[0] / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (parts[0] / "model.safetensors.index.json").write_text(json.dumps(index))
    (parts[1] / "diffusion_pytorch_model.fp16.safetensors").write_text("nobody reads it")
    check_lengths(tmp_path)
    name = "diffusion_pytorch_model.safetensors"
    for file in (parts[0] / "model-2.safetensors", parts[0] / name, parts[2] / name):
        whole = file.read_bytes()
        file.write_bytes(whole[:-1])
        with pytest.raises(ModelError, match=file.name):
            check_lengths(tmp_path)
        file.write_bytes(whole)
    (parts[0] / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-1.safetensors is missing"):
        check_lengths(tmp_path)
