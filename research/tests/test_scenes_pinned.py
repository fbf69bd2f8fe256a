"""Pictures and verdicts of the second world, pinned: its model was made of these very pictures, and measured runs had this judge."""

from __future__ import annotations

from pathlib import Path

import pytest

from research.scenes.render import layout_of
from research.scenes.world import SCENES
from world_laws import SPOILT, Pinned, scenes_of

PINNED = Pinned(SCENES, Path(__file__).with_name("scenes_pinned.json"))


def test_pictures_are_what_they_were() -> None:
    PINNED.pictures()


def test_paths_are_what_they_were() -> None:
    """Many scenes, at little cost: a picture shows one in twenty."""
    PINNED.paths(vars(layout_of(scenes_of(SCENES, 400, 6), 7)))


@pytest.mark.parametrize("fault", SPOILT)
def test_verdicts_are_what_they_were(fault: str) -> None:
    PINNED.verdict(fault)
