"""Clips as files: mp4 through PyAV, contact sheets as PNG. Clips are uint8 tensors F x H x W x 3."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor


def write_mp4(path: str | Path, clip: Tensor, fps: float, *, quality: int = 18) -> Path:
    """Write a clip as H.264 (or MPEG-4 where the FFmpeg build lacks x264); `quality` is x264's CRF, lower is better."""
    import av

    path = Path(path)
    _check(clip)
    path.parent.mkdir(parents=True, exist_ok=True)
    frames, height, width, _ = clip.shape
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    # 4:2:0 halves the colour planes, so it needs even sizes; browsers play nothing else.
    even = height % 2 == 0 and width % 2 == 0
    temporary = path.with_name(f".{path.name}.tmp")
    with av.open(str(temporary), "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuv420p" if even or codec == "mpeg4" else "yuv444p"
        if codec == "libx264":
            stream.options = {"crf": str(quality), "preset": "veryfast"}
        for index in range(frames):
            frame = av.VideoFrame.from_ndarray(clip[index].cpu().contiguous().numpy(), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    os.replace(temporary, path)
    return path


def read_video(path: str | Path) -> tuple[Tensor, float]:
    """All frames of a video file as one clip, and its frame rate."""
    import av

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no video {path}.")
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ValueError(f"{path} holds no video stream.")
            stream = container.streams.video[0]
            fps = float(stream.average_rate or stream.guessed_rate or 24)
            frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(stream)]
    except av.error.FFmpegError as error:
        raise ValueError(f"{path} cannot be read as a video: {error}.") from error
    if not frames:
        raise ValueError(f"{path} holds no frame.")
    return torch.stack(frames), fps


def read_image(path: str | Path) -> Tensor:
    """A picture as uint8 H x W x 3."""
    import numpy as np
    from PIL import Image, UnidentifiedImageError

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no image {path}.")
    try:
        with Image.open(path) as picture:
            return torch.from_numpy(np.array(picture.convert("RGB")))
    except UnidentifiedImageError as error:
        raise ValueError(f"{path} is not an image that Pillow can read.") from error


def contact_sheet(
    path: str | Path,
    clips: Sequence[Tensor],
    captions: Sequence[str] = (),
    *,
    columns: int = 6,
    cell: int = 160,
) -> Path:
    """Write a PNG with one clip a row: `columns` evenly spaced frames, at least `cell` pixels high, under a caption."""
    from PIL import Image, ImageDraw

    if not clips:
        raise ValueError("A contact sheet needs at least one clip.")
    rows = []
    for clip in clips:
        _check(clip)
        picks = torch.linspace(0, len(clip) - 1, min(columns, len(clip))).round().long()
        frames = clip[picks].cpu()
        zoom = max(1, round(cell / frames.shape[1]))
        strip = frames.permute(1, 0, 2, 3).flatten(1, 2)
        strip = strip.repeat_interleave(zoom, 0).repeat_interleave(zoom, 1)
        rows.append(Image.fromarray(strip.contiguous().numpy()))
    text = 16 if captions else 0
    sheet = Image.new("RGB", (max(row.width for row in rows), sum(row.height + text for row in rows)), "white")
    draw, top = ImageDraw.Draw(sheet), 0
    for index, row in enumerate(rows):
        if index < len(captions):
            # Pillow's built-in face knows Latin-1 only; a caption must never stop a run.
            draw.text((3, top + 2), captions[index].encode("latin-1", "replace").decode("latin-1"), fill="black")
        sheet.paste(row, (0, top + text))
        top += row.height + text
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    sheet.save(temporary, format="PNG")
    os.replace(temporary, path)
    return path


def _check(clip: Tensor) -> None:
    if clip.dtype != torch.uint8 or clip.ndim != 4 or clip.shape[-1] != 3:
        raise ValueError(f"A clip is uint8 F x H x W x 3, got {clip.dtype} of shape {tuple(clip.shape)}.")
