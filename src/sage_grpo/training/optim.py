"""Optimizers and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sage_grpo.training.adaptive_lr import AdaptiveRate
from sage_grpo.training.config import OptimizerConfig


class Optimizer:
    """AdamW for all parameters, or Muon for matrices and AdamW for the rest; one learning rate, state by name."""

    def __init__(self, params: Mapping[str, nn.Parameter], config: OptimizerConfig, *, total_updates: int) -> None:
        self.params, self.config, self.total_updates = dict(params), config, total_updates
        self.pace = AdaptiveRate(config.target_kl)
        matrices = [p for p in self.params.values() if config.kind == "muon" and p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in self.params.values() if id(p) not in chosen]
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            # Scaled so that a matrix moves as far as with AdamW: one learning rate then serves both.
            self.parts.append(
                torch.optim.Muon(
                    matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
                )
            )
        if others:
            self.parts.append(
                torch.optim.AdamW(
                    others, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
                )
            )

    def step(self, update: int) -> float:
        """Apply the gradients as optimizer update number `update` (from 0); returns the learning rate used."""
        lr = self.pace.factor * learning_rate(self.config, update, self.total_updates)
        onednn: Any = torch.backends.mkldnn  # the stubs give `enabled` the type of its descriptor
        enabled = onednn.enabled
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()
        self.materialize()  # an expert without gradients so far gets its state too: checkpoints then always hold all of it
        # Muon computes in bfloat16. On a CPU without it PyTorch turns oneDNN off permanently: rollouts would round
        # differently from the second iteration on, and a resumed run would differ.
        onednn.enabled = enabled
        return lr

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The state as flat tensors `optimizer/<parameter>/<key>`; empty before the first update."""
        flat = {}
        for name, p in self.params.items():
            for part in self.parts:
                for key, value in part.state.get(p, {}).items():
                    flat[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
        return flat

    def load_tensors(self, flat: Mapping[str, Tensor]) -> None:
        """Continue from `tensors()`."""
        for name, p in self.params.items():
            for part in self.parts:
                if any(p is q for group in part.param_groups for q in group["params"]):
                    prefix = f"optimizer/{name}/"
                    entries = {key[len(prefix) :]: t for key, t in flat.items() if key.startswith(prefix)}
                    if entries:
                        part.state[p] = entries

    def materialize(self) -> None:
        """Create empty state for every parameter, as the target of a load that reshards."""
        for part in self.parts:
            for group in part.param_groups:
                for p in group["params"]:
                    if p not in part.state:
                        part.state[p] = _empty_state(part, p)


def _empty_state(part: torch.optim.Optimizer, p: nn.Parameter) -> dict[str, Tensor]:
    if isinstance(part, torch.optim.AdamW):
        zeros = torch.zeros_like(p, memory_format=torch.preserve_format)
        return {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": torch.zeros_like(zeros)}
    return {"momentum_buffer": torch.zeros_like(p)}


def learning_rate(config: OptimizerConfig, update: int, total: int) -> float:
    """Linear warm-up, then constant, or cosine or linear decay that would reach 0 one update after the last."""
    if update < config.warmup_updates:
        return config.lr * (update + 1) / config.warmup_updates
    if config.decay == "constant":
        return config.lr
    progress = min(1.0, (update - config.warmup_updates) / max(1, total - config.warmup_updates))
    factor = 1.0 - progress if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * factor
