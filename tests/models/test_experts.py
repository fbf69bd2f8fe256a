"""Wan 2.2 with both experts trained: each learns from its own noise levels alone, and an export has both."""

from __future__ import annotations

import pytest
import torch

import tiny
from sage_grpo.models.lora import load_lora
from sage_grpo.models.spec import LoraSpec

HIGH, LOW = torch.tensor(0.9), torch.tensor(0.3)
LORA = LoraSpec(rank=3, alpha=5.0)
OWN = {"transformer.": HIGH, "transformer_2.": LOW}


def probe_of(ours) -> tuple[torch.Tensor, list]:
    conditions = ours.encode(["a cat"], [tiny.image(1)] if ours.image_to_video else None)
    return torch.randn(1, *ours.latent_shape()), conditions


def train_steps(ours, x, conditions) -> None:
    """Two steps of each expert: a LoRA's first one moves half of it."""
    optimizer = torch.optim.SGD(ours.trainable().values(), lr=0.5)
    for sigma in (HIGH, LOW) * 2:
        optimizer.zero_grad()
        ours.velocity(x, sigma, conditions).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("lora", [LORA, None])
def test_each_expert_gets_the_gradient_of_its_own_levels(lora, fresh_model) -> None:
    ours = fresh_model("wan22_t2v", lora=lora, expert="both", guidance_scale=1.0)
    x, conditions = probe_of(ours)
    params = ours.trainable()
    sizes = {prefix: sum(name.startswith(prefix) for name in params) for prefix in OWN}
    assert len(params) == sum(sizes.values())
    assert sizes["transformer."] == sizes["transformer_2."] > 0
    for prefix, sigma in OWN.items():
        assert ours.trains(sigma)
        for p in params.values():
            p.grad = None
        ours.velocity(x, sigma, conditions).square().mean().backward()
        got = {name for name, p in params.items() if p.grad is not None}
        assert got == {name for name in params if name.startswith(prefix)}


def test_a_lora_of_both_loads_in_the_stock_pipeline(fresh_model, tmp_path) -> None:
    """As the card says: the first expert's from the folder, the second's by the name of its file, which the hub knows as well."""
    kind = "wan22_t2v"
    ours = fresh_model(kind, lora=LORA, expert="both", guidance_scale=1.0)
    x, conditions = probe_of(ours)
    train_steps(ours, x, conditions)
    ours.save(tmp_path)
    card = (tmp_path / "README.md").read_text()
    lines = [line for line in card.splitlines() if "load_lora_weights" in line]
    assert len(lines) == 2
    stock, ours_again = (fresh_model(kind, guidance_scale=1.0, train=False) for _ in range(2))
    pipe = stock.pipe
    for line in lines:
        exec(line.replace("path/to/this/folder", str(tmp_path)), {"pipe": pipe})
    ours_again.load_lora(tmp_path)
    third = fresh_model(kind, guidance_scale=1.0, train=False)
    load_lora(third.pipe, tmp_path, adapter="mine")
    assert all(set(network.peft_config) == {"mine"} for network in (third.pipe.transformer, third.pipe.transformer_2))
    continued = fresh_model(
        kind, expert="both", lora=LoraSpec(rank=3, alpha=5.0, path=str(tmp_path)), guidance_scale=1.0
    )
    base = fresh_model(kind, guidance_scale=1.0, train=False)
    with torch.no_grad():
        for sigma in (HIGH, LOW):
            trained = ours.velocity(x, sigma, conditions)
            assert (trained - base.velocity(x, sigma, conditions)).abs().max() > 1e-2
            assert torch.equal(continued.velocity(x, sigma, conditions), trained)
            for other in (stock, ours_again, third):
                torch.testing.assert_close(other.velocity(x, sigma, conditions), trained, rtol=1e-5, atol=1e-5)
