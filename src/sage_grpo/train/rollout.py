"""Rollouts: sample clips with the policy and keep what training needs of their trajectories."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_grpo.data.groups import MicroBatch
from sage_grpo.data.prompts import Prompt
from sage_grpo.flow.noise import keyed_noise
from sage_grpo.models.policy import Policy
from sage_grpo.types import Conditioning


@dataclass(frozen=True)
class Trajectory:
    """What the update needs of one micro-batch: the trained steps only."""

    batch: MicroBatch
    conditions: tuple[Conditioning, ...]
    x: dict[int, Tensor]
    """State before and after every trained step (x[step], x[step + 1])."""
    v_old: dict[int, Tensor]
    """Velocity of the rollout's policy at every trained step; empty when no loss term needs it."""
    log_prob_old: dict[int, Tensor]
    """Log-probability of the step taken, at every trained step."""
    latents: Tensor
    """The samples."""


@dataclass(frozen=True)
class Storage:
    """How trajectories are kept."""

    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    velocities: bool = True
    """Keep the rollout's velocities (step-wise KL, KL mask, centred ratio)."""


@dataclass(frozen=True)
class NoiseKeys:
    """Noise of a rollout, keyed by (seed, iteration, group, member): independent of ranks, batches and interruptions."""

    seed: int
    iteration: int
    same_start: bool = False
    """All members of a group start from the same noise."""

    def start(self, batch: MicroBatch, prompts: Sequence[Prompt], shape: tuple[int, ...]) -> Tensor:
        """Initial noise of a micro-batch; a prompt with its own seed gives the same noises in every iteration."""
        rows = []
        for member in batch.members:
            index = 0 if self.same_start else member.index
            own = prompts[member.group].seed
            place = (self.seed, self.iteration, member.group) if own is None else ("prompt", own)
            rows.append(keyed_noise(shape, "start", *place, index))
        return torch.stack(rows)

    def step(self, batch: MicroBatch, step: int, shape: tuple[int, ...]) -> Tensor:
        """Exploration noise of a step."""
        return torch.stack(
            [keyed_noise(shape, "step", self.seed, self.iteration, m.group, m.index, step) for m in batch.members]
        )


@torch.no_grad()
def roll_out(
    policy: Policy,
    batch: MicroBatch,
    prompts: Sequence[Prompt],
    conditions: Mapping[int, Conditioning],
    *,
    keys: NoiseKeys,
    trained: frozenset[int],
    storage: Storage,
    progress: Callable[[], None] = lambda: None,
) -> Trajectory:
    """Sample one micro-batch from noise to latents; `conditions` are those of its groups."""
    shape, device = policy.model.latent_shape(), policy.model.device
    mine = tuple(conditions[member.group] for member in batch.members)
    x = _stored(keys.start(batch, prompts, shape).to(device), storage)
    states: dict[int, Tensor] = {}
    v_old: dict[int, Tensor] = {}
    log_prob_old: dict[int, Tensor] = {}
    for index in range(policy.schedule.num_steps):
        step = policy.step(index, x, mine)
        noisy = float(step.gaussian.std) > 0
        x_next = step.gaussian.sample(keys.step(batch, index, shape).to(device)) if noisy else step.gaussian.mean
        # Rounding the state itself, not a copy of it, keeps rollout and replay on the same numbers.
        x_next = _stored(x_next, storage)
        if index in trained:
            states.setdefault(index, _kept(x, storage))
            states[index + 1] = _kept(x_next, storage)
            log_prob_old[index] = step.gaussian.log_prob(x_next)
            if storage.velocities:
                v_old[index] = step.velocity.to(storage.device)
        x = x_next
        progress()
    return Trajectory(batch, mine, states, v_old, log_prob_old, latents=x)


def _stored(x: Tensor, storage: Storage) -> Tensor:
    return x if storage.dtype == torch.float32 else x.to(storage.dtype).to(torch.float32)


def _kept(x: Tensor, storage: Storage) -> Tensor:
    return x.to(device=storage.device, dtype=storage.dtype)
