"""Hash the metrics of short runs of every method, so that a change which must not change a number can be checked.

    python scripts/metric_hashes.py --out before.json [--only sage] [--jobs 2]
    python scripts/metric_hashes.py --compare before.json

Runs three iterations in float32 on the CPU: every method on shapes with one rank and with two, and sage, branch, nft, dpo and draft on
tiny random checkpoints of HunyuanVideo-1.5 and Wan. All rows of metrics.jsonl count, without clocks and memory. Hashes are equal on
one machine and one version of torch only. Exit status 1 when a hash differs; the first metric that differs is named.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = {"hunyuan15": "hunyuan15_t2v", "wan": "wan_t2v"}
METHODS_OF_FAMILIES = ("sage", "branch", "nft", "dpo", "draft")
SMALL = {
    "iterations": 3,
    "batch.prompts": 2,
    "batch.group_size": 4,
    "batch.micro_batch": 4,
    "rollout.steps": 6,
    "evaluate.every": 3,
    "evaluate.prompts": 2,
    "evaluate.steps": 2,
    "keep.checkpoint_every": 1000,
    "keep.videos_every": 1000,
    "sentinel.action": "warn",
    "log.progress": "false",
}
TINY = {"model.frames": 5, "model.height": 32, "model.width": 32, "model.cache": "null", "model.dtype": "float32"}
REWARD = """
def warm(videos, prompts, fps):
    return (videos[..., 0].float() - videos[..., 2].float()).mean((1, 2, 3)) / 255 + videos.float().std((1, 2, 3, 4)) / 255
"""
CLOCKS = ("time/", "memory/", "seconds", "gpu/", "throughput/")


def jobs() -> Iterator[tuple[str, int, list[str]]]:
    """Name, ranks and the words of `sage-grpo train` of every run, without --out."""
    from sage_grpo.recipes.methods import METHODS

    small = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    tiny = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    for ranks in (1, 2):
        for method in METHODS:
            more = ["--rollout.steps", "10"] if method == "branch_long" else []
            yield f"shapes/{method} x{ranks}", ranks, ["--recipe", f"shapes/{method}", *small, *more]
    for family, kind in FAMILIES.items():
        for method in METHODS_OF_FAMILIES:
            words = ["--recipe", f"{family}/{method}", *small, *tiny, "--model.path", kind]
            words += ["--objective.levels", "2"] if method in ("nft", "dpo") else []
            words += ["--rewards", '[{"name": "warm_reward:warm", "options": {"differentiable": true}}]', "--data.prompts", "p.txt", "--data.eval_prompts", "p.txt"]
            yield f"{family}/{method} x1", 1, words


def digest(folder: Path) -> dict[str, Any]:
    """The hash of a run's metrics and of its exported weights, with the rows."""
    rows = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.append({name: row[name] for name in sorted(row) if not any(clock in name for clock in CLOCKS)})
    text = json.dumps(rows, sort_keys=True)
    return {"hash": hashlib.sha256(text.encode()).hexdigest()[:16], "rows": rows}


def run(folder: Path, job: tuple[str, int, list[str]]) -> dict[str, Any]:
    """One run, a process for each rank, in a folder of its own."""
    name, ranks, words = job
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = folder / name.replace("/", "-").replace(" ", "-")
    place.mkdir()
    processes = [CONTEXT.Process(target=_rank, args=(rank, ranks, port, words, folder, place)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        return {"hash": f"failed: exit codes {[process.exitcode for process in processes]}", "rows": []}
    return digest(place / "run")


def _rank(rank: int, ranks: int, port: int, words: list[str], folder: Path, place: Path) -> None:
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch

    torch.set_num_threads(1)
    os.chdir(folder)
    file = place / f"log-{rank}.txt"
    log = os.open(file, os.O_WRONLY | os.O_CREAT)
    error = os.dup(2)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from sage_grpo.cli.main import main

    try:
        status = main(["train", *words, "--out", str(place / "run")])
    except BaseException:  # noqa: BLE001  the run is reported as failed and the next one starts
        traceback.print_exc()
        status = 1
    if status:
        os.write(error, file.read_bytes()[-2000:])
    sys.exit(status)


def first_difference(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """The first metric whose value differs."""
    if len(before) != len(after):
        return f"{len(before)} rows, now {len(after)}"
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name):
                return f"row {number}, {name}: {old.get(name)} -> {new.get(name)}"
    return "no metric"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write hashes and rows to this file")
    parser.add_argument("--compare", type=Path, help="compare with this file")
    parser.add_argument("--only", default="", help="only runs whose name holds this text")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    options = parser.parse_args()
    before = json.loads(options.compare.read_text()) if options.compare else {}
    found, differ = {}, 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hashes-")))
        (folder / "warm_reward.py").write_text(REWARD)
        (folder / "p.txt").write_text("a cat runs\na red car\na dog sleeps\n")
        sys.path.insert(0, str(ROOT / "tests"))
        import tiny

        for kind in FAMILIES.values():
            tiny.build(kind, folder / kind)
        chosen = [job for job in jobs() if options.only in job[0]]
        pool = stack.enter_context(ThreadPoolExecutor(options.jobs))
        for (name, *_), result in zip(chosen, pool.map(partial(run, folder), chosen)):
            found[name] = result
            line = f"{name:32} {result['hash']}"
            if before:
                known = before["runs"].get(name, {"hash": "", "rows": []})
                same = known["hash"] == result["hash"]
                differ += not same
                line += "  equal" if same else f"  DIFFERS: {first_difference(known['rows'], result['rows'])}"
            print(line, flush=True)
    if options.out:
        options.out.write_text(json.dumps({"machine": platform.platform(), "runs": found}, indent=1))
    print(f"{len(found)} runs" + (f", {differ} differ" if before else ""))
    return 1 if differ else 0


CONTEXT = multiprocessing.get_context("forkserver")
if __name__ == "__main__":
    CONTEXT.set_forkserver_preload(["torch", "diffusers", "transformers", "peft"])
    sys.exit(main())
