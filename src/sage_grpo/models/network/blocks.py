"""Execution of a transformer's repeated blocks: compilation, and the activations kept for the backward pass."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from sage_grpo.models.checkpoints.cache import default_folder
from sage_grpo.types import Keep

KEEP: tuple[str, ...] = get_args(Keep)
_sampling: ContextVar[bool] = ContextVar("sampling", default=False)
"""True while a pass builds graphs only to equal one that needs them."""
RECOMPILES = 64
"""Most compiled versions of one block (lengths, dtypes, with and without gradients); beyond, the compiler would silently run the
plain code, which rounds otherwise."""


def keep_activations(blocks: Sequence[nn.Module], levels: Sequence[Keep]) -> None:
    if len(levels) != len(blocks) or not set(levels) <= set(KEEP):
        raise ValueError(
            f"keep: {len(blocks)} blocks need a level each, of {', '.join(KEEP)}; got {len(levels)}: {sorted(set(levels))}."
        )
    for block, level in zip(blocks, levels):
        if not isinstance(block.forward, BlockForward):
            block.forward = BlockForward(block.forward)
        block.forward.level = level


class BlockForward:
    """A block's forward that keeps the activations of its level. The forward alone: hooks of the module (FSDP gathers weights in them) must not run
    again."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.level: Keep = "all"

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.level == "all" or _sampling.get() or not torch.is_grad_enabled():
            return self.forward(*arguments, **named)
        if self.level == "attention":
            named["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_attention)
        return checkpoint(self.forward, *arguments, use_reentrant=False, **named)


_aten = torch.ops.aten
ATTENTION = {
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _keep_attention(context: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    kept = operation in ATTENTION
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


WORTH = 500
"""Passes from which compiling pays: it takes about a minute and saves a tenth to a quarter of every pass of seconds."""


def worth_compiling(asked: bool | None, device: torch.device, dtype: str, passes: int) -> tuple[bool, str]:
    """The decision to compile for so many passes through the network, with the reason."""
    if asked is not None:
        return asked, "yes, as asked" if asked else "no, as asked"
    if device.type != "cuda" or dtype != "bfloat16":
        return False, "no: it pays on CUDA in bfloat16 only"
    if passes < WORTH:
        return False, f"no: {passes} passes are fewer than the {WORTH} from which it pays"
    return (
        True,
        f"yes: {passes:,} passes are more than the {WORTH} from which it pays; the first ones take a minute longer",
    )


def compile_blocks(
    network: nn.Module, blocks: Sequence[nn.Module], *, train: bool, ragged: Sequence[tuple[str, int]] = ()
) -> None:
    """Compile the blocks that `network` runs; they share their code, so two or three are compiled and the others reuse them. `ragged` are inputs of a
    block (name, dimension) whose length differs between samples: one compilation serves all."""
    import torch._dynamo

    # Compilations of earlier processes are found here; a temporary folder would lose them.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(default_folder().parent / "compiled"))
    torch._dynamo.config.recompile_limit = max(RECOMPILES, torch._dynamo.config.recompile_limit)
    for block in blocks:
        # The forward alone: hooks of the module (FSDP) stay outside.
        names = tuple(inspect.signature(block.forward).parameters)
        block.forward = partial(_compiled, torch.compile(block.forward), names, tuple(ragged))
    if train:
        keep_one_graph(network)


def _compiled(
    forward: Callable[..., Any], names: Sequence[str], ragged: Sequence[tuple[str, int]], *arguments: Any, **named: Any
) -> Any:
    # Networks call blocks with named inputs, or positional ones where they checkpoint: naming all gives one compilation.
    given = {**dict(zip(names, arguments)), **named}
    for name, dimension in ragged:
        torch._dynamo.maybe_mark_dynamic(given[name], dimension)
    output = forward(**given)
    return _cut(output) if _sampling.get() else output


def _cut(output: Any) -> Any:
    """The same values without the graph that made them, which frees it; the next block still sees that they would have one."""
    if isinstance(output, Tensor):
        return output.detach().requires_grad_(output.requires_grad)
    return None if output is None else tuple(map(_cut, output))  # None: the text behind Stable Diffusion 3's last block


def keep_one_graph(network: nn.Module) -> None:
    """Run passes without gradients as those with. A compiler fuses the two differently; in bfloat16 a replay would then differ from its rollout by
    far more than the clip range."""
    forward = network.forward

    def always_with_gradient(*arguments: Any, **named: Any) -> Tensor | tuple[Tensor, ...]:
        if torch.is_grad_enabled():
            return forward(*arguments, **named)
        token = _sampling.set(True)
        try:
            with torch.enable_grad():
                output = forward(*arguments, **named)
        finally:
            _sampling.reset(token)
        return output.detach() if isinstance(output, Tensor) else tuple(part.detach() for part in output)

    network.forward = always_with_gradient
