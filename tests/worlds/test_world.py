"""The embedded world by its name: what it promises, and that it has not moved."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

import world_laws as laws
from sage_grpo.models.spec import ModelSpec
from sage_grpo.tools.compare.run import PER_GPU, cores, how_many
from sage_grpo.training.config import DataConfig, TrainConfig
from sage_grpo.training.inputs import load_sources, prompts_from
from sage_grpo.worlds.world import SHAPES, WORLDS, world_of_prompts


@pytest.mark.parametrize(
    ("split", "count", "digest"), [("train", 2594, "0e9e794bcafd23d0"), ("heldout", 286, "e5085edf31e29d24")]
)
def test_the_prompts_of_the_first_world_are_what_they_were(split: Any, count: int, digest: str) -> None:
    """Every run on shapes depends on them, bit by bit: the text, the template and the order of each."""
    texts = SHAPES.texts(split)
    assert (len(texts), hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]) == (count, digest)


def test_prompts_are_different_scenes_of_their_split_and_always_the_same() -> None:
    laws.prompts_are_different_scenes_of_their_split_and_always_the_same(SHAPES)


def test_a_prompt_names_the_scene_that_made_it_in_every_template() -> None:
    laws.a_prompt_names_the_scene_that_made_it_in_every_template(SHAPES)


def test_a_judge_weighs_every_attribute_and_refuses_what_it_cannot_judge() -> None:
    laws.a_judge_weighs_every_attribute_and_refuses_what_it_cannot_judge(SHAPES)


def test_scores_do_not_depend_on_the_batch_or_on_the_callers_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    laws.scores_do_not_depend_on_the_batch_or_on_the_callers_precision(SHAPES, monkeypatch)


def test_sentences_are_understood_or_explained() -> None:
    found = SHAPES.scene.from_text("On sand, a BIG ring: red, bouncing quickly.")
    named = {"shape": "ring", "colour": "red", "motion": "bounce", "speed": "fast"}
    assert vars(found) == {**named, "size": "large", "background": "sand"}
    with pytest.raises(ValueError, match="does not name: size"):
        SHAPES.scene.from_text("a red circle moves up slowly on a white background")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (None, "shapes"),
        ("shapes", "shapes"),
        ("./shapes", None),  # a user's folder of that name is not the embedded model
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", None),
    ],
)
def test_the_model_of_a_world_is_known_by_its_name(path: str | None, name: str | None) -> None:
    config = TrainConfig(model=ModelSpec(path=path))
    assert how_many([config], ["0"]) == (1 if name is None else min(cores(), PER_GPU))
    assert how_many([config, TrainConfig(model=ModelSpec(path="owner/large"))], ["0", "1"]) == 2


@pytest.mark.parametrize("name", WORLDS)
def test_a_world_is_held_out_from_itself(name: str) -> None:
    assert DataConfig(prompts=name).held_out == name
    train, held_out = load_sources(TrainConfig(data=DataConfig(prompts=name)))
    assert [one.text for one in held_out] == WORLDS[name].texts("heldout") == [one.text for one in prompts_from(name)]
    assert not {one.text for one in train} & {one.text for one in held_out}


def test_prompts_tell_their_world() -> None:
    shapes = SHAPES.texts("heldout")[:3]
    assert world_of_prompts(shapes) is SHAPES
    assert world_of_prompts([*shapes, "a photograph of a teapot"]) is None
    assert world_of_prompts([]) is None
