"""Three splits of each world's prompts: training, choosing a rate and reporting share no scene."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import pytest

from research.prompts import FOLDER, TUNING, prompt_files
from research.scenes.world import SCENES
from sage_grpo.worlds.world import SHAPES, PromptWorld

FILES = [pytest.param(path, lines, id=f"{path.parent.name}/{path.name}") for path, lines in prompt_files()]


@pytest.mark.parametrize(("path", "lines"), FILES)
def test_a_file_has_the_prompts_that_the_program_writes(path: Path, lines: list[str]) -> None:
    assert path.read_text().splitlines() == lines


@pytest.mark.parametrize("world", [SHAPES, SCENES], ids=lambda world: world.name)
class TestSplits:
    def test_no_two_share_a_scene(self, world: PromptWorld) -> None:
        scenes = {split: {world.scene.from_text(text) for text in texts} for split, texts in splits(world).items()}
        assert all(not scenes[one] & scenes[other] for one, other in combinations(scenes, 2))
        assert len(scenes["tuning"]) == TUNING

    def test_tuning_has_the_kinds_of_prompts_of_the_others(self, world: PromptWorld) -> None:
        """Every value and every template about as often, up to four standard errors of two samples of the tuning split's size."""
        shares = {split: shares_of(world, texts) for split, texts in splits(world).items()}
        for (name, value), share in shares["train"].items():
            allowed = 4 * (2 * share * (1 - share) / TUNING) ** 0.5
            for other in ("train", "heldout"):
                assert abs(shares["tuning"][name, value] - shares[other][name, value]) < allowed, (name, value, other)


def splits(world: PromptWorld) -> dict[str, list[str]]:
    files = {split: (FOLDER / world.name / f"{split}.txt").read_text().splitlines() for split in ("train", "tuning")}
    return {**files, "heldout": world.texts("heldout")}


def shares_of(world: PromptWorld, texts: list[str]) -> Mapping[tuple[str, str], float]:
    """Share of the texts that have a value of an attribute, and of those that have a template."""
    found = Counter(pair for text in texts for pair in world.attributes(text).items())
    forms = [
        {world.scene.to_text(world.scene.from_text(text), form): form for form in range(len(world.scene.TEMPLATES))}
        for text in texts
    ]
    found += Counter(("template", str(known[text])) for known, text in zip(forms, texts))
    return defaultdict(float, {pair: count / len(texts) for pair, count in found.items()})
