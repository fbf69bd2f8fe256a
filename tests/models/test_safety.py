"""A checkpoint folder names classes of two libraries and its own files; anything else is refused, unread and unimported."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints.files import check_index
from sage_grpo.models.spec import ModelSpec


@pytest.fixture
def copy(checkpoint, tmp_path) -> Path:
    return shutil.copytree(checkpoint("wan_t2v"), tmp_path / "wan")


def load(folder: Path):
    return ModelSpec(path=str(folder), cache=None, guidance_scale=1.0).load("cpu")


def change(file: Path, **entries: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


@pytest.mark.parametrize(
    "entry",
    [
        ["evil_component", "Scheduler"],
        ["subprocess", "Popen"],
        ["transformers", "AutoModel"],
        ["transformers", "utils.logging"],
        ["diffusers", 3],
        ["diffusers"],
        ["diffusers", "UniPCMultistepScheduler", "x"],
    ],
)
def test_components_come_from_two_libraries(copy, entry, tmp_path, monkeypatch) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "evil_component.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Scheduler: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    change(copy / "model_index.json", scheduler=entry)
    with pytest.raises(ModelError, match="never code that a checkpoint names"):
        load(copy)
    assert not mark.exists()
    assert "evil_component" not in sys.modules


@pytest.mark.parametrize("name", [["evil", "Pipeline"], None, 3])
def test_the_pipeline_is_a_name(copy, name) -> None:
    change(copy / "model_index.json", _class_name=name)
    with pytest.raises(ModelError, match="_class_name"):
        load(copy)


def test_a_text_encoder_is_a_model(copy) -> None:
    for kind in ("pipeline", "PretrainedConfig", "NoSuchThing"):
        change(copy / "model_index.json", text_encoder=["transformers", kind])
        with pytest.raises(ModelError, match="no model of transformers"):
            load(copy).encode(["a cat"])


@pytest.mark.parametrize("text", ["", "[]", '{"a": ' * 100_000, "\udcff", "{'a': 1}"])
def test_an_index_that_is_no_json_object_is_refused(copy, text) -> None:
    (copy / "model_index.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"model_index\.json"):
        load(copy)


@pytest.mark.parametrize(
    "shard", ["../../elsewhere.safetensors", "/etc/x.safetensors", "..", "a\\b.safetensors", "x.bin", 3]
)
@pytest.mark.parametrize("component", ["text_encoder", "transformer"])
def test_shards_lie_beside_their_index(copy, shard, component) -> None:
    (file,) = (copy / component).glob("*.safetensors")
    (copy / component / f"{file.stem}.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"a": file.name, "b": shard}})
    )
    with pytest.raises(ModelError, match="beside the index"):
        load(copy)


def test_real_sharded_weights_load(copy) -> None:
    from transformers import UMT5EncoderModel

    whole = load(copy)
    expected = whole.encode(["a cat"])[0].tensors["text"]
    encoder = UMT5EncoderModel.from_pretrained(copy / "text_encoder")
    for file in (copy / "text_encoder").glob("*.safetensors"):
        file.unlink()
    encoder.save_pretrained(copy / "text_encoder", max_shard_size="20KB")
    assert list((copy / "text_encoder").glob("*.index.json"))
    assert load(copy).encode(["a cat"])[0].tensors["text"].equal(expected)


def test_what_pipelines_write_is_accepted() -> None:
    index = {"_class_name": "X", "boundary_ratio": None, "vae": ["diffusers", "Y"], "image_encoder": [None, None]}
    check_index(Path("model_index.json"), index)
