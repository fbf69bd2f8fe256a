"""A world: `scene` (what can be shown, to and from text, and which combinations are held out), `render` (how a clean clip looks) and `judge` (how well a
clip shows its prompt). A `PromptWorld` names these modules; they are imported when they are asked for, so that a configuration can name a world at no
cost. A world outside the package needs no entry here: its judge is a reward by import path, its prompts are files and its model is a folder.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from torch import Tensor

    from sage_grpo.types import Reward

Listed = Literal["train", "heldout"]
"""The two splits that have prompts: combinations to learn on, and combinations that nothing is ever trained on."""


@dataclass(frozen=True, kw_only=True)
class PromptWorld:
    """A world by the names of its parts."""

    name: str  # name of its prompts in `data.prompts`, and of its judge in `rewards`
    package: str  # import path of the package with the modules scene, render and judge
    judge_class: str
    """The class in `judge`: a Reward with the parts VQ, MQ, TA, Overall, drift, and TA/NAME of every attribute."""
    prompts: Mapping[Listed, int]  # number of prompts of each split; a split with fewer combinations gives them all

    @property
    def scene(self) -> Any:
        """The module of what can be shown; docs/benchmark.md lists its names."""
        return import_module(f"{self.package}.scene")

    @property
    def format(self) -> tuple[int, int, float]:
        """Frames, side and frames a second of a clip."""
        return self.scene.FRAMES, self.scene.SIDE, self.scene.FPS

    def texts(self, split: Listed) -> list[str]:
        """The prompts of a split, always the same: a scene each, with a template chosen by a fixed rule."""
        scene, draw = self.scene, random.Random(f"{self.name}/{split}")
        scenes = scene.some_scenes(split, self.prompts[split], 0)
        texts = [scene.to_text(one, draw.randrange(len(scene.TEMPLATES))) for one in scenes]
        draw.shuffle(texts)
        return texts

    def attributes(self, prompt: str) -> dict[str, str]:
        """Values that a prompt names, by attribute; ValueError for a prompt that is not of this world."""
        scene = self.scene.from_text(prompt)
        return {name: getattr(scene, name) for name in self.scene.ATTRIBUTES}

    def clips(self, prompts: Sequence[str], *, seed: int = 0) -> Tensor:
        """A clean clip of every prompt, uint8 B x F x H x W x 3: what a perfect model would make."""
        import torch

        from sage_grpo.worlds.shapes.render import to_uint8

        frames, side, _ = self.format
        scenes = [self.scene.from_text(text) for text in prompts]
        batch = self.scene.batch_of(scenes, torch.Generator().manual_seed(seed))
        clips: Tensor = import_module(f"{self.package}.render").render(batch, frames, side, side)
        return to_uint8(clips)

    def judge(self) -> Reward:
        return cast("Reward", getattr(import_module(f"{self.package}.judge"), self.judge_class)())


SHAPES = PromptWorld(
    name="shapes",
    package="sage_grpo.worlds.shapes",
    judge_class="ShapesJudge",
    prompts={"train": 4096, "heldout": 4096},  # all of them
)
"""One shape that moves on a plain background, 9 frames of 32 x 32."""
WORLDS: Mapping[str, PromptWorld] = {world.name: world for world in (SHAPES,)}
"""The worlds by name."""


def world_of_prompts(prompts: Sequence[str]) -> PromptWorld | None:
    """The embedded world if it understands all of these prompts; None if not, or without a prompt."""
    try:
        for prompt in prompts:
            SHAPES.attributes(prompt)
    except ValueError:
        return None
    return SHAPES if prompts else None
