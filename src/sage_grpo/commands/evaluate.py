"""Score a model on held-out prompts with the ODE and fixed seeds, or score existing video files, with any rewards."""

from __future__ import annotations

import json as json_module
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sage_grpo.models.spec import ModelSpec
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.train.config import EvalConfig

if TYPE_CHECKING:
    from sage_grpo.train.evaluate import Evaluation


def _shapes_reward() -> list[RewardSpec]:
    return [RewardSpec(name="shapes", weights={"TA": 1.0, "MQ": 0.5, "VQ": 0.5})]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to evaluate."""

    run: str | None = None
    """Folder of a run: takes its model, rewards, prompts and trained weights."""
    weights: Literal["final", "best", "base"] = "final"
    """Which weights of the run."""
    model: ModelSpec = ModelSpec()
    """A model, when no run is given; without one, the small checkpoint that the package carries."""
    lora: str | None = None
    """Folder of a saved LoRA to add to the model."""
    videos: Path | None = None
    """A folder of video files to score instead of a model's."""
    prompts: str = "shapes"
    """Prompts: a .txt, .csv or .jsonl file, or "shapes" for the embedded world's held-out split."""
    rewards: list[RewardSpec] = field(default_factory=_shapes_reward)
    """Rewards with their weights."""
    settings: EvalConfig = EvalConfig()
    """Number of prompts, steps, seed."""
    micro_batch: int = 8
    """Clips that are sampled together."""
    out: Path | None = None
    """Folder for scores.json, and for a contact sheet (or scores.csv for files)."""
    json: bool = False
    """Print JSON only."""


def run(options: Options) -> int:
    """Evaluate and print."""
    if options.videos is not None:
        return _score_files(options)
    from sage_grpo.rewards.base import CompositeReward
    from sage_grpo.train.evaluate import evaluate
    from sage_grpo.train.sources import first_frame, prompts_from

    options = _with_run(options)
    model = replace(options.model, train=False, lora=None).load()
    if options.lora is not None:
        model.load_lora(options.lora)
    reward = CompositeReward(options.rewards, device=model.device, require_weights=False)
    result = evaluate(
        model,
        reward,
        prompts_from(options.prompts, split="heldout"),
        options.settings,
        micro_batch=options.micro_batch,
        images=first_frame,
    )
    _report(result, options)
    return 0


def _with_run(options: Options) -> Options:
    """Fill in what a run knows."""
    if options.run is None:
        return options
    from sage_grpo.commands.export import read_config

    folder = Path(options.run)
    config = read_config(folder)
    held_out = config.data.eval_prompts or config.data.prompts
    options = replace(options, model=config.model, rewards=config.rewards, prompts=held_out)
    if options.weights == "base":
        return options
    trained = folder / options.weights
    if not trained.is_dir():
        raise FileNotFoundError(
            f"{folder} has no {options.weights!r} weights yet. `sage-grpo export --run {folder}` makes some."
        )
    if config.model.lora is not None:
        return replace(options, lora=str(trained))
    return replace(options, model=replace(config.model, path=str(trained), revision=None))


def _report(result: Evaluation, options: Options) -> None:
    metrics = {name.removeprefix("eval/"): value for name, value in result.metrics.items()}
    if options.json:
        print(json_module.dumps(metrics))
    else:
        width = max(map(len, metrics))
        print("\n".join(f"{name:<{width}}  {value:9.4f}" for name, value in metrics.items()))
    if options.out is not None:
        from sage_grpo.video import contact_sheet

        options.out.mkdir(parents=True, exist_ok=True)
        partial = options.out / ".scores.json.partial"
        partial.write_text(json_module.dumps(metrics, indent=1) + "\n")
        os.replace(partial, options.out / "scores.json")
        if len(result.clips):
            contact_sheet(options.out / "clips.png", list(result.clips), result.captions)


def _score_files(options: Options) -> int:
    from sage_grpo.commands.score_videos import score_videos

    if options.prompts == "shapes":
        raise ValueError("--videos needs --prompts FILE: one prompt per video, in the order of the file names.")
    assert options.videos is not None
    score_videos(options.videos, Path(options.prompts), options.rewards, output=options.out)
    return 0
