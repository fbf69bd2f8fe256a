"""Videos that a run keeps: a few per iteration, within a disk budget."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from sage_grpo.inside import replace_text
from sage_grpo.video import write_mp4

WRITTEN = re.compile(r"(rollout|heldout)-\d{6,}(-\d{2,}\.mp4|\.txt|\.json)")
"""Names of the files that a run keeps here."""


class Samples:
    """Writes mp4 files under a folder and deletes the oldest ones when they outgrow the budget."""

    def __init__(self, folder: Path, *, megabytes: float) -> None:
        self.folder, self.budget = folder, megabytes * 1e6

    def save(
        self, name: str, clips: Tensor, captions: Sequence[str], fps: float, rows: Sequence[Mapping[str, Any]] = ()
    ) -> list[Path]:
        """Write clips as <name>-<index>.mp4 with their prompts in <name>.txt; returns the clips' files.

        `rows` (see `Evaluation.rows`) go into <name>.json, from which a report pairs clips and scores of several evaluations.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        files = [self.folder / f"{name}-{index:02d}.mp4" for index in range(len(clips))]
        for file, clip in zip(files, clips):
            write_mp4(file, clip, fps)
        text = "".join(f"{' '.join(caption.split())}\n" for caption in captions)  # a line for each, whatever is in it
        replace_text(self.folder / f"{name}.txt", text)
        if rows:
            index = json.dumps(_index(files, clips, fps, rows), ensure_ascii=False)
            replace_text(self.folder / f"{name}.json", index)
        self.prune()
        return files

    def prune(self) -> None:
        """Delete files until the rest fits the budget; files of other people stay, and do not count.

        The oldest go first, rollouts before held-out clips; last the clips before training, with which all others are compared.
        """
        own = [file for file in self.folder.iterdir() if WRITTEN.fullmatch(file.name) and file.is_file()]
        files = sorted(own, key=lambda file: (_worth(file.name), file.stat().st_mtime_ns, file.name))
        total = sum(file.stat().st_size for file in files)
        while files and total > self.budget:
            oldest = files.pop(0)
            total -= oldest.stat().st_size
            oldest.unlink()


def _worth(name: str) -> int:
    return 2 if name.startswith("heldout-000000") else int(name.startswith("heldout"))


def _index(files: list[Path], clips: Tensor, fps: float, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    _, frames, height, width, _ = clips.shape
    named = [{**row, "clip": None if row["clip"] is None else files[row["clip"]].name} for row in rows]
    return {"fps": fps, "frames": frames, "height": height, "width": width, "rows": named}
