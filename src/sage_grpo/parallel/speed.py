"""Seconds of a pass, from a formula: operations of attention and of matrix products at the rates that a GPU reaches, bytes that the
small operations move, and what ranks exchange. Pure arithmetic; memory is in `memory.py`, beside the same two dataclasses."""

from __future__ import annotations

from dataclasses import dataclass

from sage_grpo.parallel.memory import COMPUTE, Job, Network, tokens
from sage_grpo.types import Keep

ATTENTION_BACKWARD = 2.5
"""Operations of attention's backward pass, in forward ones: five products instead of two."""
MOVED_BACKWARD, MOVED_BACKWARD_COMPILED = 1.7, 2.1
"""Bytes that the small operations move in the backward pass, in forward ones (fitted)."""
IN_ORDER, IN_ORDER_BACKWARD = 1.77, 3.21
"""What attention takes forward and backward where backward passes add up in a fixed order: flash attention instead of cuDNN's (docs/speed.md)."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a GPU reaches on work of this kind; not what its data sheet says."""

    attention: float
    """Operations per second of attention in bfloat16."""
    products: float
    """Operations per second of matrix products in bfloat16."""
    bandwidth: float
    """Bytes per second of its memory."""
    link: float = 50e9
    """Bytes per second that it receives from other GPUs."""
    launch: float = 3e-4
    """Seconds that a block takes at least, however small the clip."""
    slow: float = 8.0
    """How many times longer float32 takes."""
    forward: float = 1.0
    """What a measured forward pass took, in predicted ones."""
    backward: float = 1.0
    """The same for a backward pass."""
    decode: float = 1.0
    """The same for decoding."""


@dataclass(frozen=True)
class Operations:
    """Of one block's forward pass over one clip."""

    attention: float
    products: float
    moved: float
    """Bytes."""


def operations(network: Network, job: Job) -> Operations:
    """One block, one clip, one branch, on one of the ranks that share the clip."""
    d, video, text = network.width, tokens(network, job), job.text_tokens
    share = job.layout.sequence
    inner = 2 * network.feed_forward * d * d
    if network.text_stream:
        attention = 4 * (video + text) ** 2 * d
        products = 2 * (video + text) * (4 * d * d + inner)
        moving = video + text
    else:
        attention = 4 * video * (video + text) * d
        products = 2 * video * (6 * d * d + inner) + 2 * text * 2 * d * d
        moving = video
    lora = job.lora_rank is not None
    products += 2 * moving * network.lora_width / (2 if network.text_stream else 1) * (job.lora_rank or 0)
    if job.compiled:
        moved = network.moved_compiled + network.moved_lora_compiled * lora
    else:
        moved = network.moved + network.moved_lora * lora
    moved *= job.compute / COMPUTE
    return Operations(attention / share, products / share, moving * d * moved / share)


def forward_seconds(network: Network, job: Job, rates: Rates) -> float:
    """One forward pass of one clip and one branch."""
    return network.blocks * _forward(operations(network, job), job, rates)


def backward_seconds(network: Network, job: Job, rates: Rates) -> float:
    """The backward pass of one clip and one branch, with what has to run again for it."""
    one = operations(network, job)
    # Frozen weights need the gradient of their input alone; adapters are small.
    products = one.products * (2.0 if job.lora_rank is None else 1.1)
    moved = one.moved * (MOVED_BACKWARD_COMPILED if job.compiled else MOVED_BACKWARD)
    slower = IN_ORDER_BACKWARD if _in_order(job) else 1.0
    plain = rates.backward * _at(slower * ATTENTION_BACKWARD * one.attention, products, moved, job, rates)
    again = {level: _again(one, level, job, rates) for level in job.levels(network)}
    return sum(count * (plain + again[level]) for level, count in job.levels(network).items())


def decode_seconds(network: Network, job: Job, rates: Rates) -> float:
    """Decoding one clip."""
    vae = network.vae
    if vae is None:
        return 0.0
    efficiency = vae.efficiency if job.vae_bytes == COMPUTE else vae.efficiency_float32
    overlap = 1.45 if job.vae_tiling else 1.0  # neighbouring tiles share a quarter of their sides
    pixels = job.frames * job.height * job.width
    return rates.decode * overlap * vae.flops * pixels / (efficiency * rates.products)


def _forward(one: Operations, job: Job, rates: Rates) -> float:
    slower = IN_ORDER if _in_order(job) else 1.0
    return max(rates.launch, rates.forward * _at(slower * one.attention, one.products, one.moved, job, rates))


def _again(one: Operations, level: Keep, job: Job, rates: Rates) -> float:
    """What runs again in the backward pass of a block that kept this much."""
    if level == "all":
        return 0.0
    if level == "input":
        return _forward(one, job, rates)
    return rates.forward * _at(0.0, one.products, one.moved, job, rates)


def _in_order(job: Job) -> bool:
    """Whether the fastest attention is given up; in float32 it is not there to begin with."""
    return job.same_bits and job.compute == COMPUTE


def _at(attention: float, products: float, moved: float, job: Job, rates: Rates) -> float:
    slower = 1.0 if job.compute == COMPUTE else rates.slow
    return slower * (attention / rates.attention + products / rates.products) + moved / rates.bandwidth
