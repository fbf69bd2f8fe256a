"""The judge of the second world: clean clips get full marks, every fault costs its own part, and nothing empty passes."""

from __future__ import annotations

import pytest
import torch

import world_laws as laws
from research.scenes.render import COLOURS, backdrop, scroll_of
from research.scenes.scene import batch_of, from_text
from research.scenes.world import SCENES
from world_laws import Clips

# One clip for each thing that is hard: three alike, a second object behind and beside, every place and camera.
HARD = (
    "three striped red balls roll right in a meadow while the camera pans left",
    "two dotted blue stars spin in the snow while the camera pans right",
    "a checked yellow box slides left behind a cyan ring in the city",
    "a plain magenta cone circles left of a green ball in the desert while the camera pans left",
)


@pytest.fixture(scope="module")
def some() -> Clips:
    return laws.clips_of(SCENES, batch_of(list(map(from_text, HARD)), torch.Generator().manual_seed(0)))


# Of many clips one in a hundred or so loses its motion: small cones that pass behind, pale edges taken for a second object.
@pytest.mark.parametrize(
    ("count", "mean", "worst"), [(4, 0.95, 0.85), pytest.param(40, 0.92, 0.0, marks=pytest.mark.slow)]
)
def test_clean_clips_get_full_marks(count: int, mean: float, worst: float) -> None:
    laws.clean_clips_get_full_marks(SCENES, count, mean, worst)


def test_a_wrong_word_costs_its_own_part_and_no_other(some: Clips) -> None:
    laws.a_wrong_word_costs_its_own_part_and_no_other(some)


@pytest.mark.parametrize("kind", ["blank", "noise", "flood", "negative"])
def test_nothing_but_the_objects_of_a_world_passes(some: Clips, kind: str) -> None:
    frames, side, _ = some.world.format
    if kind == "blank":
        videos = backdrop(some.batch.place, scroll_of(some.batch, frames), side, side)
    elif kind == "noise":
        videos = torch.rand(some.clean.shape, generator=torch.Generator().manual_seed(3))
    elif kind == "flood":
        videos = torch.tensor(COLOURS)[some.batch.colour][:, None, None, None].expand_as(some.clean)
    else:
        videos = 1 - some.clean
    laws.nothing_passes(some, videos)


def test_standing_still_loses_the_motion_and_nothing_else(some: Clips) -> None:
    laws.standing_still_loses_the_motion_and_nothing_else(some, "verb", 0.45)


def test_a_prompt_outside_the_grammar_is_named_and_masked(some: Clips) -> None:
    laws.a_prompt_outside_the_grammar_is_named_and_masked(some, "research.scenes.judge:ScenesJudge")


def test_a_judge_weighs_every_attribute_and_refuses_what_it_cannot_judge() -> None:
    laws.a_judge_weighs_every_attribute_and_refuses_what_it_cannot_judge(SCENES)


@pytest.mark.slow
def test_scores_do_not_depend_on_the_batch_or_on_the_callers_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    laws.scores_do_not_depend_on_the_batch_or_on_the_callers_precision(SCENES, monkeypatch)
