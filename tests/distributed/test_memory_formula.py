"""Activations that blocks keep on a card, and the table of the document that lists them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel

from sage_grpo.models.families.hunyuan15 import Hunyuan15, PackedAttention, PackedTransformer
from sage_grpo.models.lora import add_lora, match_targets
from sage_grpo.models.network.blocks import keep_activations
from sage_grpo.models.spec import LoraSpec
from sage_grpo.plan.formulas import GIB, HUNYUAN15, RunShape, activations_within, memory, trainable

WIDTH, HEADS, RANK = 64, 4, 4


def build(blocks: int, lora: bool) -> PackedTransformer:
    transformer = HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH // HEADS,
        num_layers=blocks,
        num_refiner_layers=1,
        text_embed_dim=16,
        text_embed_2_dim=12,
        image_embed_dim=8,
        rope_axes_dim=(4, 6, 6),
    )
    for block in transformer.transformer_blocks:
        block.attn.set_processor(PackedAttention())
    if lora:
        transformer.to(torch.bfloat16)
        targets = match_targets(transformer, Hunyuan15.traits.lora_targets, ["transformer_blocks"])
        add_lora(transformer, LoraSpec(rank=RANK), targets)
    return PackedTransformer(transformer)


def saved_bytes(blocks: int, rows: int, *, lora: bool, checkpointing: bool) -> int:
    """What a forward pass keeps for its backward pass, besides parameters."""
    network = build(blocks, lora)
    if checkpointing:
        keep_activations(network.transformer.transformer_blocks, ["input"] * blocks)
    parameters = {p.untyped_storage().data_ptr() for p in network.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    dtype = torch.bfloat16 if lora else torch.float32
    x, text = torch.randn(1, 9, 1, rows, 8, dtype=dtype), torch.randn(1, 16, 16, dtype=dtype)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=not lora):
        network(x, torch.tensor([500.0]), text)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "checkpointing"), [(True, False), (False, False), (False, True)])
def test_activations_of_a_block(lora: bool, checkpointing: bool) -> None:
    """Two blocks more and 128 tokens more: everything else cancels."""

    def extra(rows: int) -> int:
        counts = [saved_bytes(blocks, rows, lora=lora, checkpointing=checkpointing) for blocks in (1, 3)]
        return counts[1] - counts[0]

    measured = (extra(32) - extra(16)) / 2 / (16 * 8 * WIDTH)
    if checkpointing:
        assert measured == pytest.approx(2.0)
    elif lora:
        assert measured == pytest.approx(HUNYUAN15.saved_lora, rel=0.02)
    else:  # on CUDA, autocast keeps the inputs of norms in float32 besides: the formula's figure is from there
        assert measured == pytest.approx(61.0, rel=0.02)
        assert 61.0 < HUNYUAN15.saved_full < 61.0 + 3 * 4


def test_parameters_of_a_block() -> None:
    two, three = build(2, False), build(3, False)
    block = sum(p.numel() for p in three.parameters()) - sum(p.numel() for p in two.parameters())
    assert block == pytest.approx(36 * WIDTH**2, rel=0.02)  # the rest are biases and norms
    adapters = sum(p.numel() for name, p in build(2, True).named_parameters() if ".lora_" in name)
    job = RunShape(lora_rank=RANK)
    small = dataclasses.replace(HUNYUAN15, blocks=2, lora_width=36 * WIDTH)
    assert adapters == trainable(small, job)


def test_the_documents_table_is_the_formulas(benchmark_module) -> None:
    assert benchmark_module("scale_table").table() in (Path(__file__).parents[2] / "docs" / "scale.md").read_text()


@pytest.mark.parametrize("gib", [20, 60, 139, 400])
def test_blocks_keep_as_much_as_fits(gib: int) -> None:
    job, room = RunShape(compiled=True), gib * GIB
    levels = activations_within(HUNYUAN15, job, room)
    assert sum(levels.values()) == HUNYUAN15.blocks

    def total(**counts: int) -> float:
        return memory(HUNYUAN15, dataclasses.replace(job, keep=tuple(counts.items()))).total

    if levels != {"input": HUNYUAN15.blocks}:
        assert total(**levels) <= room
    for more, less in (("all", "attention"), ("attention", "input")):
        if levels.get(less):  # one block more that keeps more would be too much
            other = {**levels, more: levels.get(more, 0) + 1, less: levels[less] - 1}
            assert total(**other) > room
    if gib == 400:
        assert levels == {"all": HUNYUAN15.blocks}
