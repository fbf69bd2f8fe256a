"""Exports: nothing shared with the source, float32 where a family keeps it, and LoRAs that know their expert."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sage_grpo.cli import export as command
from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints.export import write_card
from sage_grpo.models.lora import Merge, merged_weights
from sage_grpo.models.spec import LoraSpec, ModelSpec
from sage_grpo.run import saved

LORA = LoraSpec(rank=2)


def weights_of(folder: Path, component: str = "transformer") -> dict[str, torch.Tensor]:
    return load_file(folder / component / "diffusion_pytorch_model.safetensors")


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_card_says_which_components_are_left_out(model, tmp_path, monkeypatch) -> None:
    ours = model("sd3_two", guidance_scale=1.0, train=False)
    ours.save(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "\n# Weights trained with sage-grpo\n" in card
    lines, names = card.split("```python\n")[1].split("```")[0], {}
    exec(lines.replace("path/to/this/folder", str(tmp_path / "out")), names)
    assert names["pipe"].text_encoder_3 is names["pipe"].tokenizer_3 is None
    monkeypatch.setattr(ours, "spec", replace(ours.spec, path="owner/name"))
    write_card(tmp_path / "out", ours, whole=True)
    assert "base_model: owner/name" in (tmp_path / "out" / "README.md").read_text()


@pytest.fixture
def base(checkpoint, tmp_path) -> Path:
    """A checkpoint folder of the user's own, with things beside it that are not part of it."""
    folder = shutil.copytree(checkpoint("wan_t2v"), tmp_path / "base")
    (folder / "LICENSE.txt").write_text("yes")
    for stray in ("vae/.config.json.tmp", "vae/.cache/x.json", "runs/other/big.safetensors", "text_encoder/a.partial"):
        (folder / stray).parent.mkdir(parents=True, exist_ok=True)
        (folder / stray).touch()
    blob = tmp_path / "blob"  # a hub's snapshot is a folder of links into its blobs, which are not to be written
    shutil.move(folder / "vae" / "config.json", blob)
    blob.chmod(0o444)
    (folder / "vae" / "config.json").symlink_to(blob)
    return folder


def test_an_export_holds_the_checkpoint_alone_and_shares_nothing_with_it(base: Path, tmp_path) -> None:
    ours, before = ModelSpec(path=str(base), cache=None).load("cpu"), files_of(base)
    for folder in (base / "runs" / "final", tmp_path / "out"):
        ours.save(folder)
        names = {path.as_posix() for path in files_of(folder)}
        parts = {"model_index.json", "video.json", "LICENSE.txt", "README.md", "tokenizer/tokenizer_config.json"}
        assert parts <= names
        assert not [name for name in names if name.endswith((".tmp", ".partial")) or ".cache" in name or "runs" in name]
    with pytest.raises(ModelError, match="overwrite"):
        ours.save(base)
    shutil.rmtree(base / "runs" / "final")
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file():
            assert os.stat(path).st_mode & 0o200
            assert not path.is_symlink()
            assert path.stat().st_nlink == 1, path
            with path.open("r+b") as stream:  # in place: a link would carry it to the source
                stream.write(b"edited")
    assert files_of(base) == before


def test_saving_again_copies_only_what_changed(checkpoint, model, tmp_path) -> None:
    ours, base, out = model("wan_t2v"), checkpoint("wan_t2v"), tmp_path / "out"
    ours.save(out)
    large, edited = (out / "text_encoder" / name for name in ("model.safetensors", "config.json"))
    inode = large.stat().st_ino
    edited.write_text("{}")
    linked = out / "tokenizer" / "tokenizer_config.json"
    linked.unlink()
    os.link(base / "tokenizer" / "tokenizer_config.json", linked)  # what an earlier version left
    ours.save(out)
    assert large.stat().st_ino == inode
    assert edited.read_bytes() == (base / "text_encoder" / "config.json").read_bytes()
    assert not linked.samefile(base / "tokenizer" / "tokenizer_config.json")


def kept(name: str) -> bool:
    """What Wan's class says it keeps in float32."""
    parts = ("rope", "time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")
    return any(part in parts for part in name.split("."))


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "merged"])
def test_a_bfloat16_export_keeps_float32_where_the_family_does(lora, fresh_model, tmp_path) -> None:
    ours = fresh_model("wan_t2v", dtype="bfloat16", lora=lora)
    ours.save(tmp_path, merged=True)
    saved, own = weights_of(tmp_path), ours.transformer.state_dict()
    for name, tensor in saved.items():
        assert tensor.dtype == (torch.float32 if kept(name) else torch.bfloat16), name
        if kept(name) and lora is None:
            assert torch.equal(tensor, own[name].float()), name
    fine = [name for name in saved if kept(name) and not torch.equal(saved[name], saved[name].bfloat16().float())]
    assert fine  # so rounding would have been seen


def drawn(model) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.trainable().items()}


@pytest.fixture
def exported(checkpoint, tmp_path, monkeypatch, capsys):
    """(spec fields, options) -> the folder that `sage-grpo export` writes for a run whose weights are those of a fresh model."""
    from sage_grpo.distributed import checkpoint as checkpoints
    from sage_grpo.training import state
    from sage_grpo.training.config import TrainConfig

    def run(fields: dict, **options: object) -> Path:
        spec = ModelSpec(**{"path": str(checkpoint("wan_t2v")), "cache": None, "device": "cpu", **fields})
        source = tmp_path / "run"
        (source / "checkpoints" / "000001").mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(saved, "read_config", lambda folder, **options: TrainConfig(model=spec))
        monkeypatch.setattr(checkpoints, "newest_good", lambda root: root / "000001")
        monkeypatch.setattr(checkpoints, "find_fault", lambda folder: None)
        monkeypatch.setattr(state, "has_ema", lambda folder: False)
        monkeypatch.setattr(state, "load_weights", lambda folder, model, **options: drawn(model))
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        assert command.run(command.Options(run=str(source), out=str(out), **options)) == 0
        if "format" in options:
            return out
        assert f"Wrote {out} from {source}/checkpoints/000001.\n" in capsys.readouterr().out
        return out

    return run


def loras_of(folder: Path) -> dict[Path, object]:
    content: dict[Path, object] = dict(files_of(folder))
    for path in content:
        if path.suffix == ".safetensors":
            with safe_open(folder / path, framework="pt") as file:
                tensors = {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118
                content[path] = tensors, file.metadata()
    return content


@pytest.mark.parametrize(
    ("kind", "expert"),
    [
        ("wan22_t2v", "both"),
        *(pytest.param(kind, "high", marks=pytest.mark.slow) for kind in ("wan_i2v", "hunyuan15_i2v", "ltx2")),
        pytest.param("wan22_t2v", "low", marks=pytest.mark.slow),
    ],
)
def test_a_lora_is_exported_without_the_weights_of_its_base(kind, expert, checkpoint, exported, tmp_path) -> None:
    base = shutil.copytree(checkpoint(kind), tmp_path / "base")
    fields = {"path": str(base), "lora": LORA, "expert": expert, "dtype": "bfloat16"}
    ours = ModelSpec(**fields, cache=None).load("cpu")
    ours.save(tmp_path / "loaded", weights=drawn(ours))
    for file in base.rglob("*.safetensors"):
        file.unlink()
    assert loras_of(exported(fields)) == loras_of(tmp_path / "loaded")


def test_a_lora_is_exported_for_another_program(exported) -> None:
    out = exported({"lora": LORA, "dtype": "bfloat16"}, format="kohya", dtype="bfloat16")
    weights = load_file(out / "lora_kohya.safetensors")
    assert weights["lora_unet_blocks_0_ffn_0.lora_up.weight"].dtype == torch.bfloat16
    assert weights["lora_unet_blocks_0_ffn_0.lora_up.weight"].any()
    with pytest.raises(ValueError, match="writes a LoRA, but --merged folds it into the model"):
        exported({"lora": LORA}, format="comfy", merged=True)
    with pytest.raises(ValueError, match=r"writes a LoRA, but .* trained all weights"):
        exported({}, format="comfy")
    with pytest.raises(ValueError, match=r"writes a LoRA, but no program knows the layers of trainer_zoo\.toy"):
        exported({"lora": LORA, "family": "trainer_zoo.toy"}, format="peft")


def test_a_merged_export_is_a_whole_model(exported, checkpoint) -> None:
    assert weights_of(exported({"lora": LORA}, merged=True)).keys() == weights_of(checkpoint("wan_t2v")).keys()


@pytest.mark.parametrize(("scale", "kept"), [(1e-6, False), (2e-3, False), (1.0, True)])
def test_a_merge_says_how_much_of_the_update_is_in_it(scale, kept, fresh_model, tmp_path, recwarn) -> None:
    ours = fresh_model("wan_t2v", dtype="bfloat16", lora=LORA)
    weights = {name: tensor * (scale if "lora_B" in name else 0.1) for name, tensor in drawn(ours).items()}
    before = merged_weights(ours.transformer, {}, Merge())
    states, merge = ours.experts.save(tmp_path, weights, whole=True)
    layers = [name.partition(".lora_A")[0] for name in weights if ".lora_A" in name]
    halves = [[weights[f"{layer}.lora_{side}.default.weight"].double() for side in "BA"] for layer in layers]
    update = torch.cat([(up @ down).flatten() for up, down in halves])
    names = [f"{layer}.weight" for layer in layers]
    change = torch.cat([(states["transformer"][n].double() - before[n].double()).flatten() for n in names])
    assert merge.share == pytest.approx(float(change @ update / (update @ update)), rel=1e-4, abs=1e-6)
    assert (merge.share >= 0.9) == kept
    assert (change.norm() / update.norm() >= 0.9) == (scale > 1e-6)
    ours.save(tmp_path / "out", weights=weights, merged=True)
    assert any("rounds small updates away" in str(one.message) for one in recwarn) != kept
    assert ours.choices["merged"] in (tmp_path / "out" / "README.md").read_text()


# ---- experts
