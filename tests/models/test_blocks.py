"""Fast paths of the network against the plain ones: compiled blocks, adapters inside the layer's product, attention without copies."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sage_grpo.models.lora import _compute_in_input_dtype
from sage_grpo.models.network import blocks
from sage_grpo.models.network.adapted import AdaptedLinear, adapted_linear
from sage_grpo.models.network.attention import AttentionBackendName, attend
from sage_grpo.models.network.blocks import WORTH, worth_compiling
from sage_grpo.models.spec import LoraSpec, ModelSpec

SIGMA = torch.tensor(0.7)
KINDS = ["hunyuan15_t2v", "wan_t2v"]


@pytest.fixture
def compiled(checkpoint, monkeypatch):
    """Models with blocks that are traced and differentiated as a compiler does it, but run by PyTorch's own kernels."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(blocks.torch, "compile", partial(torch.compile, backend=counter))

    def load(kind: str, **fields):
        fields = {"lora": LoraSpec(rank=2), "guidance_scale": 1.0, **fields}
        return ModelSpec(path=str(checkpoint(kind)), cache=None, compile=True, **fields).load("cpu"), counter

    yield load
    torch._dynamo.reset()


def _learnt(ours: object) -> None:
    """Adapters start at zero, where half of their gradients are zero too."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in ours.trainable().values():
            parameter.add_(0.1 * torch.randn_like(parameter))


def _passes(ours, x, conditions, level: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A rollout's pass and its replay, which must be equal to the bit; the velocity and the gradients."""
    ours.keep([level] * len(ours.blocks()))
    ours.network.zero_grad()
    with torch.no_grad():
        sampled = ours.velocity(x, SIGMA, conditions)
    replayed = ours.velocity(x, SIGMA, conditions)
    assert not sampled.requires_grad
    assert torch.equal(sampled, replayed)
    replayed.square().sum().backward()
    return sampled, {name: p.grad.clone() for name, p in ours.trainable().items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "ltx2_3"])
def test_compiled_blocks_are_the_plain_ones(kind: str, compiled, fresh_model) -> None:
    plain = fresh_model(kind, lora=LoraSpec(rank=2), guidance_scale=1.0)
    fast, counter = compiled(kind)
    x, conditions = torch.randn(1, *plain.latent_shape()), plain.encode(["a cat"])
    for ours in (plain, fast):
        _learnt(ours)
    v, gradients = _passes(plain, x, conditions, "all")
    counts = []
    for level in ("all", "attention", "input") if kind in KINDS else ("attention",):
        compiled_v, compiled_gradients = _passes(fast, x, conditions, level)
        torch.testing.assert_close(compiled_v, v, rtol=1e-5, atol=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(compiled_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1  # what blocks keep is no reason to compile again


def test_a_pass_without_gradients_lets_go_of_every_block(fresh_model, monkeypatch) -> None:
    monkeypatch.setattr(blocks.torch, "compile", lambda forward: forward)
    ours = fresh_model("wan_t2v", compile=True, lora=LoraSpec(rank=2), guidance_scale=1.0)
    ours.keep(["attention"] * 2)
    assert torch._dynamo.config.recompile_limit >= blocks.RECOMPILES == 64
    graphs = []
    for block in ours.blocks():
        block.register_forward_hook(lambda module, inputs, out: graphs.append((out.grad_fn, out.requires_grad)))
    with torch.no_grad():
        ours.velocity(torch.randn(1, *ours.latent_shape()), SIGMA, ours.encode(["a cat"]))
    assert graphs == [(None, True)] * 2


class Attended(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in blocks.ATTENTION
        return function(*args, **(kwargs or {}))


def test_attention_is_computed_once_where_it_is_kept(fresh_model) -> None:
    ours = fresh_model("wan_t2v", lora=LoraSpec(rank=2), guidance_scale=1.0)
    conditions, calls = ours.encode(["a cat"]), {}
    for level in ("all", "attention", "input"):
        ours.keep([level] * 2)
        with Attended() as attended:
            ours.velocity(torch.randn(1, *ours.latent_shape()), SIGMA, conditions).sum().backward()
        calls[level] = attended.count
    assert calls == {"all": 4, "attention": 4, "input": 8}


@pytest.mark.parametrize(
    ("inputs", "outputs", "bias", "frozen_input"),
    [(6, 6, True, False), (6, 11, False, True), (6, 12, True, True), (6, 13, False, False), (12, 6, False, False)],
)
def test_an_adapted_product_is_the_sum_of_both(inputs: int, outputs: int, bias: bool, frozen_input: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, inputs, dtype=torch.float64, requires_grad=not frozen_input)
    weight = torch.randn(outputs, inputs, dtype=torch.float64)
    offset = torch.randn(outputs, dtype=torch.float64) if bias else None
    down = torch.randn(3, inputs, dtype=torch.float64, requires_grad=True)
    up = torch.randn(outputs, 3, dtype=torch.float64, requires_grad=True)
    probe = torch.randn(2, 5, outputs, dtype=torch.float64)
    leaves = [down, up] if frozen_input else [x, down, up]
    y = adapted_linear(x, weight, offset, down, up, 0.5)
    expected = F.linear(x, weight, offset) + 0.5 * F.linear(F.linear(x, down), up)
    torch.testing.assert_close(y, expected)
    assert ("Widened" in y.grad_fn.next_functions[0][0].name()) == (outputs >= 2 * inputs), "what is cheaper"
    ours, theirs = (torch.autograd.grad((out * probe).sum(), leaves) for out in (y, expected))
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_an_adapted_layer_that_is_asked_for_more_is_pefts() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0", "1"], init_lora_weights=False), network)
    wet = LoraConfig(r=2, target_modules=["1"], lora_dropout=0.5)
    inject_adapter_in_model(wet, network, "wet")
    _compute_in_input_dtype(network)
    assert [type(layer) is AdaptedLinear for layer in network] == [True, False], "one of its adapters drops"
    x, layer = torch.randn(2, 4), network[0]
    layer.set_adapter("default")
    mixed = layer(x, adapter_names=["default", "__base__"])
    torch.testing.assert_close(mixed, torch.stack([layer(x)[0], layer.base_layer(x)[1]]))
    layer.enable_adapters(False)
    torch.testing.assert_close(layer(x), layer.base_layer(x))


def test_what_a_compiled_block_is_given_and_leaves() -> None:
    given = blocks._compiled(lambda **named: named, ("a", "b"), (("b", 0),), 1, b=torch.ones(2))
    assert (given["a"], given["b"].tolist()) == (1, [1.0, 1.0])
    made = torch.ones(1, requires_grad=True) * 2
    first, nothing, last = blocks._cut((made, None, made.detach()))
    assert (first.grad_fn, nothing) == (None, None)
    assert [first.requires_grad, last.requires_grad] == [True, False]
    blocks.keep_activations([torch.nn.Linear(1, 1) for _ in blocks.KEEP], blocks.KEEP)  # all of them at once
    for levels in (["all", "all"], ["most"]):
        with pytest.raises(ValueError, match="1 blocks need a level each"):
            blocks.keep_activations([torch.nn.Linear(1, 1)], levels)


@pytest.mark.parametrize("backend", [None, AttentionBackendName._NATIVE_FLASH], ids=str)
def test_attention_without_copies_is_attention(backend) -> None:
    query, key, value = (torch.randn(2, tokens, 3, 8) for tokens in (5, 7, 7))
    scores = torch.einsum("bqhc,bkhc->bhqk", query, key) / 8**0.5
    expected = torch.einsum("bhqk,bkhc->bqhc", scores.softmax(-1), value)
    torch.testing.assert_close(attend(query, key, value, backend), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("asked", "device", "dtype", "passes", "pays"),
    [
        (True, "cpu", "float32", 1, True),
        (False, "cuda", "bfloat16", 10 * WORTH, False),
        (None, "cpu", "bfloat16", 10 * WORTH, False),
        (None, "cuda", "float32", 10 * WORTH, False),
        (None, "cuda", "bfloat16", WORTH - 1, False),
        (None, "cuda", "bfloat16", WORTH, True),
    ],
)
def test_when_compiling_pays(asked, device, dtype, passes, pays) -> None:
    decided, why = worth_compiling(asked, torch.device(device), dtype, passes)
    assert decided == pays == why.startswith("yes")
