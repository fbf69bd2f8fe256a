"""HunyuanVideo-1.5 in the authors' layout and in diffusers': every tensor is mapped once, and the way back is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from sage_grpo.cli.main import main
from sage_grpo.models import ModelError
from sage_grpo.tools.convert import to_diffusers, to_original

KIND = "hunyuan15_t2v"


@pytest.fixture
def weights(checkpoint) -> dict[str, torch.Tensor]:
    return dict(tiny.pipeline(checkpoint(KIND)).transformer.state_dict())


def test_every_tensor_goes_there_and_back(weights) -> None:
    original = to_original(weights)
    refined = sum(".refiner_blocks." in name and ".attn.to_q." in name for name in weights)
    assert refined >= 2
    assert len(original) == len(weights) - 2 * refined  # q, k and v are one there, and nothing else is joined or lost
    assert sum(tensor.numel() for tensor in original.values()) == sum(tensor.numel() for tensor in weights.values())
    back = to_diffusers(original)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_known_tensors_are_where_the_authors_have_them(weights) -> None:
    original, refiner = to_original(weights), "context_embedder.token_refiner.refiner_blocks.0"
    fused = torch.cat([weights[f"{refiner}.attn.to_{part}.weight"] for part in "qkv"])
    assert torch.equal(original["txt_in.individual_token_refiner.blocks.0.self_attn_qkv.weight"], fused)
    scale, shift = weights["norm_out.linear.weight"].chunk(2)
    assert torch.equal(original["final_layer.adaLN_modulation.1.weight"], torch.cat([shift, scale]))
    for theirs, ours in (
        ("double_blocks.1.txt_attn_k.bias", "transformer_blocks.1.attn.add_k_proj.bias"),
        ("double_blocks.0.img_attn_q_norm.weight", "transformer_blocks.0.attn.norm_q.weight"),
        ("double_blocks.0.txt_mlp.fc2.weight", "transformer_blocks.0.ff_context.net.2.weight"),
        ("double_blocks.0.img_mod.linear.weight", "transformer_blocks.0.norm1.linear.weight"),
        ("txt_in.individual_token_refiner.blocks.0.adaLN_modulation.1.weight", f"{refiner}.norm_out.linear.weight"),
        ("vision_in.proj.3.weight", "image_embedder.linear_2.weight"),
        ("byt5_in.fc3.weight", "context_embedder_2.linear_3.weight"),
        ("time_in.mlp.2.weight", "time_embed.timestep_embedder.linear_2.weight"),
    ):
        assert torch.equal(original[theirs], weights[ours]), theirs


def test_names_that_training_wraps_are_understood_and_others_refused(weights) -> None:
    original = to_original(weights)
    wrapped = {
        "module." + name.replace("double_blocks.0.", "double_blocks.0._checkpoint_wrapped_module."): tensor
        for name, tensor in original.items()
    }
    assert to_diffusers(wrapped).keys() == weights.keys()

    for convert in (to_diffusers, to_original):
        with pytest.raises(ModelError, match=r"double_blocks\.0\.img_attn_quality\.weight"):
            convert({"double_blocks.0.img_attn_quality.weight": torch.zeros(2)})
    original["module.img_in.proj.bias"] = original["img_in.proj.bias"]
    with pytest.raises(ModelError, match="which another tensor gave already"):
        to_diffusers(original)
    del weights["context_embedder.token_refiner.refiner_blocks.0.attn.to_k.weight"]
    with pytest.raises(ModelError, match=r"lack its attn\.to_k"):
        to_original(weights)


def test_a_dtype_is_the_one_that_is_asked_for_or_that_of_most_numbers(checkpoint, tmp_path: Path, weights) -> None:
    base, mixed = str(checkpoint(KIND)), tmp_path / "mixed"
    mixed.mkdir()
    original = {name: tensor.bfloat16() if tensor.ndim > 1 else tensor for name, tensor in to_original(weights).items()}
    assert sum(tensor.ndim > 1 for tensor in original.values()) < len(original) / 2
    save_file(original, mixed / "model.safetensors")
    back, there = [str(mixed), "--base", base], [base, "--to", "original"]
    for number, (words, part, stored) in enumerate(
        [
            (back, "transformer", torch.bfloat16),
            ([*back, "--dtype", "float32"], "transformer", torch.float32),
            (there, "", torch.float32),
            ([*there, "--dtype", "bfloat16"], "", torch.bfloat16),
        ]
    ):
        out = tmp_path / str(number)
        assert main(["export", *words, "--out", str(out)]) == 0
        assert {one.dtype for file in (out / part).glob("*.safetensors") for one in load_file(file).values()} == {
            stored
        }


def test_what_does_not_fit_is_refused(checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str], weights) -> None:
    base = checkpoint(KIND)

    def refused(source: Path, *more: str) -> str:
        words = ["export", str(source), "--base", str(base), "--out", str(tmp_path / "no"), *more]
        assert main(words) == 2
        assert not (tmp_path / "no").exists()
        return capsys.readouterr().err

    (tmp_path / "model.pt").touch()
    assert "pickled" in refused(tmp_path / "model.pt")
    folder = tmp_path / "distributed"
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"")
    assert "dcp_to_torch" in refused(folder)
    (folder / "__0_0.distcp").unlink()
    assert "holds no .safetensors" in refused(folder)
    original = to_original(weights)
    original.pop("img_in.proj.bias")
    original["img_in.proj.weight"] = original["img_in.proj.weight"][:4]
    save_file(original, folder / "model.safetensors")
    message = refused(folder)
    assert "lacks x_embedder.proj.bias" in message
    assert "in another shape x_embedder.proj.weight" in message
    assert "not in the original layout" in refused(base)
