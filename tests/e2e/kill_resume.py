"""Training runs as processes that are killed with SIGKILL, and a comparison of finished runs: metrics (all but times), final weights and the whole last
checkpoint (weights, optimizer, EMA, anchor)."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PRELOAD = [
    "sage_grpo.cli.main",
    "sage_grpo.run.session",
    "sage_grpo.models.families.hunyuan15",
    "sage_grpo.models.families.wan",
    "sage_grpo.rewards.built_in.video_stats",
    "diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.t5.modeling_t5",
    "peft",
]
"""Imported once in a server that every run is forked from: a start then takes a second, not ten."""


@dataclass(frozen=True)
class Kill:
    seconds: float
    """After the start of the process."""
    saved: int
    """Newest whole checkpoint at that moment."""
    writing: bool
    """Whether a checkpoint was being written."""


def command(argv: Sequence[str], log: Path) -> None:
    import torch

    torch.set_num_threads(1)
    with log.open("a") as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        from sage_grpo.cli.main import main

        status = main(list(argv))
    sys.exit(status)


def start(argv: Sequence[str], log: Path) -> multiprocessing.process.BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=command, args=(list(argv), log))
    process.start()
    return process


def newest(out: Path) -> int:
    """Number of the newest checkpoint; -1 for none."""
    return max((int(folder.name) for folder in (out / "checkpoints").glob("[0-9]*")), default=-1)


def is_writing(out: Path, since: float) -> bool:
    """Whether a checkpoint is half written, by this process and not by one that was killed before."""
    for folder in (out / "checkpoints").glob(".*.partial"):
        with contextlib.suppress(FileNotFoundError):  # renamed in this very moment
            if folder.stat().st_mtime >= since:
                return True
    return False


def kill(
    argv: Sequence[str], out: Path, log: Path, *, after: float, in_write: bool, not_beyond: int = 10**9
) -> Kill | None:
    """Start the run and kill it after some seconds, or at the first write after them; None if it ended before.

    A checkpoint numbered `not_beyond` also ends the wait, so that a fast machine leaves something for later kills.
    """
    since, began = time.time(), time.monotonic()
    process = start(argv, log)
    while process.is_alive():
        late = time.monotonic() - began >= after or newest(out) >= not_beyond
        writing = late and is_writing(out, since)
        if late and (writing or not in_write):
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
            return Kill(time.monotonic() - began, newest(out), writing)
        time.sleep(0.0005 if late else 0.01)
    process.join()
    return None


def finish(argv: Sequence[str], log: Path) -> float:
    """Run to the end; returns the seconds it took."""
    began = time.monotonic()
    process = start(argv, log)
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"The run ended with {process.exitcode}:\n{log.read_text()[-3000:]}")
    return time.monotonic() - began


def differences(one: Path, other: Path) -> list[str]:
    """What differs between two finished runs; empty when they are the same to the bit."""
    import torch
    from safetensors.torch import load_file

    def rows(out: Path) -> list[dict[str, float]]:
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in lines]

    found = [] if rows(one) == rows(other) else ["metrics.jsonl"]
    for part in ("final", f"checkpoints/{newest(one):06d}"):
        files = sorted(file.relative_to(one) for file in (one / part).rglob("*.safetensors"))
        if not files:
            found.append(f"{part} has no weights")
        for file in files:
            left, right = load_file(one / file), load_file(other / file)
            same = left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
            found += [] if same else [str(file)]
    return found


def arguments(model: str, prompts: Path, out: Path, iterations: int) -> list[str]:
    given = ["--model.path", model, "--data.prompts", str(prompts), "--data.eval_prompts", str(prompts)]
    small = ["--model.frames", "1", "--model.height", "16", "--model.width", "16", "--model.vae_slicing", "false"]
    return [
        "train", "--out", str(out), "--iterations", str(iterations), *given, *small,
        "--rewards", '[{"name": "video_stats", "weights": {"brightness": 1.0}}]',
        "--batch.prompts", "2", "--batch.group_size", "3", "--batch.micro_batch", "6", "--rollout.steps", "3",
        "--optimizer.lr", "1e-3", "--optimizer.ema", "0.9", "--optimizer.decay", "cosine", "--anchor.every", "3",
        "--kl.kind", "ppo", "--kl.warmup_updates", "4", "--evaluate.every", "5", "--evaluate.prompts", "2",
        "--evaluate.steps", "2", "--keep.checkpoint_every", "2", "--keep.videos_every", "0",
        "--log.tensorboard", "false", "--log.progress", "false",
    ]  # fmt: skip
