"""The least seconds of a pass: its FLOPs at rates that this device was measured to reach.

Of one sample's forward pass only attention and matrix products count; all else would be free on a perfect machine. A training pass
with a LoRA adds the gradients of the inputs (as many products again, and attention's backward pass, 2.5 times its forward) and
recomputes nothing. Adapters, norms and the frozen weights' gradients, which nobody needs, are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

BACKWARD = 2.5
"""FLOPs of attention's backward pass over those of its forward pass: five products instead of two."""


@dataclass(frozen=True)
class Work:
    """FLOPs of one forward pass of one sample."""

    attention: float
    products: float


def wan_work(config: Any, latents: tuple[int, ...], text: int = 512) -> Work:
    """Self-attention over all tokens, cross-attention to the text, a feed-forward layer."""
    tokens = latents[1] * latents[2] * latents[3] // 4
    width = config.num_attention_heads * config.attention_head_dim
    attention = 4 * tokens * tokens * width
    products = (
        2 * tokens * (6 * width**2 + 2 * width * config.ffn_dim) + 4 * text * width**2 + 4 * tokens * text * width
    )
    return Work(config.num_layers * attention, config.num_layers * products)


def hunyuan15_work(config: Any, latents: tuple[int, ...], text: int) -> Work:
    """Joint attention over video and text, each with its own projections and feed-forward layer."""
    tokens = latents[1] * latents[2] * latents[3] + text
    width = config.num_attention_heads * config.attention_head_dim
    attention = 4 * tokens * tokens * width
    products = 2 * tokens * (4 + 2 * config.mlp_ratio) * width**2
    return Work(config.num_layers * attention, config.num_layers * products)


def floors(work: Work, rates: Mapping[str, float]) -> dict[str, float]:
    """Seconds of every kind of pass."""
    products = work.products / rates["products"]
    forward = work.attention / rates["attention"] + products
    training = forward + BACKWARD * work.attention / rates["attention_backward"] + products
    return {
        "forward": forward,
        "guided_forward": 2 * forward,
        "training_pass": training,
        "guided_training_pass": 2 * training,
    }


def measure_rates(device: str, *, tiny: bool) -> dict[str, float]:
    """FLOP/s of a large product and of attention at a clip's length, forward and backward: the best of the kernels here."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dtype = torch.float32 if tiny else torch.bfloat16
    side, tokens, heads = (64, 64, 2) if tiny else (8192, 32760, 12)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    rates = {"products": 2 * side**3 / _least(lambda: a @ b)}
    q, k, v = (torch.randn(1, heads, tokens, 128, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    flops = 4 * tokens * tokens * heads * 128
    kernels = [SDPBackend.MATH] if tiny else [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    for kernel in kernels:
        with sdpa_kernel(kernel):
            out = F.scaled_dot_product_attention(q, k, v)
            forward = flops / _least(lambda: F.scaled_dot_product_attention(q, k, v))
            ones = torch.ones_like(out)
            seconds = _least(lambda: torch.autograd.grad(out, (q, k, v), ones, retain_graph=True))  # noqa: B023 - called here
        rates["attention"] = max(forward, rates.get("attention", 0.0))
        rates["attention_backward"] = max(BACKWARD * flops / seconds, rates.get("attention_backward", 0.0))
    return rates


def _least(run: Callable[[], Any], repeat: int = 5) -> float:
    cuda, times = torch.cuda.is_available(), []
    for _ in range(repeat + 1):
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])
