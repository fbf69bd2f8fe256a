"""Contact sheets: one clip a row, its frames side by side, as a PNG."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor


def contact_sheet(clips: Tensor, path: Path, enlarge: int = 3, columns: int = 1) -> None:
    """Write uint8 clips B x F x H x W x 3 as rows of frames; `columns` clips share a row."""
    from PIL import Image

    clips = clips[: len(clips) // columns * columns].cpu()
    rows = clips.permute(0, 2, 1, 3, 4).flatten(2, 3)  # B x H x (F W) x 3
    sheet = rows.unflatten(0, (-1, columns)).permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)
    image = Image.fromarray(sheet.contiguous().numpy())
    image = image.resize((image.width * enlarge, image.height * enlarge), Image.Resampling.NEAREST)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp.png")
    image.save(temporary)
    os.replace(temporary, path)
