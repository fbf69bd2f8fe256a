"""Lay a model out over the processes of a run."""

from __future__ import annotations

import torch

from sage_grpo.models.base import VelocityModel
from sage_grpo.models.network.sequence import SplitsSequence
from sage_grpo.parallel.context import SequenceParallel
from sage_grpo.parallel.fsdp import Engine, shard
from sage_grpo.parallel.spec import ParallelError, ParallelSpec
from sage_grpo.parallel.world import World


def distribute(model: VelocityModel, spec: ParallelSpec, world: World) -> Engine:
    """Split clips over sequence-parallel ranks and weights over all; nothing changes in a run of one process."""
    if world.control is not None and not model.spec.packed:
        raise ParallelError("model.packed: false is for comparisons in one process; leave it out.")
    if world.sequence_group is not None:
        if not isinstance(model, SplitsSequence):
            raise ParallelError(f"{type(model).__name__} cannot split a clip over ranks: set parallel.sp to 1.")
        model.split_sequence(SequenceParallel(world.sequence_group))
    blocks = model.blocks()
    kinds = {type(block) for block in blocks}
    networks = [(model.network, blocks)]
    networks += [(other, [module for module in other.modules() if type(module) in kinds]) for other in model.others]
    full = model.spec.lora is None
    dtype = getattr(torch, model.spec.dtype)
    # A LoRA's base is frozen and large, so it is sharded too. Without one, what is frozen are a few parameters that nothing
    # reads; they stay whole, so that an export finds them.
    frozen = [parameter for parameter in model.network.parameters() if not parameter.requires_grad] if full else []
    return shard(networks, spec, world, compute=dtype if full and dtype != torch.float32 else None, keep=frozen)
