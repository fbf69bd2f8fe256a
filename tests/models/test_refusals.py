"""What cannot be loaded or sampled as its pipeline would is refused by name, before any weights load."""

from __future__ import annotations

import json
import shutil

import diffusers
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

import tiny
from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints.checkpoint import read_defaults
from sage_grpo.models.checkpoints.from_configs import adapter_alone
from sage_grpo.models.spec import AdapterSpec, LoraSpec, ModelSpec


def load(folder, **fields):
    return ModelSpec(path=str(folder), cache=None, **fields).load("cpu")


def refused(folder, message: str, **fields) -> None:
    with pytest.raises(ModelError, match=message):
        load(folder, **fields)


SCHEDULER, INDEX, VAE = "scheduler/scheduler_config.json", "model_index.json", "vae/config.json"
PART = "scheduler"


def dpm(kind: str):
    plain = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    return diffusers.DPMSolverMultistepScheduler(**plain, algorithm_type=kind)


SAID = [
    ("wan_t2v", PART, diffusers.FlowMatchHeunDiscreteScheduler(), "supported are FlowMatchEuler"),
    ("wan_t2v", SCHEDULER, {"use_dynamic_shifting": True}, "sets use_dynamic_shifting to True"),
    ("wan_unipc_t2v", SCHEDULER, {"use_flow_sigmas": False}, "sets use_flow_sigmas to False"),
    ("wan_t2v", PART, dpm("sde-dpmsolver++"), r"algorithm_type to 'sde-dpmsolver\+\+'.*only 'dpmsolver' or"),
    ("flux", PART, tiny.unipc(), "is a UniPCMultistepScheduler; supported are"),
    ("hunyuan15_i2v", "transformer/config.json", {"use_meanflow": True}, "is a MeanFlow model .*step-distilled"),
    ("ltx2", VAE, {"decoder_inject_noise": [False, True, False, False]}, "would add noise of its own"),
    ("wan_t2v", INDEX, {"_class_name": "XPipeline"}, "XPipeline; supported are .*HunyuanVideo15Pipeline"),
    ("wan_t2v", INDEX, {"vae": [None, None]}, r'"vae" \(model_index.json does not list it'),
    ("wan_i2v", INDEX, {"image_encoder": [None, None]}, 'lacks its component "image_encoder"'),
    ("hunyuan15_i2v", INDEX, {"image_encoder": [None, None]}, 'lacks its component "image_encoder"'),
    ("sd3", INDEX, {"tokenizer_3": [None, None]}, 'lacks its component "tokenizer_3"'),
]


@pytest.mark.parametrize(("kind", "file", "entries", "message"), SAID)
def test_what_a_checkpoint_says_of_itself(kind: str, file: str, entries, message: str, checkpoint, tmp_path) -> None:
    """Before its transformer is read, whose file is empty here."""
    folder = tiny.variant(checkpoint(kind), tmp_path / kind, **({file: entries} if file == PART else {}))
    for weights in folder.glob("transformer*/*.safetensors"):
        weights.unlink()
        weights.touch()
    if file != PART:
        tiny.write(folder / file, {**json.loads((folder / file).read_text()), **entries})
    refused(folder, message)


ASKED = [
    ("flux", {"family": "ltx"}, "holds a FluxPipeline, but this family serves LTXPipeline"),
    ("sd3", {"attention": "_native_math"}, "this network knows PyTorch's own choice only"),
    ("hunyuan15_t2v", {"attention": "_native_cudnn", "deterministic": True}, r"model\.deterministic"),
    ("wan_t2v", {"guidance_scale_2": 3.0}, "guidance_scale_2 is 3, but .* has no second expert"),
    ("flux2_distilled", {"guidance_scale": 4.0}, "guidance_scale is 4, but .* was distilled"),
    ("ltx", {"options": {"decode_timestp": 0.1}}, "no option .decode_timestp.. Did you mean .decode_timestep."),
    ("sd3", {"options": {"x": 1.0}}, r'no option "x"\. It has none'),
    ("ltx", {"options": {"decode_timestep": 0.1}}, "takes no timestep"),
    ("hunyuan15_t2v", {"lora": LoraSpec(targets=["to_k", "attn.to_qq"])}, r"binds to no Linear module.*attn\.to_q"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), ASKED)
def test_what_is_asked_of_a_model(kind: str, fields, message: str, checkpoint) -> None:
    refused(checkpoint(kind), message, **fields)


def test_a_hub_id_is_fetched_as_safetensors_or_told_to_be_unreachable(monkeypatch, checkpoint) -> None:
    calls, lost = [], [LocalEntryNotFoundError, HfHubHTTPError.__bases__[0]]

    def fetch(name, **options):
        calls.append((name, options))
        if lost:
            raise lost.pop()("no network")
        return checkpoint("wan_t2v")

    monkeypatch.setattr(diffusers.DiffusionPipeline, "download", fetch)
    for _ in range(2):
        refused("nobody/nothing", r"neither a folder here.*Check the spelling")
    assert load("somebody/wan", revision="abc", family="wan").latent_shape() == (16, 2, 4, 4)
    assert calls[2:] == [("somebody/wan", {"revision": "abc", "use_safetensors": True})]


def test_a_lora_needs_only_the_config_files_of_a_hub_id(monkeypatch, checkpoint, tmp_path) -> None:
    asked = []
    fetched = lambda *names, **how: asked.append(how) or str(checkpoint("wan_t2v"))  # noqa: E731
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    monkeypatch.setattr(diffusers.DiffusionPipeline, "download", lambda *_, **__: pytest.fail("weights were fetched"))
    ours = adapter_alone(ModelSpec(path="owner/name", cache=None, lora=LoraSpec(rank=2)))
    ours.save(tmp_path, weights={name: torch.zeros(weight.shape) for name, weight in ours.trainable().items()})
    assert [how["allow_patterns"] for how in asked] == [["*.json"]]


def test_video_defaults_are_positive_numbers(tmp_path) -> None:
    wrong = ('"5"', "null", "{}", "true", "0", "1e999", "NaN", "1" + "0" * 30)
    cases = [(key, value, f"'{key}' must be") for key in ("frames", "height", "fps", "shift") for value in wrong]
    for key, value, message in (("frame", "5", r"unknown entries \['frame'\]"), *cases):
        (tmp_path / "video.json").write_text(f'{{"{key}": {value}}}')
        with pytest.raises(ModelError, match=message):
            read_defaults(tmp_path)


def test_folders_and_parts_that_are_not_there(checkpoint, tmp_path) -> None:
    folder = checkpoint("wan_t2v")
    refused(folder.parent / "wan_t2", r'is not a folder. Did you mean ".*wan_t2v"')
    refused(folder / "transformer", r"no model_index.json.*give its parent folder")
    refused(tmp_path, "save_pretrained")
    copy = shutil.copytree(folder, tmp_path / "wan")
    index = (copy / "model_index.json").read_text()
    (copy / "model_index.json").write_text(index.replace("WanTransformer3DModel", "NoSuchTransformer"))
    refused(copy, r"names a NoSuchTransformer as its transformer, which diffusers .* does not have")
    (copy / "model_index.json").write_text(index)
    tokenizer = (copy / "tokenizer").rename(copy / "elsewhere")
    refused(copy, r'lacks its component "tokenizer".*Download it again')
    tokenizer.rename(copy / "tokenizer")
    file = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    file.rename(file.with_suffix(".bin"))
    refused(copy, r"Pickled weights are never loaded")


def test_wrong_latents_and_conditions(model) -> None:
    ours = model("wan_t2v", guidance_scale=1.0)
    conditions, x, sigma = ours.encode(["a cat"]), torch.zeros(2, *ours.latent_shape()), torch.tensor(0.5)
    for call, message in (
        (lambda: ours.velocity(torch.zeros(1, 16, 2, 4, 5), sigma, conditions), r"need \(batch, 16, 2, 4, 4\)"),
        (lambda: ours.decode(torch.zeros(1, 16, 3, 4, 4)), r"need \(batch, 16, 2, 4, 4\)"),
        (lambda: ours.velocity(x, sigma, conditions), "2 samples but 1 conditions"),
        (lambda: ours.velocity(x[:1], sigma, conditions, guidance=3.0), r"guidance 3 needs encoded negative prompts"),
    ):
        with pytest.raises(ModelError, match=message):
            call()


def test_specs_check_themselves() -> None:
    for spec, fields, message in (
        (ModelSpec, {"guidance_scale": 1.0, "guidance_scale_2": 3.0}, r"off for both experts.*guidance_scale_2 is 3"),
        (ModelSpec, {"sigmas": [1.0, 1.0, 0.5]}, "fall strictly"),
        (ModelSpec, {"sigmas": [1.0, 0.0]}, r"must be in \(0, 1\]"),
        (ModelSpec, {"sigmas": [1.0, 0.5], "shift": 3.0}, "leave one"),
        (ModelSpec, {"family": "toy_in_a_file.py"}, r"a family is a module.* Write toy_in_a_file$"),
        (AdapterSpec, {"path": "somewhere", "file": "weights.bin"}, "safetensors file"),
    ):
        with pytest.raises((ModelError, ValueError), match=message):
            spec(**fields)
