"""What `sage-grpo shapes` and `sage-grpo scenes` do alike: score a world's model, measure the best score there is, render clips."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sage_grpo.inside import replace_text
from sage_grpo.printing import fixed
from sage_grpo.ranges import Count, Seed, checked
from sage_grpo.worlds.world import World

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor


@checked
class WorldOptions:
    """Options that the commands of all worlds have."""

    model: Path | None = None
    """Pipeline folder to score, or whose VAE `ceiling` uses; None is the world's own for `ceiling`."""
    out: Path = Path("world")
    """Folder for pictures and scores of `score`, `ceiling` and `render`."""
    prompts: Count = 64
    """Held-out prompts to score, or scenes to render."""
    steps: Count = 20
    """Steps of the ODE in scoring."""
    seed: Seed = 1
    """Seed of the scenes that are rendered, and of what no prompt names in clips of `ceiling`."""
    draws: Count = 4
    """Clips a prompt in `ceiling`."""


class Scoring(Protocol):
    """The module `score` of a world's making."""

    def score(self, folder: Path, *, prompts: int, steps: int, pictures: Path, device: torch.device) -> str:
        """Sample and judge a pipeline folder; return a table."""

    def clean_clips(
        self, folder: Path | None, prompts: Sequence[str], *, seed: int, device: torch.device
    ) -> dict[str, Tensor]:
        """Perfect clips, as they are and after a folder's VAE."""


def score(world: World, making: Scoring, options: WorldOptions) -> int:
    """Sample a model on held-out prompts and judge its clips."""
    if options.model is None or not (options.model / "model_index.json").is_file():
        raise FileNotFoundError(
            f"{world.name} score needs --model FOLDER with a saved pipeline (model_index.json), got {options.model}."
        )
    making.score(options.model, prompts=options.prompts, steps=options.steps, pictures=options.out, device=_device())
    return 0


def ceiling(world: World, making: Scoring, options: WorldOptions) -> int:
    """Scores of clean clips of the held-out prompts that runs are evaluated on, as they are and after the VAE."""
    import json

    from sage_grpo.rewards.built_in.video_stats import VideoStats
    from sage_grpo.worlds.making.score import judge_clips

    texts = world.texts("heldout")[: options.prompts] * options.draws
    found = {}
    for name, clips in making.clean_clips(options.model, texts, seed=options.seed, device=_device()).items():
        parts = VideoStats(parts=("flicker", "sharpness"))(clips, texts, world.format[2])
        scores = judge_clips(world, clips, texts) | {part: float(values.mean()) for part, values in parts.items()}
        found[name] = {part: value for part, value in scores.items() if "/" not in part}
    print(
        "\n".join(
            f"{name:<10}" + "  ".join(f"{k} {fixed(v, 4)}" for k, v in scores.items()) for name, scores in found.items()
        )
    )
    facts = {"prompts": options.prompts, "draws": options.draws, "seed": options.seed}
    replace_text(options.out / "ceiling.json", json.dumps({**facts, **found}, indent=1) + "\n")
    print(f"wrote {options.out / 'ceiling.json'}")
    return 0


def render(world: World, making: Scoring, options: WorldOptions) -> int:
    """Draw what a perfect model would, as a picture with a row a clip."""
    from importlib import import_module

    import torch

    from sage_grpo.video import contact_sheet
    from sage_grpo.worlds.shapes.render import to_uint8

    frames, side, _ = world.format
    scene, draw = (import_module(f"{world.package}.{name}") for name in ("scene", "render"))
    scenes = scene.random_scenes(options.prompts, torch.Generator().manual_seed(options.seed), split="all")
    clips = to_uint8(draw.render(scenes, frames, side, side))
    contact_sheet(options.out / "renders.png", list(clips), scenes.texts(), columns=frames, cell=96)
    replace_text(options.out / "renders.txt", "\n".join(scenes.texts()) + "\n")
    print(f"wrote {options.out / 'renders.png'}")
    return 0


def _device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
