"""What the second stage, the flow, has alike in every world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from research.pretraining.options import StageOptions
from research.pretraining.training import Inputs, Trainer


def draw_sigma(n: int, shift: float, device: torch.device) -> Tensor:
    """Noise levels for training: half logit-normal and shifted as in sampling, half uniform, so that all occur."""
    sigma = torch.sigmoid(torch.randn(n, device=device))
    sigma = shift * sigma / (1 + (shift - 1) * sigma)
    uniform = torch.rand(n, device=device)
    return torch.where(torch.rand(n, device=device) < 0.5, sigma, uniform).clamp(1e-3, 1.0)


def flow_loss(velocity: Callable[[Tensor, Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Mean squared error of v = eps - x0 on x = (1 - sigma) x0 + sigma eps; `velocity` is what the networks say at (x, sigma)."""
    x0, eps, sigma = inputs["x0"], inputs["eps"], inputs["sigma"]
    level = sigma[:, None, None, None, None]
    x = (1 - level) * x0 + level * eps
    return {"loss": (velocity(x, sigma) - (eps - x0)).square().mean()}


def flow_trainer(options: StageOptions, **given: Any) -> Trainer:
    """The trainer of the second stage; `given` is what is a world's own: parameters, loss and batches."""
    return Trainer(
        "flow",
        options,
        minutes=options.flow_minutes,
        steps=options.flow_steps,
        peak_lr=options.flow_lr,
        weight_decay=0.01,
        average=0.999,
        **given,
    )
