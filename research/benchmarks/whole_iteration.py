"""Whole iterations of real models at their real size, by the trainer itself: seconds and GiB of every phase beside what `sage-grpo plan` says.

    PYTHONPATH=src python research/benchmarks/whole_iteration.py --out research/benchmarks/results/whole_iteration_h200.jsonl \\
        --case "branch: --recipe hunyuan15_lora/branch --model.height 480 --model.width 848" \\
        --case "ab2, 4 after: --recipe hunyuan15_lora/branch --model.height 480 --model.width 848 --rollout.solver ab2 --rollout.after_steps 4"
    PYTHONPATH=src python research/benchmarks/whole_iteration.py --small --device cpu --case "branch: --recipe wan/branch --model.frames 5"   # a trial

A case is a name and the options of `sage-grpo train`. Weights are random, made on the device and shared by cases of one checkpoint; prompts encode to random
inputs; the reward is the brightness of a clip, whose seconds are nothing beside the rest. Every case first runs an iteration of one prompt and two
clips, which compiles and measures nothing. `--limit` lets the process have no more memory than a smaller card has. A case that runs out of memory says so,
and the next one begins with a new network.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from plan_vs_measured import build, find, iterate

from sage_grpo.config.parsing import given, parse
from sage_grpo.distributed.world import World
from sage_grpo.plan import hardware
from sage_grpo.plan.costs import Forecast, choose_activations, forecast
from sage_grpo.plan.formulas import GIB
from sage_grpo.recipes import recipe
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.inputs import compiles
from sage_grpo.training.offload import get_ready
from sage_grpo.utils.text import fixed, markdown

HEADS = ["case", "phase", "seconds", "plan", "GiB", "plan"]
FIRST_RATIO = "ratio/first_log"


def configured(words: str, *, small: bool, device: str) -> tuple[str, TrainConfig]:
    """A case: its name, and its options on its recipe, with a reward that needs no weights; compiled where a run of it would be."""
    name, colon, options = words.partition(":")
    argv = shlex.split(options)
    if not colon or given(argv, "recipe") is None:
        raise SystemExit(f'--case takes "NAME: --recipe TARGET/METHOD --OPTION VALUE ...", got {words!r}.')
    if given(argv, "rewards") is not None:
        raise SystemExit(f"The reward of every case is the brightness of a clip: leave --rewards out of {words!r}.")
    start = recipe(str(given(argv, "recipe")))
    config = parse(TrainConfig, argv, prog="whole_iteration.py", defaults=start, recipes=True)
    config = replace(config, rewards=[RewardSpec(name="video_stats", weights={"brightness": 1.0})])
    if small:
        config = replace(config, model=replace(config.model, dtype="float32", height=32, width=32, compile=False))
    compiled, _ = compiles(config, torch.device(device))
    return name, replace(config, model=replace(config.model, cache=None, compile=compiled))


def measured(model: Any, config: TrainConfig, said: Forecast) -> dict[str, float]:
    """One iteration, after a small one that compiles."""
    few = replace(config, batch=replace(config.batch, prompts=1, group_size=2))
    iterate(model, few, said)
    return iterate(model, config, said)


def compared(said: Forecast, row: dict[str, float]) -> dict[str, Any]:
    """Phase by phase: [measured, planned] seconds and GiB; and of the iteration."""
    phases = {
        phase.name: {
            "seconds": [row[f"time/{phase.name}"], phase.seconds],
            "gib": [row.get(f"time/peak_gib_{phase.name}", 0.0), phase.memory.total / GIB],
        }
        for phase in said.phases
    }
    whole = {
        "seconds": [row["time/total"], sum(one["seconds"][1] for one in phases.values())],
        "gib": [max(one["gib"][side] for one in phases.values()) for side in (0, 1)],
    }
    return {**phases, "iteration": whole}


def table(rows: list[dict[str, Any]]) -> str:
    """All cases, a line a phase."""
    lines = []
    for row in rows:
        for phase, found in row["phases"].items():
            seconds, sizes = ([fixed(value, 1) for value in found[key]] for key in ("seconds", "gib"))
            lines.append([row["case"], phase, *seconds, *sizes])
    return "\n".join(markdown(HEADS, lines))


def main(arguments: list[str] | None = None) -> int:
    """All cases; a line of JSON each, as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", required=True, help='"NAME: OPTIONS", as often as you like')
    parser.add_argument("--out", type=Path, default=None, help="append the results here, one line of JSON each")
    parser.add_argument("--limit", type=float, default=None, help="GiB that the process may have at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="tiny networks, to try the command itself")
    options = parser.parse_args(arguments)
    cases = [  # mistakes before the work
        configured(words, small=options.small, device=options.device) for words in options.case
    ]
    fixed_order = {config.model.deterministic for _, config in cases}
    if len(fixed_order) > 1:  # it chooses attention for the whole process
        raise SystemExit("Cases with model.deterministic and cases without it need two calls.")
    if options.limit is not None and options.device != "cuda":
        raise SystemExit(f"--limit {options.limit:g} is a limit of a GPU's memory, and --device is {options.device}.")
    get_ready(wanted=fixed_order == {True})
    device = hardware.here() if options.device == "cuda" else hardware.cpu()
    if options.limit is not None:
        whole = torch.cuda.get_device_properties(0).total_memory / GIB
        torch.cuda.set_per_process_memory_fraction(options.limit / whole)
    model, known, rows = None, None, []
    for words, (name, config) in zip(options.case, cases):
        found = find(options, config)
        network = replace(config.model, frames=None, height=None, width=None, memory=None)
        # A network takes another format, and blocks that keep more or less, without being made again.
        if network != known:
            del model
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
            model, known = build(options, config, found), network
        assert model is not None
        model.video = found.model.video
        model.keep(choose_activations(config, model, World()))
        said, begin = forecast(config, device, architecture=found), time.perf_counter()
        row: dict[str, Any] = {
            "case": name,
            "options": words.partition(":")[2].strip(),
            "device": device.title,
            "limit_gib": options.limit,
            "torch": torch.__version__,
            "compiled": config.model.compile,
            "clips": config.batch.prompts * config.batch.group_size,
        }
        try:
            found_row = measured(model, config, said)
        except torch.OutOfMemoryError as error:  # those that come after it still count
            row |= {"error": str(error).partition(". ")[0], "phases": {}}
            model = known = None
        else:
            row |= {"first_log_ratio": found_row.get(FIRST_RATIO), "phases": compared(said, found_row)}
        row["with_warm_up_s"] = time.perf_counter() - begin
        rows.append(row)
        print(f"{name}: {row['error']}" if "error" in row else table([row]), flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
