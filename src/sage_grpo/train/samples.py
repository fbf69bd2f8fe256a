"""Videos that a run keeps: a few per iteration, within a disk budget."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from sage_grpo.video import write_mp4

WRITTEN = re.compile(r"(rollout|heldout)-\d{6,}(-\d{2,}\.mp4|\.txt)")
"""Names of the files that a run keeps here."""


class Samples:
    """Writes mp4 files under a folder and deletes the oldest ones when they outgrow the budget."""

    def __init__(self, folder: Path, *, megabytes: float) -> None:
        self.folder, self.budget = folder, megabytes * 1e6

    def save(self, name: str, clips: Tensor, captions: Sequence[str], fps: float) -> list[Path]:
        """Write clips as <name>-<index>.mp4 with their prompts in <name>.txt; returns the clips' files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        files = [self.folder / f"{name}-{index:02d}.mp4" for index in range(len(clips))]
        for file, clip in zip(files, clips):
            write_mp4(file, clip, fps)
        (self.folder / f"{name}.txt").write_text("".join(f"{caption}\n" for caption in captions))
        self.prune()
        return files

    def prune(self) -> None:
        """Delete the oldest files until they fit the budget; files of other people stay, and do not count."""
        own = [file for file in self.folder.iterdir() if WRITTEN.fullmatch(file.name) and file.is_file()]
        files = sorted(own, key=lambda file: (file.stat().st_mtime_ns, file.name))
        total = sum(file.stat().st_size for file in files)
        while files and total > self.budget:
            oldest = files.pop(0)
            total -= oldest.stat().st_size
            oldest.unlink()
