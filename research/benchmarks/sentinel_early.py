"""How early the sentinel sees a reward being hacked: runs of the shapes world whose every training clip and held-out clip is kept.

    PYTHONPATH=src:benchmarks python research/benchmarks/sentinel_early.py run proxy --seed 1000     # minutes of one CPU core
    PYTHONPATH=src:benchmarks python research/benchmarks/sentinel_early.py show                      # what the sentinel says of them

A run adds a line to results/sentinel_early_cpu.jsonl: all scores of its training clips, and of its held-out prompts (means over the clips of a
prompt). `proxy` is trained on the naive proxy and watched by the judge; `judge` is trained on the judge's Overall, and any of its parts can be taken
for a witness afterwards. What is there was made with `proxy --seed 1000` to 1004, `judge --every 4 --seed 2000` to 2002 (..._judge.jsonl), and `proxy
--every 2 --prompts 128` with `--iterations 10`, and with `--iterations 8 --per_prompt 4` (..._clips.jsonl).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from broken_runs import short
from shapes_rewards import SETTING_B, judged, proxied

from sage_grpo.callbacks.journal import read_rows
from sage_grpo.health import sentinel as sentinel_module
from sage_grpo.health.config import SentinelConfig
from sage_grpo.health.evidence import ScoreChange, by_prompt
from sage_grpo.health.sentinel import Finding, HeldOutRewards, Sentinel
from sage_grpo.health.statistics import agreements
from sage_grpo.recipes import recipe
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.session import run as train
from sage_grpo.tools.compare.prepare import MINIATURE
from sage_grpo.training import trainer as trainer_module
from sage_grpo.training.config import TrainConfig

FILE = Path(__file__).parent / "results" / "sentinel_early_cpu.jsonl"
WITNESSES: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "proxy": {"judge": SETTING_B},
    "judge": {part: {part: 1.0} for part in ("VQ", "MQ", "TA")},
}
"""Who can watch a run."""
PARTS = ("VQ", "MQ", "TA")


@dataclass(frozen=True)
class Size:
    """How long a run is, and how it is evaluated."""

    iterations: int
    every: int
    prompts: int
    per_prompt: int


ROWS = ("reward/total", "reward/group_std", "gradient/norm", "weights/distance", "eval/total", "eval/Overall")


def configuration(name: str, seed: int, out: Path, size: Size) -> TrainConfig:
    """shapes/branch, evaluated often."""
    config = recipe("shapes/branch")
    watching = [] if name == "proxy" else [{"name": "shapes_proxy", "weights": {"proxy": 0.0}, "metric_only": True}]
    rewards = [RewardSpec(**row) for row in (proxied() if name == "proxy" else [*judged(), *watching])]
    small = {"vae_slicing": MINIATURE["model.vae_slicing"], "cache": None, "options": MINIATURE["model.options"]}
    return replace(
        config, out=str(out), seed=seed, iterations=size.iterations, rewards=rewards,
        model=replace(config.model, device="cpu", **small),
        batch=replace(config.batch, micro_batch=MINIATURE["batch.micro_batch"]),
        evaluate=replace(config.evaluate, every=size.every, prompts=size.prompts, per_prompt=size.per_prompt, steps=20, show=0),
        keep=replace(config.keep, checkpoint_every=size.iterations, videos_every=0),
        log=replace(config.log, tensorboard=False, progress=False),
    )  # fmt: skip


def make(name: str, seed: int, size: Size) -> dict[str, Any]:
    """Run it, and note every score."""
    held_out: list[dict[str, list[float | None]]] = []
    trained: list[dict[str, list[float | None]]] = []
    evaluate, score = trainer_module.evaluate, trainer_module.Trainer.score

    def evaluated(*arguments: Any, **options: Any) -> Any:
        result = evaluate(*arguments, **options)
        columns = {part: [row["scores"][part] for row in result.rows] for part in ("total", *PARTS)}
        held_out.append(
            {part: [short(value) for value in by_prompt(column, size.per_prompt)] for part, column in columns.items()}
        )
        return result

    def scored(self: Any, *arguments: Any) -> Any:
        result = score(self, *arguments)
        columns = {part: [short(v) for v in result.parts[part].tolist()] for part in PARTS}
        total = [short(v) for v in result.total.tolist()]
        trained.append({"groups": result.groups.tolist(), "total": total, **columns})
        return result

    trainer_module.evaluate, trainer_module.Trainer.score = evaluated, scored  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(name, seed, Path(folder) / "run", size)
        train(config)
        rows = read_rows(Path(config.out) / "metrics.jsonl")
    kept = [{key: short(row[key]) for key in ("iteration", *ROWS) if key in row} for row in rows]
    shape = {"recipe": "shapes/branch", "per_prompt": size.per_prompt}
    return {"name": name, "seed": seed, **shape, "rows": kept, "trained": trained, "clips": held_out}


def read(file: Path | None = None) -> list[Mapping[str, Any]]:
    """The runs of a file, or of all."""
    files = sorted(FILE.parent.glob("sentinel_early_cpu*.jsonl")) if file is None else [file]
    return [json.loads(line) for one in files for line in one.read_text().splitlines()]


def replay(
    run: Mapping[str, Any], witness: Mapping[str, float], config: SentinelConfig | None = None
) -> tuple[list[Finding], float]:
    """What the sentinel says of a recorded run with this witness, and the most evidence it ever saw, in standard errors."""
    watching = {"witness": dict(witness)}
    sentinel = Sentinel(config or SentinelConfig(), witnesses=HeldOutRewards(scores=watching))
    found, seen, trained, clips = [], [0.0], iter(run["trained"]), iter(run["clips"])
    known = sentinel_module.evidence

    def noted(held_out: ScoreChange, drop: ScoreChange | None) -> float:
        seen.append(known(held_out, drop))
        return seen[-1]

    sentinel_module.evidence = noted
    try:
        for row in run["rows"]:
            if "eval/total" in row:
                found += sentinel.evaluated(row["iteration"], next(clips))
                continue
            columns = {name: torch.tensor(column) for name, column in next(trained).items()}
            own = agreements(columns["total"], columns, columns["groups"], watching)
            found += sentinel.observe(row["iteration"], {**row, **own})
    finally:
        sentinel_module.evidence = known
    return found, max(seen)


def lost_at(run: Mapping[str, Any], iteration: int) -> float:
    """Share of the true score's best gain that was lost by an evaluation."""
    truth = {row["iteration"]: row["eval/Overall"] for row in run["rows"] if "eval/total" in row}
    before = max(score for at, score in truth.items() if at <= iteration)
    return (before - truth[iteration]) / (max(truth.values()) - truth[0])


def show(run: Mapping[str, Any]) -> None:
    """A run in a few lines."""
    truth = [f"{row['eval/Overall']:.3f}" for row in run["rows"] if "eval/total" in row]
    size = f"{len(run['clips'][0]['total'])} held-out prompts x {run['per_prompt']}"
    print(f"{run['name']} {run['seed']}, {size}: true score {' '.join(truth)}")
    for title, weights in WITNESSES[run["name"]].items():
        found, most = replay(run, weights)
        told = [(one.iteration, one.name) for one in found if one.new]
        share = f", {lost_at(run, told[0][0]):.0%} of the gain lost" if told and run["name"] == "proxy" else ""
        print(f"  {title} watches: {told or 'silent'}{share}; most evidence {most:.1f}")


def main() -> None:
    """Run or show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "show"])
    parser.add_argument("name", nargs="?", default="proxy", choices=["proxy", "judge"])
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--per_prompt", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.what == "run":
        line = json.dumps(
            make(
                options.name,
                options.seed,
                Size(options.iterations, options.every, options.prompts, options.per_prompt),
            ),
            separators=(",", ":"),
        )
        with (options.out or FILE).open("a") as stream:
            stream.write(line + "\n")
    else:
        for run in read(options.out):
            show(run)


if __name__ == "__main__":
    main()
