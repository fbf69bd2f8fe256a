"""Pictures and verdicts of the worlds, pinned: models were made of these very pictures, and what was measured of runs is what these judges said."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from spoiling import spoil
from torch import Tensor

from research.scenes.render import layout_of
from sage_grpo.worlds.shapes.judge import NaiveProxy
from sage_grpo.worlds.shapes.render import trajectory
from sage_grpo.worlds.world import SCENES, SHAPES, WORLDS, World

FILE = Path(__file__).with_name("pinned.json")
"""By world and by what was looked at. A world that shall be another one has other numbers: a test that fails prints them."""
FAULTS = {"noise": 0.08, "jitter": 0.04, "blur": 0.9, "ghost": 0.3, "change": 0.4, "mix": 0.25}


def projections(values: Tensor) -> list[float]:
    """Four projections of all values on weights in [-1/2, 1/2) that look random, of about the size of the values."""
    flat = values.double().flatten()
    place = torch.arange(len(flat))
    weights = [((place * place * step + place) % 65536).double() / 65536 - 0.5 for step in (40503, 20011, 9973, 31337)]
    return [float((flat * weight).sum() / len(flat) ** 0.5) for weight in weights]


def drawn(world: World, count: int, **values: Any) -> tuple[Any, Tensor]:
    """Scenes and their clean clips."""
    module: Any = world.scene
    batch = module.random_scenes(count, torch.Generator().manual_seed(5), "all")
    frames, side, _ = world.format
    return batch, import_module(f"{world.package}.render").render(batch, frames, side, side)


def compared(world: World, name: str, found: Any, near: float) -> None:
    known = json.loads(FILE.read_text())[world.name][name]
    assert found.keys() == known.keys()
    for part, values in found.items():
        assert values == pytest.approx(known[part], abs=near, nan_ok=True), f"{name}, {part}: {json.dumps(found)}"


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_pictures_are_what_they_were(world: World) -> None:
    _, clips = drawn(world, 16)
    odd = drawn(world, 6)[0]
    small = import_module(f"{world.package}.render").render(odd, 5, 24, 40)
    compared(world, "pictures", {"own format": projections(clips), "another": projections(small)}, 3e-4)


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_paths_are_what_they_were(world: World) -> None:
    """Many scenes, at little cost: what a picture shows of one in twenty."""
    module: Any = world.scene
    batch = module.random_scenes(400, torch.Generator().manual_seed(6), "all")
    found = {"centres": trajectory(batch, 7)} if world.name == "shapes" else vars(layout_of(batch, 7))
    compared(world, "paths", {name: projections(values) for name, values in found.items()}, 3e-4)


LONGER = [pytest.param(SCENES, fault, marks=pytest.mark.slow) for fault in ("jitter", "blur", "ghost")]


@pytest.mark.parametrize(
    ("world", "fault"),
    [*((SHAPES, one) for one in FAULTS), *((SCENES, one) for one in ("noise", "change", "mix")), *LONGER],
)
def test_verdicts_are_what_they_were(world: World, fault: str) -> None:
    """Of clips that are half right in many ways: faults, ghosts of other frames, one that becomes another, and prompts of others."""
    batch, clean = drawn(world, 4)
    if fault == "ghost":
        clips = clean.lerp(clean.mean(1, keepdim=True), FAULTS[fault])
    elif fault == "mix":  # of two clips: what is seen is half of each
        clips = clean.lerp(clean.roll(1, 0), FAULTS[fault])
    elif fault == "change":
        kept = round((1 - FAULTS[fault]) * clean.shape[1])
        clips = torch.cat([clean[:, :kept], clean.roll(1, 0)[:, kept:]], 1)
    else:
        clips = spoil(fault, FAULTS[fault], import_module(f"{world.package}.render").render, batch, clean)
    texts = batch.texts(2)
    texts[1], texts[3] = texts[3], texts[1]
    judge: Any = world.judge()
    verdict = judge.examine(clips)
    found = {name: [round(float(value), 5) for value in values] for name, values in judge.parts(verdict, texts).items()}
    found["gate"] = [round(float(value), 5) for value in verdict.gate]
    found["offset"] = [round(float(value), 5) for value in verdict.nearest.offset.flatten()]
    compared(world, fault, found, 5e-3)


def test_what_the_proxy_says_is_what_it_said() -> None:
    batch, clips = drawn(WORLDS["shapes"], 4)
    found = NaiveProxy().differentiable(255 * clips, batch.texts(0), 8.0)
    compared(WORLDS["shapes"], "proxy", {"proxy": [round(float(value), 5) for value in found["proxy"]]}, 1e-4)
