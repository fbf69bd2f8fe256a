"""Workers beside the trainer: seconds and megabytes of an iteration with and without them, beside what `sage-grpo plan` says.

    PYTHONPATH=src python research/benchmarks/workers.py --out research/benchmarks/results/workers_h200.json \\
        --recipe hunyuan15_lora/branch --model.path /tmp/hunyuan15 --model.frames 17 --model.height 256 --model.width 448 \\
        --data.prompts prompts.txt --rewards '[{name: video_stats, weights: {brightness: 1}}]' --evaluate.prompts 1

Three short runs of one configuration: in one process, with workers, and with workers that are one iteration ahead (`rollout.staleness 1`). On a
machine with one GPU all of them share it, so that workers can only win what a single process leaves idle; what is tested is that the same
work is done, that nothing waits for long, and how much travels. Seconds are those of the iterations after the first.
Further options are those of `sage-grpo train`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from sage_grpo.utils.text import fixed, markdown

WAYS: dict[str, list[str]] = {
    "one process": [],
    "workers": ["--rollout.on", "ray"],
    "workers, one iteration ahead": ["--rollout.on", "ray", "--rollout.staleness", "1"],
}
SHOWN = {
    "iteration, s": "time/total",
    "sampling, s": "time/rollout",
    "decoding, s": "time/decode",
    "update, s": "time/update",
    "workers busy, s": "crew/busy_s",
    "waited for them, s": "crew/waited_s",
    "gap of log-probabilities": "crew/gap",
}
"""Rows of the table, and their metrics."""


def called(name: str, words: list[str]) -> str:
    """Output of the program, in a process of its own: the memory of a run is given back."""
    command = [sys.executable, "-m", "sage_grpo", name, *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"sage-grpo {name} {' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def measured(words: list[str], out: Path) -> dict[str, float]:
    """Means over the iterations after the first; of a first one much is spent on what happens once."""
    called("train", [*words, "--out", str(out)])
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row.get("iteration", 0) > 1 and "time/rollout" in row]
    if not rows:
        raise SystemExit("The run has no iteration after its first: give --iterations 2 or more.")
    keys = sorted({key for row in rows for key in row if key.startswith(("time/", "crew/", "reward/total"))})
    return {key: mean(row[key] for row in rows if key in row) for key in keys} | {"iterations": len(rows)}


def predicted(words: list[str]) -> dict[str, Any]:
    """The plan of the configuration with workers on machines of their own, of this kind."""
    said = json.loads(called("plan", [*words, "--json"]))
    phases = {name: phase["seconds"] for name, phase in said["phases"].items()}
    return {"hardware": said["hardware"], "phases": phases, **said["crew"]}


def told(report: dict[str, Any]) -> str:
    """The tables."""
    runs, plan = report["runs"], report["plan"]
    lines = [
        [label, *(fixed(run[key], 4 if "gap" in key else 2) if key in run else "" for run in runs.values())]
        for label, key in SHOWN.items()
    ]
    here = sum(plan["phases"].get(name, 0.0) for name in ("rollout", "decode", "reward"))
    sums = [
        ["sampling, decoding and scoring in one process, s", fixed(here, 2)],
        ["the same by workers, each on a GPU of its own, s", fixed(plan["sampling_seconds"], 2)],
        ["update, s", fixed(plan["updating_seconds"], 2)],
    ]
    return "\n".join([*markdown(["measured", *runs], lines), "", *markdown(["plan", "value"], sums)])


def main() -> int:
    """Every way, then the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="write the results as JSON")
    parser.add_argument("--workers", type=int, choices=range(1, 65), default=2, metavar="1..64")
    parser.add_argument("--share", type=float, default=None, help="GPUs of a worker; by default they share one")
    options, words = parser.parse_known_args()
    words = ["--iterations", "4", "--evaluate.every", "0", "--keep.videos_every", "0", *words]
    share = 1 / options.workers if options.share is None else options.share
    crew = ["--rollout.ray.workers", str(options.workers), "--rollout.ray.gpus", str(share)]
    report: dict[str, Any] = {"command": sys.argv[1:], "workers": options.workers, "runs": {}}
    report["plan"] = predicted([*words, *crew, *WAYS["workers"]])
    for name, more in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            given = [*words, *crew, *more] if more else words
            report["runs"][name] = measured(given, Path(folder) / "run")
        print(f"{name}: {report['runs'][name]['time/total']:.2f} s an iteration", flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1))
    print(told(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
