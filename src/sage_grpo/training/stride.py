"""How far an iteration's updates moved the policy: the exact KL between the policies before and after them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sage_grpo.parallel.world import World
from sage_grpo.rl.trust_region import closed_form_kl
from sage_grpo.training.planning.plan import Plan
from sage_grpo.training.rollout import Rollout


@torch.no_grad()
def path_kl(
    plan: Plan, rollout: Rollout, world: World, device: torch.device, progress: Callable[[], None] = lambda: None
) -> float:
    """KL(policy of the rollout, policy now) of a whole path, per latent dimension, over all ranks: the same number on each.

    By the chain rule the KL of two laws of a path is the sum of the KLs of its steps, at states of the first law, which is where
    the rollout has been. Each group measures it at the step that its gauge names. One pass forward per group.
    """
    gauged = plan.gauged(world.rank)
    idle = next(iter(rollout.records))  # sharded networks take all ranks to run
    passes = [*gauged.items(), *[(idle, [])] * (plan.gauge_rounds - len(gauged))]
    total = 0.0
    for replay, rows in passes:
        record = rollout.records[replay]
        x = record.x.to(device=device, dtype=torch.float32)
        v = record.policy.step(replay.step, x, record.conditions).velocity
        if rows and record.v_old is not None:
            sensitivity = record.policy.transition(replay.step).sensitivity.expand(len(v))
            kl = closed_form_kl(v, record.v_old.to(v.device), sensitivity)
            total += sum(weight * float(kl[row]) for row, weight in rows)
        progress()
    return float(world.sum(torch.tensor([total], dtype=torch.float64))) / len(plan.groups)
