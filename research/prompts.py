"""Write the worlds' prompts as files, one prompt a line: `python -m research.prompts`.

Three splits, so that no rate is chosen on the prompts that results are reported on: `train`, `tuning` (evaluations that choose a rate) and `heldout`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from research.scenes.world import SCENES
from sage_grpo.utils.safe_io import replace_text
from sage_grpo.worlds.world import SHAPES

FOLDER = Path(__file__).resolve().parent
TUNING = 256
"""Prompts of a tuning split."""


def prompt_files() -> Iterator[tuple[Path, list[str]]]:
    """Every prompt file and its lines."""
    for split in SCENES.prompts:
        yield FOLDER / "scenes" / f"{split}.txt", SCENES.texts(split)
    yield FOLDER / "scenes" / "tuning.txt", scenes_tuning()
    tuning, rest = shapes_tuning()
    yield FOLDER / "shapes" / "tuning.txt", tuning
    yield FOLDER / "shapes" / "train.txt", rest


def scenes_tuning() -> list[str]:
    """Held-out combinations of the second world that heldout.txt does not have; its networks were pretrained on none of them."""
    scene: Any = SCENES.scene
    evaluated = set(scene.some_scenes("heldout", SCENES.prompts["heldout"]))
    drawn = scene.some_scenes("heldout", SCENES.prompts["heldout"], seed=1)
    draw = random.Random(f"{SCENES.name}/tuning")
    free = [one for one in drawn if one not in evaluated][:TUNING]
    return [scene.to_text(one, draw.randrange(len(scene.TEMPLATES))) for one in free]


def shapes_tuning() -> tuple[list[str], list[str]]:
    """A tuning split of the first world, and the training prompts without it: the evaluations use nearly all of its held-out combinations."""
    train = SHAPES.texts("train")
    chosen = set(random.Random("shapes/tuning").sample(train, TUNING))
    return [text for text in train if text in chosen], [text for text in train if text not in chosen]


def main() -> None:
    """Write all of them."""
    for path, lines in prompt_files():
        replace_text(path, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
