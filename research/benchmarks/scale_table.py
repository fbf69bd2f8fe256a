"""The tables of docs/scale.md: memory per GPU and traffic per iteration from 1 to 64 GPUs, from formulas. Run it to print them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from sage_grpo.distributed.spec import Layout
from sage_grpo.plan.formulas import COMPUTE, GIB, HUNYUAN15, MASTER, NetworkShape, RunShape, memory, tokens, trainable


@dataclass(frozen=True)
class Traffic:
    """Bytes that one GPU receives in an iteration."""

    gather: float
    """Weights, before every block's forward and backward pass."""
    reduce: float
    """Gradients."""
    exchange: float
    """Tokens for heads and back (sequence parallelism)."""


CLIPS, STEPS, TRAINED, UPDATES = 64, 20, 19, 2
"""An iteration: clips, their steps, those of them that explore and are trained, and updates."""
CHANNELS = 32
"""Latent channels."""


def rounds(job: RunShape) -> int:
    """Micro-batches of a rank."""
    return math.ceil(CLIPS / job.layout.data / job.micro_batch)


def kept_states(network: NetworkShape, job: RunShape) -> float:
    """Bytes of trajectories: x in bfloat16, v_old, and the reference's velocities of one update."""
    state = COMPUTE + MASTER + MASTER / UPDATES * job.anchor
    return state * CHANNELS * tokens(network, job) * TRAINED * rounds(job) * job.micro_batch


def traffic(network: NetworkShape, job: RunShape) -> Traffic:
    """Bytes that a GPU receives in one iteration."""
    layout, train = job.layout, trainable(network, job)
    shards, sp = layout.weight_shards, layout.sequence
    rollout = rounds(job) * STEPS * job.branches
    update = rounds(job) * TRAINED * job.branches
    anchor = update if job.anchor else 0
    weights = COMPUTE * network.parameters + (0 if job.lora_rank is None else MASTER * train)
    gathers = rollout + anchor + update * (2 if job.reshard else 1)
    reductions = update if job.sync_every_pass else UPDATES * job.branches
    across = 2 * (layout.replicate - 1) / layout.replicate / shards
    local = tokens(network, job) / sp * network.width * COMPUTE * job.micro_batch
    attention = rollout + anchor + update * (3 if job.checkpointing else 2)
    return Traffic(
        gather=gathers * weights * (shards - 1) / shards,
        reduce=reductions * MASTER * train * ((shards - 1) / shards + across),
        exchange=attention * network.blocks * 4 * local * (sp - 1) / sp,
    )


LAYOUTS = {1: (1,), 2: (1, 2), 4: (1, 4), 8: (1, 2, 8), 16: (1, 4), 32: (1, 4), 64: (1, 4, 8)}
"""Values of sp in the table, by the number of GPUs."""


def table(network: NetworkShape, job: RunShape) -> str:
    """Markdown: memory and traffic of a job from 1 to 64 GPUs."""
    head = "| GPUs | dp x sp | weights | gathered | gradients | optimizer | anchor | activations | **total GiB** | micro-batches | gather | reduce | exchange |"
    lines = [head, "|" + " ---: |" * 13]
    for gpus, sp in ((gpus, sp) for gpus, several in LAYOUTS.items() for sp in several):
        placed = dataclasses.replace(job, layout=Layout(1, gpus // sp, sp))
        placed = dataclasses.replace(placed, kept_states=kept_states(network, placed))
        m, t = memory(network, placed), traffic(network, placed)
        sizes = [m.weights, m.gathered, m.gradients, m.optimizer, m.copies, m.activations + m.trajectories]
        cells = [
            str(gpus),
            f"{gpus // sp} x {sp}",
            *(f"{size / GIB:.1f}" for size in sizes),
            f"**{m.total / GIB:.0f}**",
        ]
        cells += [str(rounds(placed)), *(f"{size / GIB:,.0f}" for size in (t.gather, t.reduce, t.exchange))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tables() -> str:
    """The tables of docs/scale.md: HunyuanVideo-1.5, 81 frames of 480 x 848, 64 clips, 20 steps."""
    lora, full = RunShape(), RunShape(lora_rank=None)
    return f"LoRA of rank 32:\n\n{table(HUNYUAN15, lora)}\n\nAll weights:\n\n{table(HUNYUAN15, full)}\n"


if __name__ == "__main__":
    print(tables(), end="")
