"""Batches of prompts of several lengths, and the choice of the attention."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from sage_grpo.models import ModelError
from sage_grpo.models.families.hunyuan15 import causal_mask
from sage_grpo.models.network import attention
from sage_grpo.models.network.attention import choose_backend
from sage_grpo.models.network.inputs import in_equal_batches

SIGMA = torch.tensor(0.7)


def test_sub_batches_keep_the_order() -> None:
    counts, calls = [2, 3, 1, 2, 3], []  # an order that is not its own inverse
    inputs = [{"a": torch.full((n,), float(row))} for row, n in enumerate(counts)]

    def run(x, batch):
        calls.append(len(x))
        assert torch.equal(x[:, 0], batch["a"][:, 0])
        return x * 10

    x = torch.arange(5.0)[:, None]
    assert torch.equal(in_equal_batches(run, x, inputs, torch.device("cpu")), x * 10)
    assert calls == [2, 2, 1]


def test_causal_mask_is_the_stock_one() -> None:
    from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock

    expected = HunyuanVideo15AttnBlock.prepare_causal_attention_mask(3, 4, torch.float32, torch.device("cpu"))
    assert torch.equal(causal_mask(3, 4, torch.float32, torch.device("cpu"), batch_size=2), expected)


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({"_native_cudnn": 10.0, "_native_flash": 17.0}, "_native_cudnn"),
        ({"_native_cudnn": 10.0, "_native_flash": 9.0}, "_native_cudnn"),  # about equal: always the same choice
        ({"_native_cudnn": 10.0, "_native_flash": 8.0}, "_native_flash"),
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


def test_a_kernel_is_timed_forward_and_backward(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Mock(elapsed_time=lambda end: 3.0))
    monkeypatch.setattr(torch.cuda, "synchronize", Mock())
    case = torch.device("cpu"), torch.float32, attention.Shape(7, 2, 8)
    assert attention._milliseconds(attention.AttentionBackendName.NATIVE, *case) == 3.0


def test_a_deterministic_model_has_no_kernel_without_a_fixed_order(monkeypatch) -> None:
    cuda, shape = torch.device("cuda"), attention.Shape(7, 2, 8)
    assert choose_backend("auto", cuda, torch.float32, shape)[0].value == "native"
    for name in ("flash_hub", "nativ"):
        with pytest.raises(ModelError, match=r"native"):
            choose_backend(name, cuda, torch.bfloat16, shape)
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


def test_prompts_of_several_lengths_are_one_batch(fresh_model) -> None:
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
