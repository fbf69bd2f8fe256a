"""Whether a long run stays as it began: seconds, memory and live tensors per iteration, with slopes.

    PYTHONPATH=src python research/benchmarks/steady.py --out steady.json                 # 50 iterations of shapes, CPU or CUDA
    PYTHONPATH=src python research/benchmarks/steady.py --out steady.json --what wan      # a tiny random Wan with guidance and a LoRA

Whole runs go through the runner, so that checkpoints, journal, TensorBoard, videos and evaluations are in it. A slope is a least-squares
line over the iterations after the first fifth, with a 95% interval. A figure drifts when even the low end of its interval adds up, over the run, to more than the tolerance of its median
(seconds 10%, memory 2%, tensors none). Exit status 1 when something drifts.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import statistics
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from sage_grpo.models.spec import LoraSpec, ModelSpec
from sage_grpo.recipes import recipe
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.session import run
from sage_grpo.training.config import BatchConfig, TrainConfig
from sage_grpo.training.events import Hooks, IterationEvent

TOLERANCE = {"seconds": 0.10, "rss_mib": 0.02, "allocated_mib": 0.02, "reserved_mib": 0.02, "tensors": 0.0}
"""Share of the median by which a figure may grow over the run."""
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Slope:
    """A line through a figure of every iteration."""

    per_iteration: float
    interval: float
    """Half of the 95% interval of the slope."""
    median: float
    growth: float
    """What the low end of the interval adds up to over the run, as a share of the median."""

    def drifts(self, tolerance: float) -> bool:
        """Whether it surely grows by more than this share."""
        return self.growth > tolerance


def slope(values: Sequence[float]) -> Slope:
    """Least squares after the first fifth, in which allocators and caches fill."""
    kept = list(values)[len(values) // 5 :]
    count, middle = len(kept), (len(kept) - 1) / 2
    if count < 3:
        raise ValueError(f"A slope takes at least 3 iterations, got {len(values)}.")
    mean, spread = statistics.fmean(kept), sum((x - middle) ** 2 for x in range(count))
    rise = sum((x - middle) * (y - mean) for x, y in enumerate(kept)) / spread
    rest = sum((y - mean - rise * (x - middle)) ** 2 for x, y in enumerate(kept))
    interval = 1.96 * math.sqrt(rest / (count - 2) / spread)
    median = statistics.median(kept)
    growth = max(0.0, rise - interval) * (count - 1) / median if median else 0.0
    return Slope(rise, interval, median, growth)


def live_tensors() -> dict[int, weakref.ref[torch.Tensor]]:
    """Tensors that Python knows of, by their address."""
    gc.collect()
    return {id(thing): weakref.ref(thing) for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)}


def resident_mib() -> float:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def sample(event: IterationEvent, before: Mapping[int, weakref.ref[torch.Tensor]]) -> dict[str, float]:
    """The figures after one iteration. Tensors from `before` the run are not the run's: they may die at any time."""
    born = sum(key not in before or before[key]() is not ref() for key, ref in live_tensors().items())
    figures = {"seconds": event.metrics["time/total"], "rss_mib": resident_mib(), "tensors": born}
    if torch.cuda.is_available():
        figures["allocated_mib"] = torch.cuda.memory_allocated() / MIB
        figures["reserved_mib"] = torch.cuda.memory_reserved() / MIB
    return figures


def configuration(what: str, out: Path, iterations: int) -> TrainConfig:
    """A run with everything on that a long one has."""
    config = recipe("shapes/sage")
    config = dataclasses.replace(
        config,
        out=str(out / "run"),
        iterations=iterations,
        batch=BatchConfig(prompts=2, group_size=4, micro_batch=4),
        evaluate=dataclasses.replace(config.evaluate, every=10, prompts=4, steps=6),
        keep=dataclasses.replace(config.keep, checkpoint_every=5, videos_every=10),
        optimizer=dataclasses.replace(config.optimizer, ema=0.95),
        log=dataclasses.replace(config.log, progress=False),
    )
    if what == "shapes":
        return config
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    import tiny

    folder = tiny.build("wan_t2v", out / "wan")
    prompts = out / "prompts.txt"
    prompts.write_text("a cat\na red dog\na bird\n")
    model = ModelSpec(path=str(folder), lora=LoraSpec(rank=4), guidance_scale=3.0, cache=str(out / "cache"))
    return dataclasses.replace(
        config,
        model=model,
        rewards=[RewardSpec(name="video_stats", weights={"sharpness": 1.0})],
        data=dataclasses.replace(config.data, prompts=str(prompts), eval_prompts=str(prompts), encode_ahead=2),
    )


def measure(config: TrainConfig) -> list[dict[str, float]]:
    """Run; returns the figures of every iteration."""
    rows: list[dict[str, float]] = []
    before = live_tensors()
    run(config, hooks=Hooks(iteration=lambda event: rows.append(sample(event, before))), quiet=True)
    return rows


def judge(rows: Sequence[dict[str, float]]) -> dict[str, dict[str, float | bool]]:
    """Slopes of all figures, and whether they drift."""
    slopes = {name: slope([row[name] for row in rows]) for name in rows[0]}
    return {name: {**dataclasses.asdict(line), "drifts": line.drifts(TOLERANCE[name])} for name, line in slopes.items()}


def main() -> int:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="write the results as JSON")
    parser.add_argument("--what", choices=("shapes", "wan"), default="shapes")
    parser.add_argument("--iterations", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(configuration(options.what, Path(folder), options.iterations))
    verdict = judge(rows)
    for name, line in verdict.items():
        print(
            f"{name:<14} median {line['median']:10.3f}  slope {line['per_iteration']:+.2e} ± {line['interval']:.1e} an iteration  "
            f"{'DRIFTS' if line['drifts'] else 'flat'} (surely {line['growth']:.2%} over the run)"
        )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if options.out is not None:
        report = {
            "device": device,
            "torch": torch.__version__,
            "what": options.what,
            "slopes": verdict,
            "iterations": rows,
        }
        options.out.write_text(json.dumps(report, indent=1))
    return 1 if any(line["drifts"] for line in verdict.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
