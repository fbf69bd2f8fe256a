"""LoRA and full weights: what is trained is what a user of diffusers loads, of one network and of two experts; adapters that are part of the base."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_grpo.models import ModelError
from sage_grpo.models.lora import FILE, load_lora
from sage_grpo.models.spec import AdapterSpec, LoraSpec, ModelSpec

HIGH, LOW = torch.tensor(0.9), torch.tensor(0.3)
LORA = LoraSpec(rank=3, alpha=5.0)
OWN = {"transformer.": HIGH, "transformer_2.": LOW}


@pytest.fixture
def get(fresh_model):
    return lambda kind="wan_t2v", **fields: fresh_model(kind, guidance_scale=1.0, **fields)


def moved(ours):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in ours.trainable().values():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return ours


ENCODED: dict[str, list] = {}
"""Text encoders load once."""


def probe(model, sigma: torch.Tensor = HIGH) -> torch.Tensor:
    x = torch.randn(1, *model.latent_shape(), generator=torch.Generator().manual_seed(3))
    kind = model.index["_class_name"]
    if kind not in ENCODED:
        ENCODED[kind] = model.encode(['a cat "x"'])
    with torch.no_grad():
        return model.velocity(x, sigma, ENCODED[kind])


def assert_close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "expert"), [("wan22_t2v", "low"), pytest.param("hunyuan15_t2v", "high", marks=pytest.mark.slow)]
)
def test_saved_lora_gives_the_trained_velocities(kind: str, expert: str, get, model, tmp_path) -> None:
    ours = moved(get(kind, lora=LORA, expert=expert))
    sigma = HIGH if expert == "high" else LOW
    ours.save(tmp_path)
    stock = get(kind, expert=expert, train=False)
    if kind.startswith("hunyuan15"):
        load_lora(stock.pipe, tmp_path)
    else:
        stock.pipe.load_lora_weights(str(tmp_path), load_into_transformer_2=True)
    trained = probe(ours, sigma)
    assert_close(probe(stock, sigma), trained)
    assert (trained - probe(model(kind, guidance_scale=1.0, train=False), sigma)).abs().max() > 1e-2
    assert str(ours.folder) not in (tmp_path / "README.md").read_text()


def test_weights_replace_parameters_without_touching_the_model(get, tmp_path) -> None:
    ours = get(lora=LORA)
    before = {name: parameter.detach().clone() for name, parameter in ours.trainable().items()}
    other = {name: torch.randn_like(parameter) for name, parameter in before.items()}
    ours.save(tmp_path / "lora", weights=other)
    saved = load_file(tmp_path / "lora" / FILE)
    name = "blocks.0.attn1.to_q.lora_B.default.weight"
    assert torch.equal(saved["transformer.blocks.0.attn1.to_q.lora_B.weight"], other[name])

    ours.save(tmp_path / "merged", weights=other, merged=True)
    assert all(torch.equal(parameter, before[name]) for name, parameter in ours.trainable().items())
    merged = ModelSpec(path=str(tmp_path / "merged"), cache=None, guidance_scale=1.0, train=False).load("cpu")
    with torch.no_grad():
        for name, parameter in ours.trainable().items():
            parameter.copy_(other[name])
    torch.testing.assert_close(probe(merged), probe(ours), rtol=1e-4, atol=1e-4)
    with pytest.raises(ModelError, match="no parameter"):
        ours.save(tmp_path / "x", weights={"nonsense": torch.zeros(1)})


def test_adapters_start_alike_everywhere(get) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    a = get(lora=LORA)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    b, c = get(lora=LORA), get(lora=LoraSpec(rank=3, seed=1))
    assert all(torch.equal(p, q) for p, q in zip(a.trainable().values(), b.trainable().values()))
    assert not all(torch.equal(p, q) for p, q in zip(a.trainable().values(), c.trainable().values()))


@pytest.mark.parametrize(("alpha", "scale"), [(None, 1.0), (6.0, 2.0)])
def test_alpha_over_rank_scales_the_adapter(alpha: float | None, scale: float, get) -> None:
    layer = get(lora=LoraSpec(rank=3, alpha=alpha)).transformer.blocks[0].attn1.to_q
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    with torch.no_grad():
        up.copy_(torch.randn_like(up))
        x = torch.randn(2, down.shape[1])
        assert_close(layer(x) - layer.base_layer(x), scale * x @ down.T @ up.T)


# ---- both experts


@pytest.mark.parametrize("lora", [LORA, None])
def test_each_expert_gets_the_gradient_of_its_own_levels(lora, get) -> None:
    ours = get("wan22_t2v", lora=lora, expert="both")
    x, conditions, params = torch.randn(1, *ours.latent_shape()), ours.encode(["a cat"]), ours.trainable()
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


def test_a_lora_of_both_loads_in_the_stock_pipeline_and_continues(get, model, tmp_path) -> None:
    kind = "wan22_t2v"
    ours = moved(get(kind, lora=LORA, expert="both"))
    ours.save(tmp_path)
    lines = [line for line in (tmp_path / "README.md").read_text().splitlines() if "load_lora_weights" in line]
    assert len(lines) == 2
    base, (stock, again, third) = (
        model(kind, guidance_scale=1.0, train=False),
        (get(kind, train=False) for _ in range(3)),
    )
    for line in lines:
        exec(line.replace("path/to/this/folder", str(tmp_path)), {"pipe": stock.pipe})
    again.load_lora(tmp_path)
    assert not again.trainable()
    with pytest.raises(ModelError, match="rank"):
        get(kind, expert="both", lora=LoraSpec(rank=4, path=str(tmp_path)))
    load_lora(third.pipe, tmp_path, adapter="mine")
    assert all(set(network.peft_config) == {"mine"} for network in (third.pipe.transformer, third.pipe.transformer_2))
    continued = get(kind, expert="both", lora=LoraSpec(rank=3, alpha=5.0, path=str(tmp_path)))
    for sigma in (HIGH, LOW):
        trained = probe(ours, sigma)
        assert (trained - probe(base, sigma)).abs().max() > 1e-2
        assert torch.equal(probe(continued, sigma), trained)
        for other in (stock, again, third):
            assert_close(probe(other, sigma), trained)


# ---- adapters that are part of the model that training starts from: frozen, everywhere, and not part of what is exported


def saved(get, kind: str, folder) -> torch.Tensor:
    """A LoRA whose weights are drawn, in a folder; and a velocity with it."""
    model = moved(get(kind, lora=LoraSpec(rank=3, alpha=5.0, targets=["to_q", "to_k"])))
    model.save(folder)
    return probe(model)


@pytest.mark.parametrize("kind", ["wan_t2v", pytest.param("hunyuan15_t2v", marks=pytest.mark.slow)])
def test_the_base_has_the_adapter_and_what_is_trained_and_exported_does_not(kind: str, get, model, tmp_path) -> None:
    with_it = saved(get, kind, tmp_path / "turbo")
    ours = get(kind, lora=LoraSpec(rank=2, targets=["to_v"]), adapters=[AdapterSpec(path=str(tmp_path / "turbo"))])
    assert_close(probe(ours), with_it)
    assert (probe(model(kind, guidance_scale=1.0, train=False)) - with_it).abs().max() > 1e-2
    assert all("to_v" in name and ".lora_" in name for name in ours.trainable())
    ours.save(tmp_path / "mine")
    assert all("to_v" in name for name in load_file(tmp_path / "mine" / FILE))
    card = (tmp_path / "mine" / "README.md").read_text()
    assert card.index("fuse_lora(lora_scale=1)") < card.index("path/to/this/folder")


def test_its_scale_and_several_add_up(get, tmp_path) -> None:
    whole = saved(get, "wan_t2v", tmp_path)
    half = AdapterSpec(path=str(tmp_path), scale=0.5)
    assert_close(probe(get(adapters=[half, half], train=False)), whole)


def test_what_is_no_adapter_of_the_model_is_refused(get, tmp_path) -> None:
    saved(get, "wan_t2v", tmp_path)
    weights, bad = load_file(tmp_path / FILE), tmp_path / "bad"
    bad.mkdir()
    for why, tensors, metadata in (
        ("fits|holds no LoRA", {f"other.{name}": tensor for name, tensor in weights.items()}, {}),
        ("NaN", {name: tensor * torch.nan for name, tensor in weights.items()}, {}),
        ("holds no LoRA", {name: tensor[:, :2].contiguous() for name, tensor in weights.items()}, {}),
        ("megatron_core", weights, {"lora_adapter_metadata": '{"transformer.megatron_core": "of_the_file"}'}),
    ):
        save_file(tensors, bad / FILE, metadata=metadata)
        with pytest.raises(ModelError, match=why):
            get(adapters=[AdapterSpec(path=str(bad))])
    for fields, why in (({"file": "x.safetensors"}, r"no x.safetensors"), ({"expert": "low"}, "no expert")):
        with pytest.raises(ModelError, match=why):
            get(adapters=[AdapterSpec(path=str(tmp_path), **fields)])
