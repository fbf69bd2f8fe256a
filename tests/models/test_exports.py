"""Exports: nothing shared with the source, float32 where a family keeps it, and LoRAs that know their expert."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sage_grpo.commands import export as command
from sage_grpo.folder import saved
from sage_grpo.models import ModelError
from sage_grpo.models.lora import FILE, load_lora
from sage_grpo.models.spec import LoraSpec, ModelSpec

LORA = LoraSpec(rank=2)


def weights_of(folder: Path, component: str = "transformer") -> dict[str, torch.Tensor]:
    return load_file(folder / component / "diffusion_pytorch_model.safetensors")


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- what a card says


def test_a_card_says_which_components_are_left_out(model, tmp_path) -> None:
    """diffusers loads a checkpoint without them only when told so: the card's own lines load the export."""
    model("sd3_two", guidance_scale=1.0, train=False).save(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    lines, names = card.split("```python\n")[1].split("```")[0], {}
    exec(lines.replace("path/to/this/folder", str(tmp_path / "out")), names)
    assert names["pipe"].text_encoder_3 is names["pipe"].tokenizer_3 is None


# ---- what is written lies alone


@pytest.fixture
def base(checkpoint, tmp_path) -> Path:
    """A checkpoint folder of the user's own, with things beside it that are not part of it."""
    folder = shutil.copytree(checkpoint("wan_t2v"), tmp_path / "base")
    (folder / "LICENSE.txt").write_text("yes")
    for stray in (
        "vae/.config.json.tmp",
        ".cache/huggingface/x.lock",
        "runs/other/big.safetensors",
        "text_encoder/a.partial",
    ):
        (folder / stray).parent.mkdir(parents=True, exist_ok=True)
        (folder / stray).touch()
    return folder


def test_editing_an_export_changes_nothing_else(base: Path, tmp_path) -> None:
    ours = ModelSpec(path=str(base), cache=None).load("cpu")
    before = files_of(base)
    ours.save(tmp_path / "out")
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file():
            assert os.access(path, os.W_OK)
            assert path.stat().st_nlink == 1, path
            with path.open("r+b") as stream:  # in place: a link would carry it to the source
                stream.write(b"edited")
    assert files_of(base) == before


def test_the_installed_package_is_never_linked_to(tmp_path) -> None:
    ours = ModelSpec(cache=None).load("cpu")
    ours.save(tmp_path / "out")
    links = {path.name: path.stat().st_nlink for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert set(links.values()) == {1}
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


def test_files_of_a_hub_cache_are_copied_through_their_links(base: Path, tmp_path) -> None:
    """A hub's snapshot is a folder of links into its blobs."""
    blob = tmp_path / "blob"
    shutil.move(base / "vae" / "config.json", blob)
    blob.chmod(0o444)
    (base / "vae" / "config.json").symlink_to(blob)
    ModelSpec(path=str(base), cache=None).load("cpu").save(tmp_path / "out")
    copied = tmp_path / "out" / "vae" / "config.json"
    assert not copied.is_symlink()
    assert not copied.samefile(blob)
    assert os.stat(copied).st_mode & 0o200


def test_an_export_holds_the_checkpoint_and_nothing_that_lies_beside_it(base: Path, tmp_path) -> None:
    ours = ModelSpec(path=str(base), cache=None).load("cpu")
    ours.save(base / "runs" / "final")  # a run inside the base's own folder must not copy itself
    ours.save(tmp_path / "out")
    assert set(files_of(tmp_path / "out")) == set(files_of(base / "runs" / "final"))
    names = {path.as_posix() for path in files_of(tmp_path / "out")}
    assert {"model_index.json", "video.json", "LICENSE.txt", "README.md", "tokenizer/tokenizer_config.json"} <= names
    assert not [name for name in names if name.endswith((".tmp", ".partial", ".lock")) or "runs" in name]


def test_saving_again_copies_only_what_changed(base: Path, tmp_path) -> None:
    ours = ModelSpec(path=str(base), cache=None).load("cpu")
    out = tmp_path / "out"
    ours.save(out)
    large, edited = (out / "text_encoder" / name for name in ("model.safetensors", "config.json"))
    inode = large.stat().st_ino
    edited.write_text("{}")
    linked = out / "vae" / "config.json"
    linked.unlink()
    os.link(base / "vae" / "config.json", linked)  # what an earlier version left
    ours.save(out)
    assert large.stat().st_ino == inode
    assert edited.read_bytes() == (base / "text_encoder" / "config.json").read_bytes()
    assert not linked.samefile(base / "vae" / "config.json")


def test_a_save_that_fails_leaves_no_temporary_files(base: Path, tmp_path, monkeypatch) -> None:
    import huggingface_hub

    def full(*arguments, **options):
        raise OSError("No space left on device")

    ours = ModelSpec(path=str(base), cache=None, lora=LORA).load("cpu")
    monkeypatch.setattr(huggingface_hub, "save_torch_state_dict", full)
    with pytest.raises(OSError, match="No space"):
        ours.save(tmp_path / "out", merged=True)
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space"):
        ours.save(tmp_path / "lora")
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space"):
        ours.save(tmp_path / "third", merged=True)
    left = [path for name in ("out", "lora", "third") for path in (tmp_path / name).rglob("*")]
    assert not [path for path in left if ".tmp" in path.name]


# ---- precision


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


def test_a_family_without_such_modules_is_stored_in_one_dtype(fresh_model, tmp_path) -> None:
    fresh_model("hunyuan15_t2v", dtype="bfloat16").save(tmp_path)
    assert {tensor.dtype for tensor in weights_of(tmp_path).values()} == {torch.bfloat16}


@pytest.fixture
def exported(checkpoint, tmp_path, monkeypatch):
    """(spec fields, options) -> the folder that `sage-grpo export` writes for a run whose weights are those of a fresh model."""
    from sage_grpo.parallel import checkpoint as checkpoints
    from sage_grpo.training import state
    from sage_grpo.training.config import TrainConfig

    def run(fields: dict, **options: object) -> Path:
        spec = ModelSpec(path=str(checkpoint("wan_t2v")), cache=None, device="cpu", **fields)
        source = tmp_path / "run"
        (source / "checkpoints" / "000001").mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(saved, "read_config", lambda folder, **options: TrainConfig(model=spec))
        monkeypatch.setattr(checkpoints, "newest_good", lambda root: root / "000001")
        monkeypatch.setattr(checkpoints, "find_fault", lambda folder: None)
        torch.manual_seed(0)
        monkeypatch.setattr(
            state,
            "load_weights",
            lambda folder, model, **options: {n: torch.randn_like(p) for n, p in model.trainable().items()},
        )
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        assert command.run(command.Options(run=str(source), out=str(out), **options)) == 0
        return out

    return run


@pytest.mark.parametrize(
    ("run", "asked", "stored"),
    [
        ("float32", None, torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
        ("bfloat16", None, torch.bfloat16),
        ("bfloat16", "float32", torch.float32),
    ],
)
def test_export_stores_what_was_asked_for(run, asked, stored, exported) -> None:
    full = weights_of(exported({"dtype": run}, dtype=asked))
    assert {tensor.dtype for name, tensor in full.items() if not kept(name)} == {stored}
    merged = weights_of(exported({"dtype": run, "lora": LORA}, dtype=asked, merged=True))
    assert {tensor.dtype for name, tensor in merged.items() if not kept(name)} == {stored}
    adapter = load_file(exported({"dtype": run, "lora": LORA}, dtype=asked) / FILE)
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32 if asked is None else stored}


def test_a_float32_merge_does_not_pass_through_bfloat16(exported) -> None:
    merged = weights_of(exported({"dtype": "bfloat16", "lora": LORA}, dtype="float32", merged=True))
    name = "blocks.0.attn1.to_q.weight"
    assert not torch.equal(merged[name], merged[name].bfloat16().float())


# ---- experts


@pytest.fixture(scope="module")
def loras(fresh_model, tmp_path_factory) -> dict[str, Path]:
    """A LoRA of each expert, and one of a model with a single network."""
    root = tmp_path_factory.mktemp("loras")
    fresh_model("wan22_t2v", lora=LORA, expert="high").save(root / "high")
    fresh_model("wan22_t2v", lora=LORA, expert="low").save(root / "low")
    fresh_model("wan_t2v", lora=LORA).save(root / "single")
    return {name: root / name for name in ("high", "low", "single")}


def test_the_file_names_its_expert(loras) -> None:
    for name, expected in (("high", "high"), ("low", "low"), ("single", None)):
        with safe_open(loras[name] / FILE, framework="pt") as file:
            assert file.metadata().get("sage_grpo_expert") == expected
            assert "lora_alpha" in file.metadata()["lora_adapter_metadata"]


@pytest.mark.parametrize(("own", "other"), [("high", "low"), ("low", "high")])
def test_a_lora_is_refused_by_the_other_expert(own: str, other: str, loras, fresh_model) -> None:
    fresh_model("wan22_t2v", train=False, expert=own).load_lora(loras[own])
    message = rf'LoRA of the {other}-noise expert.*into the {own}-noise expert\. Set model.expert to "{other}"'
    with pytest.raises(ModelError, match=message):
        fresh_model("wan22_t2v", train=False, expert=own).load_lora(loras[other])
    with pytest.raises(ModelError, match=message):
        fresh_model("wan22_t2v", expert=own, lora=LoraSpec(rank=2, path=str(loras[other])))


def test_a_stock_pipeline_gets_it_into_the_right_network(loras, fresh_model) -> None:
    pipe = fresh_model("wan22_t2v", train=False).pipe
    load_lora(pipe, loras["low"])
    assert [
        any("lora" in name for name, _ in net.named_parameters()) for net in (pipe.transformer, pipe.transformer_2)
    ] == [
        False,
        True,
    ]
    with pytest.raises(ModelError, match="low-noise expert"):
        load_lora(pipe, loras["low"], component="transformer")
    load_lora(pipe, loras["high"], component="transformer")
    load_lora(pipe, loras["single"], component="transformer_2", adapter="elsewhere")  # it does not say: as asked


def test_a_model_with_one_network_refuses_an_experts_lora(loras, fresh_model) -> None:
    with pytest.raises(ModelError, match="this checkpoint has one network"):
        fresh_model("wan_t2v", train=False).load_lora(loras["high"])
    fresh_model("wan_t2v", train=False).load_lora(loras["single"])


def test_generate_and_evaluate_refuse_it(loras, checkpoint, tmp_path, capsys) -> None:
    from sage_grpo.cli import main

    model = ["--model.path", str(checkpoint("wan22_t2v")), "--model.device", "cpu", "--lora", str(loras["low"])]
    reward = '[{"name": "video_stats", "weights": {"brightness": 1.0}}]'
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\n")
    out = ["--out", str(tmp_path / "out")]
    for argv in (["generate", "--prompts", "a cat"], ["evaluate", "--prompts", str(prompts), "--rewards", reward]):
        assert main([*argv, *model, *out]) == 2
        assert "low-noise expert, but would be loaded into the high-noise expert" in capsys.readouterr().err
