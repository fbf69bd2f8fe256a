"""Scenes, their sentences and the split."""

from __future__ import annotations

import pytest

from sage_grpo.worlds.shapes.scene import (
    ATTRIBUTES,
    Scene,
    all_scenes,
    from_text,
    heldout_scenes,
    to_text,
    train_scenes,
)

FIRST_HELDOUT = [
    "a small red circle moves right slowly on a grey background",
    "a small red circle moves left slowly on a navy background",
]


def test_free_wording_is_understood() -> None:
    scene = from_text("On sand, a BIG ring: red, bouncing quickly.")
    assert scene == Scene(shape="ring", colour="red", motion="bounce", speed="fast", size="large", background="sand")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a small red circel moves up slowly on a white background", "Did you mean 'circle'"),
        ("a small red blue circle moves up slowly on a white background", "two values of colour"),
        ("a red circle moves up slowly on a white background", "does not name: size"),
    ],
)
def test_bad_text_is_explained(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_text(text)


def test_split_is_a_partition_that_shows_every_value_on_both_sides() -> None:
    train, heldout = train_scenes(), heldout_scenes()
    assert not set(train) & set(heldout)
    assert set(train) | set(heldout) == set(all_scenes())
    assert 0.08 < len(heldout) / len(all_scenes()) < 0.12
    for name, values in ATTRIBUTES.items():
        for side in (train, heldout):
            assert {getattr(scene, name) for scene in side} == set(values)


def test_split_never_moves() -> None:
    # Checkpoints are trained against this very split: if this fails, held-out prompts have leaked.
    assert len(heldout_scenes()) == 286
    assert [to_text(scene) for scene in heldout_scenes()[:2]] == FIRST_HELDOUT
