"""Checks of what the network is told: tokens, encodings, prompts, padding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sage_grpo.doctor.finding import Finding, graded, relative, rounding
from sage_grpo.models.base import VelocityModel
from sage_grpo.models.checkpoints.stock import fresh_encoding, token_ids
from sage_grpo.models.family import FamilyModel
from sage_grpo.types import Conditioning

SHORT = "a cat"
LONG = "a small grey cat walks slowly over a wooden bridge while rain falls on the quiet river below it"
MIDDLE = torch.tensor(0.7)
"""A noise level at which the prompt matters."""
MOST_UNKNOWN = 0.2
"""A larger share of unknown tokens in a plain prompt means another model's vocabulary."""


def tokenizer(model: FamilyModel, prompts: Sequence[str]) -> Finding:
    """Every tokenizer turns different prompts into different tokens that it knows."""
    rows = {name: [token_ids(model, text)[name] for text in prompts] for name in token_ids(model, SHORT)}
    faults, counts = [], []
    for name, found in rows.items():
        ids = [row[0] for row in found]
        total = sum(map(len, ids))
        unknown = sum(row[0].count(row[1]) for row in found if row[1] is not None)
        counts.append(f"{name} {total / len(prompts):.0f} tokens a prompt, {unknown} unknown")
        if not all(ids):
            faults.append(f"{name} finds no token in {prompts[ids.index([])]!r}")
        elif unknown > MOST_UNKNOWN * total:
            faults.append(f"{name} does not know {unknown} of {total} tokens")
        elif len({tuple(row) for row in ids}) < len(set(prompts)):
            faults.append(f"{name} gives different prompts the same tokens")
    return Finding(
        name="tokenizer",
        status="fail" if faults else "pass",
        value="; ".join(faults or counts),
        why="an empty vocabulary makes all prompts alike: the reward then teaches the model to ignore them",
        remedy="download the checkpoint's tokenizer folders again in full",
    )


def encodings(model: FamilyModel, texts: Sequence[str], images: Sequence[Tensor | None]) -> Finding:
    """What the cache holds of prompts against a fresh encoding."""
    gaps = [
        _gap(one.tensors, fresh_encoding(model, text, image))
        for text, image, one in zip(texts, images, model.encode(texts, images))
    ]
    largest = max(gaps)
    limit = rounding(model.dtype)
    return Finding(
        name="encodings",
        status=graded(largest, warn=limit, fail=10 * limit),
        value=f"cached and fresh encodings of {len(texts)} prompts differ by {largest:.2g}",
        why="with an encoding of other text or of another encoder the model is trained on prompts that nobody wrote",
        remedy=f"delete {model._cache.folder}, or set model.cache to another folder",
        number=largest,
    )


def _gap(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    if found.keys() != wanted.keys():
        return math.inf
    return max(relative(found[name], wanted[name]) for name in wanted)


@torch.no_grad()
def prompt(model: VelocityModel, x: Tensor, conditions: Sequence[Conditioning]) -> Finding:
    """Two prompts give two velocities at one x."""
    first, second = (model.velocity(x[:1], MIDDLE, [one]) for one in conditions[:2])
    gap = relative(second, first)
    return Finding(
        name="prompt",
        status="pass" if 1e-5 < gap < math.inf else "fail",
        value=f"velocities of two prompts differ by {gap:.2g}",
        why="a network that does not read its prompt cannot learn to follow it",
        remedy="compare what the pipeline makes of the two prompts; a user's family must hand the encoding to the network",
        number=gap,
    )


@torch.no_grad()
def padding(model: VelocityModel, x: Tensor, images: Sequence[Tensor | None]) -> Finding:
    """A short prompt has its own velocity also beside a long one, and its encoding carries no padding."""
    why = "padding that is attended changes the velocity, by how much depends on the batch: rollout and replay then disagree"
    remedy = (
        "a family's encode must return valid tokens only, and batches must mask or avoid padding (docs/extending.md)"
    )
    short, long = model.encode([SHORT, LONG], [images[0]] * 2)
    lengths = [[len(tensor) for tensor in one.tensors.values()] for one in (short, long)]
    pair = x[:1].expand(2, *x.shape[1:]).contiguous()
    alone = model.velocity(pair[:1], MIDDLE, [short])
    beside = model.velocity(pair, MIDDLE, [short, long])[:1]
    gap = relative(beside, alone)
    limit = rounding(getattr(torch, model.spec.dtype))
    status = graded(gap, warn=limit, fail=10 * limit)
    value = f"alone and beside a longer prompt the velocity differs by {gap:.2g}"
    if isinstance(model, FamilyModel) and not model.traits.padded and lengths[0] == lengths[1]:
        status, value = (
            "fail",
            f"prompts of {len(SHORT)} and {len(LONG)} letters have encodings of one length, {lengths[0]}",
        )
    return Finding(name="padding", status=status, value=value, why=why, remedy=remedy, number=gap)
