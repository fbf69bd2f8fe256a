"""`sage-grpo shapes`: pretrain the embedded world's model, score a pipeline folder, measure the best score there is, or render clips."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Literal

from sage_grpo.inside import replace_text
from sage_grpo.printing import fixed
from sage_grpo.ranges import Count, Seed, checked
from sage_grpo.worlds.making.shapes.options import PretrainOptions


@checked
class Options:
    """Options of `sage-grpo shapes`."""

    action: Literal["pretrain", "score", "ceiling", "render"]
    """What to do: train a model from scratch, judge an existing one, judge clean clips after its VAE (the best that any weights can
    reach), or draw what a perfect model would."""
    pretrain: PretrainOptions = field(default_factory=PretrainOptions)
    """Options of pretraining."""
    model: Path | None = None
    """Pipeline folder to score, or whose VAE `ceiling` uses; None is the embedded one for `ceiling`."""
    out: Path = Path("shapes")
    """Folder for pictures and scores of `score`, `ceiling` and `render`."""
    prompts: Count = 64
    """Held-out prompts to score, or scenes to render."""
    steps: Count = 20
    """Steps of the ODE in scoring."""
    seed: Seed = 1
    """Seed of the scenes that are rendered, and of where clips of `ceiling` have their objects."""
    draws: Count = 4
    """Clips a prompt in `ceiling`."""


def run(options: Options) -> int:
    """Do what `action` says; return the exit status."""
    if options.action == "pretrain":
        from sage_grpo.worlds.making.shapes.pretrain import pretrain

        return pretrain(options.pretrain)
    options.out.mkdir(parents=True, exist_ok=True)
    return {"score": _score, "ceiling": _ceiling, "render": _render}[options.action](options)


def _score(options: Options) -> int:
    import torch

    from sage_grpo.worlds.making.shapes.score import score

    if options.model is None or not (options.model / "model_index.json").is_file():
        raise FileNotFoundError(
            f"shapes score needs --model FOLDER with a saved pipeline (model_index.json), got {options.model}."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    score(options.model, prompts=options.prompts, steps=options.steps, pictures=options.out, device=device)
    return 0


def _ceiling(options: Options) -> int:
    """Scores of clean clips of the held-out prompts that runs are evaluated on, as they are and after the VAE."""
    import json

    import torch

    from sage_grpo.rewards.built_in.video_stats import VideoStats
    from sage_grpo.worlds.making.shapes.score import clean_clips, judge_clips
    from sage_grpo.worlds.shapes.scene import FPS
    from sage_grpo.worlds.world import SHAPES

    texts = SHAPES.texts("heldout")[: options.prompts] * options.draws
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {}
    for name, clips in clean_clips(options.model, texts, seed=options.seed, device=device).items():
        parts = VideoStats(parts=("flicker", "sharpness"))(clips, texts, FPS)
        scores = judge_clips(clips, texts) | {part: float(values.mean()) for part, values in parts.items()}
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


def _render(options: Options) -> int:
    import torch

    from sage_grpo.video import contact_sheet
    from sage_grpo.worlds.shapes.render import render, to_uint8
    from sage_grpo.worlds.shapes.scene import FRAMES, SIDE, random_scenes

    scenes = random_scenes(options.prompts, torch.Generator().manual_seed(options.seed), split="all")
    clips = to_uint8(render(scenes, FRAMES, SIDE, SIDE))
    contact_sheet(options.out / "renders.png", list(clips), scenes.texts(), columns=FRAMES, cell=96)
    replace_text(options.out / "renders.txt", "\n".join(scenes.texts()) + "\n")
    print(f"wrote {options.out / 'renders.png'}")
    return 0
