"""Completes an export for the hub (`export --push_to`): a card with metrics, recipe and clips."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_grpo.callbacks.journal import read_rows
from sage_grpo.utils.safe_io import inside, replace_text, replacing
from sage_grpo.utils.text import markdown, number

if TYPE_CHECKING:
    from sage_grpo.training.config import TrainConfig

CLIPS = 4


def complete(out: Path, run: Path, config: TrainConfig, iteration: int) -> None:
    """Copy clips next to the weights, and add recipe and metrics to the card."""
    clips = _clips(run)
    for source, name in clips:
        with replacing(out / "clips" / name) as fresh:
            shutil.copyfile(source, fresh)
    card = out / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else "# Weights trained with sage-grpo\n"
    added = [*_recipe(config, iteration), *_metrics(run, iteration), *_shown(clips)]
    replace_text(card, "\n".join([text.rstrip("\n"), *added, ""]))


def _recipe(config: TrainConfig, iteration: int) -> list[str]:
    """The recipe of the run, without names of files or machines."""
    rewards = "; ".join(
        f"{spec.title} {json.dumps(spec.weights)}" if spec.weights else spec.title for spec in config.rewards
    )
    rows: dict[str, Any] = {
        "iterations": f"{iteration} of {config.iterations}",
        "rewards": rewards,
        "prompts x clips an iteration": f"{config.batch.prompts} x {config.batch.group_size}",
        "sampler": f"{config.kernel.name}, eta {config.kernel.eta:g}, {config.rollout.steps} steps, window {config.rollout.window.kind}",
        "trust region": config.trust_region.mode,
        "optimizer": f"{config.optimizer.kind}, learning rate {config.optimizer.lr:g}",
        "seed": config.seed,
    }
    return ["", "## Recipe", "", *markdown(["", ""], rows.items())]


def _metrics(run: Path, iteration: int) -> list[str]:
    """Scores on held-out prompts before training and at the last evaluation up to `iteration`."""
    rows = [
        row for row in read_rows(inside(run, "metrics.jsonl")) if "eval/total" in row and row["iteration"] <= iteration
    ]
    if len(rows) < 2:
        return []
    first, last = rows[0], rows[-1]
    names = [
        name
        for name, value in last.items()
        if name.startswith("eval/") and isinstance(first.get(name), float) and isinstance(value, float)
    ]
    scores = [(name.removeprefix("eval/"), number(first[name]), number(last[name])) for name in names]
    return [
        "",
        "## Scores on held-out prompts",
        "",
        *markdown(["", "before", f"iteration {last['iteration']}"], scores),
    ]


def _clips(run: Path) -> list[tuple[Path, str]]:
    """Held-out clips of the first and the last evaluation, with the same prompts."""
    # A link could publish any file of this machine.
    found = sorted(file for file in inside(run, "videos").glob("heldout-*-*.mp4") if not file.is_symlink())
    moments = sorted({path.stem.split("-")[1] for path in found})
    kept = [moments[0], moments[-1]] if len(moments) > 1 else moments
    return [
        (path, path.name) for path in found if path.stem.split("-")[1] in kept and int(path.stem.split("-")[2]) < CLIPS
    ]


def _shown(clips: list[tuple[Path, str]]) -> list[str]:
    if not clips:
        return []
    lines = (f'<video src="clips/{name}" controls loop muted width="320"></video>' for _, name in clips)
    return ["", "## Clips", "", "Held-out prompts, the same seeds; the first number is the iteration.", "", *lines]
