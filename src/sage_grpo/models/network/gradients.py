"""Tensors without storage, and the order in which gradients reach parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

empty = partial(torch.empty, device="meta")  # A tensor without storage


def one_after_another(*outputs: Tensor) -> tuple[Tensor, ...]:
    """The same tensors, whose graphs a backward pass runs through one at a time. In a joint backward pass a weight that two forward passes read waits
    for both of its gradients: 31 GiB more for HunyuanVideo-1.5. Gradients reach parameters through `backward` only, not through
    `torch.autograd.grad`."""
    if not any(output.requires_grad for output in outputs):
        return outputs
    return _OneAfterAnother.apply(outputs, *(output.detach().requires_grad_() for output in outputs))  # type: ignore[no-untyped-call]


class _OneAfterAnother(torch.autograd.Function):
    """Identity; `outputs` have the graphs, `heads` are their detached values."""

    @staticmethod
    def forward(ctx: Any, outputs: tuple[Tensor, ...], *heads: Tensor) -> tuple[Tensor, ...]:
        ctx.outputs = outputs
        return tuple(head.view_as(head) for head in heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        for output, gradient in zip(ctx.outputs, gradients):
            torch.autograd.backward(output, gradient)
        return (None,) * (1 + len(gradients))
