"""Laws of any world, and clips to try them on: the embedded world obeys them, and so does the one in research/scenes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.types import PartScores
from sage_grpo.worlds.shapes.render import to_uint8
from sage_grpo.worlds.world import PromptWorld

FAULTS = ("VQ", "MQ", "TA")
SPOILT = {"noise": 0.08, "jitter": 0.04, "blur": 0.9, "ghost": 0.3, "change": 0.4, "mix": 0.25}
"""Faults and their strengths, under which verdicts are pinned."""


@dataclass(frozen=True)
class Clips:
    """Clean clips of a world."""

    world: PromptWorld
    batch: Any
    clean: Tensor

    def judged(self, videos: Tensor) -> dict[str, Tensor]:
        return self.world.judge()(to_uint8(videos), self.batch.texts(1), self.world.format[2])


def drawn_by(world: PromptWorld, *words: Any) -> Tensor:
    found: Tensor = import_module(f"{world.package}.render").render(*words)
    return found


def clips_of(world: PromptWorld, batch: Any) -> Clips:
    frames, side, _ = world.format
    return Clips(world, batch, drawn_by(world, batch, frames, side, side))


def scenes_of(world: PromptWorld, count: int, seed: int, split: str = "all") -> Any:
    module: Any = world.scene
    return module.random_scenes(count, torch.Generator().manual_seed(seed), split)


def clean_clips_get_full_marks(world: PromptWorld, count: int, mean: float, worst: float) -> None:
    some = clips_of(world, scenes_of(world, count, 1, "heldout"))
    scores = world.judge()(to_uint8(some.clean), some.batch.texts(4), world.format[2])
    assert tuple(scores) == world.judge().names
    for part in FAULTS:
        assert scores[part].mean() >= mean, part
        assert scores[part].min() >= worst, part
        assert scores[part].max() <= 1 + 1e-6, part
    assert scores["drift"].mean() < 0.012
    assert torch.allclose(scores["Overall"], scores["TA"] + scores["MQ"] / 2 + scores["VQ"] / 2, atol=1e-6)


def a_wrong_word_costs_its_own_part_and_no_other(some: Clips) -> None:
    module, judge, tried = some.world.scene, some.world.judge(), set()
    (scene, *_), verdict = some.batch.scenes(), judge.examine(some.clean[:1])
    assert verdict.nearest.scenes() == [scene]
    right = judge.parts(verdict, [module.to_text(scene)])
    for attribute, values in module.ATTRIBUTES.items():
        for value in values:
            try:
                wrong = type(scene)(**{**vars(scene), attribute: value})
            except ValueError:  # no such scene
                continue
            if wrong != scene:
                tried.add(attribute)
                told = judge.parts(verdict, [module.to_text(wrong)])
                assert right["TA"] - told["TA"] > 0.75 * judge.weights[attribute], wrong
                others = [part for part in judge.names if part not in ("TA", "Overall", f"TA/{attribute}")]
                assert all(torch.equal(told[part], right[part]) for part in others), wrong
    assert len(tried) >= 6


def nothing_passes(some: Clips, videos: Tensor) -> None:
    scores = some.judged(videos)
    assert scores["Overall"].max() <= 0.4
    assert scores["drift"].min() > 0.03


def standing_still_loses_the_motion_and_nothing_else(some: Clips, motion: str, most: float) -> None:
    scores = some.judged(some.clean[:, 4:5].expand_as(some.clean))
    assert scores["MQ"].max() < most
    assert scores[f"TA/{motion}"].max() < 0.15
    assert scores[f"TA/{next(iter(some.world.scene.ATTRIBUTES))}"].min() > 0.8
    assert scores["VQ"].min() > 0.6


def a_prompt_outside_the_grammar_is_named_and_masked(some: Clips, reward: str) -> None:
    prompts = [some.batch.texts(1)[0], "a red unicorn moves right", "a red ball"]
    composite = CompositeReward([RewardSpec(name=reward)], require_weights=False)
    scores, report = composite.score(to_uint8(some.clean[:3]), prompts, 8.0)
    unknown, missing = report.failures
    assert (unknown.index, missing.index) == (1, 2)
    assert f"outside the grammar of the {some.world.name} world: Unknown word 'unicorn'" in unknown.reason
    for part, values in scores.parts.items():  # parts that need no prompt are still judged
        assert values.isnan().tolist() == ([False] * 3 if part in ("VQ", "MQ", "drift") else [False, True, True]), part


def prompts_are_different_scenes_of_their_split_and_always_the_same(world: PromptWorld) -> None:
    for split in ("train", "heldout"):
        texts = world.texts(split)
        assert len(set(texts)) == len(texts) >= 256
        scenes = [world.scene.from_text(text) for text in texts[::6]]
        assert len(set(scenes)) == len(scenes)
        assert len({text.split()[0] for text in texts}) > 2  # in several forms
        assert all(scene.heldout == (split == "heldout") for scene in scenes)
        assert texts == world.texts(split)
        assert texts != sorted(texts)


def a_prompt_names_the_scene_that_made_it_in_every_template(world: PromptWorld) -> None:
    module: Any = world.scene
    scenes = [*module.some_scenes("train", 120, 3), *module.some_scenes("heldout", 40, 3)]
    for template in range(len(module.TEMPLATES)):
        texts = [module.to_text(scene, template) for scene in scenes]
        assert [module.from_text(text) for text in texts] == scenes
        assert len(set(texts)) == len(scenes)
        assert set(" ".join(texts).split()) <= set(module.words())
        assert world.attributes(texts[0]) == {name: getattr(scenes[0], name) for name in module.ATTRIBUTES}
    assert module.to_text(scenes[0]) == module.to_text(scenes[0], 0)
    assert len({module.to_text(scenes[0], template) for template in range(len(module.TEMPLATES))}) >= 6
    assert all(word == word.lower() and word.isalpha() for word in module.words())
    with pytest.raises(ValueError, match="Unknown word"):
        world.attributes("a photograph of a teapot")


def a_judge_weighs_every_attribute_and_refuses_what_it_cannot_judge(world: PromptWorld) -> None:
    judge: Any = world.judge()
    assert list(judge.weights) == list(world.scene.ATTRIBUTES)
    assert sum(judge.weights.values()) == pytest.approx(1)
    frames, side, fps = world.format
    whole = torch.zeros(1, frames, side, side, 3, dtype=torch.uint8)
    for clips, why in (
        (whole[:, :, :8], "too small"),
        (whole[:, :1], "too small"),
        (whole.float(), "uint8"),
        (whole.expand(2, -1, -1, -1, -1), "(?i)one prompt a clip"),
    ):
        with pytest.raises(ValueError, match=why):
            judge(clips, ["x"], fps)
    assert judge(whole[:0], [], fps)["TA"].shape == (0,)


def noisy_scores(world: PromptWorld, device: str = "cpu", part: slice = slice(None)) -> PartScores:
    batch = scenes_of(world, 3, 0)
    frames, side, fps = world.format
    clips = drawn_by(world, batch.to(device), frames, side, side).cpu()
    clips = to_uint8(clips + 0.03 * torch.randn(clips.shape, generator=torch.Generator().manual_seed(7)))
    return world.judge()(clips[part].to(device), batch.texts(5)[part], fps)


def scores_do_not_depend_on_the_batch_or_on_the_callers_precision(
    world: PromptWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, again, part = noisy_scores(world), noisy_scores(world), noisy_scores(world, part=slice(1, 3))
    judging: Any = import_module(f"{world.package}.judge")
    monkeypatch.setitem(judging.PIXELS_AT_ONCE, "cpu", world.format[0] * world.format[1] ** 2)
    with torch.autocast("cpu", torch.bfloat16):
        portions = noisy_scores(world)
    for name in whole:
        assert torch.equal(whole[name], again[name]), name
        assert torch.allclose(whole[name][1:3], part[name], atol=1e-4), name
        assert torch.allclose(whole[name], portions[name], atol=1e-4), name


def is_a_small_folder(folder: Path, most: float) -> None:
    files = [file for file in folder.rglob("*") if file.is_file()]
    sizes = [file.stat().st_size for file in files]
    assert 1e6 < sum(sizes) <= most
    assert max(sizes) <= 10e6
    assert {file.suffix for file in files} <= {".safetensors", ".json", ".md", ".jinja", ".txt"}


@dataclass(frozen=True)
class Pinned:
    """Numbers of a world in a file. A world that shall be another one has other numbers: a test that fails prints them."""

    world: PromptWorld
    file: Path

    def compare(self, name: str, found: Any, near: float) -> None:
        known = json.loads(self.file.read_text())[name]
        assert found.keys() == known.keys()
        for part, values in found.items():
            assert values == pytest.approx(known[part], abs=near, nan_ok=True), f"{name}, {part}: {json.dumps(found)}"

    def pictures(self) -> None:
        some, odd = clips_of(self.world, scenes_of(self.world, 16, 5)), scenes_of(self.world, 6, 5)
        small = drawn_by(self.world, odd, 5, 24, 40)
        self.compare("pictures", {"own format": projections(some.clean), "another": projections(small)}, 3e-4)

    def paths(self, found: dict[str, Tensor]) -> None:
        self.compare("paths", {name: projections(values) for name, values in found.items()}, 3e-4)

    def verdict(self, fault: str) -> None:
        """Verdicts on clips that are half right in many ways: faults, ghosts of other frames, one that becomes another, and prompts of others."""
        some = clips_of(self.world, scenes_of(self.world, 4, 5))
        clean = some.clean
        if fault == "ghost":
            clips = clean.lerp(clean.mean(1, keepdim=True), SPOILT[fault])
        elif fault == "mix":  # of two clips: every picture is half of each
            clips = clean.lerp(clean.roll(1, 0), SPOILT[fault])
        elif fault == "change":
            kept = round((1 - SPOILT[fault]) * clean.shape[1])
            clips = torch.cat([clean[:, :kept], clean.roll(1, 0)[:, kept:]], 1)
        else:
            clips = spoil(fault, SPOILT[fault], self.world, some.batch, clean)
        texts = some.batch.texts(2)
        texts[1], texts[3] = texts[3], texts[1]
        judge: Any = self.world.judge()
        verdict = judge.examine(clips)
        found = {name: rounded(values) for name, values in judge.parts(verdict, texts).items()}
        found |= {"gate": rounded(verdict.gate), "offset": rounded(verdict.nearest.offset.flatten())}
        self.compare(fault, found, 5e-3)


def rounded(values: Sequence[Tensor] | Tensor) -> list[float]:
    return [round(float(value), 5) for value in values]


def projections(values: Tensor) -> list[float]:
    """Four projections of all values on weights in [-1/2, 1/2) that look random, of about the size of the values."""
    flat = values.double().flatten()
    place = torch.arange(len(flat))
    weights = [((place * place * step + place) % 65536).double() / 65536 - 0.5 for step in (40503, 20011, 9973, 31337)]
    return [float((flat * weight).sum() / len(flat) ** 0.5) for weight in weights]


def spoil(kind: str, strength: float, world: PromptWorld, batch: Any, clean: Tensor) -> Tensor:
    """Clips with white noise of this standard deviation (0.03 is 30 dB), a blur of so many pixels, a brightness of every frame's own, or objects that
    are off their path by so much."""
    generator = torch.Generator().manual_seed(7)
    if kind == "jitter":
        way = strength * torch.randn(*clean.shape[:2], 2, generator=generator)
        return drawn_by(world, batch, *clean.shape[1:4], way)
    if kind == "blur":
        return blurred(clean, strength)
    shape = clean.shape if kind == "noise" else (*clean.shape[:2], 1, 1, 1)
    change = strength * torch.randn(shape, generator=generator)
    return (clean + change if kind == "noise" else clean * (1 + change)).clamp(0, 1)


def blurred(clips: Tensor, sigma: float) -> Tensor:
    """Gaussian blur; the border is repeated outwards."""
    taps = torch.arange(-6, 7)
    weights = torch.softmax(-0.5 * (taps / max(sigma, 1e-3)).square(), 0)
    for axis in (2, 3):
        at = torch.arange(clips.shape[axis])
        parts = [w * clips.index_select(axis, (at + tap).clamp(0, len(at) - 1)) for w, tap in zip(weights, taps)]
        clips = torch.stack(parts).sum(0)
    return clips
