"""Short runs of the shapes world, healthy and broken on purpose, as curves that the sentinel's tests replay and docs/reading-a-run.md shows.

    PYTHONPATH=src python research/benchmarks/broken_runs.py run proxy --seed 1     # one run, minutes of one CPU core
    PYTHONPATH=src python research/benchmarks/broken_runs.py draw                   # the figures, from the curves

A run adds a line to results/broken_runs.jsonl: its rows of metrics.jsonl (four digits, without times and single steps), and for every
evaluation the score of each clip, from which paired differences are taken.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shapes_rewards import SETTING_B, judged, proxied
from torch import Tensor

from sage_grpo.callbacks.journal import read_rows
from sage_grpo.health.config import SentinelConfig
from sage_grpo.health.sentinel import HeldOutRewards, Sentinel
from sage_grpo.recipes import recipe
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.session import run as train
from sage_grpo.training import trainer as trainer_module
from sage_grpo.training.config import TrainConfig
from sage_grpo.worlds.shapes.judge import ShapesJudge

FILE = Path(__file__).parent / "results" / "broken_runs.jsonl"
IMAGES = Path(__file__).parents[2] / "docs" / "images"
ITERATIONS, EVERY, PROMPTS, CONSTANT_FROM = 30, 5, 48, 12
KEPT = ("total", "Overall", "TA", "MQ", "VQ", "drift", "flicker", "sharpness")
"""What is kept of every held-out clip."""
CALLS = {"count": 0}


def fading(videos: Tensor, prompts: Sequence[str], fps: float) -> Tensor:
    """The judge's Overall, until after some iterations it says the same of every clip (a reward server that lost its model)."""
    scores = ShapesJudge()(videos, prompts, fps)["Overall"]
    CALLS["count"] += 1  # an iteration is one call, and so is an evaluation: those at 0, 5 and 10 come before
    return scores if CALLS["count"] <= CONSTANT_FROM + 3 else scores * 0 + 1.4


def configuration(name: str, seed: int, out: Path) -> TrainConfig:
    """A broken run is shapes/branch with one thing wrong."""
    config = recipe("shapes/branch")
    rewards = [RewardSpec(**row) for row in (proxied() if name == "proxy" else judged())]
    if name == "constant":
        rewards = [
            RewardSpec(name="broken_runs:fading", batch_size=0, try_out=False),
            *(RewardSpec(**row) for row in proxied()[1:]),
        ]
    lr = 20 * config.optimizer.lr if name == "hot" else config.optimizer.lr
    return replace(
        config, out=str(out), seed=seed, iterations=ITERATIONS, rewards=rewards, model=replace(config.model, device="cpu"),
        optimizer=replace(config.optimizer, lr=lr),
        evaluate=replace(config.evaluate, every=EVERY, prompts=PROMPTS, steps=10, show=0),
        keep=replace(config.keep, checkpoint_every=ITERATIONS, videos_every=0),
        log=replace(config.log, tensorboard=False, progress=False),
    )  # fmt: skip


def make(name: str, seed: int) -> dict[str, Any]:
    """Run it."""
    clips: list[dict[str, list[float | None]]] = []
    evaluate = trainer_module.evaluate

    def noted(*arguments: Any, **options: Any) -> Any:
        result = evaluate(*arguments, **options)
        clips.append(
            {
                part: [short(row["scores"][part]) for row in result.rows]
                for part in KEPT
                if part in result.rows[0]["scores"]
            }
        )
        return result

    trainer_module.evaluate = noted
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(name, seed, Path(folder) / "run")
        train(config)
        rows = read_rows(Path(config.out) / "metrics.jsonl")
    curves = [{key: short(value) for key, value in row.items() if wanted(key)} for row in rows]
    rewards = [asdict(reward) for reward in config.rewards]
    return {
        "name": name,
        "seed": seed,
        "recipe": "shapes/branch",
        "lr": config.optimizer.lr,
        "rewards": rewards,
        "rows": curves,
        "clips": clips,
    }


def wanted(key: str) -> bool:
    """Neither times nor single steps nor the judge's single attributes."""
    return not key.startswith("time/") and "TA/" not in key and not key[-3:].isdigit()


def short(value: float | None) -> float | None:
    """Four digits."""
    if isinstance(value, int):
        return value
    return value if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def read(file: Path = FILE) -> list[Mapping[str, Any]]:
    """All runs."""
    return [json.loads(line) for line in file.read_text().splitlines()]


FIGURES: Mapping[str, tuple[str, Sequence[tuple[str, str]]]] = {
    "healthy": ("Healthy: shapes/branch", (("reward/total", "training reward"), ("eval/total", "held-out total"), ("gradient/norm", "gradient/norm"))),
    "hot": ("Learning rate 20 times too high", (("reward/total", "training reward"), ("eval/total", "held-out total"), ("gradient/norm", "gradient/norm"))),
    "constant": ("The reward says the same of all clips from iteration 13 on", (("reward/group_std", "reward/group_std"), ("advantage/std", "advantage/std"), ("gradient/norm", "gradient/norm"))),
    "proxy": ("A reward that can be hacked (shapes_proxy)", (("eval/total", "held-out total (the proxy)"), ("eval/Overall", "the true judge (metric_only)"), ("eval/sharpness", "sharpness (metric_only)"))),
}  # fmt: skip
"""What each figure shows: a title, and a metric a panel."""


def draw(run: Mapping[str, Any], folder: Path = IMAGES) -> Path:
    """Three panels of a run; dotted where the sentinel spoke first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    title, panels = FIGURES[run["name"]]
    figure, axes = pyplot.subplots(1, 3, figsize=(9.6, 2.5), constrained_layout=True)
    told = spoken(run)
    for axis, (metric, label) in zip(axes, panels):
        points = [(row["iteration"], row[metric]) for row in run["rows"] if row.get(metric) is not None]
        axis.plot(*zip(*points), marker="o" if metric.startswith("eval/") else None, markersize=3, color="#1f6feb")
        axis.set_title(label, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        for at, name in told[:1]:
            axis.axvline(at, linestyle=":", color="#c2410c")
            axis.text(
                at, axis.get_ylim()[0], f" {name}", rotation=90, fontsize=7, color="#c2410c", va="bottom", ha="right"
            )
    figure.suptitle(f"{title} (seed {run['seed']})", fontsize=10)
    file = folder / f"run-{run['name']}.png"
    figure.savefig(file, dpi=100, metadata={"Software": ""})
    pyplot.close(figure)
    return file


def spoken(run: Mapping[str, Any]) -> list[tuple[int, str]]:
    """(iteration, name) of what the sentinel would have said."""
    witnesses = HeldOutRewards(
        scores={"shapes": dict(SETTING_B)} if run["name"] in ("proxy", "constant") else {},
        statistics=("flicker", "sharpness"),
    )
    sentinel = Sentinel(SentinelConfig(), clips=48, clip=0.0108, witnesses=witnesses)
    found, clips = [], iter(run["clips"])
    for row in run["rows"]:
        number = row["iteration"]
        found += sentinel.evaluated(number, next(clips)) if "eval/total" in row else sentinel.observe(number, row)
    return [(finding.iteration, finding.name) for finding in found if finding.new]


def main() -> None:
    """Run or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "draw"])
    parser.add_argument("name", nargs="?", default="healthy", choices=["healthy", "hot", "constant", "proxy"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    if options.what == "run":
        line = json.dumps(make(options.name, options.seed), separators=(",", ":"))
        with options.out.open("a") as stream:
            stream.write(line + "\n")
    else:
        first = {run["name"]: run for run in reversed(read(options.out))}
        for run in first.values():
            print(draw(run), spoken(run))


if __name__ == "__main__":
    main()
