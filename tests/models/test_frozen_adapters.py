"""LoRAs that are part of the model that training starts from: frozen, everywhere, and not part of what is exported."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_grpo.models import ModelError
from sage_grpo.models.lora import FILE
from sage_grpo.models.spec import AdapterSpec, LoraSpec

LORA = LoraSpec(rank=3, alpha=5.0, targets=["to_q", "to_k"])
OWN = LoraSpec(rank=2, targets=["to_v"])
SIGMA = torch.tensor(0.9)


def probe(model):
    """A velocity of one sample."""
    x = torch.randn(1, *model.latent_shape(), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model.velocity(x, SIGMA, model.encode(["a cat"]))


def saved(fresh_model, kind: str, folder):
    """A LoRA whose weights are drawn, in a folder; and a velocity with it."""
    model = fresh_model(kind, lora=LORA, guidance_scale=1.0)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.trainable().values():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    model.save(folder)
    return probe(model)


@pytest.mark.parametrize("kind", ["wan_t2v", pytest.param("hunyuan15_t2v", marks=pytest.mark.slow)])
def test_the_base_has_the_adapter_and_what_is_trained_and_exported_does_not(kind, fresh_model, tmp_path):
    with_it = saved(fresh_model, kind, tmp_path / "turbo")
    adapter = AdapterSpec(path=str(tmp_path / "turbo"))
    model = fresh_model(kind, lora=OWN, adapters=[adapter], guidance_scale=1.0)
    torch.testing.assert_close(probe(model), with_it, rtol=1e-4, atol=1e-5)
    assert (probe(fresh_model(kind, guidance_scale=1.0)) - with_it).abs().max() > 1e-2
    assert all("to_v" in name and ".lora_" in name for name in model.trainable())
    model.save(tmp_path / "mine")
    assert all("to_v" in name for name in load_file(tmp_path / "mine" / FILE))
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "On top of the adapter turbo" in card
    assert card.index("fuse_lora(lora_scale=1)") < card.index("path/to/this/folder")


def test_its_scale_and_several_add_up(fresh_model, tmp_path):
    whole = saved(fresh_model, "wan_t2v", tmp_path / "a")
    half = AdapterSpec(path=str(tmp_path / "a"), scale=0.5)
    model = fresh_model("wan_t2v", adapters=[half, half], guidance_scale=1.0, train=False)
    torch.testing.assert_close(probe(model), whole, rtol=1e-4, atol=1e-5)


def test_what_is_no_adapter_of_the_model_is_refused(fresh_model, tmp_path):
    saved(fresh_model, "wan_t2v", tmp_path / "a")
    weights = load_file(tmp_path / "a" / FILE)
    cases = {
        "fits": {f"other.{name}": tensor for name, tensor in weights.items()},
        "NaN": {name: tensor * torch.nan for name, tensor in weights.items()},
        "holds no LoRA": {name: tensor[:, :2].contiguous() for name, tensor in weights.items()},
    }
    for number, (why, tensors) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(tensors, folder / FILE)
        with pytest.raises(ModelError, match=f"{why}|holds no LoRA"):
            fresh_model("wan_t2v", adapters=[AdapterSpec(path=str(folder))])
    save_file(
        weights, folder / FILE, metadata={"lora_adapter_metadata": '{"transformer.megatron_core": "of_the_file"}'}
    )
    with pytest.raises(ModelError, match="megatron_core"):
        fresh_model("wan_t2v", adapters=[AdapterSpec(path=str(folder))])
    with pytest.raises(ModelError, match=r"no x.safetensors"):
        fresh_model("wan_t2v", adapters=[AdapterSpec(path=str(tmp_path), file="x.safetensors")])
    with pytest.raises(ModelError, match="no expert"):
        fresh_model("wan_t2v", adapters=[AdapterSpec(path=str(tmp_path / "a"), expert="low")])
