"""The gallery of the second world: held-out prompts in rows, the base and trained adapters in columns, from the same noise, moving.

    sage-grpo compare --suite research/suites/scenes_headline.yaml --arms '[sage, branch]' --seeds 1 --first_seed 8001 --weights true --out runs/headline
    sage-grpo compare --suite research/suites/scenes_hacking.yaml --arms '["branch, hot"]' --seeds 1 --first_seed 8001 --weights true --out runs/hacking
    python scripts/gallery.py docs/images/gallery.webp sage=ADAPTER branch=ADAPTER hacked=ADAPTER

An adapter is a folder in runs/headline/weights or runs/hacking/weights, or what `sage-grpo export` writes, under its name in the picture. Run it in the repository's folder.
Prompts are the first of the evaluation's, one clip each and none left out, so that nobody has chosen.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_pictures import moving
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1]))
from research.scenes.world import MODEL, SCENES
from sage_grpo import generate
from sage_grpo.models.spec import ModelSpec
from sage_grpo.tools.report.picture import lettered

ROWS, ZOOM, LINE, GAP = 5, 2, 17, 6
"""Prompts; pixels of the picture for one of the clip; height of a line of words; pixels between clips."""


def main(file: Path, adapters: dict[str, str]) -> None:
    """Make the clips of every column and put them together."""
    prompts = SCENES.texts("heldout")[:ROWS]
    columns: dict[str, Tensor] = {}
    for name, adapter in {"base": None, **adapters}.items():
        made = generate(prompts, model=ModelSpec(path=str(MODEL), guidance_scale=1.0), lora=adapter, steps=20, seed=0)
        columns[name] = made.videos
        print(f"{name}: {len(made.videos)} clips", flush=True)
    print(moving(sheet(columns, prompts), file, made.fps))


def sheet(columns: dict[str, Tensor], prompts: list[str]) -> Tensor:
    """All clips in one, F x H x W x 3: names above the columns, each prompt above its row."""
    width = max(clips.shape[3] for clips in columns.values()) * ZOOM + GAP
    whole = width * len(columns)
    places = {name: width * (place + 0.5) for place, name in enumerate(columns)}
    parts = [lettered(whole, LINE + 4, places)]
    for row, prompt in enumerate(prompts):
        parts += [lettered(whole, LINE, {text: whole / 2}) for text in textwrap.wrap(prompt, int(1.9 * whole / LINE))]
        clips = [clips[row].repeat_interleave(ZOOM, 1).repeat_interleave(ZOOM, 2) for clips in columns.values()]
        parts.append(torch.cat([F.pad(clip, (0, 0, GAP // 2, GAP // 2, 0, GAP), value=255) for clip in clips], dim=2))
    frames = max(part.shape[0] for part in parts if part.ndim == 4)
    return torch.cat([part.expand(frames, -1, -1, -1) for part in parts], dim=1)


if __name__ == "__main__":
    if len(sys.argv) < 3 or not all("=" in word for word in sys.argv[2:]):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), dict(word.split("=", 1) for word in sys.argv[2:]))
