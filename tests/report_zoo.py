"""Folders of runs as training leaves them, written in milliseconds: real small videos, invented numbers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import yaml

from sage_grpo.callbacks import journal
from sage_grpo.callbacks.observers import VideoFolder
from sage_grpo.recipes import recipe
from sage_grpo.run import identity
from sage_grpo.types import Sound

PROMPTS = (
    "a red circle moves left",
    "a blue ring on a navy wall",
    "a green cross loops around",
    "<img src=x onerror=\"window.hacked=1\"> </script><script>window.hacked=2</script> & 'quotes'",
    "مثلث أحمر يتحرك 红色的圆 🎈",
    "a yellow circle on sand",
)
GAINS = (0.1, -0.4, 0.3, 0.0, -0.1, 0.5)
"""Of the last evaluation over base, prompt by prompt."""
FRAMES, FPS = 8, 8.0


def clip(shade: int, frames: int = FRAMES) -> torch.Tensor:
    video = torch.full((frames, 32, 32, 3), shade, dtype=torch.uint8)
    for number in range(frames):
        video[number, 12:20, 3 * number : 3 * number + 8] = torch.tensor([230, 60, 40], dtype=torch.uint8)
    return video


def rows(iteration: int, last: int, prompts: Sequence[str] = PROMPTS, gains: Sequence[float] = GAINS) -> list[dict]:
    """What an evaluation knows of its clips: gains grow in proportion to the iteration."""
    found = []
    for place, prompt in enumerate(prompts):
        total = 1.0 + 0.01 * place + gains[place] * iteration / last
        scores = {"total": total, "TA": total / 2, "drift": 0.1}
        found.append({"prompt": prompt, "noise": f"1234/{place}/0", "scores": scores, "clip": place})
    return found


CREW = {"workers": 3.0, "staleness": 1.0, "waited_s": 0.5, "busy_s": 3.0}
"""Metrics of workers."""


def write_metrics(
    folder: Path, iterations: int, every: int, *, failed: int = 0, workers: bool = False, kl: float = 1e-4
) -> None:
    with (folder / "metrics.jsonl").open("w") as stream:
        for number in range(iterations + 1):
            if number:
                row = {"iteration": number, "reward/total": 1 + 0.01 * number, "reward/failed": failed * (number == 2)}
                row |= {"kl/total": kl * number, "kl/lambda": 1e-7, "gradient/norm": 2.0 / number, "time/total": 1.5}
                row |= {f"crew/{name}": value for name, value in CREW.items()} if workers else {}
                row |= {
                    f"gradient/{kind}/{step:03d}": 0.1 * (step + 1) for kind in ("raw", "sent") for step in range(3)
                }
                stream.write(json.dumps(row) + "\n")
            if number % every == 0 or number == iterations:
                mean = 1.025 + number / iterations * sum(GAINS) / len(GAINS)
                row = {"iteration": number, "eval/total": mean, "eval/total_stderr": 0.01}
                row |= {"eval/TA": mean / 2, "eval/drift": 0.1, "eval/failed": 0.0}
                stream.write(json.dumps(row) + "\n")


def hum(count: int) -> Sound:
    waves = 0.3 * torch.sin(2 * torch.pi * 440 * torch.arange(16_000 * FRAMES // int(FPS)) / 16_000)
    return Sound(waves.expand(count, 1, -1), 16_000)


def fake_run(
    folder: Path,
    *,
    seed: int = 0,
    iterations: int = 4,
    every: int = 2,
    lr: float = 5e-5,
    sound: bool = False,
    workers: bool = False,
    kl: float = 1e-4,
) -> Path:
    """A finished run with evaluations at 0, every, ..., iterations."""
    folder.mkdir(parents=True)
    start = recipe("shapes/sage")
    config = replace(
        start, out=str(folder), seed=seed, iterations=iterations, optimizer=replace(start.optimizer, lr=lr)
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(identity.plain(dataclasses.asdict(config)), sort_keys=False))
    write_metrics(folder, iterations, every, failed=3, workers=workers, kl=kl)
    samples = VideoFolder(folder / "videos", megabytes=100)
    for number in range(0, iterations + 1, every):
        shades = [40 + 20 * seed + 30 * number + place for place in range(len(PROMPTS))]
        clips = torch.stack([clip(min(255, shade) if number else 30 + place) for place, shade in enumerate(shades)])
        heard = hum(len(clips)) if sound else None
        samples.save(f"heldout-{number:06d}", clips, PROMPTS, FPS, rows(number, iterations), heard)
    sigmas = [1.0, 0.9, 0.75, 0.5, 0.0]
    (folder / "schedule.json").write_text(
        json.dumps({"sigmas": sigmas, "stochastic": [True, True, True, False], "offset": 0})
    )
    journal.note(folder, "start", 0, "")
    journal.note(folder, "resume", 2, "changed: <b>keep</b>")
    journal.note(folder, "sentinel", 3, "lr halved")
    (folder / ".finished").write_text(f"{iterations}\n")
    return folder
