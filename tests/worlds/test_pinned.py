"""Pictures and verdicts of the embedded world, pinned: its model was made of these very pictures, and measured runs had this judge."""

from __future__ import annotations

from pathlib import Path

import pytest

from sage_grpo.worlds.shapes.judge import NaiveProxy
from sage_grpo.worlds.shapes.render import trajectory
from sage_grpo.worlds.world import SHAPES
from world_laws import SPOILT, Pinned, clips_of, rounded, scenes_of

PINNED = Pinned(SHAPES, Path(__file__).with_name("pinned.json"))


def test_pictures_are_what_they_were() -> None:
    PINNED.pictures()


def test_paths_are_what_they_were() -> None:
    PINNED.paths({"centres": trajectory(scenes_of(SHAPES, 400, 6), 7)})


@pytest.mark.parametrize("fault", SPOILT)
def test_verdicts_are_what_they_were(fault: str) -> None:
    PINNED.verdict(fault)


def test_what_the_proxy_says_is_what_it_said() -> None:
    some = clips_of(SHAPES, scenes_of(SHAPES, 4, 5))
    found = NaiveProxy().differentiable(255 * some.clean, some.batch.texts(0), 8.0)
    PINNED.compare("proxy", {"proxy": rounded(found["proxy"])}, 1e-4)
