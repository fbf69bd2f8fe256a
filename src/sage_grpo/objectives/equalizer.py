"""Temporal gradient equaliser."""

from __future__ import annotations

import torch
from torch import Tensor


def equalizing_weights(sensitivity: Tensor, *, cap: float | None = None) -> Tensor:
    """S_t = median over trained steps(sensitivity) / sensitivity_t. (paper Eq. 9, with |b| / std for N_t)

    `sensitivity` holds the trained steps only. The weights multiply the surrogate, not the log-ratio and not the KL.
    """
    if sensitivity.ndim != 1 or len(sensitivity) == 0:
        raise ValueError(
            f"sensitivity must be one non-empty row of trained steps, got shape {tuple(sensitivity.shape)}."
        )
    if not bool((torch.isfinite(sensitivity) & (sensitivity > 0)).all()):
        raise ValueError(
            "sensitivity must be finite and positive: a step with std = 0 is deterministic and must not be trained."
        )
    if cap is not None and cap <= 0:
        raise ValueError(f"cap must be positive, got {cap}.")
    median = torch.quantile(sensitivity.to(torch.float64), 0.5)
    weights = median / sensitivity.to(torch.float64)
    if cap is not None:
        weights = weights.clamp(max=cap)
    return weights.to(torch.float32)
