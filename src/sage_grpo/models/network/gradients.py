"""Parameters that never receive a gradient, and the order in which gradients reach the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

empty = partial(torch.empty, device="meta")  # A tensor without storage
_traced: dict[Hashable, frozenset[str]] = {}
"""Results for networks by class and configuration: tracing takes half of the time of loading a small model."""


def without_gradient(
    transformer: Any, blocks: Mapping[str, str], run: Callable[[nn.Module], Tensor], inputs: Hashable = None
) -> set[str]:
    """Names of the parameters that the output of `run` does not depend on. HunyuanVideo-1.5's last block projects its text stream although nothing
    reads it, and a text-to-video model never calls its image embedder. Parameters without gradients break sharded optimizers and checkpoints, so they
    must be frozen. They are read off the autograd graph of a copy on the meta device with two of the repeated `blocks` (lists, each with the config's
    name for its length): one represents the last, one all before it. `run` gives it inputs on the meta device; `inputs` names all that `run` takes
    from elsewhere than the configuration, so that results can be cached."""
    if inputs is None:
        return _trace(transformer, blocks, run)
    config = {name: value for name, value in transformer.config.items() if name != "_name_or_path"}
    key = (type(transformer), repr(sorted(config.items())), tuple(blocks.items()), inputs)
    if key not in _traced:
        _traced[key] = frozenset(_trace(transformer, blocks, run))
    return set(_traced[key])


def _trace(transformer: Any, blocks: Mapping[str, str], run: Callable[[nn.Module], Tensor]) -> set[str]:
    layers = {name: len(getattr(transformer, name)) for name in blocks}
    fewer = {blocks[name]: min(2, count) for name, count in layers.items()}
    # Without diffusers' own notes, among which is a list of names whose values it would set back to the class's.
    config = {name: value for name, value in transformer.config.items() if not name.startswith("_")}
    with torch.device("meta"):
        copy = type(transformer).from_config({**config, **fewer})
    copy.requires_grad_(True)
    with torch.enable_grad():
        reached = _reached(run(copy))
    dead = [name for name, parameter in copy.named_parameters() if parameter not in reached]
    return {name for short in dead for name in _stands_for(short, layers)}


def unread_queries(transformer: Any, blocks: Iterable[str]) -> set[str]:
    """Names of the parameters of the text's queries in the last block, whose answers nothing reads: their gradient is zero."""
    *_, name = blocks
    last = f"{name}.{len(getattr(transformer, name)) - 1}.attn"
    unread = (f"{last}.add_q_proj.", f"{last}.norm_added_q.")
    return {name for name, _ in transformer.named_parameters() if name.startswith(unread)}


def _reached(output: Tensor) -> set[Tensor]:
    pending: list[Any] = [output.grad_fn]  # torch's stubs have no node with a variable
    seen, leaves = set[Any](), set[Tensor]()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves.add(node.variable)
        pending += [parent for parent, _ in node.next_functions]
    return leaves


def _stands_for(name: str, layers: Mapping[str, int]) -> list[str]:
    match = re.fullmatch(r"(\w+)\.(\d)\.(.+)", name)
    if match is None or layers.get(match[1], 0) < 2:
        return [name]
    last = layers[match[1]] - 1
    return [f"{match[1]}.{row}.{match[3]}" for row in ([last] if match[2] == "1" else range(last))]


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
