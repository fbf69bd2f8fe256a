"""Fast paths of the network against the plain ones: compiled blocks, adapters inside the layer's product, attention without copies."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from peft.tuners.lora import Linear
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sage_grpo.models.network import attention, blocks
from sage_grpo.models.network.adapted import AdaptedLinear, adapted_linear
from sage_grpo.models.network.attention import AttentionBackendName, PlainAttention, attend
from sage_grpo.models.network.blocks import WORTH, keep_activations, keep_one_graph, worth_compiling
from sage_grpo.models.spec import LoraSpec, ModelSpec

SIGMA = torch.tensor(0.7)
KINDS = ["hunyuan15_t2v", "wan_t2v"]
PROMPTS = ["a cat", "a small dog runs", "two birds sit on a wire and sing"]


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


@pytest.mark.slow
def test_blocks_share_what_was_compiled(monkeypatch) -> None:
    """One compilation for the first block, whose input has no gradient, and one for all others."""
    from diffusers import WanTransformer3DModel

    from sage_grpo.models.families.wan import Wan
    from sage_grpo.models.lora import add_lora, match_targets

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(blocks.torch, "compile", partial(torch.compile, backend=counter))
    network = WanTransformer3DModel(
        num_attention_heads=1, attention_head_dim=12, ffn_dim=8, num_layers=5, text_dim=4, freq_dim=8, in_channels=2, out_channels=2
    )  # fmt: skip
    for block in network.blocks:
        block.attn1.set_processor(PlainAttention())
        block.attn2.set_processor(PlainAttention())
    add_lora(network, LoraSpec(rank=2), match_targets(network, Wan.traits.lora_targets, ["blocks"]))
    blocks.compile_blocks(network, list(network.blocks), train=True)
    for rows in (1, 1):
        network(torch.randn(rows, 2, 1, 4, 4), torch.tensor([500.0] * rows), torch.randn(rows, 3, 4), return_dict=False)
    torch._dynamo.reset()
    assert counter.frame_count == 2


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
@pytest.mark.parametrize(
    "kind", [*KINDS, "ltx", "ltx2_3", "hunyuan", "sana_video", "flux", "flux2", "sd3", "qwen_image", "z_image"]
)
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
    if kind == "hunyuan15_t2v":
        _text_of_any_length_needs_no_other_compilation(fast, x, counter)


def _text_of_any_length_needs_no_other_compilation(ours, x, counter) -> None:
    counts = [counter.frame_count]
    for prompt in PROMPTS:
        conditions = ours.encode([prompt])
        with torch.no_grad():
            ours.velocity(x, SIGMA, conditions)
        ours.velocity(x, SIGMA, conditions)
        counts.append(counter.frame_count)
    lengths = {len(ours.encode([prompt])[0].tensors["text"]) for prompt in PROMPTS}
    assert len(lengths) == len(PROMPTS)
    assert counts[0] > 0, counts
    assert len(set(counts)) == 1


def test_a_block_may_have_nothing_to_say_of_the_text(checkpoint, model, monkeypatch) -> None:
    """The last one of Stable Diffusion 3 gives None for it."""
    monkeypatch.setattr(blocks.torch, "compile", lambda forward: forward)
    spec = ModelSpec(path=str(checkpoint("sd3")), cache=None, compile=True, guidance_scale=1.0, height=16, width=16)
    ours, plain = spec.load("cpu"), model("sd3", guidance_scale=1.0, height=16, width=16)
    x, conditions = torch.randn(1, *ours.latent_shape()), plain.encode(["a cat"])
    with torch.no_grad():
        assert torch.equal(ours.velocity(x, SIGMA, conditions), plain.velocity(x, SIGMA, conditions))


def test_a_pass_without_gradients_lets_go_of_every_block(checkpoint, monkeypatch) -> None:
    """The graphs of a rollout are there only to be equal to the replay's: none may outlive its block."""
    monkeypatch.setattr(blocks.torch, "compile", lambda forward: forward)
    spec = ModelSpec(
        path=str(checkpoint("wan_t2v")), cache=None, compile=True, lora=LoraSpec(rank=2), guidance_scale=1.0
    )
    ours = spec.load("cpu")
    ours.keep(["attention"] * 2)
    graphs = []
    for block in ours.blocks():
        block.register_forward_hook(
            lambda module, inputs, output: graphs.append((output.grad_fn, output.requires_grad))
        )
    with torch.no_grad():
        ours.velocity(torch.randn(1, *ours.latent_shape()), SIGMA, ours.encode(["a cat"]))
    assert graphs == [(None, True)] * 2


def test_one_graph_of_a_network_with_several_outputs() -> None:
    network = nn.Linear(2, 2)
    forward = network.forward
    network.forward = lambda x: (forward(x), x)
    keep_one_graph(network)
    with torch.no_grad():
        outputs = network(torch.randn(1, 2))
    assert not any(output.requires_grad for output in outputs)


class Attended(TorchDispatchMode):
    """Counts calls of attention."""

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


def test_levels_are_checked(fresh_model) -> None:
    ours = fresh_model("wan_t2v", lora=LoraSpec(rank=2))
    with pytest.raises(ValueError, match="2 blocks need a level each"):
        keep_activations(ours.blocks(), ["all"])
    with pytest.raises(ValueError, match="some"):
        ours.keep(["all", "some"])


@pytest.mark.parametrize(("inputs", "outputs"), [(6, 6), (6, 11), (6, 12), (6, 40), (12, 6)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen_input", [True, False])
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
    ours, theirs = (torch.autograd.grad((out * probe).sum(), leaves) for out in (y, expected))
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other)


def test_adapters_compute_in_the_dtype_of_their_input(fresh_model, monkeypatch) -> None:
    from sage_grpo.models.network import adapted

    seen = set()

    def watched(x, weight, bias, down, up, scale):
        y = adapted_linear(x, weight, bias, down, up, scale)
        seen.add((x.dtype, down.dtype, up.dtype, y.dtype))
        return y

    monkeypatch.setattr(adapted, "adapted_linear", watched)
    ours = fresh_model("hunyuan15_t2v", lora=LoraSpec(rank=2), dtype="bfloat16", guidance_scale=1.0)
    ours.velocity(torch.randn(1, *ours.latent_shape()), SIGMA, ours.encode(["a cat"])).sum().backward()
    assert seen == {(torch.bfloat16, torch.float32, torch.float32, torch.bfloat16)}
    assert {(p.dtype, p.grad.dtype) for p in ours.trainable().values()} == {(torch.float32, torch.float32)}


def test_an_adapter_on_top_of_another_adds_up(fresh_model, tmp_path) -> None:
    """A saved LoRA under the one that is trained: both count, as peft has it."""
    first = fresh_model("wan_t2v", lora=LoraSpec(rank=2), guidance_scale=1.0)
    _learnt(first)
    first.save(tmp_path)
    ours = fresh_model("wan_t2v", lora=LoraSpec(rank=3), guidance_scale=1.0)
    _learnt(ours)
    ours.load_lora(tmp_path)
    ours.transformer.set_adapter(list(ours.transformer.peft_config))
    x, conditions = torch.randn(1, *ours.latent_shape()), ours.encode(["a cat"])
    with torch.no_grad():
        fast = ours.velocity(x, SIGMA, conditions)
        for layer in ours.transformer.modules():
            if isinstance(layer, AdaptedLinear):
                layer.__class__ = Linear
        plain = ours.velocity(x, SIGMA, conditions)
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)
    assert not torch.equal(plain, first.velocity(x, SIGMA, conditions).detach())


@pytest.mark.parametrize("backend", [None, AttentionBackendName._NATIVE_FLASH], ids=str)
def test_attention_without_copies_is_attention(backend) -> None:
    query, key, value = (torch.randn(2, tokens, 3, 8) for tokens in (5, 7, 7))
    scores = torch.einsum("bqhc,bkhc->bhqk", query, key) / 8**0.5
    expected = torch.einsum("bhqk,bkhc->bqhc", scores.softmax(-1), value)
    torch.testing.assert_close(attend(query, key, value, backend), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", [None, AttentionBackendName._NATIVE_FLASH], ids=str)
@pytest.mark.parametrize(("kind", "calls"), [("hunyuan15_t2v", ["set"] * 2), ("wan_t2v", ["set", None] * 2)])
def test_diffusers_own_division_of_tokens_reaches_its_dispatcher(
    kind, calls, backend, fresh_model, monkeypatch
) -> None:
    """With any backend; Wan divides self-attention only, as its stock processor does."""
    seen, dispatch = [], attention.dispatch_attention_fn

    def spy(*tokens, parallel_config=None, **named):
        seen.append(parallel_config)
        return dispatch(*tokens, **named)

    monkeypatch.setattr(attention, "dispatch_attention_fn", spy)
    ours = fresh_model(kind, guidance_scale=1.0, train=False)
    attention.set_backend(ours.network, backend)
    for module in ours.network.modules():
        if "_parallel_config" in dir(type(getattr(module, "processor", None))):
            module.processor._parallel_config = "set"
    with torch.no_grad():
        ours.velocity(torch.randn(1, *ours.latent_shape()), SIGMA, ours.encode(["a cat"]))
    taken = [call for call in calls if call == "set" or backend is None]  # our own path to a kernel needs no dispatcher
    assert seen == taken


def test_a_masked_call_is_divided_as_well(monkeypatch, fresh_model) -> None:
    """A call with a mask, or with a picture beside the text, is the stock processor's, with what diffusers has set."""
    from diffusers.models.transformers import transformer_hunyuan_video15, transformer_wan

    for module, kind in ((transformer_hunyuan_video15, "hunyuan15_t2v"), (transformer_wan, "wan_i2v")):
        seen, dispatch = [], module.dispatch_attention_fn

        def spy(*tokens, parallel_config=None, seen=seen, dispatch=dispatch, **named):
            seen.append(parallel_config)
            return dispatch(*tokens, **named)

        monkeypatch.setattr(module, "dispatch_attention_fn", spy)
        ours = fresh_model(kind, guidance_scale=1.0, train=False, packed=False)
        layer = ours.blocks()[0].attn if kind == "hunyuan15_t2v" else ours.blocks()[0].attn1
        layer.processor._parallel_config = "set"
        if kind == "wan_i2v":  # self-attention has no picture; a mask sends it there
            layer(torch.randn(1, 4, layer.inner_dim), None, torch.ones(4, 4, dtype=torch.bool), None)
        else:
            ours.velocity(torch.randn(1, *ours.latent_shape()), SIGMA, ours.encode(["a cat"]))
        assert "set" in seen, kind


@pytest.mark.parametrize(
    ("asked", "device", "dtype", "passes", "told"),
    [
        (True, "cpu", "float32", 1, "yes, as asked"),
        (False, "cuda", "bfloat16", 10 * WORTH, "no, as asked"),
        (None, "cpu", "bfloat16", 10 * WORTH, "no: it pays on CUDA in bfloat16 only"),
        (None, "cuda", "float32", 10 * WORTH, "no: it pays on CUDA in bfloat16 only"),
        (None, "cuda", "bfloat16", WORTH - 1, f"no: {WORTH - 1} passes are fewer than the {WORTH} from which it pays"),
        (None, "cuda", "bfloat16", 4000, f"yes: 4,000 passes are more than the {WORTH} from which it pays; the first"),
    ],
)
def test_when_compiling_pays(asked, device, dtype, passes, told) -> None:
    decided, why = worth_compiling(asked, torch.device(device), dtype, passes)
    assert decided == told.startswith("yes")
    assert why.startswith(told)
