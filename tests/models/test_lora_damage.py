"""Files of a LoRA that are damaged, empty or another model's: each is refused in words, before a network is touched."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sage_grpo.models import ModelError
from sage_grpo.models.lora import EXPERT_KEY, FILE, load_into, read_header
from sage_grpo.utils.pretrained import LORA_KEYS, lora_config_fault

CONFIG = "lora_adapter_metadata"


class Network(nn.Module):
    def __init__(self, says: BaseException | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 4), nn.Linear(4, 4)])
        self.says, self.loaded = says, 0

    def load_lora_adapter(self, folder: str, **settings: Any) -> None:
        """As diffusers': counted."""
        self.loaded += 1
        if self.says is not None:
            raise self.says


def lora(rank: int = 2, layer: int = 0) -> dict[str, Tensor]:
    wide, high = (6, 4) if layer == 0 else (4, 4)
    name = f"transformer.blocks.{layer}"
    return {f"{name}.lora_A.weight": torch.ones(rank, wide), f"{name}.lora_B.weight": torch.ones(high, rank)}


def saved(folder: Path, tensors: dict[str, Tensor], **metadata: str) -> Path:
    save_file(tensors, folder / FILE, metadata=metadata or None)
    return folder


def header(content: bytes, more: bytes = b"") -> bytes:
    return struct.pack("<Q", len(content)) + content + more


def refused(says: str, folder: Path) -> None:
    network = Network()
    with pytest.raises(ModelError, match=says):
        load_into(network, folder)
    assert not network.loaded


def test_a_whole_file_is_loaded(tmp_path) -> None:
    network = Network()
    load_into(network, saved(tmp_path, {**lora(), **lora(3, 1)}, **{CONFIG: json.dumps({"transformer.r": 3})}))
    assert network.loaded == 1
    assert len(read_header(tmp_path).shapes) == 4
    load_into(network, saved(tmp_path, lora(1)))
    assert network.loaded == 2
    assert read_header(saved(tmp_path, lora(), sage_grpo_expert="low")).metadata == {EXPERT_KEY: "low"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        struct.pack("<Q", 2**40),
        header(b"[]"),
        header(b"[" * 5000),
        header(b'{"transformer.a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'),
        header(b'{"transformer.a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}', b"\x00" * 8),
        header(b'{"transformer.a": {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]}}', b"\x00" * 8),
        b"PK\x03\x04 a pickle in a zip file" * 10,
    ],
)
def test_damaged_headers_are_refused_in_words(content: bytes, tmp_path) -> None:
    (tmp_path / FILE).write_bytes(content)
    refused(FILE, tmp_path)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({}, "holds no tensor"),
        ({"diffusion_model.blocks.0.lora_A.weight": torch.ones(2, 6)}, "change nothing"),
        ({"transformer.blocks.7.lora_A.weight": torch.ones(2, 6)}, "no layer blocks.7"),
        ({"transformer.blocks.0.lora_A.weight": torch.ones(2, 6)}, "no other half"),
        ({**lora(), "transformer.blocks.0.lora_B.weight": torch.ones(4, 3, 1)}, "shape"),
        ({**lora(), "transformer.blocks.0.lora_B.weight": torch.ones(5, 2)}, "shape"),
        ({**lora(), "transformer.blocks.0.lora_A.weight": torch.ones(0, 6)}, "shape"),
        ({**lora(), "transformer.blocks.0.lora_A.weight": torch.ones(2, 6, dtype=torch.int8)}, "I8"),
    ],
)
def test_weights_of_another_model_are_refused_by_name(tensors: dict[str, Tensor], says: str, tmp_path) -> None:
    refused(says, saved(tmp_path, tensors))


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "[" * 5000,
        '{"transformer.r": 1000000000}',
        '{"transformer.r": 0}',
        '{"transformer.lora_alpha": NaN}',
        '{"transformer.rank_pattern": {"blocks.0": 3}}',
        '{"transformer.alpha_pattern": {"blocks.0": 1e308}}',
        '{"transformer.megatron_core": "of_the_file"}',
        '{"other.megatron_core": "of_the_file", "transformer.megatron_core": null}',
        '{"transformer.of_another_library": null}',
        '{"transformer.use_dora": true}',
        '{"transformer.bias": "all"}',
        '{"transformer.modules_to_save": ["blocks.1"]}',
        '{"transformer.init_lora_weights": "pissa"}',
    ],
)
def test_a_configuration_that_the_weights_do_not_have_is_refused(config: str, tmp_path) -> None:
    refused("configuration", saved(tmp_path, lora(), **{CONFIG: config}))


def test_what_peft_writes_of_a_lora_is_known() -> None:
    from peft import LoraConfig

    plain = LoraConfig(target_modules=["to_q"]).to_dict()
    asked = {"use_rslora": True, "alpha_pattern": {"to_q": 4}, "lora_dropout": 0.1, "layers_to_transform": [0]}
    assert plain.keys() <= LORA_KEYS.keys()
    for one in (plain, plain | asked):
        assert lora_config_fault(json.loads(json.dumps(one, default=list))) is None


def test_memory_that_runs_out_is_no_fault_of_the_file_and_what_libraries_stumble_over_is(tmp_path) -> None:
    for error in (ImportError("no x"), KeyError("r"), TypeError("x"), RuntimeError("size mismatch"), ValueError("no")):
        with pytest.raises(ModelError, match=type(error).__name__):
            load_into(Network(error), saved(tmp_path, lora()))
    with pytest.raises(torch.OutOfMemoryError):
        load_into(Network(torch.OutOfMemoryError("full")), saved(tmp_path, lora()))


@pytest.mark.parametrize(("name", "flag"), [("lora_magnitude_vector", "use_dora"), ("lora_B.bias", "lora_bias")])
def test_dora_and_biases_are_refused_beside_a_configuration(name: str, flag: str, tmp_path) -> None:
    weights = {**lora(), f"transformer.blocks.0.{name}": torch.ones(4)}
    refused("not supported", saved(tmp_path, weights, **{CONFIG: "{}"}))
    refused(
        f'"{flag}", and only false is supported',
        saved(tmp_path, weights, **{CONFIG: f'{{"transformer.{flag}": true}}'}),
    )


@pytest.mark.parametrize("pattern", ["([a-z0-9_.]+)+!", "(a|a)*!", ".*.*.*!", "a?a?a?!"])
def test_a_pattern_that_would_be_matched_for_ever_is_refused(pattern: str) -> None:
    for key in ("rank_pattern", "alpha_pattern"):
        assert "may take for ever" in str(lora_config_fault({key: {pattern: 1}}))
        assert lora_config_fault({key: {r"^blocks\.\d+\.attn1.to_q": 1, "ff.net.0.proj": 1}}) is None
