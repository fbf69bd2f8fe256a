"""Pictures of a run: its scores over time, and clips before and after training, as a picture and as videos."""

from __future__ import annotations

import re
import textwrap
import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_grpo.tools.report.run_data import RunData, read_run
from sage_grpo.utils.safe_io import replacing
from sage_grpo.utils.statistics import Z95
from sage_grpo.utils.video import Lettering, lettering, read_video, write_mp4

COLOURS = {"total": "#1d1f23", "TA": "#1368aa", "MQ": "#00805a", "VQ": "#c4511d", "drift": "#8540ad"}
SPARE = ("#96700a", "#c22f70", "#4b6478", "#12807f", "#6b7280")
SHAPES = "osD^vPX*"
STYLE = {
    "font.size": 13,
    "axes.titlesize": 15,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#777777",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e2",
    "legend.frameon": False,
    "legend.fontsize": 12.5,
    "lines.linewidth": 2.2,
    "figure.facecolor": "white",
}
"""Large enough to be read when the picture is shown 480 lines high."""
WRITTEN = "[0-9][0-9]-*.mp4"
GUTTER = 0.02
"""Width of the gap as a share of a clip's width."""
SHORT = 512
"""Pixels of the shorter side of a clip in a video of two."""


def draw_run(out: Path, file: Path, *, clips: int = 4, frames: int = 5) -> Path:
    """Write a PNG with the curves of metrics.jsonl and, if videos were kept, held-out clips before and after."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    run = read_run(out)
    if not run.rows and not run.evaluations:
        raise FileNotFoundError(f"{out} has no metrics.jsonl with rows: is it the folder of a run?")
    pairs = run.pairs(min(run.clips, default=0), clips)
    letters = lettering([run.name, *(prompt for prompt, _, _ in pairs)])
    if letters.remark:
        warnings.warn(f"{file}: {letters.remark}", stacklevel=2)
    with plt.rc_context({**STYLE, "font.family": letters.family}):
        lines = (len(pairs) + 1) // 2
        figure = plt.figure(figsize=(14, 4.7 + 3.1 * lines), dpi=100, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.03)
        last = run.evaluations[-1]["iteration"] if run.evaluations else run.rows[-1]["iteration"]
        title = f"{letters.show(run.name)}: {last} iterations"
        figure.suptitle(title, fontsize=18, weight="bold", x=0.01, ha="left", parse_math=False)
        top, bottom = figure.subfigures(2, 1, height_ratios=(4.4, 3.1 * lines)) if pairs else (figure, None)
        _curves(top.subplots(1, 3), run)
        if bottom is not None:
            _before_after(bottom, pairs, frames, letters)
        with replacing(file) as fresh:
            figure.savefig(fresh, format="png")
        plt.close(figure)
    return file


def _curves(axes: Sequence[Any], run: RunData) -> None:
    left, middle, right = axes
    _curve(left, run.evaluations, _parts(run.evaluations), "Held-out prompts", "score")
    _curve(middle, run.rows, ["reward/total"], "Rollouts (exploring)", "reward")
    kl = [name for name in ("kl/position", "kl/velocity", "kl/total") if any(row.get(name) for row in run.rows)]
    if kl:
        _curve(right, run.rows, kl[:2], "Trust region", "KL (nats per dimension)", log=True)
    else:
        _curve(right, run.rows, ["gradient/norm"], "Gradient", "norm before clipping")


def _curve(axis: Any, rows: Sequence[Any], names: Sequence[str], title: str, unit: str, *, log: bool = False) -> None:
    spare = iter(SPARE * 4)
    for place, name in enumerate(names):
        points = [(row["iteration"], row[name]) for row in rows if row.get(name) is not None]
        points = [(x, y) for x, y in points if y > 0] if log else points
        if not points:
            continue
        short = name.split("/", 1)[1]
        colour = COLOURS.get(short) or next(spare)
        marker = SHAPES[place % len(SHAPES)] if len(points) < 25 else ""
        axis.plot(*zip(*points), label=short, color=colour, marker=marker, markersize=5)
    known = [row for row in rows if row.get("eval/total_stderr")]
    if known and "eval/total" in names:
        x, y, errors = zip(*((row["iteration"], row["eval/total"], row["eval/total_stderr"]) for row in known))
        low, high = ([v + sign * Z95 * error for v, error in zip(y, errors)] for sign in (-1, 1))
        axis.fill_between(x, low, high, color=COLOURS["total"], alpha=0.1, lw=0, label="total, 95% interval")
    if log:
        axis.set_yscale("log")
    axis.set_title(title)
    axis.set_xlabel("iteration")
    axis.set_ylabel(unit)
    if len(axis.lines) > 1:  # under the axes, where it hides no line
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, columnspacing=1.2, handlelength=1.6)


def _parts(evals: Sequence[Any]) -> list[str]:
    """The total and the main parts: sub-parts such as TA/colour would crowd the picture."""
    names = {name for row in evals for name in row if name.startswith("eval/") and name.count("/") == 1}
    return ["eval/total", *sorted(names - {"eval/total", "eval/failed", "eval/total_stderr", "eval/Overall"})]


def _before_after(figure: Any, pairs: list[tuple[str, Path, Path]], frames: int, letters: Lettering) -> None:
    """A grid of clips, in each the frames before training above those after it, apart so that motion is visible."""
    axes = figure.subplots((len(pairs) + 1) // 2, 2, squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, (prompt, before, after) in zip(axes.flat, pairs):
        (old, fps), (new, _) = read_video(before), read_video(after)
        chosen = torch.linspace(0, len(old) - 1, min(frames, len(old))).round().long()
        rows = [strip(clip[chosen.clamp(max=len(clip) - 1)]) for clip in (old, new)]
        height, width = rows[0].shape[:2]
        gap = torch.full((max(2, height // 12), width, 3), 255, dtype=torch.uint8)
        axis.imshow(
            torch.cat([rows[0], gap, rows[1]]).numpy(), interpolation="nearest" if height < 100 else "antialiased"
        )
        caption = textwrap.shorten(letters.show(prompt), 110, placeholder=" …")
        axis.set_title(textwrap.fill(caption, 58), fontsize=13, fontweight="normal", parse_math=False)
        side = {"ha": "right", "va": "center", "rotation": 90}
        axis.text(-0.01 * width, height / 2, "base", color="#6b7280", **side)
        axis.text(-0.01 * width, height * 1.5 + len(gap), "tuned", color="#1368aa", **side)
        below, small = 2.06 * height + len(gap), {"ha": "center", "va": "top", "fontsize": 11, "color": "#6b7280"}
        for place, frame in enumerate(chosen.tolist()):
            axis.text((place + 0.5) * (width / len(chosen)), below, f"{frame / fps:.2f} s", **small)
    if letters.remark:
        figure.supxlabel(letters.remark, fontsize=11, color="#6b7280")


def strip(frames: Tensor) -> Tensor:
    """Frames in a row with white gutters between them, H x W x 3."""
    gap = torch.full((frames.shape[1], max(2, frames.shape[2] // 16), 3), 255, dtype=torch.uint8)
    pieces = [piece for frame in frames for piece in (frame, gap)]
    return torch.cat(pieces[:-1], dim=1)


def write_pairs(run: RunData, folder: Path, *, most: int = 8) -> list[Path]:
    """Pair the clips of the last evaluation with those before training; returns the files, none without pairs."""
    if len(run.clips) < 2 or 0 not in run.clips:
        return []  # and videos of an earlier end of the run stay
    files = []
    for place, (prompt, left, right) in enumerate(run.pairs(0, most)):
        (base, fps), (tuned, _) = read_video(left), read_video(right)
        files.append(write_mp4(folder / f"{place:02d}-{slug(prompt)}.mp4", side_by_side(base, tuned), fps))
    for old in folder.glob(WRITTEN):
        if old not in files:  # of an earlier end of this run
            old.unlink()
    return files


def side_by_side(left: Tensor, right: Tensor, short: int = SHORT) -> Tensor:
    """Two clips of one size in one frame, "base" written over the left and "tuned" over the right; the shorter one ends in a still.

    Pixels of small clips are repeated until the shorter side is about `short` long.
    """
    zoom = max(1, round(short / min(left.shape[1:3])))
    frames = max(len(left), len(right))
    held = [
        torch.cat([clip, clip[-1:].expand(frames - len(clip), -1, -1, -1)])
        .repeat_interleave(zoom, 1)
        .repeat_interleave(zoom, 2)
        for clip in (left, right)
    ]
    height, width = held[0].shape[1:3]
    gap = torch.full((frames, height, max(2, round(GUTTER * width)), 3), 255, dtype=torch.uint8)
    both = torch.cat([held[0], gap, held[1]], dim=2)
    head = lettered(both.shape[2], max(14, height // 12), {"base": width / 2, "tuned": both.shape[2] - width / 2})
    whole = torch.cat([head.expand(frames, -1, -1, -1), both], dim=1)
    return F.pad(whole, (0, 0, 0, whole.shape[2] % 2, 0, whole.shape[1] % 2), value=255)  # 4:2:0 needs even sizes


def lettered(width: int, height: int, words: Mapping[str, float]) -> Tensor:
    """A white band with words, each around its place from the left."""
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    face = ImageFont.truetype(lettering(words).file, round(0.7 * height))
    band = Image.new("RGB", (width, height), "white")
    for word, middle in words.items():
        ImageDraw.Draw(band).text((middle, height / 2), word, fill="#1d1f23", font=face, anchor="mm")
    return torch.from_numpy(np.array(band))


def slug(prompt: str, *, most: int = 48) -> str:
    """A prompt as part of a file name, in any script."""
    words = re.sub(r"[^\w]+", "-", unicodedata.normalize("NFKC", prompt)).strip("-_").lower()
    while len(words.encode()) > 2 * most:  # a file system counts bytes
        words = words[:-1]
    return words[:most].strip("-_") or "clip"
