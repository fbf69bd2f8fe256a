"""Whether two runs of one seed have the same bits on this machine, with and without `model.deterministic`, and what it costs.

    PYTHONPATH=src python research/benchmarks/same_bits.py --out research/benchmarks/results/same_bits_h200.json

First attention's backward pass alone, at the miniature's size in float32 and at that of HunyuanVideo-1.5 (480 x 848 x 81) in bfloat16: seconds, and
how many of the repeats differ from the first. Then whole training of the miniature: many processes share the machine, half of them with the
setting; a run differs from the first of its kind from the iteration on that is printed. About 70 s on an H200. `--small` tries the command itself.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from sage_grpo.recipes import recipe
from sage_grpo.run.session import assemble
from sage_grpo.tools.compare import machine
from sage_grpo.tools.compare.design import Arm, Suite
from sage_grpo.tools.compare.prepare import configured
from sage_grpo.training.inputs import build
from sage_grpo.training.offload import get_ready, same_bits

SHAPES: dict[str, tuple[torch.dtype, tuple[int, int, int, int]]] = {
    "miniature": (torch.float32, (48, 4, 68, 32)),
    "hunyuan15 480x848x81": (torch.bfloat16, (1, 16, 33_646, 128)),
}
"""Batch, heads, tokens of clip and text, channels of a head."""
RECIPES = ("shapes/sage_paper", "shapes/flow_grpo")


def attention(dtype: torch.dtype, shape: tuple[int, ...], *, wanted: bool, repeats: int) -> dict[str, Any]:
    """Repeats of one backward pass."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    get_ready(wanted=wanted)
    torch.manual_seed(0)
    q, k, v, gradient = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    found, seconds = [], []
    for _ in range(repeats + 1):
        inputs = [part.detach().requires_grad_() for part in (q, k, v)]
        out = scaled_dot_product_attention(*inputs)
        _wait()
        start = time.perf_counter()
        with same_bits(device, wanted=wanted):
            out.backward(gradient)
        _wait()
        seconds.append(time.perf_counter() - start)
        found.append([part.grad for part in inputs])
    differ = sum(any(not torch.equal(a, b) for a, b in zip(found[0], other, strict=True)) for other in found[1:])
    return {"seconds": statistics.median(seconds[1:]), "differ": differ, "repeats": repeats}


def train(name: str, iterations: int, *, wanted: bool) -> dict[str, Any]:
    """A short run: a digest of the weights after every iteration, and seconds of one."""
    torch.set_num_threads(1)
    arm = Arm(name=name, recipe=name, options={"model.deterministic": wanted}, iterations=iterations)
    suite = Suite(name="same_bits", title="", question="", arms=(arm,), baseline=name)
    config = replace(configured(suite, arm, recipe(name)), seed=1002)  # as a comparison has it
    trainer = assemble(config, build(config))
    trainer.encode_prompts()
    digests, seconds = [], []
    for _ in range(iterations):
        start = time.perf_counter()
        trainer.step()
        _wait()
        seconds.append(time.perf_counter() - start)
        sha = hashlib.sha256()
        for parameter in trainer.model.trainable().values():
            sha.update(parameter.detach().cpu().numpy().tobytes())
        digests.append(sha.hexdigest()[:16])
    return {
        "recipe": name,
        "wanted": wanted,
        "digests": digests,
        "seconds": statistics.median(seconds[1:] or seconds),
    }


def side_by_side(processes: int, iterations: int) -> list[dict[str, Any]]:
    """Runs of every recipe with and without the setting, all at once."""
    kinds = [(name, wanted) for name in RECIPES for wanted in (False, True)]
    jobs = [kind for kind in kinds for _ in range(processes // len(kinds))]
    with machine.mps(torch.cuda.is_available()) as (environment, _):
        running = [
            subprocess.Popen(
                [sys.executable, __file__, "--one", name, "--iterations", str(iterations)] + ["--wanted"] * wanted,
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                text=True,
            )
            for name, wanted in jobs
        ]
        runs = [json.loads(process.communicate()[0].splitlines()[-1]) for process in running]
    rows = []
    for name, wanted in kinds:
        own = [run for run in runs if (run["recipe"], run["wanted"]) == (name, wanted)]
        parted = [_first_difference(own[0]["digests"], run["digests"]) for run in own[1:]]
        rows.append(
            {
                "recipe": name,
                "deterministic": wanted,
                "runs": len(own),
                "iterations": iterations,
                "part_after": parted,
                "seconds": statistics.median(run["seconds"] for run in own),
            }
        )
    return rows


def _first_difference(first: list[str], other: list[str]) -> int | None:
    """The iteration after which two runs differ; None where they never do."""
    return next((number for number, (a, b) in enumerate(zip(first, other, strict=True), start=1) if a != b), None)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Both measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--small", action="store_true", help="four processes of two iterations, small attention")
    parser.add_argument("--one", metavar="RECIPE", help=argparse.SUPPRESS)
    parser.add_argument("--wanted", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(train(options.one, options.iterations, wanted=options.wanted)))
        return
    shapes = {"small": (torch.float32, (2, 2, 64, 16))} if options.small else SHAPES
    passes = {
        # With the setting first: cuBLAS is told once in a process.
        name: {str(wanted).lower(): attention(dtype, shape, wanted=wanted, repeats=8) for wanted in (True, False)}
        for name, (dtype, shape) in shapes.items()
    }
    for name, found in passes.items():
        ratio = found["true"]["seconds"] / found["false"]["seconds"]
        print(
            f"{name}: {found['false']['differ']} of 8 differ without, {found['true']['differ']} with, {ratio:.2f} times the seconds"
        )
    rows = side_by_side(4 if options.small else options.processes, 2 if options.small else options.iterations)
    for row in rows:
        print(row)
    if options.out:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        report = {"device": device, "torch": torch.__version__, "attention": passes, "training": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
