"""Worlds by name: what every one of them promises, and that the first one has not moved."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_grpo.models import ModelError
from sage_grpo.models.checkpoints.checkpoint import resolve
from sage_grpo.models.spec import ModelSpec
from sage_grpo.recipes import recipe
from sage_grpo.run.preflight import check_files
from sage_grpo.tools.compare.machine import PER_GPU, cores, how_many
from sage_grpo.tools.compare.prepare import ceiling, columns_of
from sage_grpo.training.config import DataConfig, TrainConfig
from sage_grpo.training.inputs import load_sources, prompts_from
from sage_grpo.types import PartScores
from sage_grpo.worlds import judging
from sage_grpo.worlds.shapes.render import to_uint8
from sage_grpo.worlds.world import SCENES, SHAPES, WORLDS, World, world_of_model, world_of_prompts

SPLITS = ("train", "heldout")


@pytest.mark.parametrize(
    ("split", "count", "digest"), [("train", 2594, "0e9e794bcafd23d0"), ("heldout", 286, "e5085edf31e29d24")]
)
def test_the_prompts_of_the_first_world_are_what_they_were(split: Any, count: int, digest: str) -> None:
    """Every run on shapes depends on them, bit by bit: the text, the template and the order of each."""
    texts = SHAPES.texts(split)
    assert (len(texts), hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]) == (count, digest)


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_prompts_of_a_world_are_different_scenes_of_their_split_and_always_the_same(world: World) -> None:
    for split in SPLITS:
        texts = world.texts(split)
        assert len(set(texts)) == len(texts) >= 256
        scenes = [world.scene.from_text(text) for text in texts[::6]]
        assert len(set(scenes)) == len(scenes)
        assert len({text.split()[0] for text in texts}) > 2  # in several forms
        assert all(scene.heldout == (split == "heldout") for scene in scenes)
        assert texts == world.texts(split)
        assert texts != sorted(texts)


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_what_a_prompt_names_is_the_scene_that_made_it_in_every_template(world: World) -> None:
    module: Any = world.scene
    scenes = [*module.some_scenes("train", 120, 3), *module.some_scenes("heldout", 40, 3)]
    for template in range(len(module.TEMPLATES)):
        texts = [module.to_text(scene, template) for scene in scenes]
        assert [module.from_text(text) for text in texts] == scenes
        assert len(set(texts)) == len(scenes)
        assert set(" ".join(texts).split()) <= set(module.words())
        assert world.attributes(texts[0]) == {name: getattr(scenes[0], name) for name in module.ATTRIBUTES}
    assert len({module.to_text(scenes[0], template) for template in range(len(module.TEMPLATES))}) >= 6
    assert all(word == word.lower() and word.isalpha() for word in module.words())
    with pytest.raises(ValueError, match="Unknown word"):
        world.attributes("a photograph of a teapot")


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_a_judge_weighs_every_attribute_and_refuses_what_it_cannot_judge(world: World) -> None:
    judge: Any = world.judge()
    assert list(judge.weights) == list(world.scene.ATTRIBUTES)
    assert sum(judge.weights.values()) == pytest.approx(1)
    frames, side, fps = world.format
    whole = torch.zeros(1, frames, side, side, 3, dtype=torch.uint8)
    for clips, why in (
        (whole[:, :, :8, :8], "too small"),
        (whole[:, :1], "too small"),
        (whole.float(), "uint8"),
        (whole.expand(2, -1, -1, -1, -1), "one prompt a clip"),
    ):
        with pytest.raises(ValueError, match=why):
            judge(clips, ["x"], fps)
    assert judge(whole[:0], [], fps)["TA"].shape == (0,)


def drawn(world: World, n: int) -> tuple[Any, Callable[..., Tensor]]:
    """Scenes of a world, and what renders them."""
    module: Any = world.scene
    batch = module.random_scenes(n, torch.Generator().manual_seed(0), "all")
    return batch, import_module(f"{world.package}.render").render


def noisy_scores(world: World, device: str = "cpu", part: slice = slice(None)) -> PartScores:
    """What the judge says of some noisy clips, or of a part of them."""
    batch, render = drawn(world, 3)
    clips = render(batch.to(device), *(world.format[:1] + world.format[1:2] * 2)).cpu()
    clips = to_uint8(clips + 0.03 * torch.randn(clips.shape, generator=torch.Generator().manual_seed(7)))
    return world.judge()(clips[part].to(device), batch.texts(5)[part], world.format[2])


@pytest.mark.parametrize("world", [SHAPES, pytest.param(SCENES, marks=pytest.mark.slow)], ids=WORLDS)
def test_scores_do_not_depend_on_the_batch_or_on_the_callers_precision(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, again, part = noisy_scores(world), noisy_scores(world), noisy_scores(world, part=slice(1, 3))
    monkeypatch.setitem(judging.PIXELS_AT_ONCE, "cpu", world.format[0] * world.format[1] ** 2)
    with torch.autocast("cpu", torch.bfloat16):
        portions = noisy_scores(world)
    for name in whole:
        assert torch.equal(whole[name], again[name]), name
        assert torch.allclose(whole[name][1:3], part[name], atol=1e-4), name
        assert torch.allclose(whole[name], portions[name], atol=1e-4), name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (None, "shapes"),
        ("shapes", "shapes"),
        ("scenes", "scenes"),
        ("models/scenes", "scenes"),
        ("./shapes", None),  # a user's folder of that name is not the embedded model
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", None),
    ],
)
def test_the_model_of_a_world_is_known_by_its_name(path: str | None, name: str | None) -> None:
    found = world_of_model(path)
    assert (found and found.name) == name
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
    shapes, scenes = SHAPES.texts("heldout")[:3], SCENES.texts("heldout")[:3]
    assert world_of_prompts(shapes) is SHAPES
    assert world_of_prompts(scenes) is SCENES
    assert world_of_prompts([*shapes, *scenes]) is None
    assert world_of_prompts([]) is None


def test_a_ceiling_is_told_only_where_it_was_measured() -> None:
    weights = {"TA": 1.0, "MQ": 0.5, "VQ": 0.5}
    assert ceiling({"TA": 2.0}) == 2 * SHAPES.ceiling["TA"]
    assert ceiling({"TA": 1.0, "drift": -1.0}) is None
    both = columns_of([recipe("shapes/sage"), recipe("wan/sage")])  # two judges: one column says nothing of either
    assert [(column.key, column.ceiling) for column in both] == [("total", None)]
    (first, *rest) = columns_of([recipe("shapes/sage"), recipe("shapes/branch")])
    assert (first.key, first.ceiling) == ("total", ceiling(weights))
    assert [column.key for column in rest] == ["TA", "MQ", "VQ", "drift"]


def test_a_model_that_the_package_does_not_carry_says_where_it_comes_from(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="sage-grpo scenes pretrain"):
        resolve(ModelSpec(path="scenes"))
    with pytest.raises(FileNotFoundError, match="sage-grpo scenes pretrain"):
        check_files(recipe("scenes/branch"))
