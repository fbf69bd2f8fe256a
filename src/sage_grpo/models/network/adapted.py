"""The product of a layer that has a LoRA, with as little memory traffic as its shape allows."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor
from torch.nn import functional as F

WIDE = 2  # from so many times more outputs than inputs on, widening the input costs less than adding to the output


def adapted_linear(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """x W^T + b + scale x A^T B^T, in the dtype of x; the adapter's halves A (`down`) and B (`up`) may be kept in float32. peft's way makes two more
    tensors as large as the layer's output: at video sizes a tenth of a forward pass, for a hundredth of its arithmetic. Here both are one product
    with r more columns, or, where widening the input would cost more, the adapter's part is added into the layer's output."""
    rows = x.flatten(0, -2)
    down, up = down.to(x.dtype), (scale * up).to(x.dtype)
    # A compiler computes straight into the wider input, and would make a copy for a product in place.
    if torch.compiler.is_compiling() or weight.shape[0] >= WIDE * weight.shape[1]:
        y = _Widened.apply(rows, weight, bias, down, up)  # type: ignore[no-untyped-call]
    else:
        y = F.linear(rows, weight, bias).addmm_(F.linear(rows, down), up.t())
    return y.unflatten(0, x.shape[:-1])


class AdaptedLinear(Linear):
    """peft's layer, which computes the case of every training run (adapters on, not merged) with `adapted_linear`."""

    def forward(self, x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        base = self.base_layer
        active = [name for name in self.active_adapters if name in self.lora_A]
        unusual = arguments or named or x.dtype != base.weight.dtype
        if unusual or self.disable_adapters or self.merged or not active:
            return super().forward(x, *arguments, **named)
        first, *others = active
        down, up = self.lora_A[first].weight, self.lora_B[first].weight
        y = adapted_linear(x, base.weight, base.bias, down, up, self.scaling[first])
        for name in others:
            low = F.linear(x, self.lora_A[name].weight.to(x.dtype))
            y = y + F.linear(low, (self.scaling[name] * self.lora_B[name].weight).to(x.dtype))
        return y


class _Widened(torch.autograd.Function):
    """[x, x A^T] [W, B]^T + b. Automatic differentiation would also compute the gradient of W, which is frozen."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor) -> Tensor:
        low = F.linear(x, down)
        return F.linear(torch.cat([x, low], dim=1), torch.cat([weight, up], dim=1), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, down, up = inputs
        ctx.save_for_backward(x, weight, down, up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, down, up = ctx.saved_tensors
        both = gradient @ torch.cat([weight, up], dim=1)
        to_x: Tensor | None
        to_x, to_low = both[:, : weight.shape[1]], both[:, weight.shape[1] :]
        low = F.linear(x, down)  # cheaper to compute again than to keep
        to_x = torch.addmm(to_x, to_low, down) if ctx.needs_input_grad[0] else None
        return to_x, None, None, to_low.t() @ x, gradient.t() @ low
