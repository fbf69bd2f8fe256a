"""LoRA and full weights: what is trained is what a user of diffusers loads."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import tiny
from sage_grpo.models import ModelError
from sage_grpo.models.lora import load_lora
from sage_grpo.models.spec import LoraSpec, ModelSpec

SIGMA = torch.tensor(0.9)
LORA = LoraSpec(rank=3, alpha=5.0)


def train_a_step(ours) -> tuple[torch.Tensor, list]:
    """Move the trainable parameters; returns a probe and its conditions."""
    images = [tiny.image(1)] if ours.image_to_video else None
    conditions = ours.encode(['a cat "x"'], images)
    x = torch.randn(1, *ours.latent_shape())
    sigma = SIGMA if ours.spec.expert == "high" else torch.tensor(0.3)
    optimizer = torch.optim.SGD(ours.trainable().values(), lr=0.5)
    for _ in range(2):  # a LoRA's first step moves B only
        optimizer.zero_grad()
        ours.velocity(x, sigma, conditions).square().mean().backward()
        optimizer.step()
    return x, conditions


def reloaded(ours, folder, component: str = "transformer"):
    """A stock pipeline's transformer with the saved LoRA, run through the stock forward of a fresh adapter."""
    fresh = ModelSpec(
        path=ours.spec.path, cache=None, train=False, packed=False, expert=ours.spec.expert, guidance_scale=1.0
    ).load("cpu")
    if "HunyuanVideo15" in fresh.index["_class_name"]:
        load_lora(fresh.pipe, folder)
    else:
        fresh.pipe.load_lora_weights(str(folder), load_into_transformer_2=component == "transformer_2")
    return fresh


@pytest.mark.parametrize(
    ("kind", "expert"),
    [("wan22_t2v", "low"), pytest.param("hunyuan15_t2v", "high", marks=pytest.mark.slow)],
)
def test_saved_lora_gives_the_trained_velocities(kind: str, expert: str, fresh_model, tmp_path) -> None:
    ours = fresh_model(kind, lora=LORA, guidance_scale=1.0, expert=expert)
    sigma = SIGMA if expert == "high" else torch.tensor(0.3)
    x, conditions = train_a_step(ours)
    ours.save(tmp_path / "lora")
    with torch.no_grad():
        trained = ours.velocity(x, sigma, conditions)
        theirs = reloaded(ours, tmp_path / "lora", ours.experts.components[0]).velocity(x, sigma, conditions)
        base = fresh_model(kind, guidance_scale=1.0, train=False).velocity(x, sigma, conditions)
    torch.testing.assert_close(theirs, trained, rtol=1e-5, atol=1e-5)
    assert (trained - base).abs().max() > 1e-2
    card = (tmp_path / "lora" / "README.md").read_text()
    assert str(ours.folder) not in card
    assert "rank 3, alpha 5" in card
    assert ("load_into_transformer_2=True" in card) == (expert == "low")
    assert ("from sage_grpo.models.lora import load_lora" in card) == kind.startswith("hunyuan15")


def test_saved_lora_continues(fresh_model, tmp_path) -> None:
    ours = fresh_model("wan_t2v", lora=LORA, guidance_scale=1.0)
    train_a_step(ours)
    ours.save(tmp_path)
    again = fresh_model("wan_t2v", lora=LoraSpec(rank=3, alpha=5.0, path=str(tmp_path)))
    for name, parameter in again.trainable().items():
        assert torch.equal(parameter, ours.trainable()[name])
    with pytest.raises(ModelError, match="rank"):
        fresh_model("wan_t2v", lora=LoraSpec(rank=4, path=str(tmp_path)))
    inference = fresh_model("wan_t2v", train=False, guidance_scale=1.0)
    inference.load_lora(tmp_path)
    x, conditions = torch.randn(1, *ours.latent_shape()), ours.encode(["a cat"])
    with torch.no_grad():
        assert torch.equal(inference.velocity(x, SIGMA, conditions), ours.velocity(x, SIGMA, conditions))
    assert not inference.trainable()


def test_weights_replace_parameters_without_touching_the_model(fresh_model, tmp_path) -> None:
    ours = fresh_model("wan_t2v", lora=LORA, guidance_scale=1.0)
    before = {name: parameter.detach().clone() for name, parameter in ours.trainable().items()}
    other = {name: torch.randn_like(parameter) for name, parameter in before.items()}
    ours.save(tmp_path / "lora", weights=other)
    saved = load_file(tmp_path / "lora" / "pytorch_lora_weights.safetensors")
    name = "blocks.0.attn1.to_q.lora_B.default.weight"
    assert torch.equal(saved["transformer.blocks.0.attn1.to_q.lora_B.weight"], other[name])

    ours.save(tmp_path / "merged", weights=other, merged=True)
    assert all(torch.equal(parameter, before[name]) for name, parameter in ours.trainable().items())
    merged = ModelSpec(path=str(tmp_path / "merged"), cache=None, guidance_scale=1.0, train=False).load("cpu")
    with torch.no_grad():
        for name, parameter in ours.trainable().items():
            parameter.copy_(other[name])
        x, conditions = torch.randn(1, *ours.latent_shape()), ours.encode(["a cat"])
        expected, v = ours.velocity(x, SIGMA, conditions), merged.velocity(x, SIGMA, conditions)
    torch.testing.assert_close(v, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ModelError, match="no parameter"):
        ours.save(tmp_path / "x", weights={"nonsense": torch.zeros(1)})


def test_adapters_start_alike_everywhere(fresh_model) -> None:
    torch.manual_seed(1)
    a = fresh_model("wan_t2v", lora=LORA)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    b = fresh_model("wan_t2v", lora=LORA)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, q) for p, q in zip(a.trainable().values(), b.trainable().values()))
    c = fresh_model("wan_t2v", lora=LoraSpec(rank=3, seed=1))
    assert not all(torch.equal(p, q) for p, q in zip(a.trainable().values(), c.trainable().values()))


@pytest.mark.parametrize(("alpha", "scale"), [(None, 1.0), (6.0, 2.0)])
def test_alpha_over_rank_scales_the_adapter(alpha: float | None, scale: float, fresh_model) -> None:
    layer = fresh_model("wan_t2v", lora=LoraSpec(rank=3, alpha=alpha)).transformer.blocks[0].attn1.to_q
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    with torch.no_grad():
        up.copy_(torch.randn_like(up))
        x = torch.randn(2, down.shape[1])
        torch.testing.assert_close(layer(x) - layer.base_layer(x), scale * x @ down.T @ up.T, rtol=1e-4, atol=1e-5)
