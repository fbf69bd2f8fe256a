"""Videos that a run keeps: a few per iteration, within a disk budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from sage_grpo.video import write_mp4


class Samples:
    """Writes mp4 files under a folder and deletes the oldest ones when they outgrow the budget."""

    def __init__(self, folder: Path, *, megabytes: float) -> None:
        self.folder, self.budget = folder, megabytes * 1e6

    def save(self, name: str, clips: Tensor, captions: Sequence[str], fps: float) -> None:
        """Write clips as <name>-<index>.mp4 with their prompts in <name>.txt."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for index, clip in enumerate(clips):
            write_mp4(self.folder / f"{name}-{index:02d}.mp4", clip, fps)
        (self.folder / f"{name}.txt").write_text("".join(f"{caption}\n" for caption in captions))
        self.prune()

    def prune(self) -> None:
        """Delete the oldest files until the folder fits the budget."""
        files = sorted(self.folder.iterdir(), key=lambda file: (file.stat().st_mtime_ns, file.name))
        total = sum(file.stat().st_size for file in files)
        while files and total > self.budget:
            oldest = files.pop(0)
            total -= oldest.stat().st_size
            oldest.unlink()
