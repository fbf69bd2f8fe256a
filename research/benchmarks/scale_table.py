"""The table of docs/scale.md: memory per GPU from 1 to 64 GPUs, from formulas. Run it to print it."""

from __future__ import annotations

import dataclasses
import math

from sage_grpo.distributed.spec import Layout
from sage_grpo.plan.formulas import COMPUTE, GIB, HUNYUAN15, MASTER, NetworkShape, RunShape, memory, tokens

CLIPS, TRAINED, UPDATES = 64, 19, 2
"""An iteration: clips, trained steps of each, and updates."""
CHANNELS = 32
"""Latent channels."""
LAYOUTS = {1: (1,), 2: (1, 2), 4: (1, 4), 8: (1, 2, 8), 64: (1, 4)}
"""Values of sp in the table, by the number of GPUs."""


def kept_states(network: NetworkShape, job: RunShape) -> float:
    """Bytes of trajectories: x in bfloat16, v_old, and the reference's velocities of one update."""
    state = COMPUTE + MASTER + MASTER / UPDATES * job.anchor
    rounds = math.ceil(CLIPS / job.layout.data / job.micro_batch)
    return state * CHANNELS * tokens(network, job) * TRAINED * rounds * job.micro_batch


def gib(network: NetworkShape, job: RunShape) -> str:
    """Peak of an update."""
    return f"{memory(network, dataclasses.replace(job, kept_states=kept_states(network, job))).total / GIB:.0f}"


def table() -> str:
    """Markdown: HunyuanVideo-1.5, 81 frames of 480 x 848, 64 clips, 20 steps."""
    lines = ["| GPUs | data x sequence parallel | LoRA of rank 32 | all weights |", "|" + " ---: |" * 4]
    for gpus, sp in ((gpus, sp) for gpus, several in LAYOUTS.items() for sp in several):
        layout = Layout(1, gpus // sp, sp)
        sizes = [gib(HUNYUAN15, RunShape(layout=layout, lora_rank=rank)) for rank in (RunShape().lora_rank, None)]
        lines.append("| " + " | ".join([str(gpus), f"{gpus // sp} x {sp}", *sizes]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
