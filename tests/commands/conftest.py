"""What the tests of commands share."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from sage_grpo import video


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[Path, Tensor]:
    """Every clip as it was before it was encoded, by its file: a codec may make twenty grey levels of one."""
    clips: dict[Path, Tensor] = {}
    write = video.write_mp4

    def kept(path: str | Path, clip: Tensor, *rest: float, **options: int) -> Path:
        clips[Path(path)] = clip.clone()
        return write(path, clip, *rest, **options)

    monkeypatch.setattr(video, "write_mp4", kept)
    return clips
