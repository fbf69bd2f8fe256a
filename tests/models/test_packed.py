"""Padding dropped equals padding masked, in values and gradients; batches of mixed lengths keep their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
from sage_grpo.models import ModelError
from sage_grpo.models.families.hunyuan15 import causal_mask
from sage_grpo.models.network import attention
from sage_grpo.models.network.attention import choose_backend
from sage_grpo.models.network.inputs import in_equal_batches

PROMPTS = ["a cat", 'a dog holds "hi" up']
SIGMA = torch.tensor(0.7)


class StockForward:
    """The transformer's own forward with padding and masks, as the stock pipeline calls it, in place of the packed one."""

    def __init__(self, model: Any) -> None:
        self.pipe, self.transformer = model.pipe, model.transformer

    def __call__(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        text: torch.Tensor,
        glyphs: torch.Tensor | None = None,
        image: torch.Tensor | None = None,
    ) -> torch.Tensor:
        pipe, config = self.pipe, self.transformer.config
        glyphs = x.new_zeros(len(x), 0, config.text_embed_2_dim) if glyphs is None else glyphs
        (text, text_mask), (glyphs, glyph_mask) = (
            padded(text, pipe.tokenizer_max_length),
            padded(glyphs, pipe.tokenizer_2_max_length),
        )
        if image is None:
            image = x.new_zeros(len(x), pipe.vision_num_semantic_tokens, config.image_embed_dim)
        return self.transformer(
            hidden_states=x,
            timestep=timestep.to(x.dtype),
            encoder_hidden_states=text,
            encoder_attention_mask=text_mask,
            encoder_hidden_states_2=glyphs,
            encoder_attention_mask_2=glyph_mask,
            image_embeds=image,
            return_dict=False,
        )[0]


def padded(tokens: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.zeros(len(tokens), length, dtype=torch.int64, device=tokens.device)
    mask[:, : tokens.shape[1]] = 1
    return torch.nn.functional.pad(tokens, (0, 0, 0, length - tokens.shape[1])), mask


@pytest.mark.parametrize("kind", ["hunyuan15_i2v", pytest.param("hunyuan15_t2v", marks=pytest.mark.slow)])
def test_dropped_padding_is_masked_padding(kind: str, fresh_model) -> None:
    packed, stock = (fresh_model(kind, guidance_scale=1.0) for _ in range(2))
    stock.network = StockForward(stock)
    # Less padding than the 1,985 tokens of the real thing.
    for name, count in (
        ("tokenizer_max_length", 60),
        ("tokenizer_2_max_length", 40),
        ("vision_num_semantic_tokens", 9),
    ):
        setattr(stock.pipe, name, count)
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
