"""Batches without padding: samples whose inputs have equal shapes run together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]


def in_equal_batches(
    run: Callable[[Tensor, dict[str, Tensor]], Tensor], x: Tensor, inputs: Sequence[Inputs], device: torch.device
) -> Tensor:
    """Apply `run(x, inputs)` to sub-batches of equal input shapes and put the results back in order.

    A group of rollouts shares its prompt, so there is mostly one sub-batch. The split depends on the shapes alone, hence
    replaying the same batch gives the same bits.
    """
    rows_by_shape: dict[tuple[object, ...], list[int]] = {}
    for row, tensors in enumerate(inputs):
        shape = tuple((name, tuple(tensor.shape)) for name, tensor in sorted(tensors.items()))
        rows_by_shape.setdefault(shape, []).append(row)
    if len(rows_by_shape) == 1:
        return run(x, stack(inputs, device))
    outputs = [run(x[rows], stack([inputs[row] for row in rows], device)) for rows in rows_by_shape.values()]
    order = torch.tensor([row for rows in rows_by_shape.values() for row in rows])
    return torch.cat(outputs)[order.argsort().to(x.device)]


def stack(inputs: Sequence[Inputs], device: torch.device) -> dict[str, Tensor]:
    """Inputs of equal shapes as one batch on the device; a tensor that all samples share travels there once."""
    batch = {}
    for name, first in inputs[0].items():
        if all(tensors[name] is first for tensors in inputs):
            batch[name] = first.to(device)[None].expand(len(inputs), *first.shape).contiguous()
        else:
            batch[name] = torch.stack([tensors[name] for tensors in inputs]).to(device)
    return batch


def seen_tokens(text: Tensor, mask: Tensor) -> Tensor:
    """The tokens of one text that a network with this mask attends to; text is tokens x channels.

    Where the mask leaves none (an empty prompt, and a tokenizer that marks neither beginning nor end), all of them: pipelines mask by
    adding one large negative number to scores, and what is added to every score changes no softmax.
    """
    valid = mask.bool()
    return text[valid] if bool(valid.any()) else text
