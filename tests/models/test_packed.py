"""Padding dropped equals padding masked, in values and gradients; batches of mixed lengths keep their order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiny
from sage_grpo.models import ModelError
from sage_grpo.models.families.hunyuan15 import causal_mask
from sage_grpo.models.network import attention
from sage_grpo.models.network.attention import PackedAttention, choose_backend, set_backend
from sage_grpo.models.network.inputs import in_equal_batches

PROMPTS = ["a cat", 'a dog holds "hi" up']
SIGMA = torch.tensor(0.7)


@pytest.mark.parametrize("kind", ["hunyuan15_t2v", "hunyuan15_i2v"])
def test_dropped_padding_is_masked_padding(kind: str, fresh_model) -> None:
    packed, stock = (fresh_model(kind, guidance_scale=1.0, packed=flag) for flag in (True, False))
    if kind.endswith("i2v"):  # one kind with all of the real padding is enough
        stock.pipe.tokenizer_max_length, stock.pipe.tokenizer_2_max_length = 60, 40
    x = torch.randn(2, *packed.latent_shape())
    images = [tiny.image(i) for i in range(2)] if kind.endswith("i2v") else None
    conditions = packed.encode(PROMPTS, images)
    v, v_stock = packed.velocity(x, SIGMA, conditions), stock.velocity(x, SIGMA, conditions)
    torch.testing.assert_close(v, v_stock, rtol=1e-5, atol=1e-5)

    probe = torch.randn_like(v)
    (v * probe).sum().backward()
    (v_stock * probe).sum().backward()
    for (name, ours), theirs in zip(packed.trainable().items(), stock.trainable().values()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_frozen_are_exactly_those_without_gradient(fresh_model) -> None:
    ours = fresh_model("hunyuan15_t2v", guidance_scale=1.0)
    ours.velocity(torch.randn(1, *ours.latent_shape()), SIGMA, ours.encode(["a cat"])).sum().backward()
    assert all(parameter.grad is not None for parameter in ours.trainable().values())
    frozen = {name for name, parameter in ours.transformer.named_parameters() if not parameter.requires_grad}
    heads = {".".join(name.split(".")[:3]) for name in frozen}
    assert {"transformer_blocks.1.ff_context", "transformer_blocks.1.attn"} <= heads
    assert "transformer_blocks.0.ff_context" not in heads
    assert {"image_embedder", "context_embedder_2"} <= {name.split(".")[0] for name in frozen}


@pytest.mark.parametrize("image", [False, True])
def test_dead_parameters_of_a_deeper_network(image: bool, fresh_model) -> None:
    """The shortcut of two blocks finds what the whole graph has."""
    ours = fresh_model("hunyuan15_i2v" if image else "hunyuan15_t2v", guidance_scale=1.0)
    ours.transformer = network = type(ours.transformer).from_config({**ours.transformer.config, "num_layers": 4})
    expected = ours._unread(ours.transformer)
    ours.network = ours._adapted(network).requires_grad_(True)
    conditions = ours.encode(["a cat"], [tiny.image()] if image else None)
    v = ours.velocity(torch.randn(1, *ours.latent_shape()), SIGMA, conditions)
    names, parameters = zip(*network.named_parameters())
    gradients = torch.autograd.grad(v.sum(), parameters, allow_unused=True)
    silent = {name for name, gradient in zip(names, gradients) if gradient is None or not gradient.any()}
    assert {name for name, gradient in zip(names, gradients) if gradient is None} <= expected <= silent
    assert "transformer_blocks.3.attn.add_q_proj.weight" in expected
    assert any("transformer_blocks.3.ff_context" in name for name in expected)


def test_network_never_sees_a_mask(model, monkeypatch) -> None:
    ours = model("hunyuan15_t2v")
    seen = []
    call = PackedAttention.__call__

    def spy(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        seen.append((attention_mask, encoder_hidden_states.shape[1]))
        return call(self, attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)

    monkeypatch.setattr(PackedAttention, "__call__", spy)
    conditions = ours.encode(["a cat"])
    ours.velocity(torch.randn(1, *ours.latent_shape()), SIGMA, conditions)
    tokens = [len(conditions[0].tensors["text"]), len(conditions[0].negative["text"])]
    assert seen == [(None, tokens[0])] * 2 + [(None, tokens[1])] * 2  # two blocks, two branches


def test_sub_batches_keep_the_order() -> None:
    inputs = [
        {"a": torch.full((n,), float(row))} for row, n in enumerate([2, 3, 1, 2, 3])
    ]  # an order that is not its own inverse
    calls = []

    def run(x, batch):
        calls.append(len(x))
        assert torch.equal(x[:, 0], batch["a"][:, 0])
        return x * 10

    x = torch.arange(5.0)[:, None]
    assert torch.equal(in_equal_batches(run, x, inputs, torch.device("cpu")), x * 10)
    assert calls == [2, 2, 1]


def test_vae_decodes_batches_as_it_does_single_clips(model) -> None:
    single, batched = model("hunyuan15_t2v", train=False), model("hunyuan15_t2v", train=False, vae_slicing=False)
    latents = torch.randn(3, *single.latent_shape())
    steps = []
    clips = single.decode(latents, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(1, 3), (2, 3), (3, 3)]
    assert (clips.int() - batched.decode(latents).int()).abs().max() <= 1
    assert clips.shape == (3, 5, 32, 32, 3)


def test_causal_mask_is_the_stock_one() -> None:
    from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock

    expected = HunyuanVideo15AttnBlock.prepare_causal_attention_mask(3, 4, torch.float32, torch.device("cpu"))
    assert torch.equal(causal_mask(3, 4, torch.float32, torch.device("cpu"), batch_size=2), expected)


def test_tiled_decoding_agrees_far_from_seams(model) -> None:
    fields = {"train": False, "height": 320, "width": 32, "frames": 1}
    whole, tiled = model("hunyuan15_t2v", **fields), model("hunyuan15_t2v", vae_tiling=True, **fields)
    assert [tiled.pipe.vae.use_tiling, whole.pipe.vae.use_tiling] == [True, False]
    latents = torch.randn(1, *whole.latent_shape())
    a, b = whole.decode(latents), tiled.decode(latents)
    assert a.shape == b.shape == (1, 1, 320, 32, 3)
    assert not torch.equal(a, b)


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({"_native_cudnn": 10.0, "_native_flash": 17.0}, "_native_cudnn"),
        ({"_native_cudnn": 10.0, "_native_flash": 9.0}, "_native_cudnn"),  # about equal: always the same choice
        ({"_native_cudnn": 10.0, "_native_flash": 8.0}, "_native_flash"),
        ({"_native_flash": 8.0}, "_native_flash"),
        ({}, "native"),
    ],
)
def test_the_fastest_kernel_is_taken(times: dict[str, float], best: str, monkeypatch) -> None:
    monkeypatch.setattr(attention, "_milliseconds", lambda backend, *_: times.get(backend.value))
    attention._fastest.cache_clear()
    backend, why = choose_backend("auto", torch.device("cuda"), torch.bfloat16, attention.Shape(7, 2, 8))
    attention._fastest.cache_clear()
    assert backend.value == best
    assert all(f"{ms:.1f} ms" in why for ms in times.values())


def test_a_deterministic_model_has_no_kernel_without_a_fixed_order(model, monkeypatch) -> None:
    times = {"_native_cudnn": 1.0, "_native_flash": 9.0}
    monkeypatch.setattr(attention, "_milliseconds", lambda backend, *_: times.get(backend.value))
    place = torch.device("cuda"), torch.bfloat16, attention.Shape(7, 2, 8)
    attention._fastest.cache_clear()
    assert [choose_backend("auto", *place, deterministic=wanted)[0].value for wanted in (False, True, False)] == [
        "_native_cudnn", "_native_flash", "_native_cudnn",
    ]  # fmt: skip
    attention._fastest.cache_clear()
    for name in ("native", "_native_flash", "_native_efficient", "_native_math"):
        assert choose_backend(name, *place, deterministic=True)[0].value == name
    for name in ("_native_cudnn", "flash", "sage", "xformers"):
        with pytest.raises(ModelError, match=rf'"{name}" has no backward pass .*_native_flash'):
            choose_backend(name, *place, deterministic=True)
    with pytest.raises(ModelError, match=r"model\.deterministic"):
        model("hunyuan15_t2v", attention="_native_cudnn", deterministic=True)


def test_backend_is_the_models_own(model) -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    before = _AttentionBackendRegistry.get_active_backend()[0]
    a, b = model("hunyuan15_t2v", attention="_native_math"), model("hunyuan15_t2v")
    backends = [m.blocks()[0].attn.processor._attention_backend for m in (a, b)]
    assert backends == [AttentionBackendName._NATIVE_MATH, AttentionBackendName.NATIVE]
    assert _AttentionBackendRegistry.get_active_backend()[0] == before
    cuda, shape = torch.device("cuda"), attention.Shape(7, 2, 8)
    assert choose_backend("auto", cuda, torch.float32, shape)[0] == AttentionBackendName.NATIVE
    for name in ("flash_hub", "nativ"):
        with pytest.raises(ModelError, match=r"native"):
            choose_backend(name, cuda, torch.bfloat16, shape)
    set_backend(nn.Linear(1, 1), AttentionBackendName.NATIVE)  # nothing to set is fine


def test_prompts_of_several_lengths_are_one_batch(fresh_model) -> None:
    """Padding that nothing attends to changes neither values nor gradients, and one pass serves all prompts that fit."""
    plain = fresh_model("hunyuan15_t2v", guidance_scale=1.0)
    prompts = ["a cat", "a cat and a dog that run", "a bird", 'a dog holds "hi" up', "a " * 30]
    conditions = plain.encode(prompts)
    lengths = [len(condition.tensors["text"]) for condition in conditions]
    assert len({*lengths[:3]}) == 3
    assert max(lengths[:4]) < lengths[4]
    padded = fresh_model("hunyuan15_t2v", guidance_scale=1.0, options={"pad_text": max(lengths[:4])})
    passes = []
    padded.network.register_forward_hook(lambda module, given, v: passes.append(len(v)))
    x = torch.randn(5, *plain.latent_shape())
    v, v_padded = plain.velocity(x, SIGMA, conditions), padded.velocity(x, SIGMA, conditions)
    assert sorted(passes) == [1, 1, 3]  # glyphs and what is too long are apart
    torch.testing.assert_close(v_padded, v, rtol=1e-5, atol=1e-5)
    probe = torch.randn_like(v)
    (v * probe).sum().backward()
    (v_padded * probe).sum().backward()
    for (name, ours), theirs in zip(padded.trainable().items(), plain.trainable().values()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_padding_is_refused_where_it_cannot_be(fresh_model) -> None:
    with pytest.raises(ModelError, match=r"pad_text is for model\.packed"):
        fresh_model("hunyuan15_t2v", packed=False, options={"pad_text": 8})
    for tokens in (-1, 8.5):
        with pytest.raises(ModelError, match=f"pad_text is a whole number from 0, got {tokens}"):
            fresh_model("hunyuan15_t2v", options={"pad_text": tokens})
