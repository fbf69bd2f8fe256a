"""`sage-grpo shapes`: pretrain the embedded world's model, score a pipeline folder, render perfect clips, or judge these (the ceiling)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sage_grpo.ranges import Count, Seed, check
from sage_grpo.shapes.pretrain import PretrainOptions


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `sage-grpo shapes`."""

    action: Literal["pretrain", "score", "render", "ceiling"]
    """What to do: train a model from scratch, judge an existing one, draw what a perfect model would, or judge that after the VAE."""
    pretrain: PretrainOptions = field(default_factory=PretrainOptions)
    """Options of pretraining."""
    model: Path | None = None
    """Pipeline folder to score, or whose VAE perfect clips pass; None is the embedded model for the latter."""
    out: Path = Path("shapes")
    """Folder for pictures and scores of `score` and `render`."""
    prompts: Count = 64
    """Held-out prompts to score, or scenes to render or to judge."""
    steps: Count = 20
    """Steps of the ODE in scoring."""
    seed: Seed = 1
    """Seed of the scenes that are rendered."""

    def __post_init__(self) -> None:
        check(self)


def run(options: Options) -> int:
    """Do what `action` says; return the exit status."""
    if options.action == "pretrain":
        from sage_grpo.shapes.pretrain import pretrain

        return pretrain(options.pretrain)
    if options.action == "ceiling":
        return _ceiling(options)
    options.out.mkdir(parents=True, exist_ok=True)
    return _score(options) if options.action == "score" else _render(options)


def _score(options: Options) -> int:
    import torch

    from sage_grpo.shapes.pretrain import score

    if options.model is None or not (options.model / "model_index.json").is_file():
        raise FileNotFoundError(
            f"shapes score needs --model FOLDER with a saved pipeline (model_index.json), got {options.model}."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    score(options.model, prompts=options.prompts, steps=options.steps, pictures=options.out, device=device)
    return 0


def _ceiling(options: Options) -> int:
    import json

    from sage_grpo.shapes.pretrain import FPS, FRAMES, SIDE
    from sage_grpo.shapes.score import ceiling, load_vae

    found = ceiling(options.prompts, FRAMES, SIDE, FPS, options.seed, load_vae(options.model))
    print(json.dumps({name: round(value, 4) for name, value in found.items()}, indent=1))
    return 0


def _render(options: Options) -> int:
    import torch

    from sage_grpo.shapes.pretrain import FRAMES, SIDE
    from sage_grpo.shapes.render import render, to_uint8
    from sage_grpo.shapes.scene import random_scenes
    from sage_grpo.video import contact_sheet

    scenes = random_scenes(options.prompts, torch.Generator().manual_seed(options.seed), split="all")
    clips = to_uint8(render(scenes, FRAMES, SIDE, SIDE))
    contact_sheet(options.out / "renders.png", list(clips), scenes.texts(), columns=FRAMES, cell=96)
    (options.out / "renders.txt").write_text("\n".join(scenes.texts()) + "\n")
    print(f"wrote {options.out / 'renders.png'}")
    return 0
