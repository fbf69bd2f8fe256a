"""Methods against one another in the shapes world: many runs side by side, held-out scores over training, seeds and intervals.

    PYTHONPATH=src python benchmarks/methods.py run --out runs.jsonl --seeds 8 --iterations 135 --parallel 16
    PYTHONPATH=src python benchmarks/methods.py table runs.jsonl > table.md
    PYTHONPATH=src python benchmarks/methods.py compare runs.jsonl --out FOLDER    # as a folder of `sage-grpo compare`, its successor

`run` starts one process per (method, seed), at most `--parallel` at a time, skips what the file already holds, and stops starting new
ones after `--limit` seconds. On one GPU, start NVIDIA's MPS first; with OMP_NUM_THREADS=1 sixteen runs share an H200 well.
A row has the held-out scores of 128 prompts at every evaluated iteration and the network's cost of an iteration, read off its plan:
one per sample and forward pass, three per sample forward and backward.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

POINTS = (0, 15, 30, 45, 90, 135, 200, 270, 340, 400)
"""Iterations that are evaluated."""
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 11: 2.20, 15: 2.13}
"""97.5% quantiles of Student's t by degrees of freedom."""
METHODS = ("branch", "flash_grpo", "sage", "sage_all", "mix_grpo", "flow_grpo", "dance_grpo", "cps")


def configure(method: str, seed: int, iterations: int) -> Any:
    """The recipe shapes/METHOD; a suffix after + names variants that are no recipe (see `VARIANTS`)."""
    from sage_grpo.recipes import recipe

    name, *changes = method.split("+")
    config = recipe(f"shapes/{'sage' if name == 'sage_all' else name}")
    if name == "sage_all":
        config = replace(config, update=replace(config.update, step_fraction=1.0))
    for change in changes:
        config = VARIANTS[change.split("=")[0]](config, change.partition("=")[2])
    return replace(
        config,
        seed=1000 + seed,
        iterations=iterations,
        evaluate=replace(config.evaluate, prompts=128, steps=20, show=0),
        model=replace(config.model, vae_slicing=False, cache=None),
    )


VARIANTS = {
    "at": lambda c, v: replace(
        c,
        rollout=replace(c.rollout, window=replace(c.rollout.window, at=[int(s) for s in v.split(",")], weights=None)),
    ),
    "lr": lambda c, v: replace(c, optimizer=replace(c.optimizer, lr=float(v))),
    "eta": lambda c, v: replace(c, kernel=replace(c.kernel, eta=float(v))),
    "kernel": lambda c, v: replace(c, kernel=replace(c.kernel, name=v)),
    "prompts": lambda c, v: replace(
        c, batch=replace(c.batch, prompts=int(v), group_size=48 // int(v), micro_batch=48 // int(v))
    ),
    "decay": lambda c, v: replace(c, optimizer=replace(c.optimizer, decay=v)),
    "ema": lambda c, v: replace(c, optimizer=replace(c.optimizer, ema=float(v))),
    "solver": lambda c, v: replace(c, rollout=replace(c.rollout, solver=v)),
    "after": lambda c, v: replace(c, rollout=replace(c.rollout, after_steps=int(v))),
    "branches": lambda c, v: replace(c, rollout=replace(c.rollout, window=replace(c.rollout.window, branches=int(v)))),
}


def cost(trainer: Any, plan: Any) -> float:
    """Samples through the network in an iteration: forward 1, forward and backward 3."""
    rows = sum(len(plan.trunk(group)) for group in plan.groups)
    rows += sum(
        len(b.members) * (plan.group_of(b).schedule.num_steps - plan.group_of(b).branch) for b in plan.batches(0)
    )
    replayed = sum(
        1 if replay.shared else len(replay.members) for u in range(plan.updates) for replay in plan.replays(0, u)
    )
    return rows + replayed * (3 + (trainer.state.anchor is not None))


def one(method: str, seed: int, iterations: int, out: Path) -> None:
    """One run; appends its row."""
    import torch

    from sage_grpo.train.build import build
    from sage_grpo.train.trainer import Trainer

    start, config = time.perf_counter(), configure(method, seed, iterations)
    trainer = Trainer(config, build(config))
    trainer.encode_prompts()
    plan = trainer.planner.plan(0, trainer.state.stream.peek(trainer.config.batch.prompts))
    curve: dict[str, dict[str, float]] = {}
    seconds = 0.0
    while True:
        number = trainer.state.iteration
        if number in POINTS and (number > 0 or seed == 0):
            metrics = trainer.evaluate().metrics
            trainer.clock.report()
            keep = ("total", "TA", "MQ", "VQ", "drift")
            curve[str(number)] = {name: round(metrics[f"eval/{name}"], 5) for name in keep}
        if number >= iterations:
            break
        seconds += trainer.step()["time/total"]
    row = {
        "method": method,
        "seed": seed,
        "iterations": iterations,
        "curve": curve,
        "cost": cost(trainer, plan),
        "seconds_per_iteration": round(seconds / iterations, 4),
        "seconds": round(time.perf_counter() - start, 1),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "torch": torch.__version__,
    }
    with out.open("a") as stream:
        stream.write(json.dumps(row) + "\n")


def run(options: argparse.Namespace) -> int:
    """Start what is missing, side by side."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["method"], row["seed"], row["iterations"]) for row in read(options.out)}
    jobs = []
    for word in options.methods:
        method, _, longer = word.partition("@")
        jobs += [(method, seed, int(longer or options.iterations)) for seed in range(options.first, options.seeds)]
    jobs.sort(key=lambda job: (job[1], -job[2]))
    jobs = [job for job in jobs if job not in done]
    start, running, failed = time.monotonic(), [], 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    while jobs or running:
        while jobs and len(running) < options.parallel and time.monotonic() - start < options.limit:
            method, seed, iterations = jobs.pop(0)
            words = ["one", method, str(seed), str(iterations), "--out", str(options.out)]
            running.append(subprocess.Popen([sys.executable, __file__, *words], env=environment))
        if not running:
            break
        time.sleep(0.2)
        ended = [process for process in running if process.poll() is not None]
        failed += sum(process.returncode != 0 for process in ended)
        running = [process for process in running if process not in ended]
        if ended:
            print(f"{time.monotonic() - start:.0f} s: {len(running)} running, {len(jobs)} to come", flush=True)
    return 1 if failed or jobs else 0


def read(file: Path) -> list[dict[str, Any]]:
    """The rows of a results file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half of its 95% interval over seeds."""
    if len(values) < 2:
        return values[0], math.nan
    freedom = len(values) - 1
    quantile = STUDENT[max(known for known in STUDENT if known <= freedom)]
    return statistics.mean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def table(options: argparse.Namespace) -> int:
    """Markdown: scores at equal iterations, at equal network cost, and paired differences from the first method."""
    rows = read(options.file)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    first = options.baseline if options.baseline in methods else methods[0]
    by = {m: {row["seed"]: row for row in rows if row["method"] == m} for m in methods}
    budget = options.at * next(iter(by[first].values()))["cost"]
    print(
        f"| method | seeds | cost | s / it | {options.at} iterations | {first} minus it | drift | at {first}'s cost |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for method in methods:
        runs = by[method]
        point = str(options.at)
        ended = [run for run in runs.values() if point in run["curve"]]
        if not ended:
            continue
        mean, half = interval([run["curve"][point]["total"] for run in ended])
        drift, drift_half = interval([run["curve"][point]["drift"] for run in ended])
        shared = [s for s in runs if s in by[first] and point in runs[s]["curve"] and point in by[first][s]["curve"]]
        gap, gap_half = interval(
            [by[first][s]["curve"][point]["total"] - runs[s]["curve"][point]["total"] for s in shared]
        )
        equal, equal_half = interval([at_cost(run, budget) for run in ended])
        print(
            f"| {method} | {len(ended)} | {ended[0]['cost']:.0f} | {statistics.mean(r['seconds_per_iteration'] for r in ended):.2f} "
            f"| {mean:.3f} ± {half:.3f} | {gap:+.3f} ± {gap_half:.3f} | {drift:.4f} ± {drift_half:.4f} | {equal:.3f} ± {equal_half:.3f} |"
        )
    return 0


def at_cost(run: dict[str, Any], budget: float) -> float:
    """The score where a run had cost as much, between the evaluations before and after."""
    reached = budget / run["cost"]
    points = sorted((int(number), scores["total"]) for number, scores in run["curve"].items() if int(number) > 0)
    points = [(0, BASE), *points]
    for (low, before), (high, after) in pairwise(points):
        if low <= reached <= high:
            return before + (after - before) * (reached - low) / (high - low)
    return points[-1][1]


def as_comparison(options: argparse.Namespace) -> int:
    """The rows as those of `sage-grpo compare`, whose tables, figures and leaderboard then serve them too."""
    from sage_grpo.lab import store
    from sage_grpo.lab.design import FIRST_SEED, Arm, Column, Suite
    from sage_grpo.lab.suites.common import DRIFT, OVERALL
    from sage_grpo.recipes import recipe

    rows = read(options.file)
    base = next(row["curve"]["0"] for row in rows if "0" in row["curve"])  # the same for all: one model, fixed noises
    evaluation = {"evaluate.prompts": 128, "evaluate.steps": 20}
    names = list(dict.fromkeys(row["method"] for row in rows))
    starts = {name: "shapes/sage" if name == "sage_all" else f"shapes/{name}" for name in names}
    own = {name: {**evaluation, **({"update.step_fraction": 1.0} if name == "sage_all" else {})} for name in names}
    found = []
    for row in rows:
        curve = {"0": base, **row["curve"]}
        last = row["iterations"]
        found.append(
            {
                **{"suite": "methods", "format": store.FORMAT, "arm": row["method"], "recipe": starts[row["method"]]},
                **{"seed": FIRST_SEED + row["seed"], "key": f"{row['method']}-{row['seed']}-{last}", "kind": "train"},
                **{"status": "done", "error": None, "iterations": last, "reached": last},
                "settings": own[row["method"]] | {"iterations": last},
                "evaluations": {point: {**scores, "Overall": scores["total"]} for point, scores in curve.items()},
                "passes": {point: int(point) * row["cost"] for point in curve},
                **{
                    "updates": last * recipe(starts[row["method"]]).update.updates_per_rollout,
                    "training": {},
                    "steps": {},
                    "commit": "",
                },
                "seconds": {"iteration": row["seconds_per_iteration"], "evaluate": 0.0, "total": row["seconds"]},
                **{"machine": {"device": row["device"]}, "versions": {"torch": row["torch"]}, "code": ""},
            }
        )
    suite = Suite(
        name="methods",
        title="Eight methods over 135 iterations",
        question="Which method learns most, at equal iterations and at equal network passes?",
        arms=tuple(Arm(name=name, recipe=starts[name], options=own[name]) for name in names),
        baseline="branch",
        seeds=tuple(sorted({row["seed"] for row in found})),
        iterations=max(row["iterations"] for row in found),
        columns=(OVERALL, *(Column(key=key) for key in ("VQ", "MQ", "TA")), DRIFT),
    )
    options.out.mkdir(parents=True, exist_ok=True)
    store.write(options.out / store.ROWS, "".join(json.dumps(row) + "\n" for row in found).encode())
    store.save_suite(
        options.out, suite, [row["key"] for row in found], "benchmarks/methods.py run --seeds 8 --iterations 135"
    )
    return 0


BASE = 1.28282
"""Held-out score of the miniature before training."""


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    many = parts.add_parser("run")
    many.add_argument("--out", type=Path, required=True)
    many.add_argument("--methods", nargs="*", default=METHODS, help="NAME, NAME+variant=value, NAME@iterations")
    many.add_argument("--first", type=int, default=0)
    many.add_argument("--seeds", type=int, default=8)
    many.add_argument("--iterations", type=int, default=135)
    many.add_argument("--parallel", type=int, default=16)
    many.add_argument("--limit", type=float, default=math.inf)
    single = parts.add_parser("one")
    single.add_argument("method")
    single.add_argument("seed", type=int)
    single.add_argument("iterations", type=int)
    single.add_argument("--out", type=Path, required=True)
    show = parts.add_parser("table")
    show.add_argument("file", type=Path)
    show.add_argument("--at", type=int, default=135)
    show.add_argument("--baseline", default="branch")
    convert = parts.add_parser("compare")
    convert.add_argument("file", type=Path)
    convert.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.what == "compare":
        return as_comparison(options)
    if options.what == "one":
        one(options.method, options.seed, options.iterations, options.out)
        return 0
    return run(options) if options.what == "run" else table(options)


if __name__ == "__main__":
    raise SystemExit(main())
