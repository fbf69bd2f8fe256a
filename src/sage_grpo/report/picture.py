"""One picture of a run: how the scores moved, and what the model makes now compared with before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from sage_grpo.train.folder.journal import read_rows
from sage_grpo.video import read_video

COLOURS = {"total": "#222222", "TA": "#1f77b4", "MQ": "#2ca02c", "VQ": "#ff7f0e", "drift": "#d62728"}
SPARE = ("#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22")


def draw_run(out: Path, file: Path, *, clips: int = 6, frames: int = 5) -> Path:
    """Write a PNG with the curves of metrics.jsonl and, where videos were kept, held-out clips before and after."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = read_rows(out / "metrics.jsonl")
    steps = [row for row in rows if "reward/total" in row]
    evals = [row for row in rows if "eval/total" in row]
    if not rows:
        raise FileNotFoundError(f"{out} has no metrics.jsonl with rows: is it the folder of a run?")
    pairs = _pairs(out / "videos", clips)
    figure = plt.figure(figsize=(15, 8 if pairs else 4.5), dpi=110, layout="constrained")
    figure.suptitle(f"{out.name}: {len(steps)} iterations", fontsize=14)
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1.15)) if pairs else (figure, None)
    left, middle, right = top.subplots(1, 3)
    _curve(left, steps, ["reward/total"], "rollout reward (noisy policy)")
    _curve(middle, evals, _parts(evals), "held-out prompts, ODE")
    _curve(right, steps, ["kl/position", "kl/velocity", "gradient/kl_share"], "trust region", log=True)
    if bottom is not None:
        _before_after(bottom, pairs, frames)
    partial = file.with_name(f".{file.name}.partial.png")
    figure.savefig(partial)
    plt.close(figure)
    os.replace(partial, file)
    return file


def _curve(axis: Any, rows: list[dict[str, Any]], names: list[str], title: str, *, log: bool = False) -> None:
    spare = iter(SPARE * 4)
    for name in names:
        points = [(row["iteration"], row[name]) for row in rows if row.get(name) is not None]
        points = [(x, y) for x, y in points if y > 0] if log else points
        if not points:
            continue
        short = name.split("/", 1)[1]
        colour = COLOURS.get(short) or next(spare)
        axis.plot(*zip(*points), label=name.removeprefix("eval/"), color=colour, marker="o" if len(points) < 12 else "")
    if log:
        axis.set_yscale("log")
    axis.set_title(title, fontsize=11)
    axis.set_xlabel("iteration")
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(fontsize=8, loc="best", framealpha=0.6)


def _parts(evals: list[dict[str, Any]]) -> list[str]:
    """The total and the main parts: sub-parts such as TA/colour would crowd the picture."""
    names = {name for row in evals for name in row if name.startswith("eval/") and name.count("/") == 1}
    return ["eval/total", *sorted(names - {"eval/total", "eval/failed", "eval/total_stderr", "eval/Overall"})]


def _pairs(folder: Path, count: int) -> list[tuple[str, Path, Path]]:
    """(prompt, before, after) of held-out clips that were kept at the first and at the last evaluation."""
    sheets = sorted(folder.glob("heldout-*.txt"))
    if len(sheets) < 2:
        return []
    first, last = sheets[0].stem, sheets[-1].stem
    pairs = []
    for index, prompt in enumerate(sheets[0].read_text().splitlines()[:count]):
        before, after = (folder / f"{stem}-{index:02d}.mp4" for stem in (first, last))
        if before.is_file() and after.is_file():
            pairs.append((prompt, before, after))
    return pairs


def _before_after(figure: Any, pairs: list[tuple[str, Path, Path]], frames: int) -> None:
    """A grid of clips: the frames before training over those after it."""
    columns = 2
    axes = figure.subplots((len(pairs) + columns - 1) // columns, columns, squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, (prompt, before, after) in zip(axes.flat, pairs):
        strips = []
        for file in (before, after):
            clip, _ = read_video(file)
            chosen = torch.linspace(0, len(clip) - 1, frames).round().long()
            strips.append(torch.cat(list(clip[chosen]), dim=1))
        axis.imshow(torch.cat(strips, dim=1).numpy(), interpolation="nearest")
        axis.axvline(strips[0].shape[1] - 0.5, color="white", linewidth=3)
        axis.set_title(f"{prompt}\nbefore | after", fontsize=8)
