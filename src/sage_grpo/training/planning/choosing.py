"""Which clips of a rollout its updates train, once their rewards are known: the best and the worst, and in which update.

Every rank has all rewards and the whole plan, so that all choose alike and know how many passes the others make.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from sage_grpo.data.groups import Member
from sage_grpo.rl.selection import best_and_worst
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.planning.plan import Plan


def choose(config: TrainConfig, plan: Plan, advantages: Tensor, valid: Tensor) -> Plan:
    """The plan with the clips that its updates train; the same plan where every update trains all of them. `advantages` and `valid` have a value for
    every clip, group by group."""
    updates, deals = plan.updates, config.update.deal == "clips" and plan.updates > 1
    if config.batch.trained >= plan.group_size and not deals:
        return plan
    chosen: list[set[Member]] = [set() for _ in range(updates)]
    values, ok, dealt = advantages.tolist(), valid.tolist(), 0
    for group in plan.groups:
        own = slice(group.index * plan.group_size, (group.index + 1) * plan.group_size)
        members = [Member(group.index, place) for place in best_and_worst(values[own], ok[own], config.batch.trained)]
        if not deals:
            for part in chosen:
                part.update(members)
            continue
        random.Random(f"clips/{config.seed}/{plan.iteration}/{group.index}").shuffle(members)
        for member in members:
            # On from where the last group ended: no update goes without, also where groups have fewer clips than there are updates.
            chosen[dealt % updates].add(member)
            dealt += 1
    return replace(plan, chosen=tuple(map(frozenset, chosen)))


def described(config: TrainConfig) -> str:
    """A sentence for the terminal on which clips are trained in which update; empty where every update trains all of them."""
    batch, update = config.batch, config.update
    words = []
    if batch.trained < batch.group_size:
        words.append(f"the best and the worst {batch.trained} of {batch.group_size} are trained")
    if update.deal == "clips" and update.updates_per_rollout > 1:
        words.append(f"dealt out to {update.updates_per_rollout} updates")
    return ", ".join(words)


def foresee(config: TrainConfig, plan: Plan) -> Plan:
    """What `choose` will give before there are rewards: clips are drawn at random, so that passes through the network can be counted."""
    draw = torch.Generator().manual_seed(plan.iteration)
    clips = len(plan.groups) * plan.group_size
    return choose(config, plan, torch.rand(clips, generator=draw), torch.ones(clips, dtype=torch.bool))
