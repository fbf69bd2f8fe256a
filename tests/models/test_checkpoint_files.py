"""Files that are incomplete, or another model's, are refused by name before anything is computed with them."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints import cache
from sage_grpo.models.checkpoints.checkpoint import read_defaults
from sage_grpo.models.checkpoints.files import check_lengths, opened_weights
from sage_grpo.models.spec import ModelSpec
from sage_grpo.recipes import recipe
from sage_grpo.types import VideoSpec

ROOT = Path(__file__).parents[2]
State = dict[str, torch.Tensor]


def load(folder: Path, **fields):
    return ModelSpec(path=str(folder), cache=None, **{"train": False, "guidance_scale": 1.0, **fields}).load("cpu")


def change(file: Path, edit: Callable[[State], object]) -> None:
    state = load_file(file)
    edit(state)
    save_file(state, file, {"format": "pt"})


@pytest.fixture
def copy(checkpoint, tmp_path):
    """kind -> a copy of a tiny checkpoint that a test may spoil."""
    return lambda kind: shutil.copytree(checkpoint(kind), tmp_path / kind)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_good_checkpoints_raise_no_false_alarm(kind: str, checkpoint) -> None:
    """Tied embeddings are stored once, buffers not at all; every encoder is loaded."""
    ours = load(checkpoint(kind))
    images = [tiny.image()] if ours.image_to_video else None
    assert len(ours.encode(['a cat says "miau"'], images)) == 1


def test_the_shipped_checkpoint_raises_no_false_alarm() -> None:
    assert ModelSpec(train=False, cache=None).load("cpu").encode(["a red circle"])


@pytest.mark.parametrize(
    ("kind", "component", "name"),
    [
        ("wan_t2v", "transformer", "blocks.0.attn1.to_k.weight"),
        ("wan22_t2v", "transformer_2", "proj_out.bias"),
        ("hunyuan15_t2v", "transformer", "proj_out.weight"),
        ("hunyuan15_t2v", "vae", "decoder.conv_in.conv.weight"),
    ],
)
def test_weights_that_a_network_lacks_has_too_many_of_or_in_another_shape(kind, component, name, copy) -> None:
    folder = copy(kind)
    file = folder / component / "diffusion_pytorch_model.safetensors"
    kept = load_file(file)[name]
    change(file, lambda state: state.pop(name))
    with pytest.raises(ModelError, match=rf'Component "{component}" of .*it lacks {name}\. Download it again'):
        load(folder)
    change(file, lambda state: state.update({name: kept, "stranger.weight": torch.zeros(1)}))
    with pytest.raises(ModelError, match=rf'"{component}".*it also holds stranger\.weight\.'):
        load(folder)
    change(file, lambda state: (state.pop("stranger.weight"), state.update({name: torch.zeros(7)})))
    with pytest.raises(ModelError, match=rf'"{component}".*it holds in another shape {name}\.'):
        load(folder)


def test_what_diffusers_ignores_is_no_stranger(copy) -> None:
    """Wan's published image-to-video weights hold norms that no version of the class has."""
    folder = copy("wan_t2v")
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    change(file, lambda state: state.update({"blocks.0.attn2.norm_added_q.weight": torch.zeros(1)}))
    load(folder)


@pytest.mark.parametrize(
    ("kind", "component", "name"),
    [
        ("wan_t2v", "text_encoder", "encoder.block.0.layer.0.SelfAttention.q.weight"),
        ("wan_t2v", "text_encoder", "shared.weight"),
        ("wan_i2v", "image_encoder", "encoder.layers.0.mlp.fc1.bias"),
        ("hunyuan15_t2v", "text_encoder", "layers.1.mlp.up_proj.weight"),
        ("hunyuan15_t2v", "text_encoder_2", "encoder.final_layer_norm.weight"),
    ],
)
def test_weights_that_an_encoder_lacks_are_never_random(kind: str, component: str, name: str, copy) -> None:
    folder = copy(kind)
    file = folder / component / "model.safetensors"
    change(file, lambda state: state.pop(name))
    ours = load(folder)
    images = [tiny.image()] if ours.image_to_video else None
    with pytest.raises(ModelError, match=rf'Component "{component}" of .*it lacks .*{name.split(".")[-2]}'):
        ours.encode(['a cat says "miau"'], images)
    change(file, lambda state: state.update({name: torch.zeros(3)}))
    with pytest.raises(ModelError, match=rf'"{component}".*it (lacks|holds in another shape) '):
        load(folder).encode(['a cat says "miau"'], images)


def test_files_that_were_cut_short_or_forgotten(copy) -> None:
    folder = copy("wan_t2v")
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match=r"vae.diffusion_pytorch_model.safetensors was cut short"):
        load(folder)
    file.rename(file.with_name("diffusion_pytorch_model.fp16.safetensors"))
    with pytest.raises(ModelError, match=r"diffusion_pytorch_model.safetensors is missing \(found: .*fp16"):
        load(folder)


# ---- tokenizers


def without_vocabulary(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").unlink()


def with_a_vocabulary_alone(folder: Path) -> None:
    """vocab.json without merges.txt."""
    words = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "tokenizer" / "vocab.json").write_text(json.dumps(words))
    without_vocabulary(folder)


def rows(component: str, count: int) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / component / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": count}))

    return edit


@pytest.mark.parametrize(
    ("kind", "spoil", "message"),
    [
        ("hunyuan15_t2v", without_vocabulary, r'"tokenizer" of .*needs tokenizer.json, or vocab.json and merges.txt'),
        ("hunyuan15_t2v", with_a_vocabulary_alone, r"there is no tokenizer.json and no merges.txt"),
        ("hunyuan15_t2v", rows("text_encoder", 152064), r'tokenizer" knows 257 tokens, but its model has 152064'),
        ("hunyuan15_t2v", rows("text_encoder", 200), r"knows 257 tokens.*200 embeddings: they do not belong together"),
        ("hunyuan15_t2v", rows("text_encoder_2", 1510), r'"tokenizer_2" of .*knows 384 tokens.*1510 embeddings'),
        ("wan_t2v", rows("text_encoder", 256384), r'"tokenizer" of .*knows 384 tokens, .*256384 embeddings'),
    ],
)
def test_tokenizers_that_do_not_fit_their_text_encoder(kind, spoil, message, copy) -> None:
    folder = copy(kind)
    spoil(folder)
    with pytest.raises(ModelError, match=message):
        load(folder)


# ---- prompts are cleaned as Wan's pipelines do


def test_ftfy_is_required_and_pinned() -> None:
    needed = (ROOT / "pyproject.toml").read_text().split("dependencies = [")[1].split("]\n")[0]
    assert '"ftfy>=' in needed
    assert "\nftfy==" in (ROOT / "constraints.txt").read_text()


def test_wan_encodes_cleaned_prompts_and_refuses_to_do_without(model, checkpoint, monkeypatch) -> None:
    wide, plain = model("wan_t2v", guidance_scale=1.0).encode(["色调艳丽，过曝", "色调艳丽,过曝"])
    assert torch.equal(wide.tensors["text"], plain.tensors["text"])  # ftfy makes the wide comma a plain one
    from sage_grpo.models.checkpoints import checkpoint as module

    found = importlib.util.find_spec
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "ftfy" else found(name))
    with pytest.raises(ModelError, match="Wan needs the package ftfy"):
        load(checkpoint("wan_t2v"))


def test_another_cleaner_is_another_encoding(monkeypatch, tmp_path) -> None:
    encoded = []

    def encode() -> State:
        encoded.append(1)
        return {"text": torch.zeros(1)}

    versions = iter(["6.3.1", "6.3.1", "7.0"])
    monkeypatch.setattr(cache, "version", lambda name: next(versions))
    for expected in (1, 1, 2):
        cache.EncodingCache(tmp_path, "checkpoint").get(("a prompt",), encode)
        assert len(encoded) == expected

    def absent(name: str) -> str:
        raise cache.PackageNotFoundError(name)

    monkeypatch.setattr(cache, "version", absent)
    cache.EncodingCache(tmp_path, "checkpoint").get(("a prompt",), encode)
    assert len(encoded) == 3


# ---- recipes leave to a checkpoint what it knows


def as_published(folder: Path, *, guidance: float, shift: float, target_size: int) -> Path:
    """A tiny checkpoint that says of itself what a published one does."""
    (folder / "video.json").unlink()
    for name, entry in {
        "guider/guider_config.json": {"guidance_scale": guidance},
        "scheduler/scheduler_config.json": {"shift": shift},
        "transformer/config.json": {"target_size": target_size},
    }.items():
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **entry}))
    return folder


@pytest.mark.parametrize(
    ("published", "guidance", "shift", "size"),
    [
        ({"guidance": 6.0, "shift": 5.0, "target_size": 640}, 6.0, 5.0, (480, 848)),
        ({"guidance": 6.0, "shift": 9.0, "target_size": 960}, 6.0, 9.0, (720, 1280)),
        ({"guidance": 1.0, "shift": 5.0, "target_size": 640}, 1.0, 5.0, (480, 848)),
    ],
    ids=["480p", "720p", "distilled"],
)
def test_the_hunyuan_recipe_takes_guidance_and_shift_from_its_checkpoint(
    published, guidance, shift, size, copy
) -> None:
    folder = as_published(copy("hunyuan15_t2v"), **published)
    spec = recipe("hunyuan15").model
    fields = {name: getattr(spec, name) for name in ("guidance_scale", "shift", "frames", "fps", "height", "width")}
    ours = load(folder, **fields)
    assert (ours.guidance_scale, ours.shift) == (guidance, shift)
    assert ours.video == VideoSpec(frames=81, height=352, width=624, fps=24)
    own = load(folder, **{**fields, "height": None, "width": None})
    assert (own.video.height, own.video.width) == size


def test_wan_5b_is_made_for_longer_and_larger_clips(copy) -> None:
    folder = copy("wan22_5b_t2v")
    (folder / "video.json").unlink()
    assert read_defaults(folder) == {"frames": 121, "height": 704, "width": 1280, "fps": 24.0}
    (folder / "video.json").write_text('{"fps": 8.0}')
    assert read_defaults(folder)["fps"] == 8.0


@pytest.mark.parametrize("size", [-1, -8, +1, 30, 4, 0])
def test_a_file_of_the_wrong_length_is_told_by_its_header(size: int, tmp_path: Path) -> None:
    """One byte too few is enough; `size` is cut off (or added), or all that is left."""
    file = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    file.parent.mkdir()
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(5)}, file, {"format": "pt"})
    check_lengths(tmp_path)
    content = file.read_bytes() + b"\0"
    file.write_bytes(content[: len(content) - 1 + size] if size in (-1, -8, 1) else content[:size])
    with pytest.raises(ModelError, match=r"model.safetensors was cut short .*bytes\). Download .* 'vae/\*'"):
        check_lengths(tmp_path)


@pytest.mark.parametrize("header", [b"[]", b"{", b'{"a": 1}', b'{"a": {"data_offsets": []}}', b"\xff"])
def test_a_header_that_is_none_is_no_traceback(header: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="no safetensors file"), opened_weights(file):
        pass


def test_every_file_that_is_read_must_be_whole(tmp_path: Path) -> None:
    """Of all components, also shards that an index names; what nobody reads may be anything."""
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
    for file in (
        parts[0] / "model-2.safetensors",
        parts[0] / "diffusion_pytorch_model.safetensors",
        parts[2] / "diffusion_pytorch_model.safetensors",
    ):
        whole = file.read_bytes()
        file.write_bytes(whole[:-1])
        with pytest.raises(ModelError, match=file.name):
            check_lengths(tmp_path)
        file.write_bytes(whole)
    (parts[0] / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-1.safetensors is missing"):
        check_lengths(tmp_path)
