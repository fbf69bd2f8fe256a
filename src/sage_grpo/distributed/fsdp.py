"""Sharded networks: FSDP2 per block, with its interface for training."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from sage_grpo.distributed.spec import ParallelSpec
from sage_grpo.distributed.world import World


@dataclass(frozen=True)
class Engine:
    """Gradient reduction and gathering of sharded tensors. Without networks it is one process: nothing to do."""

    world: World = World()
    networks: tuple[FSDPModule, ...] = ()
    sync_every_pass: bool = False

    @property
    def scale(self) -> float:
        """Factor of the loss: FSDP averages over all processes, but every one adds its own share of the loss."""
        return float(self.world.processes) if self.networks else 1.0

    def begin(self) -> None:
        """Prepare an update's first backward pass: gradients stay on this process."""
        self.synchronize(self.sync_every_pass)

    def synchronize(self, on: bool = True) -> None:
        for network in self.networks:
            network.set_requires_gradient_sync(on)

    def clip_gradients(self, params: Iterable[nn.Parameter], max_norm: float) -> float:
        params = list(params)
        norm = get_total_norm([p.grad for p in params if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        clip_grads_with_norm_(params, max_norm, norm)
        return float(norm)

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Unsharded copies in the main process's CPU memory, one tensor at a time; empty on the others."""
        result = {}
        for name, tensor in tensors.items():
            full = whole(tensor)
            if self.world.is_main:
                result[name] = full.to("cpu", copy=True)
        return result


@torch.no_grad()
def disagreeing(tensors: Mapping[str, Tensor], world: World) -> list[int]:
    """The processes whose tensors differ from those of the first; all of them call this. Shards are gathered one tensor at a time."""
    full = (whole(tensor).double() for tensor in tensors.values())
    # Sum and sum of squares: equal for equal bits, different after a change of one value.
    digests = torch.tensor([[float(one.sum()), float(one.square().sum())] for one in full], dtype=torch.float64)
    table = world.gather(digests.reshape(1, -1))
    return [number for number, row in enumerate(table) if not torch.equal(row, table[0])]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, detached; every process that has a part of it calls this."""
    held = tensor.detach()
    return held.full_tensor() if isinstance(held, DTensor) else held


def shard(
    networks: Sequence[tuple[nn.Module, Sequence[nn.Module]]],
    spec: ParallelSpec,
    world: World,
    *,
    compute: torch.dtype | None = None,
    keep: Iterable[nn.Parameter] = (),
) -> Engine:
    """Shard networks (each with its blocks) in place over all processes; parameters become DTensors.

    Networks may lie in CPU memory: each block moves to the device and is cut before the next one follows. `compute` is the dtype in which weights are
    gathered, where it is not their own; gradients are reduced in float32. `keep` are parameters that stay whole on every process. Call this before
    optimizers, reference weights and averages are made.
    """
    if world.control is None:
        return Engine()
    # Processes as FSDP sees them: the ranks of one clip hold different weights too.
    sizes = {} if world.layout.replicate == 1 else {"replicate": world.layout.replicate}
    sizes["weights"] = world.layout.weight_shards
    kind = "cpu" if world.device is None else world.device.type
    mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    keep = set(keep)
    offload = CPUOffloadPolicy(pin_memory=kind == "cuda") if spec.cpu_offload else OffloadPolicy()
    # Inputs are left alone: timesteps must not be rounded, and autocast or the adapter has the tokens' dtype in hand.
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    wrap = partial(fully_shard, mesh=mesh, mp_policy=precision, offload_policy=offload, ignored_params=keep)
    # FSDP warns of networks that return views, because changing them in place would be wrong; no caller does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    roots = []
    for network, blocks in networks:
        before: FSDPModule | None = None
        for block in blocks:
            sharded = wrap(block, reshard_after_forward=spec.reshard)
            if before is not None:
                # By default FSDP goes by the order of the forward passes, which it forgets after the first of guidance's two branches.
                sharded.set_modules_to_backward_prefetch([before])
            before = sharded
        roots.append(wrap(network, reshard_after_forward=True))
        # FSDP moves only what it shards.
        for tensor in (*network.buffers(), *(p for p in network.parameters() if p in keep)):
            tensor.data = tensor.data.to(mesh.device_type)
        network.register_forward_hook(partial(_after_forward, spec.cpu_offload and kind != "cpu"))
    return Engine(world=world, networks=tuple(roots), sync_every_pass=spec.sync_every_pass)


def _after_forward(
    offloaded: bool, network: nn.Module, arguments: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]
) -> Any:
    """Clean up after the root's forward pass: free gathered weights without gradients, return an alias of the output with them."""
    if not torch.is_grad_enabled():
        # No backward pass will free gathered weights, and the reference's and the policy's weights are swapped between passes:
        # gathered weights would be used again although they are stale.
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        if offloaded:
            # Weights are copied to the device asynchronously, and the caller may change them in CPU memory next.
            torch.accelerator.current_stream().synchronize()
        return None
    # Gradients at the velocity are taken before the network's backward pass; an alias keeps that from triggering FSDP's hooks.
    if isinstance(output, Tensor):
        return output.view_as(output)
    return tuple(part.view_as(part) for part in output)
