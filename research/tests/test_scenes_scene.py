"""Sentences of the second world, and its split."""

from __future__ import annotations

import pytest

from research.scenes.scene import ATTRIBUTES, Scene, from_text, random_scenes, some_scenes, to_text

HELDOUT = [
    "two checked yellow balls circle in a city at night while the camera pans right",
    "two checked blue stars bounce in the desert while the camera pans left",
]
BALL = Scene(place="meadow", count="one", kind="ball", colour="red", texture="striped", verb="bounce")


def test_free_wording_is_understood() -> None:
    found = from_text("Behind a YELLOW cone: a dotted blue box, sliding left. Desert!")
    assert (found.relation, found.other_colour, found.other_kind) == ("behind", "yellow", "cone")
    assert (found.colour, found.kind, found.verb) == ("blue", "box", "left")
    assert (found.place, found.camera) == ("desert", "still")
    # One word with three meanings: a way, a camera and a side.
    found = from_text("a striped red star spins left of a cyan box in the snow while the camera pans left")
    assert (found.verb, found.relation, found.camera) == ("spin", "left", "left")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a striped red bal bounces in a meadow", "Did you mean 'ball'"),
        ("a striped red blue ball bounces in a meadow", "two values of colour"),
        ("a striped red ball in a meadow", "does not name: verb"),
        ("a striped red ball bounces left of a yellow in a meadow", "does not name: other_kind"),
        ("a plain red ball spins in a meadow", "Nobody sees"),
        ("two striped red balls bounce left of a blue box in a meadow", "which one object has"),
        ("a striped red ball bounces left of a red box in a meadow", "must differ"),
        ("a striped red ball bounces behind a blue box in a meadow", "others stay left or right"),
    ],
)
def test_bad_text_is_explained(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_text(text)


def test_the_split_shows_every_value_on_both_sides() -> None:
    scenes = some_scenes("all", 700)
    heldout = [scene for scene in scenes if scene.heldout]
    assert 0.07 < len(heldout) / len(scenes) < 0.14
    for side in (heldout, some_scenes("train", 500)):
        for name, values in ATTRIBUTES.items():
            assert {getattr(scene, name) for scene in side} == set(values), name
    for split, expected in (("train", False), ("heldout", True)):
        assert {scene.heldout for scene in random_scenes(300, None, split).scenes()} == {expected}


def test_the_split_never_moves() -> None:
    # Checkpoints are trained against this very split, and prompts are drawn in this very order.
    assert not BALL.heldout
    assert [to_text(scene) for scene in some_scenes("heldout", 2)] == HELDOUT
