"""Optimizers with their options, and the learning rate: its schedule, and what follows the exact KL of the updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sage_grpo.config.ranges import Decay, Natural, NotNegative, Positive, checked
from sage_grpo.health.checks import LEAST


@checked
class OptimizerConfig:
    """Optimizer and learning rate."""

    kind: Literal["adamw", "muon"] = "adamw"
    """AdamW, or Muon for matrices with AdamW for the rest."""
    lr: Positive = 1e-5
    """Peak learning rate."""
    target_kl: Positive | None = None
    """Adapt the learning rate (at most lr) so that a rollout's updates move the policy by this KL, in nats per path."""
    max_kl: Positive | None = None
    """Scale a rollout's updates back when they move the policy by more than this KL, in nats per path."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    eps: Positive = 1e-8
    """AdamW's epsilon; the metric gradient/rms_over_eps shows whether gradients are well above it."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay."""
    max_grad_norm: Positive = 1.0
    """Largest gradient norm; larger gradients are scaled down."""
    warmup_updates: Natural = 0
    """Updates of linear warm-up."""
    decay: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after warm-up: constant, or falling to 0 at the end of the run."""
    ema: Decay | None = None
    """Decay per update of a moving average of the weights; None keeps none."""

    def __post_init__(self) -> None:
        if self.target_kl is not None and self.max_kl is not None and self.max_kl < self.target_kl:
            raise ValueError(
                f"optimizer.max_kl ({self.max_kl}) is below optimizer.target_kl ({self.target_kl}), which no rollout could then "
                "reach: 4 to 10 times the target leaves room for its scatter."
            )

    @property
    def measures_kl(self) -> bool:
        """True if the KL of a rollout's updates is measured, which takes a network pass per prompt."""
        return self.target_kl is not None or self.max_kl is not None


@dataclass(eq=False)
class Optimizer:
    """AdamW for all parameters, or Muon for matrices and AdamW for the rest; one learning rate, state by name."""

    params: Mapping[str, nn.Parameter]
    config: OptimizerConfig
    _: KW_ONLY
    total_updates: int

    def __post_init__(self) -> None:
        config = self.config
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


GAIN = 1 / 3
"""Share of a deviation that one observation corrects: a rollout's KL scatters by a factor of 2 around its mean, because
prompts differ."""
LARGEST_STEP = 1.5
"""The factor changes by at most this, up or down, from one rollout to the next."""
SLACK = 0.02
"""Relative tolerance of the KL of a step that is scaled back."""
TRIES = 12
"""Most shares of a step that are measured; two to four are usual."""


class AdaptiveRate:
    """Holds the factor on the learning rate; `observe` is called once per rollout with the same KL on every rank."""

    def __init__(self, target: float | None) -> None:
        self.target, self.factor = target, 1.0
        self.brake = 1.0
        """The sentinel's factor on step sizes, which applies with and without a target."""

    def slow_to(self, brake: float) -> None:
        """Make steps `brake` times as long as they would be; the KL is quadratic in them, so a target follows."""
        self.factor *= brake / self.brake
        self.brake = brake

    def observe(self, kl: float) -> float:
        """Count one rollout's updates, which moved the policy by this KL; returns the factor of the next ones.

        The KL is quadratic in the step, so a step of sqrt(target / kl) times the length would have met the target. A KL
        of exactly 0 means that there was no gradient: it does not change the factor.
        """
        if not math.isfinite(kl) or kl < 0:
            raise ValueError(f"A KL of {kl} cannot steer the learning rate.")
        if self.target is not None and kl > 0:
            kl /= self.brake**2
            wanted = math.sqrt(self.target / kl) ** GAIN
            step = min(max(wanted, 1 / LARGEST_STEP), LARGEST_STEP)
            self.factor = min(max(self.factor * step, LEAST * self.brake), self.brake)
        return self.factor

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "brake": self.brake}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor, self.brake = float(state["factor"]), float(state["brake"])


def share_kept(kl: float, most: float, measure: Callable[[float], float]) -> float:
    """The largest share of a step whose KL is at most `most`, within SLACK; `kl` is that of the whole step.

    `measure` returns the KL at a share. The KL is quadratic in short steps only, so shares are searched: the next one
    lies on the line through the last two in logarithms; every fourth, or where that line leaves the bounds, halfway
    between the bounds. Where no try is within SLACK (rounding alone may have a larger KL), it is the largest share
    whose KL was below `most`.
    """
    if kl <= most * (1 + SLACK):
        return 1.0
    low, high, share, power = 0.0, 1.0, 1.0, 2.0
    for number in range(TRIES):
        guess: float = share * (most / kl) ** (1 / power)
        if number % 4 == 3 or not low < guess < high:
            guess = math.sqrt(low * high) or high / 2
        last, share, last_kl, kl = share, guess, kl, max(measure(guess), 1e-30 * most)
        if abs(kl - most) <= SLACK * most:
            return share
        low, high = (share, high) if kl < most else (low, share)
        power = max(0.5, math.log(kl / last_kl) / math.log(share / last))
    return low
