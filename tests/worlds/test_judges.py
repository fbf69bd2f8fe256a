"""The judge of the embedded world: clean clips get full marks, every fault costs its own part, and nothing empty or doubled passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import world_laws as laws
from sage_grpo.worlds.shapes.fit import SIZES, _match_outlines
from sage_grpo.worlds.shapes.judge import NaiveProxy
from sage_grpo.worlds.shapes.render import backdrop, coverage, palette, to_uint8, trajectory
from sage_grpo.worlds.shapes.scene import random_scenes
from sage_grpo.worlds.world import SHAPES
from world_laws import Clips


@pytest.fixture(scope="module")
def some() -> Clips:
    return laws.clips_of(SHAPES, random_scenes(12, torch.Generator().manual_seed(0), "all"))


def test_clean_clips_get_full_marks() -> None:
    laws.clean_clips_get_full_marks(SHAPES, 40, 0.95, 0.95)


def test_clips_of_another_shape_are_judged_too(some: Clips) -> None:
    judge, texts = SHAPES.judge(), some.batch.texts(0)
    assert some.batch.texts() == texts
    wide = laws.drawn_by(SHAPES, some.batch, 9, 24, 40)
    assert judge.examine(wide).nearest.scenes() == some.batch.scenes()
    made = SHAPES.clips(texts, seed=3)
    assert made.shape == to_uint8(some.clean).shape
    assert judge(made, texts, 8.0)["Overall"].min() > 1.9
    floats, parts = judge.differentiable(255 * some.clean, texts, 8.0), judge.parts(judge.examine(some.clean), texts)
    for part, values in parts.items():
        torch.testing.assert_close(floats[part], values, rtol=0, atol=2e-4)


@pytest.mark.parametrize("width", [32, 40])
def test_the_first_guess_of_a_centre_is_near(width: int) -> None:
    places = torch.tensor([[0.013, -0.27], [-0.31, 0.222], [0.4, 0.33]])
    shape, size = torch.tensor([0, 1, 0]), torch.tensor([0, 1, 1])
    _, found, outline = _match_outlines(coverage(shape, size, places, 32, width))
    assert outline.tolist() == (SIZES * shape + size).tolist()
    assert float((found - places).abs().max()) < 0.006  # of 0.0625 a pixel


def test_a_wrong_word_costs_its_own_part_and_no_other(some: Clips) -> None:
    laws.a_wrong_word_costs_its_own_part_and_no_other(some)


def second_object(some: Clips) -> Tensor:
    """Paint another object, of any shape, size and color, on the other side of the frame."""
    frames, side, _ = some.world.format
    other = random_scenes(len(some.batch), torch.Generator().manual_seed(9), "all")
    middle = trajectory(some.batch, frames).mean(1, keepdim=True)
    place = (-0.6 * middle.sign()).expand(-1, frames, -1).flatten(0, 1)
    shape, size = (values.repeat_interleave(frames) for values in (other.shape, other.size))
    mask = coverage(shape, size, place, side, side).reshape(*some.clean.shape[:4], 1)
    return torch.lerp(some.clean, palette(other.colour)[:, None, None, None], mask)


@pytest.mark.parametrize("kind", ["blank", "noise", "flood", "odd"])
def test_nothing_but_the_objects_of_a_world_passes(some: Clips, kind: str) -> None:
    _, side, _ = some.world.format
    if kind == "blank":
        videos = backdrop(some.batch.background, side, side).unsqueeze(1).expand_as(some.clean)
    elif kind == "noise":
        videos = torch.rand(some.clean.shape, generator=torch.Generator().manual_seed(3))
    elif kind == "flood":
        videos = palette(some.batch.colour)[:, None, None, None].expand_as(some.clean)
    else:
        videos = second_object(some)
    laws.nothing_passes(some, videos)


def test_standing_still_loses_the_motion_and_nothing_else(some: Clips) -> None:
    laws.standing_still_loses_the_motion_and_nothing_else(some, "motion", 0.2)


@pytest.mark.parametrize("name", ["shapes", "shapes_proxy"])
def test_a_prompt_outside_the_grammar_is_named_and_masked(some: Clips, name: str) -> None:
    laws.a_prompt_outside_the_grammar_is_named_and_masked(some, name)


def test_the_proxy_is_hacked_by_a_flood_that_the_judge_refuses(some: Clips) -> None:
    proxy = NaiveProxy()
    flood = palette(some.batch.colour)[:, None, None, None].expand_as(some.clean)
    blank = backdrop(some.batch.background, 32, 32).unsqueeze(1).expand_as(some.clean)
    hacked, honest, empty = (
        proxy(to_uint8(videos), some.batch.texts(0), 8.0)["proxy"] for videos in (flood, some.clean, blank)
    )
    assert (hacked > honest).all()
    assert (honest > empty).float().mean() > 0.9, "it is not senseless"
    with pytest.raises(ValueError, match="uint8"):
        proxy(some.clean, some.batch.texts(0), 8.0)
