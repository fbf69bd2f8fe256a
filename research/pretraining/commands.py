"""The actions that the scripts of both worlds share: make a world's model, score it, measure the best score there is, render clips."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_grpo.config.help import manual
from sage_grpo.config.parsing import parse
from sage_grpo.config.ranges import Count, Seed, checked
from sage_grpo.utils.safe_io import replace_text
from sage_grpo.utils.text import fixed
from sage_grpo.worlds.world import PromptWorld

if TYPE_CHECKING:
    import torch

    from research.pretraining.pretrain import Maker


@checked
class WorldOptions:
    """Options that the scripts of all worlds have."""

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


def main(kind: type, run: Callable[[Any], int], *, prog: str, about: str, argv: Sequence[str] | None = None) -> int:
    """Parse the words of a script, whose first one is the action, and run it; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        print(manual(kind, "", prog=prog, about=about))
        return 0
    if words and not words[0].startswith("-"):
        words = ["--action", *words]
    try:
        return run(parse(kind, words, prog=prog))
    except (ValueError, FileNotFoundError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2


def run(world: PromptWorld, options: Any) -> int:
    """Run an action that every world has; return the exit status."""
    maker: Maker = import_module(f"research.pretraining.{world.name}.pretrain").MAKER
    if options.action == "pretrain":
        from research.pretraining.pretrain import pretrain

        return pretrain(options.pretrain, maker)
    options.out.mkdir(parents=True, exist_ok=True)
    return {"score": score, "ceiling": ceiling, "render": render}[options.action](maker, options)


def score(maker: Maker, options: WorldOptions) -> int:
    """Sample a model on held-out prompts and judge its clips."""
    from research.pretraining import score as making

    world, folder = maker.world, options.model
    if folder is None or not (folder / "model_index.json").is_file():
        raise FileNotFoundError(
            f"{world.name} score needs --model FOLDER with a saved pipeline (model_index.json), got {folder}."
        )
    making.score(world, folder, prompts=options.prompts, steps=options.steps, pictures=options.out, device=_device())
    return 0


def ceiling(maker: Maker, options: WorldOptions) -> int:
    """Scores of clean clips of the held-out prompts that runs are evaluated on, as they are and after the VAE."""
    import json

    from research.pretraining.score import clean_clips, judge_clips
    from sage_grpo.rewards.built_in.video_stats import VideoStats

    world = maker.world
    codec = maker.codec(maker.load_vae(options.model or maker.model(), _device()))
    texts = world.texts("heldout")[: options.prompts] * options.draws
    found = {}
    for name, clips in clean_clips(world, codec, texts, seed=options.seed).items():
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


def render(maker: Maker, options: WorldOptions) -> int:
    """Draw what a perfect model would, as a picture with a row a clip."""
    import torch

    from sage_grpo.utils.video import contact_sheet
    from sage_grpo.worlds.shapes.render import to_uint8

    world = maker.world
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
