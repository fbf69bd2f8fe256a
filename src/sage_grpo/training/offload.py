"""Memory of a process: weights over ranks, tensors and VAE between GPU and CPU, activations for the backward pass; deterministic sums."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import deterministic as _deterministic

from sage_grpo.config.parsing import ConfigError
from sage_grpo.distributed.context import SequenceParallel
from sage_grpo.distributed.fsdp import Engine, shard
from sage_grpo.distributed.spec import ParallelError, ParallelSpec
from sage_grpo.distributed.world import World
from sage_grpo.models.base import VelocityModel, abilities
from sage_grpo.models.spec import ModelSpec
from sage_grpo.types import Keep


def distribute(model: VelocityModel, spec: ParallelSpec, world: World) -> Engine:
    """Split clips over sequence-parallel ranks and weights over all; nothing changes in a run of one process."""
    if world.sequence_group is not None:
        split = abilities(model).split_sequence
        if split is None:
            raise ParallelError(f"{type(model).__name__} cannot split a clip over ranks: set parallel.sp to 1.")
        split(SequenceParallel(world.sequence_group))
    blocks = model.blocks()
    kinds = {type(block) for block in blocks}
    networks = [(model.network, blocks)]
    networks += [(other, [module for module in other.modules() if type(module) in kinds]) for other in model.others]
    full = model.spec.lora is None
    dtype = getattr(torch, model.spec.dtype)
    # A LoRA's base is frozen and large, so it is sharded too. In full fine-tuning the frozen part is a few unused
    # parameters; they stay whole, so that an export finds them.
    trained = (
        [network for network, _ in networks if any(one.requires_grad for one in network.parameters())] if full else []
    )
    frozen = [one for network in trained for one in network.parameters() if not one.requires_grad]
    return shard(networks, spec, world, compute=dtype if full and dtype != torch.float32 else None, keep=frozen)


def to_device(x: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy x to the computing device, asynchronously from pinned memory."""
    if device.type == "cuda" and x.device.type == "cpu" and not x.is_pinned():
        x = x.pin_memory()
    return x.to(device, non_blocking=True).to(dtype or x.dtype)


def to_storage(x: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy x to its storage device. Call `settle` before the CPU reads it; `to_device` needs no waiting."""
    return x.to(dtype or x.dtype).to(device, non_blocking=True)  # PyTorch makes this copy a pinned one


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


GIB = 2**30
SHARE = 0.9
"""Share of the memory available to this process that may be planned; the rest is for the allocator's fragmentation."""


@dataclass
class VaeMover:
    """Moves the VAE off the accelerator after a decoding, until an iteration has shown that all phases have room for
    it."""

    model: VelocityModel
    spec: ModelSpec = ModelSpec()
    stays: bool = False
    bytes: int = 0
    """Size of the VAE on the accelerator, known after its first move."""

    @contextmanager
    def decoding(self) -> Iterator[None]:
        device = self.model.device
        self.model.place("vae", device)
        yield
        if device.type != "cpu" and not self.stays:
            held = self._held()
            self.model.place("vae", "cpu")
            self.bytes = max(self.bytes, held - self._held())

    def observe(self, times: Mapping[str, float]) -> None:
        peaks = [gib * 2**30 for name, gib in times.items() if name.startswith("time/peak_gib_")]
        if not peaks or not self.bytes:
            return
        away = 0 if self.stays else self.bytes
        self.stays = max(peaks) + away <= SHARE * self._available()

    def _held(self) -> int:
        return torch.cuda.memory_allocated(self.model.device) if self.model.device.type == "cuda" else 0

    def _available(self) -> int:
        """Bytes that this process can use: those that are free and those that it holds already, within its budget."""
        free, total = torch.cuda.mem_get_info(self.model.device)
        return min(free + torch.cuda.memory_reserved(self.model.device), int(self.spec.budget(total / GIB) * GIB))


_held: set[torch.device] = set()
"""Devices with a memory budget in this process; a later run without a budget lifts it."""


def _indexed(device: torch.device) -> int:
    """Index of a GPU: PyTorch sets no limit on `cuda` without one, the device of a run on one GPU."""
    return torch.cuda.current_device() if device.index is None else device.index


def hold_to_budget(spec: ModelSpec, device: torch.device) -> None:
    """Limit this process to `model.memory`, so that a higher peak is an error here."""
    if spec.memory is not None:
        gib = torch.cuda.get_device_properties(device).total_memory / GIB
        torch.cuda.set_per_process_memory_fraction(spec.budget(gib) / gib, _indexed(device))
        _held.add(device)
    elif device in _held:
        torch.cuda.set_per_process_memory_fraction(1.0, _indexed(device))
        _held.discard(device)


DEVICES = ("cuda",)
"""A CPU adds in one order anyway."""
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Settings of PyTorch's CUDA allocator; the second is the newer name. A value set by the user is kept."""
deterministic: Any = _deterministic
"""Module whose one setting is made on import, which type checkers do not see."""
_turned_off: list[bool] = []
"""Not empty if this process turned cuDNN's attention off: a later run turns it on again."""


def get_ready(*, wanted: bool) -> None:
    """Prepare a process before its first allocation and matrix product: PyTorch and cuBLAS read their settings once. With `wanted`, cuDNN's
    attention is off: its backward pass has no fixed order, and PyTorch does not report that."""
    if torch.cuda.is_available() and not any(os.environ.get(name) for name in ALLOCATOR):
        # The activations that blocks keep are planned by tensor sizes. In segments of fixed sizes 3.7 of 24 GiB were
        # lost between them (Wan 1.3B, one H200).
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"
    if wanted:
        os.environ.setdefault(WORKSPACE, ":4096:8")
    if wanted and torch.backends.cuda.cudnn_sdp_enabled():
        torch.backends.cuda.enable_cudnn_sdp(False)
        _turned_off.append(True)
    elif not wanted and _turned_off:
        torch.backends.cuda.enable_cudnn_sdp(True)
        _turned_off.clear()


@contextmanager
def same_bits(device: torch.device, *, wanted: bool) -> Iterator[None]:
    """Context in which backward passes sum in a fixed order; an operation without one is an error that names it."""
    if not wanted or device.type not in DEVICES:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # would write all memory twice
    try:
        yield
    except RuntimeError as error:
        if "determinis" not in str(error):
            raise
        raise ConfigError(
            f"model.deterministic cannot be kept, because the backward pass of this model has a part without a fixed order: {error} "
            "Use --model.deterministic false; runs of one seed may then differ in the last digits."
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = filled


def set_activations(
    asked: bool | Literal["attention", "auto"], model: VelocityModel, chosen: Sequence[Keep] | None
) -> None:
    """Set the activations that a model's blocks keep, and record the choice; None decides by what is asked alone."""
    if chosen is None:
        chosen = configured(asked, len(model.blocks()), cuda=model.device.type == "cuda")
    model.keep(list(chosen))
    abilities(model).choices["blocks keep"] = kept(chosen)


def configured(asked: bool | Literal["attention", "auto"], blocks: int, *, cuda: bool) -> list[Keep]:
    """The level of every block; "auto" where memory is not known is attention on a GPU and all on a CPU."""
    known: dict[bool | str, Keep] = {True: "input", False: "all", "attention": "attention"}
    return [known.get(asked) or ("attention" if cuda else "all")] * blocks


def kept(chosen: Sequence[Keep]) -> str:
    words = {"all": "everything", "attention": "attention's outputs", "input": "their input only"}
    return ", ".join(f"{words[level]} ({count} of {len(chosen)})" for level, count in Counter(chosen).items())
