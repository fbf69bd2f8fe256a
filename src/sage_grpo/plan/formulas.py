"""Formulas for memory and seconds of a run on GPUs. Pure arithmetic: no weights and no GPU are needed.

Seconds are operations of attention and of matrix products at a GPU's measured rates, and bytes that the small
operations move.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

from sage_grpo.distributed.spec import Layout
from sage_grpo.types import Keep

GIB = 2**30
COMPUTE, MASTER = 2, 4  # bytes of a number in bfloat16 and in float32
ATTENTION_BACKWARD = 2.5  # ratio of backward to forward operations of attention: five products instead of two
MOVED_BACKWARD, MOVED_BACKWARD_COMPILED = 1.7, 2.1
"""Ratio of backward to forward bytes that the small operations move (fitted)."""
IN_ORDER, IN_ORDER_BACKWARD = 1.77, 3.21
"""Slowdown of attention, forward and backward, if backward passes sum in a fixed order: flash attention instead of
cuDNN's (docs/speed.md)."""
DIFFERENTIATED = 5.0
"""Ratio of the gradient of a clip to its decoding: three decodings, because chunks run again twice, and the backward
pass."""
LAUNCHES_BACKWARD = 1.6  # least duration of a backward pass, in forward passes
WITHOUT_LORA = 0.5
"""Ratio of kernels of a block without a LoRA to those with one: 85 operations of HunyuanVideo-1.5's, counted."""


@dataclass(frozen=True, kw_only=True)
class Vae:
    """Costs of decoding. Working sets and speeds are fitted to measurements (research/benchmarks/plan_vs_measured.py)."""

    parameters: int
    flops: float  # operations per pixel of the clip
    working: float  # bytes in bfloat16 per pixel of a chunk, without those passed on between chunks (`past`)
    frames: int = 4  # frames of a latent frame, the fewest that are decoded together
    pixels_at_once: int = 0  # pixels of a chunk of frames, rounded down to whole latent frames; 0 is one latent frame
    graph: float = 0.0
    """Bytes in bfloat16 per pixel of a chunk's graph for a gradient; 0 is not known. Counted on the meta device, as
    `past` is."""
    past: float = 0.0  # bytes in bfloat16 per pixel of a frame that are passed from one chunk to the next
    graph_pixels: int = 0
    """Pixels of a chunk that is decoded for a gradient, rounded down to whole latent frames; 0 is one latent frame."""
    tile: int = 256  # side of a tile in pixels, with tiling
    efficiency: float = 0.32  # speed in bfloat16 relative to a matrix product
    efficiency_float32: float = 0.2  # the same in float32 (TF32)


HUNYUAN15_VAE = Vae(
    parameters=1_260_634_115,
    flops=25.3e6,
    working=1808.0,
    pixels_at_once=4 * 2**20,
    graph=11_200.0,
    past=6830.0,
    graph_pixels=2 * 2**20,
    efficiency=0.36,
)


@dataclass(frozen=True, kw_only=True)
class NetworkShape:
    """Parameters of a video transformer for the formulas, by its mean block. Fitted numbers are bytes per token and
    unit of width."""

    blocks: int
    width: int
    heads: int
    block_parameters: float
    other_parameters: float
    lora_width: float
    """LoRA parameters of a block per unit of rank: the sum of inputs and outputs of the adapted matrices."""
    lora_weights: float  # parameters of the adapted matrices of a block
    patch: tuple[int, int, int]  # pixels of a token: frames, height, width (VAE and patch together)
    unread_parameters: int = 0  # parameters that text-to-video never reads and that are not trained
    frozen_parameters: int = 0  # parameters of another expert, which runs but is not trained
    trained_networks: int = 1  # 2 if both experts are trained; a pass runs one of them
    video_products: float = 12.0  # multiplications of a video token with weights of a block, in widths squared
    text_products: float = 12.0  # the same of a token of text
    pairs: tuple[float, float, float] = (1.0, 2.0, 1.0)
    """Pairs in a block's attention: of the squared number of video tokens, of its product with the text's, of the
    text's squared."""
    saved_full: float = 69.0
    """Kept by a block for its backward pass when all weights are trained (bfloat16, measured on CUDA)."""
    saved_lora: float = 46.0  # the same with a LoRA on every matrix
    saved_compiled: float | None = None  # the same, compiled; None if not measured
    working: float = 24.0
    """Gradients inside one block's backward pass; an estimate that reproduces peaks measured at the real size within
    2%."""
    forward: float = 25.0  # held inside one block's forward pass without gradients (measured)
    moved: float = 620.0  # moved through memory by the small operations of a block's forward pass (fitted)
    moved_compiled: float = 240.0
    moved_lora: float = 110.0  # additional bytes moved by the adapters
    moved_lora_compiled: float = 50.0
    vae: Vae = HUNYUAN15_VAE

    @property
    def parameters(self) -> int:
        return round(self.blocks * self.block_parameters + self.other_parameters)

    @property
    def text_stream(self) -> bool:
        """True if text attends together with the video and runs through the blocks; otherwise the video reads it by
        cross-attention."""
        return self.pairs[2] > 0


HUNYUAN15 = NetworkShape(
    blocks=54,
    width=2048,
    heads=16,
    # Two streams with modulation (6), attention (4) and feed-forward (8 widths squared) each.
    block_parameters=36 * 2048**2,
    other_parameters=8_330_000_000 - 54 * 36 * 2048**2,
    lora_width=36 * 2048,
    lora_weights=24 * 2048**2,
    patch=(4, 16, 16),
    saved_compiled=41.0,  # 38.6 measured at 81 frames, 42.9 at 33
)


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """The properties of a training run that memory and traffic depend on."""

    layout: Layout = Layout()
    lora_rank: int | None = 32  # None trains all weights
    frames: int = 81
    height: int = 480
    width: int = 848
    text_tokens: int = 256
    given_tokens: int = 0  # tokens besides a clip's own that run through the blocks
    micro_batch: int = 1
    guidance: bool = True  # two forward passes for one velocity
    negative_gradient: bool = True  # with guidance: both passes are kept for the backward pass, and have one
    compute: int = COMPUTE  # bytes of a number in the network's precision
    checkpointing: bool = True
    keep: tuple[tuple[Keep, int], ...] = ()  # with checkpointing: number of blocks that keep more than their input
    compiled: bool = False
    same_bits: bool = False
    """True if backward passes sum in a fixed order, which the fastest attention does not support."""
    anchor: bool = True
    anchor_offload: bool = False
    ema: bool = False
    max_kl: bool = False  # True if updates that go too far are scaled back, which takes a copy of the weights
    moments: int = 2  # moments per trained parameter: 2 for AdamW, 1 for Muon
    reshard: bool = True
    cpu_offload: bool = False
    sync_every_pass: bool = False
    vae_bytes: int = COMPUTE
    vae_tiling: bool = False
    kept_states: float = 0.0  # bytes of the trajectories that a rank keeps from rollout to update

    @property
    def branches(self) -> int:
        """Forward passes of one velocity with a backward pass."""
        return 2 if self.guidance and self.negative_gradient else 1

    def activations(self, network: NetworkShape) -> dict[Keep, int]:
        if not self.checkpointing:
            return {"all": network.blocks}
        more = dict(self.keep)
        return {"input": network.blocks - sum(more.values()), **more}


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the peak of a phase."""

    weights: float
    gathered: float
    gradients: float
    optimizer: float
    copies: float  # reference, moving average, and the weights before a rollout's updates
    activations: float
    trajectories: float
    visitor: float = 0.0  # bytes in this phase only: the VAE, or a reward

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


def tokens(network: NetworkShape, job: RunShape) -> int:
    frames, height, width = network.patch
    own = ((job.frames - 1) // frames + 1) * (job.height // height) * (job.width // width)
    return own + job.given_tokens


def trainable(network: NetworkShape, job: RunShape) -> int:
    if job.lora_rank is None:
        return network.trained_networks * (network.parameters - network.unread_parameters)
    return round(network.trained_networks * network.blocks * network.lora_width * job.lora_rank)


def memory(network: NetworkShape, job: RunShape) -> Memory:
    """At the peak of an update, without encoders, VAE and rewards, which are moved off between phases."""
    layout, train = job.layout, trainable(network, job)
    full = job.lora_rank is None
    kept = 0 if job.cpu_offload else 1 / layout.weight_shards
    bases = network.trained_networks * network.parameters
    stored = MASTER * bases if full else job.compute * bases + MASTER * train
    stored += job.compute * network.frozen_parameters
    copies = MASTER * train * ((job.anchor and not job.anchor_offload) + job.ema + job.max_kl)
    whole_gradients = layout.processes > 1 and not job.sync_every_pass
    return Memory(
        weights=stored * kept,
        gathered=_gathered(network, job),
        gradients=MASTER * train * (kept + whole_gradients),
        optimizer=job.moments * MASTER * train * kept,
        copies=copies * kept,
        activations=_activations(network, job),
        trajectories=job.kept_states,
    )


def activations_within(network: NetworkShape, job: RunShape, room: float) -> dict[Keep, int]:
    """Kept activations of the blocks with which an update takes at most `room` bytes and recomputes least.

    Attention is the slowest part of a block to recompute per byte kept, so all blocks keep its outputs before any keeps
    everything.
    """
    blocks = network.blocks
    pairs: tuple[tuple[Keep, Keep], ...] = (("all", "attention"), ("attention", "input"))
    for more, less in pairs:
        for count in range(blocks, -1, -1):
            keep = ((more, count), (less, blocks - count))
            if memory(network, dataclasses.replace(job, keep=keep)).total <= room:
                return {level: number for level, number in keep if number}
    return {"input": blocks}


def sampling_memory(network: NetworkShape, job: RunShape) -> Memory:
    # A compiled block runs as in a pass with gradients, for equal bits; its graph is then detached.
    working = max(network.forward, saved(network, job)) if job.compiled else network.forward
    passing = working * job.compute / COMPUTE * _numbers(network, job)
    return dataclasses.replace(memory(network, job), gradients=0.0, activations=passing)


def decoding_memory(network: NetworkShape, job: RunShape) -> Memory:
    idle = dataclasses.replace(memory(network, job), gradients=0.0, activations=0.0, gathered=0.0)
    vae, area = network.vae, job.height * job.width
    if job.vae_tiling:  # all frames of a tile, and the clip that is assembled from tiles
        at_once = job.frames * min(job.height, vae.tile) * min(job.width, vae.tile)
        whole = 3.0 * (job.vae_bytes + MASTER) * job.frames * area
    else:
        chunk = vae.frames * max(1, vae.pixels_at_once // (vae.frames * area))
        at_once, whole = min(job.frames, chunk) * area, 0.0
        if chunk < job.frames:
            whole = vae.past * job.vae_bytes / COMPUTE * area
    working = vae.working * job.vae_bytes / COMPUTE * at_once + whole
    return dataclasses.replace(idle, activations=working, visitor=float(job.vae_bytes * vae.parameters))


def differentiating_memory(network: NetworkShape, job: RunShape) -> Memory:
    """While a clip is decoded with a graph and differentiated, without the reward's own activations.

    For n chunks in runs of sqrt(n), the kept bytes are the pasts of all runs, those of the current run's chunks, and
    the graph of one chunk.
    """
    decoding, vae = decoding_memory(network, job), network.vae
    area, latents = job.height * job.width, 1 + (job.frames - 1) // vae.frames
    # Tiles are not divided into chunks.
    chunk = latents if job.vae_tiling else max(1, vae.graph_pixels // (vae.frames * area))
    chunks = math.ceil(latents / chunk)
    pasts = math.ceil(chunks / math.isqrt(chunks)) + math.isqrt(chunks) if chunks > 1 else 0
    graph = (vae.graph * min(job.frames, chunk * vae.frames) + vae.past * pasts) * area
    clip = 2 * 3 * MASTER * job.frames * area  # and its gradient
    return dataclasses.replace(decoding, activations=graph * job.vae_bytes / COMPUTE + clip)


def _numbers(network: NetworkShape, job: RunShape) -> float:
    """Tokens of this rank's part of a micro-batch, times the width."""
    layout = job.layout
    local = math.ceil(tokens(network, job) / layout.sequence)
    if network.text_stream:
        local += math.ceil(job.text_tokens / layout.sequence)
    return float(local * network.width * job.micro_batch)


def _gathered(network: NetworkShape, job: RunShape) -> float:
    """Weights in the computing precision besides the shards: of the current block and the next one, or of all."""
    blocks = network.blocks
    if job.layout.processes == 1:
        if job.lora_rank is not None or job.compute == MASTER:
            return 0.0
        # Blocks that keep everything keep autocast's bfloat16 copies for the backward pass of each branch.
        return COMPUTE * network.block_parameters * max(1, job.activations(network).get("all", 0) * job.branches)
    rank = job.lora_rank or 0
    block = COMPUTE * network.block_parameters + MASTER * network.lora_width * rank
    return block * (2 if job.reshard else blocks) + COMPUTE * network.other_parameters


def saved(network: NetworkShape, job: RunShape) -> float:
    """Bytes per token and unit of width that a block without recomputation keeps."""
    if job.lora_rank is None:
        return network.saved_full
    return network.saved_compiled or network.saved_lora if job.compiled else network.saved_lora


def _activations(network: NetworkShape, job: RunShape) -> float:
    """Bytes that blocks keep for every branch with a gradient, and those of the current block, which is recomputed if
    it kept less."""
    levels, whole = job.activations(network), saved(network, job)
    attention = COMPUTE * (1 if network.text_stream else 2)
    bytes_of = {"input": COMPUTE, "attention": COMPUTE + attention, "all": whole}
    kept = job.branches * sum(count * bytes_of[level] for level, count in levels.items())
    current = whole if levels.get("all", 0) < network.blocks else 0.0
    return (kept + current + network.working) * job.compute / COMPUTE * _numbers(network, job)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates that a GPU reaches on this workload, not those of its data sheet."""

    attention: float  # operations per second of attention in bfloat16
    products: float  # operations per second of matrix products in bfloat16
    bandwidth: float  # bytes per second of its memory
    link: float = 50e9  # bytes per second that it receives from other GPUs
    launch: float = 3e-4  # least seconds of a block, for small clips
    eager: float = 0.0  # the same for an uncompiled block with a LoRA: the CPU launches its kernels one by one
    slow: float = 8.0  # slowdown of float32


class Operations(NamedTuple):
    """Operations of one block's forward pass over one clip, and the bytes that it moves."""

    attention: float
    products: float
    moved: float


def operations(network: NetworkShape, job: RunShape) -> Operations:
    """Operations of one block, clip and branch on one of the ranks that share the clip."""
    d, video, text = network.width, tokens(network, job), job.text_tokens
    share = job.layout.sequence
    of_video, of_both, of_text = network.pairs
    attention = 4 * d * (of_video * video**2 + of_both * video * text + of_text * text**2)
    products = 2 * d * d * (network.video_products * video + network.text_products * text)
    moving = video + text * network.text_stream
    lora = job.lora_rank is not None
    products *= 1 + (job.lora_rank or 0) * network.lora_width / network.lora_weights
    if job.compiled:
        moved = network.moved_compiled + network.moved_lora_compiled * lora
    else:
        moved = network.moved + network.moved_lora * lora
    moved *= job.compute / COMPUTE
    return Operations(attention / share, products / share, moving * d * moved / share)


def forward_seconds(network: NetworkShape, job: RunShape, rates: Rates) -> float:
    return network.blocks * _forward(operations(network, job), job, rates)


def backward_seconds(network: NetworkShape, job: RunShape, rates: Rates) -> float:
    """Seconds of the backward pass of one clip and one branch, with its recomputation."""
    one = operations(network, job)
    # Frozen weights need only the gradient of their input; adapters are small.
    products = one.products * (2.0 if job.lora_rank is None else 1.1)
    moved = one.moved * (MOVED_BACKWARD_COMPILED if job.compiled else MOVED_BACKWARD)
    slower = IN_ORDER_BACKWARD if _in_order(job) else 1.0
    plain = _at(slower * ATTENTION_BACKWARD * one.attention, products, moved, job, rates)
    plain = max(LAUNCHES_BACKWARD * _least(job, rates), plain)
    recomputed = _at(0.0, one.products, one.moved, job, rates)
    again = {"all": 0.0, "attention": recomputed, "input": _forward(one, job, rates)}
    return sum(count * (plain + again[level]) for level, count in job.activations(network).items())


def decode_seconds(network: NetworkShape, job: RunShape, rates: Rates) -> float:
    vae = network.vae
    efficiency = vae.efficiency if job.vae_bytes == COMPUTE else vae.efficiency_float32
    overlap = 1.45 if job.vae_tiling else 1.0  # neighboring tiles share a quarter of their sides
    pixels = job.frames * job.height * job.width
    return overlap * vae.flops * pixels / (efficiency * rates.products)


def _forward(one: Operations, job: RunShape, rates: Rates) -> float:
    slower = IN_ORDER if _in_order(job) else 1.0
    return max(_least(job, rates), _at(slower * one.attention, one.products, one.moved, job, rates))


def _least(job: RunShape, rates: Rates) -> float:
    eager = 0.0 if job.compiled else rates.eager * (1.0 if job.lora_rank is not None else WITHOUT_LORA)
    return max(rates.launch, eager)


def _in_order(job: RunShape) -> bool:
    """True if the fastest attention is not used because of a fixed order; in float32 it is not available anyway."""
    return job.same_bits and job.compute == COMPUTE


def _at(attention: float, products: float, moved: float, job: RunShape, rates: Rates) -> float:
    slower = 1.0 if job.compute == COMPUTE else rates.slow
    return slower * (attention / rates.attention + products / rates.products) + moved / rates.bandwidth
