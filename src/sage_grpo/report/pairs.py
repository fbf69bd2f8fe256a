"""Videos with the base left and the tuned model right: same prompt, same noise."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import torch
from torch import Tensor

from sage_grpo.report.run_data import RunData
from sage_grpo.video import read_video, write_mp4

WRITTEN = "[0-9][0-9]-*.mp4"
GUTTER = 0.02
"""Width of the gap as a share of a clip's width."""


def write_pairs(run: RunData, folder: Path, *, most: int = 8) -> list[Path]:
    """Pair the clips of the last evaluation with those before training; returns the files, none where nothing pairs."""
    if len(run.clips) < 2 or 0 not in run.clips:
        return []  # and what an earlier end of the run has left stays
    files = []
    for place, (prompt, left, right) in enumerate(run.pairs(0, most)):
        (base, fps), (tuned, _) = read_video(left), read_video(right)
        files.append(write_mp4(folder / f"{place:02d}-{slug(prompt)}.mp4", side_by_side(base, tuned), fps))
    for old in folder.glob(WRITTEN):
        if old not in files:  # of an earlier end of this run
            old.unlink()
    return files


def side_by_side(left: Tensor, right: Tensor) -> Tensor:
    """Two clips of one size in one frame, with a white gap; the shorter one stands still at its end."""
    frames, height, width = max(len(left), len(right)), left.shape[1], left.shape[2]
    gap = max(2, round(GUTTER * width / 2) * 2)
    if (2 * width + gap) % 2:  # 4:2:0 needs an even width
        gap += 1
    held = [torch.cat([clip, clip[-1:].expand(frames - len(clip), -1, -1, -1)]) for clip in (left, right)]
    return torch.cat([held[0], torch.full((frames, height, gap, 3), 255, dtype=torch.uint8), held[1]], dim=2)


def slug(prompt: str, *, most: int = 48) -> str:
    """A prompt as part of a file name, in any script."""
    words = re.sub(r"[^\w]+", "-", unicodedata.normalize("NFKC", prompt)).strip("-_").lower()
    while len(words.encode()) > 2 * most:  # a file system counts bytes
        words = words[:-1]
    return words[:most].strip("-_") or "clip"
