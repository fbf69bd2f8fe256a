"""Small tools of the trainer tests."""

from __future__ import annotations

import torch

from sage_grpo.train.trainer import Trainer


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """A copy of the trainable weights."""
    return {name: p.detach().clone() for name, p in trainer.state.params.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Equal to the bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
