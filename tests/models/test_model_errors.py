"""Errors say what is wrong and what to do."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

import tiny
from sage_grpo.models import ModelError
from sage_grpo.models.spec import LoraSpec, ModelSpec


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copytree(checkpoint("wan_t2v"), tmp_path / "wan")


def load(folder, **fields):
    return ModelSpec(path=str(folder), cache=None, **fields).load("cpu")


def test_wrong_folder(checkpoint, tmp_path) -> None:
    folder = checkpoint("wan_t2v")
    with pytest.raises(ModelError, match=r'is not a folder. Did you mean ".*wan_t2v"'):
        load(folder.parent / "wan_t2")
    with pytest.raises(ModelError, match=r"no model_index.json.*give its parent folder"):
        load(folder / "transformer")
    with pytest.raises(ModelError, match="save_pretrained"):
        load(tmp_path)


@pytest.mark.parametrize("kind", [LocalEntryNotFoundError, HfHubHTTPError.__bases__[0]])
def test_hub_id_that_cannot_be_fetched(kind, monkeypatch) -> None:
    """Not in the cache, or whatever the hub's HTTP client calls a lost connection."""
    from diffusers import DiffusionPipeline

    def offline(*arguments, **options):
        raise kind("no network")

    monkeypatch.setattr(DiffusionPipeline, "download", offline)
    with pytest.raises(ModelError, match=r"neither a folder here.*Check the spelling"):
        load("nobody/nothing")


def test_hub_id_is_downloaded_once_as_safetensors(monkeypatch, checkpoint) -> None:
    from diffusers import DiffusionPipeline

    calls = []
    monkeypatch.setattr(
        DiffusionPipeline, "download", lambda name, **options: calls.append((name, options)) or checkpoint("wan_t2v")
    )
    ours = load("somebody/wan", revision="abc", family="wan")
    assert ours.latent_shape() == (16, 2, 4, 4)
    assert calls == [("somebody/wan", {"revision": "abc", "use_safetensors": True})]


def test_unknown_pipeline(copy) -> None:
    index = json.loads((copy / "model_index.json").read_text())
    (copy / "model_index.json").write_text(json.dumps({**index, "_class_name": "KandinskyPipeline"}))
    with pytest.raises(ModelError, match=r"KandinskyPipeline; supported are .*HunyuanVideo15Pipeline.*extending"):
        load(copy)


@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder", "tokenizer"])
def test_missing_component(component: str, copy) -> None:
    shutil.rmtree(copy / component)
    with pytest.raises(ModelError, match=rf'lacks its component "{component}".*Download it again'):
        load(copy)


def test_unlisted_component(copy) -> None:
    index = json.loads((copy / "model_index.json").read_text())
    (copy / "model_index.json").write_text(json.dumps({**index, "vae": [None, None]}))
    with pytest.raises(ModelError, match=r'"vae" \(model_index.json does not list it'):
        load(copy)


def test_pickles_are_not_loaded(copy) -> None:
    file = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    file.rename(file.with_suffix(".bin"))
    with pytest.raises(ModelError, match=r"Pickled weights are never loaded"):
        load(copy)


def test_image_encoder_that_is_missing_is_named_when_needed(checkpoint, tmp_path) -> None:
    folder = shutil.copytree(checkpoint("wan_i2v"), tmp_path / "wan")
    shutil.rmtree(folder / "image_encoder")
    with pytest.raises(ModelError, match="image_encoder"):
        load(folder).encode(["a cat"], [tiny.image()])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"frames": 6}, r"frames must be 4k \+ 1.*got 6: use 5 or 9"),
        ({"height": 36}, r"height must be a multiple of 16 here, got 36: use 32 or 48"),
        ({"width": 8}, r"width must be a multiple of 16 here, got 8: use 16"),
    ],
)
def test_sizes_that_the_vae_cannot_make(fields, message, checkpoint) -> None:
    with pytest.raises(ModelError, match=message):
        load(checkpoint("wan_t2v"), **fields)


def test_wrong_latents_and_conditions(model) -> None:
    ours = model("wan_t2v", guidance_scale=1.0)
    conditions = ours.encode(["a cat"])
    with pytest.raises(ModelError, match=r"need \(batch, 16, 2, 4, 4\)"):
        ours.velocity(torch.zeros(1, 16, 2, 4, 5), torch.tensor(0.5), conditions)
    with pytest.raises(ModelError, match=r"need \(batch, 16, 2, 4, 4\)"):
        ours.decode(torch.zeros(1, 16, 3, 4, 4))
    x = torch.zeros(2, *ours.latent_shape())
    with pytest.raises(ModelError, match="2 samples but 1 conditions"):
        ours.velocity(x, torch.tensor(0.5), conditions)
    with pytest.raises(ModelError, match=r"guidance 3 needs encoded negative prompts"):
        ours.velocity(x[:1], torch.tensor(0.5), conditions, guidance=3.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"family": "hunyuan_15"}, "Did you mean 'hunyuan15'"),
        ({"guidance_scale": 0.5}, "at least 1"),
        ({"frames": 0}, "frames must be at least 1"),
        ({"shift": -1.0}, "shift must be positive"),
    ],
)
def test_specs_check_themselves(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSpec(**fields)


def test_lora_specs_check_themselves() -> None:
    with pytest.raises(ValueError, match="rank"):
        LoraSpec(rank=0)
    with pytest.raises(ValueError, match="alpha"):
        LoraSpec(alpha=0.0)


def test_unknown_video_defaults(copy) -> None:
    (copy / "video.json").write_text('{"frame": 5}')
    with pytest.raises(ModelError, match="unknown entries"):
        load(copy)


def test_missing_lora_folder(model, tmp_path) -> None:
    with pytest.raises(ModelError, match="holds no LoRA"):
        model("wan_t2v", train=False).load_lora(tmp_path)


def test_family_module_that_does_not_exist() -> None:
    with pytest.raises(ModelError, match=r"there is no module no\.such\.family"):
        ModelSpec(family="no.such.family").load()


def test_cuda_that_is_not_there(monkeypatch, checkpoint) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="sees no CUDA device"):
        ModelSpec(path=str(checkpoint("wan_t2v"))).load("cuda")
