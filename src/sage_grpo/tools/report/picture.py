"""Videos of a run: clips before and after training beside one another."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_grpo.tools.report.run_data import RunData
from sage_grpo.utils.video import caption_font, read_video, write_mp4

WRITTEN = "[0-9][0-9]-*.mp4"
GUTTER = 0.02  # width of the gap as a share of a clip's width
SHORT = 512  # pixels of the shorter side of a clip in a video of two


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
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    face = ImageFont.truetype(caption_font(words), round(0.7 * height))
    band = Image.new("RGB", (width, height), "white")
    for word, middle in words.items():
        ImageDraw.Draw(band).text((middle, height / 2), word, fill="#1d1f23", font=face, anchor="mm")
    return torch.from_numpy(np.array(band))


def slug(prompt: str, *, most: int = 48) -> str:
    words = re.sub(r"[^\w]+", "-", unicodedata.normalize("NFKC", prompt)).strip("-_").lower()
    while len(words.encode()) > 2 * most:  # a file system counts bytes
        words = words[:-1]
    return words[:most].strip("-_") or "clip"
