"""Prompts and pictures are encoded once, under keys that cover all that encoding reads: an encoding from the disk is the one that would be made now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from sage_grpo.models.checkpoints.cache import EncodingCache, image_digest
from sage_grpo.models.spec import ModelSpec

UNREAD = {"transformer", "transformer_2", "scheduler", "guider", "audio_vae", "vocoder"}
"""Components that no encoding of a prompt or a picture reads."""
QUICK = ("wan_i2v",)
SLOW = (*("ltx2", "hunyuan15_i2v", "qwen_image_edit", "ltx", "flux", "flux2"), *("sd3", "z_image", "ltx2_3"))
PROMPT = 'a cat holds a sign "hi"'
BYTES = "ByT5Tokenizer"
OTHER = {"image_mean": [0.1, 0.2, 0.3], "eos_token": "<unk>"}
"""Settings of components without weights."""
SETTINGS: dict[str, Any] = {"qwen_image_edit": {"options": {"picture_pixels": 64 * 64}}}


def changed(component: Path) -> None:
    """Other weights and other settings under the same names, of a copy whose files are links to its source's."""
    for file in [path for path in component.rglob("*") if path.is_file()]:
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            tensors |= {
                name: one + 0.3 * torch.randn_like(one) for name, one in tensors.items() if one.is_floating_point()
            }
            file.unlink()
            save_file(tensors, file, metadata={"format": "pt"})
        elif file.suffix == ".json":
            content = json.loads(file.read_text())
            for name, value in OTHER.items():
                content |= {name: value} if name in content and content.get("tokenizer_class", BYTES) == BYTES else {}
            words = content.get("model", {}).get("vocab", {})
            for one, other in ("ca", "nt") if words else ():
                for end in ("", "</w>") if "c</w>" in words else ("",):
                    words[one + end], words[other + end] = words[other + end], words[one + end]
            tiny.write(file, {**content, **({} if words else {"_diffusers_version": "0"})})


def load(folder: Path, cache: Path, **fields: Any) -> Any:
    return ModelSpec(path=str(folder), cache=str(cache), guidance_scale=1.0, train=False, **fields).load("cpu")


def encoded(model: Any) -> dict[str, torch.Tensor]:
    picture = [tiny.image(1, 48, 40)] if max(model.pictures) else None
    return dict(model.encode([PROMPT], picture)[0].tensors)


def fresh(model: Any) -> dict[str, torch.Tensor]:
    model.cache = EncodingCache(None, "")
    model.conditions.clear()
    return encoded(model)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", [*QUICK, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)])
def test_whatever_component_changes_cached_encodings_are_fresh_ones(kind: str, checkpoint, tmp_path: Path) -> None:
    settings, cache = SETTINGS.get(kind, {}), tmp_path / "cache"
    before = load(tiny.variant(checkpoint(kind), tmp_path / "before"), cache, **settings)
    base, pictured = encoded(before), max(before.pictures)
    moved = set()
    components = {path.name for path in checkpoint(kind).iterdir() if path.is_dir()} - UNREAD
    for name in sorted(components):
        folder = tiny.variant(checkpoint(kind), tmp_path / name)
        changed(folder / name)
        model = load(folder, cache, **settings)
        cached, made = encoded(model), fresh(model)
        assert same(cached, made), name
        moved |= set() if same(made, base) else {name}
    assert moved == components - (set() if pictured else {"vae"})


@pytest.mark.parametrize(
    ("kind", "cases"),
    [
        ("ltx2", [{"options": {"image_crf": 0}}]),
        ("qwen_image_edit", [{"options": {"picture_pixels": 96 * 96}}]),
        ("wan_i2v", [{"frames": 9}, {"dtype": "bfloat16", "vae_dtype": "float32"}, {"vae_dtype": "bfloat16"}]),
    ],
)
def test_whatever_setting_changes_cached_encodings_are_fresh_ones(kind: str, cases, checkpoint, tmp_path: Path) -> None:
    base = encoded(load(checkpoint(kind), tmp_path, **SETTINGS.get(kind, {})))
    for settings in cases:
        model = load(checkpoint(kind), tmp_path, **settings)
        cached, made = encoded(model), fresh(model)
        assert same(cached, made)
        assert not same(made, base)


@pytest.mark.parametrize("kind", ["sd3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("wan_t2v", "flux"))])
def test_latents_of_other_components_have_another_key(kind: str, checkpoint, tmp_path: Path) -> None:
    made = {}
    parts = sorted(path.name for path in checkpoint(kind).iterdir() if path.is_dir())
    for name in ("", *parts):
        folder = tiny.variant(checkpoint(kind), tmp_path / f"other {name}")
        if name:
            changed(folder / name)
        model = load(folder, tmp_path / "cache")
        video = model.video
        clip = torch.stack([tiny.image(frame, video.height, video.width) for frame in range(video.frames)])[None]
        made[name] = (model.codec.key(), model.codec.to_latents(clip))
    key, latents = made.pop("")
    moved = {name for name, (_, other) in made.items() if not torch.equal(other, latents)}
    assert moved == {"vae"}
    assert moved == {name for name, (other, _) in made.items() if other != key}


def test_pictures_are_told_apart() -> None:
    picture = tiny.image(1, 4, 6)
    others = [picture.reshape(6, 4, 3), tiny.image(2, 4, 6), picture[None], None]
    prints = {image_digest(one) for one in (picture, *others)}
    assert len(prints) == len(others) + 1
    assert image_digest(picture.clone()) in prints


def test_too_long_prompts_are_cut_as_in_the_pipeline(model) -> None:
    assert len(model("wan_t2v").encode(["x" * 2000])[0].tensors["text"]) == 512
    assert len(model("hunyuan15_t2v").encode(["x" * 2000])[0].tensors["text"]) == 1000
