"""A checkpoint folder names classes of two libraries and its own files; anything else is refused, unread and unimported."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints.from_configs import weightless
from sage_grpo.models.spec import ModelSpec
from sage_grpo.utils.json_schema import DocumentError
from sage_grpo.utils.pretrained import from_pretrained, load_config


@pytest.fixture
def copy(checkpoint, tmp_path) -> Path:
    return shutil.copytree(checkpoint("wan_t2v"), tmp_path / "wan")


def load(folder: Path):
    return ModelSpec(path=str(folder), cache=None, guidance_scale=1.0).load("cpu")


def change(file: Path, **entries: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


CODE = "never code that a checkpoint names"


@pytest.mark.parametrize(
    ("name", "entry", "says"),
    [
        ("scheduler", ["evil_component", "Scheduler"], CODE),
        ("scheduler", ["subprocess", "Popen"], CODE),
        ("scheduler", ["transformers", "utils.logging"], CODE),
        ("scheduler", ["diffusers", 3], CODE),
        ("scheduler", ["diffusers", "UniPCMultistepScheduler", "x"], CODE),
        ("transformer", ["diffusers", "WanPipeline"], "transformer, which is not part of a pipeline"),
        ("vae", ["diffusers", "ConfigMixin"], "vae, which is not part of a pipeline"),
        ("vae", ["transformers", "UMT5EncoderModel"], "only its text and image encoders"),
        ("scheduler", ["diffusers", "WanPipeline"], "scheduler of .* is a WanPipeline"),
        ("tokenizer", ["transformers", "Trainer"], "tokenizer"),
        ("tokenizer", ["transformers", "UMT5EncoderModel"], "tokenizer"),
    ],
)
def test_a_component_is_a_part_and_no_pipeline(copy, name, entry, says, tmp_path, monkeypatch) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "evil_component.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Scheduler: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    inner = {"_class_name": "WanPipeline", "vae": ["evil_component", "Scheduler"]}
    (copy / name / "model_index.json").write_text(json.dumps(inner))
    change(copy / "model_index.json", **{name: entry})
    with pytest.raises(ModelError, match=says):
        load(copy)
    assert not mark.exists()
    assert "evil_component" not in sys.modules


def test_a_text_encoder_is_a_model(copy) -> None:
    kinds = {
        "pipeline": "not part",
        "PretrainedConfig": "not part",
        "NoSuchThing": "does not have",
        "T5Tokenizer": "not a model",
    }
    for kind, fault in kinds.items():
        change(copy / "model_index.json", text_encoder=["transformers", kind])
        with pytest.raises(ModelError, match=fault):
            load(copy).encode(["a cat"])


def test_entries_of_another_kind_are_refused(copy) -> None:
    index = json.loads((copy / "model_index.json").read_text())
    cases = [(name, value, "") for name in ("transformer", "tokenizer") for value in ("x", [], {"a": 1}, [None], None)]
    cases += [("transformer_2", value, "") for value in (3, [None], "x" * 10**6)]
    cases += [("_class_name", value, "_class_name") for value in (["evil", "Pipeline"], None, 3)]
    vae = ["diffusers", "AutoencoderKLWan"]
    cases += [(name, vae, "names of components are words") for name in ("../elsewhere", "/", "")]
    for name, value, message in cases:
        (copy / "model_index.json").write_text(json.dumps({**index, name: value}))
        with pytest.raises(ModelError, match=message or None):
            load(copy)


CONFIGS = ("transformer/config.json", "vae/config.json", "text_encoder/config.json", "scheduler/scheduler_config.json")


@pytest.mark.parametrize("file", ["model_index.json", *CONFIGS])
def test_a_configuration_that_is_none_is_refused(copy, file) -> None:
    for text in ("", "[]", "null", '{"a": ' * 100_000, '{"num_layers": "x", "shift": "x", "base_dim": {}}'):
        (copy / file).write_text(text)
        with pytest.raises(ModelError, match=file.partition("/")[0]):
            load(copy).encode(["a cat"])
    (copy / file).unlink()
    os.mkfifo(copy / file)
    with pytest.raises(ModelError, match="json"):
        load(copy).encode(["a cat"])


@pytest.mark.parametrize(
    ("component", "entry"),
    [
        ("transformer", {"num_layers": 9000}),
        ("transformer", {"rope_max_seq_len": 10**12}),
        ("vae", {"base_dim": 10**7}),
        ("text_encoder", {"num_layers": 10**18}),
        ("text_encoder", {"d_ff": 10**12}),
    ],
)
def test_a_network_is_no_larger_than_its_weights(copy, component, entry) -> None:
    change(copy / component / "config.json", **entry)
    with pytest.raises(ModelError, match=r"larger network than its weights|networks have at most"):
        load(copy).encode(["a cat"])


@pytest.fixture
def encoder(copy, monkeypatch) -> Path:
    """A folder with a text encoder; a kernel that is asked for from the hub fails the test."""
    from transformers.integrations import hub_kernels

    def fetch(name: str, *args: object, **options: object) -> None:
        raise AssertionError(f"{name} would be fetched")

    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", fetch)
    return copy / "text_encoder"


@pytest.mark.parametrize(
    "entry",
    [
        {"attn_implementation": "kernels-community/flash-attn2"},
        {"_attn_implementation": "a/b@c:d"},
        {"attn_implementation": {"": "a/b"}},
        {"text_config": {"inner": [{"attn_implementation": "a/b"}]}},
        {"experts_implementation": "a/b"},
        {"quantization_config": {"quant_method": "mxfp4"}},
    ],
)
def test_a_configuration_fetches_no_code(encoder, entry) -> None:
    from transformers import AutoConfig, UMT5EncoderModel

    change(encoder / "config.json", **entry)
    for read in (lambda: from_pretrained(UMT5EncoderModel, encoder), lambda: load_config(AutoConfig, encoder)):
        with pytest.raises(DocumentError, match=r"config\.json: \w+ is "):
            read()
    with pytest.raises(ModelError, match=r"config\.json: \w+ is "):
        load(encoder.parent).encode(["a cat"])


def test_a_configurations_own_class_is_not_imported(encoder, tmp_path) -> None:
    from transformers import AutoConfig, UMT5Config

    (encoder / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w').close()\nclass Config: pass\n")
    change(encoder / "config.json", auto_map={"AutoConfig": "evil.Config"})
    assert type(load_config(AutoConfig, encoder)) is UMT5Config
    assert not (tmp_path / "mark").exists()


def test_the_attention_of_encoders_is_ours(encoder) -> None:
    from transformers import UMT5EncoderModel

    default = from_pretrained(UMT5EncoderModel, encoder).config._attn_implementation
    for name, used in {"flash_attention_2": default, "flex_attention": default, "eager": "eager"}.items():
        change(encoder / "config.json", attn_implementation=name)
        assert from_pretrained(UMT5EncoderModel, encoder).config._attn_implementation == used


def test_a_text_encoder_is_no_adapter_of_another_model(encoder) -> None:
    (encoder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "a/b", "megatron_core": "evil"})
    )
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        load(encoder.parent).encode(["a cat"])


@pytest.mark.parametrize(
    ("component", "value"), [("transformer", torch.inf), ("vae", torch.nan), ("text_encoder", torch.nan)]
)
def test_weights_that_are_no_numbers_make_no_clip(copy, component, value) -> None:
    from sage_grpo.models.policy import build_solver, solve

    (file,) = (copy / component).glob("*.safetensors")
    weights = load_file(file)
    name = next(
        n for n in sorted(weights) if n.endswith("proj_out.weight") or "decoder.conv_in.weight" in n or "final" in n
    )
    weights[name] = weights[name] * value
    save_file(weights, file, {"format": "pt"})

    def sample() -> None:
        model = load(copy)
        conditions = model.encode(["a cat"])
        model.decode(solve(model, build_solver(model, "euler", 2), torch.randn(1, *model.latent_shape()), conditions))

    with pytest.raises(ModelError, match=f"{name} holds NaN or infinity"):
        sample()


@pytest.mark.parametrize("load", [load, lambda folder: weightless(ModelSpec(path=str(folder)), folder)])
def test_a_scheduler_makes_no_table_that_fills_the_memory(copy, load) -> None:
    change(copy / "scheduler" / "scheduler_config.json", num_train_timesteps=10**13)
    with pytest.raises(ModelError, match="num_train_timesteps is 10000000000000; schedulers have at most 10,000"):
        load(copy)
