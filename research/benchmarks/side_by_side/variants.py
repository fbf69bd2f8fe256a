"""Variants that run side by side: a framework, and settings on top of what its users get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MODELS = ("wan", "hunyuan15")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One column of the tables."""

    framework: str
    """The module that runs it: ours, stock (passes only), or peer (an iteration on Wan; it has no HunyuanVideo-1.5)."""
    models: tuple[str, ...] = MODELS
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of ours by dotted key; of the peer by section and key; of stock diffusers whether blocks are compiled."""


VARIANTS = {
    "ours": Variant(framework="ours"),
    "peer": Variant(framework="peer", models=("wan",)),
    "ours_14": Variant(framework="ours", models=("wan",), settings={"model.memory": 14.0}),
    "ours_24": Variant(framework="ours", models=("wan",), settings={"model.memory": 24.0}),
    "ours_plain": Variant(framework="ours", settings={"model.compile": False, "update.gradient_checkpointing": True}),
    "stock": Variant(framework="stock"),
    "stock_compiled": Variant(framework="stock", settings={"compile": True}),
    "peer_kept": Variant(framework="peer", models=("wan",), settings={"train.enable_gradient_checkpointing": False}),
    "peer_cudnn": Variant(framework="peer", models=("wan",), settings={"model.attn_backend": "_native_cudnn"}),
}
"""The most important come first. With a number: held to so many GiB, which is what the peer needs, and a card of that size.

The peer with activations kept instead of recomputed, and with another attention, show that it was not measured at its worst."""
