"""Ours, ours with other settings, stock diffusers and a peer on the same job, one process each: seconds and memory per pass and phase.

    PYTHONPATH=src python research/benchmarks/side_by_side/run.py --out side_by_side.jsonl --peer FLOW_FACTORY_CHECKOUT
    PYTHONPATH=src python research/benchmarks/side_by_side/run.py --out tiny.jsonl --tiny          # plumbing, on a CPU

Wan 2.1 1.3B (an iteration and its passes) and HunyuanVideo-1.5 (its passes), random weights of the real sizes, 480p x 81 frames, LoRA 32, bfloat16.
`variants.py` has what is compared. `--set model.compile=false` changes a setting of ours. Every process appends one line of JSON to --out, with the
commits of both; `table.py` prints them. An iteration is timed --repeats times: the median counts, and the tables say how far the others are from it.

The first iteration chooses its level by the time that is left: 0 is the whole job, 1 half of its clips, 2 also as few steps as there can be; phases are
linear in these, and the table scales them up. All others take the same level. What does not fit --budget is left out and said so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from job import FULL, HUNYUAN15_WIDTH, TINY, Job
from table import read, render
from variants import MODELS, VARIANTS

EXPECTED = {"wan": 70.0, "hunyuan15": 65.0, "stock": 55.0}
"""Seconds on an H200 of an iteration on Wan, of HunyuanVideo-1.5's passes, and of stock passes; what has less time is not started."""
AGAIN = 15.0
"""Seconds of one more iteration of the smallest part on Wan."""

RESERVE = 10.0
"""Seconds to stop what is running."""

Launch = Callable[[dict[str, Any], float], None]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; errors name what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="append the results here, one line of JSON each")
    parser.add_argument("--peer", type=Path, default=None, help="a checkout of Flow-Factory")
    parser.add_argument(
        "--variants", default=None, help=f"of {','.join(VARIANTS)}; default: all, the peer where it is given"
    )
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {','.join(MODELS)}")
    parser.add_argument("--budget", type=float, default=350.0, help="seconds for everything")
    parser.add_argument("--repeats", type=int, default=1, help="timed iterations of every variant")
    parser.add_argument(
        "--level", type=int, choices=(0, 1, 2), default=None, help="part of the job; default: what fits"
    )
    parser.add_argument(
        "--work", type=Path, default=None, help="folder of weights and runs (4 GB), kept; default: a temporary one"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of ours, as in a configuration"
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, for plumbing on a CPU")
    options = parser.parse_args(arguments)
    names = options.variants or ",".join(
        name for name, variant in VARIANTS.items() if variant.framework != "peer" or options.peer
    )
    options.variants, options.models = names.split(","), options.models.split(",")
    for given, known in ((options.variants, VARIANTS), (options.models, MODELS)):
        for name in given:
            if name not in known:
                parser.error(f"there is no {name!r}: use {', '.join(known)}.")
    if options.repeats < 1:
        parser.error(f"--repeats is at least 1, got {options.repeats}.")
    if any(VARIANTS[name].framework == "peer" for name in options.variants) and options.peer is None:
        parser.error("a variant of the peer needs --peer PATH, a checkout of Flow-Factory.")
    if options.peer is not None and not (options.peer / "examples").is_dir():
        parser.error(f"--peer {options.peer} is not a checkout of Flow-Factory: it has no folder examples.")
    if any("=" not in text for text in options.set):
        parser.error(f"--set takes KEY=VALUE, got {options.set}.")
    return options


def units(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Model and variant of every process, in order."""
    return [
        (model, name)
        for name, variant in VARIANTS.items()
        for model in variant.models
        if model in options.models and name in options.variants
    ]


def iterates(unit: tuple[str, str]) -> bool:
    """True for a process that runs whole iterations, not only passes."""
    return unit[0] == "wan" and VARIANTS[unit[1]].framework != "stock"


def expected(unit: tuple[str, str], repeats: int) -> float:
    """Seconds that a process takes."""
    model, variant = unit
    again = AGAIN * (repeats - 1) if iterates(unit) else 0.0
    return again + EXPECTED["stock" if VARIANTS[variant].framework == "stock" else model]


def fitting(todo: list[tuple[str, str]], seconds: float, repeats: int) -> list[tuple[str, str]]:
    """The units that there will be time for."""
    chosen: list[tuple[str, str]] = []
    for unit in todo:
        if sum(expected(each, repeats) for each in (*chosen, unit)) <= seconds:
            chosen.append(unit)
    return chosen


def job_of(model: str, *, tiny: bool) -> Job:
    """The job at a model's own size."""
    if tiny:
        return TINY
    return FULL if model == "wan" else dataclasses.replace(FULL, width=HUNYUAN15_WIDTH, guidance=6.0)


def launch(unit: dict[str, Any], seconds: float) -> None:
    """Run one unit in its own process, which writes its line also when it is told to stop."""
    process = subprocess.Popen([sys.executable, str(Path(__file__).with_name("unit.py")), json.dumps(unit)])
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()


def commit(folder: Path | None) -> str | None:
    """The commit of a checkout, with a plus where files were changed since; None without a repository."""
    try:
        told = ["git", "-C", str(folder), "describe", "--always", "--abbrev=12", "--dirty=+"]
        return subprocess.run(told, capture_output=True, text=True, check=True).stdout.strip() if folder else None
    except (OSError, subprocess.CalledProcessError):
        return None


def measure(options: argparse.Namespace, work: Path, start: Launch = launch) -> list[dict[str, Any]]:
    """Run all units within the budget; returns their lines."""
    begin, level, repeats = time.perf_counter(), options.level, options.repeats
    commits = {"ours": commit(Path(__file__).parent), "peer": commit(options.peer)}
    known = len(read(options.out)) if options.out.is_file() else 0
    todo = units(options)
    while todo:
        model, variant = own = todo.pop(0)
        left = options.budget - (time.perf_counter() - begin)
        need = 0.0 if options.tiny else expected(own, repeats)
        if left < need:
            print(f"{model} {variant}: left out; {left:.0f} s are left, and it takes about {need:.0f}.", flush=True)
            continue
        print(f"{model} {variant}: {left:.0f} s left", flush=True)
        later = fitting(todo, left - need, repeats)
        iterations = [pair for pair in later if iterates(pair)]
        free = left - RESERVE - sum(expected(pair, repeats) for pair in later if pair not in iterations)
        unit = {
            "model": model,
            "variant": variant,
            "job": dataclasses.asdict(job_of(model, tiny=options.tiny)),
            "level": level,
            "share": free / (1 + len(iterations)),
            "seconds": free - sum(expected(pair, repeats) for pair in iterations),
            "repeats": repeats,
            "commits": commits,
            "out": str(options.out),
            "work": str(work),
            "tiny": options.tiny,
            "peer": None if options.peer is None else str(options.peer.resolve()),
            "set": dict(text.split("=", 1) for text in options.set),
        }
        start(unit, left - RESERVE / 2)
        lines = read(options.out)[known:] if options.out.is_file() else []
        level = next((line["level"] for line in lines if "level" in line), level)
    return read(options.out)[known:] if options.out.is_file() else []


def main() -> int:
    """Measure and print; 1 when something failed."""
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        lines = measure(options, work)
    print(render(lines))
    return 0 if lines and all(line["status"] == "ok" for line in lines) else 1


if __name__ == "__main__":
    raise SystemExit(main())
