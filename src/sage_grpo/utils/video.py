"""Clips as files: mp4 through PyAV, contact sheets as PNG with captions. Clips are uint8 tensors F x H x W x 3."""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_grpo.types import Sound, VideoSpec
from sage_grpo.utils.safe_io import replacing

OPTIONS = {"preset": "veryfast", "bf": "0", "weightp": "0", "sc_threshold": "0"}
"""Options of x264 that make the bytes depend on the clip alone. Its lookahead reads uninitialized memory, so every user of it is off: CRF with its
macroblock tree, B-frames, weights and scene cuts."""
LARGEST = 4 << 30
"""Bytes that the frames, or the sound, of one file may take: a few kilobytes can decode to more than there is memory."""
GUTTER, CAPTION = 3, 24
"""Pixels between frames of a contact sheet, and for a line above them."""
LAYOUTS = {1: "mono", 2: "stereo"}
"""By the number of channels."""


def write_mp4(path: str | Path, clip: Tensor, fps: float, *, quality: int = 18, sound: Sound | None = None) -> Path:
    """Write a clip as H.264; the same clip gives the same bytes. `quality` is x264's quantizer: lower is better, 0 is lossless. The sound becomes AAC."""
    import av

    path = Path(path)
    check_clip(clip)
    _, height, width, _ = clip.shape
    # 4:2:0 halves the color planes, so it needs even sizes; browsers play nothing else.
    even = height % 2 == 0 and width % 2 == 0
    with replacing(path) as fresh, av.open(str(fresh), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuv420p" if even else "yuv444p"
        stream.options = {"qp": str(quality), **OPTIONS}
        # The number of threads depends on the machine, and x264's bytes on their number.
        stream.codec_context.thread_count = 1
        if sound is not None:  # before the first frame is written
            audio = container.add_stream("aac", rate=sound.rate, layout=LAYOUTS[len(sound.waves)])
        for pixels in clip.cpu().contiguous().numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
        if sound is not None:
            container.mux(audio.encode(_frame_of(replace(sound, waves=sound.waves.clamp(-1, 1)))))
            container.mux(audio.encode())
    return path


def _frame_of(sound: Sound) -> Any:
    import av

    samples = sound.waves.to(torch.float32).contiguous().numpy()
    frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=LAYOUTS[len(samples)])
    frame.sample_rate, frame.pts, frame.time_base = sound.rate, 0, Fraction(1, sound.rate)
    return frame


@cache
def has_sound(path: Path) -> bool:
    import av

    with suppress(av.error.FFmpegError), av.open(str(path)) as container:
        return bool(container.streams.audio)
    return False


def resampled(sound: Sound, rate: int) -> Sound:
    import av

    if sound.rate == rate:
        return sound
    resampler = av.AudioResampler(format="fltp", layout=LAYOUTS[len(sound.waves)], rate=rate)
    pieces = [*resampler.resample(_frame_of(sound)), *resampler.resample(None)]
    return Sound(torch.cat([torch.from_numpy(piece.to_ndarray()) for piece in pieces], dim=1), rate)


def read_sound(path: str | Path) -> Sound | None:
    """The sound of a video file, of one clip; None where it has none."""
    import av

    with av.open(str(path)) as container:
        if not container.streams.audio:
            return None
        stream = container.streams.audio[0]
        channels = 2 if stream.channels > 1 else 1
        resampler = av.AudioResampler(format="fltp", layout=LAYOUTS[channels], rate=stream.rate)
        frames, size = [], 0
        for frame in chain(container.decode(stream), [None]):
            for piece in resampler.resample(frame):
                size += 4 * channels * piece.samples
                _refuse_large(path, size)
                frames.append(piece)
    waves = torch.cat([torch.from_numpy(frame.to_ndarray()) for frame in frames], dim=1)
    return Sound(waves.clamp(-1, 1), int(stream.rate))


def _refuse_large(path: str | Path, size: int) -> None:
    if size > LARGEST:
        raise ValueError(
            f"{path} takes more than {LARGEST / 2**30:g} GB of memory when it is decoded: cut it or scale it down "
            "(ffmpeg -i LARGE -t SECONDS -vf scale=WIDTH:-2 SMALL)."
        )


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
            # First by the header, before anything is decoded; then by the frames, for a header may be wrong.
            _refuse_large(path, 3 * stream.frames * stream.height * stream.width)
            frames, size = [], 0
            for frame in container.decode(stream):
                size += 3 * frame.height * frame.width
                _refuse_large(path, size)
                frames.append(torch.from_numpy(frame.to_ndarray(format="rgb24")))
    except av.error.FFmpegError as error:
        raise ValueError(f"{path} cannot be read as a video: {error}.") from error
    if not frames:
        raise ValueError(f"{path} holds no frame.")
    return torch.stack(frames), fps


def video_format(path: str | Path) -> VideoSpec:
    """The format of a file, by its header where that has the number of frames; ValueError where it cannot be read."""
    import av

    with suppress(av.error.FFmpegError), av.open(str(path)) as container:  # else `read_video` names the fault
        stream = next(iter(container.streams.video), None)
        if stream is not None and stream.frames and stream.average_rate:
            fps = float(stream.average_rate)
            return VideoSpec(frames=stream.frames, height=stream.height, width=stream.width, fps=fps)
    clip, fps = read_video(path)
    return VideoSpec(frames=len(clip), height=clip.shape[1], width=clip.shape[2], fps=fps)


def read_image(path: str | Path) -> Tensor:
    import numpy as np
    from PIL import Image, UnidentifiedImageError

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no image {path}.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = Image.open(path)  # reads the header alone
        with picture:
            return torch.from_numpy(np.array(picture.convert("RGB")))
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} is too large a picture: {error} Scale it down.") from error
    except UnidentifiedImageError as error:
        raise ValueError(f"{path} is not an image that Pillow can read.") from error


def read_pictures(first: Path | None, last: Path | None = None) -> Tensor | None:
    """A first frame, uint8 H x W x 3; with a last one both, 2 x H x W x 3, which are then of one size."""
    if first is None or last is None:
        return None if first is None else read_image(first)
    pair = read_image(first), read_image(last)
    if pair[0].shape != pair[1].shape:
        sizes = " and ".join(f"{one.shape[1]} x {one.shape[0]}" for one in pair)
        raise ValueError(
            f"{first} and {last} are the first and the last frame of one clip, but their sizes are {sizes}: make them equal."
        )
    return torch.stack(pair)


def contact_sheet(
    path: str | Path, clips: Sequence[Tensor], captions: Sequence[str] = (), *, columns: int = 6, cell: int = 160
) -> Path:
    """Write a PNG with one clip a row: `columns` evenly spaced frames, at least `cell` pixels high, under a caption.

    White gutters keep frames apart: without them motion looks like a wide picture.
    """
    from PIL import Image, ImageDraw, ImageFont

    if not clips:
        raise ValueError("A contact sheet needs at least one clip.")
    rows = []
    for clip in clips:
        check_clip(clip)
        picks = torch.linspace(0, len(clip) - 1, min(columns, len(clip))).round().long()
        frames = clip[picks].cpu()
        zoom = max(1, round(cell / frames.shape[1]))
        frames = frames.repeat_interleave(zoom, 1).repeat_interleave(zoom, 2)
        gap = torch.full((frames.shape[1], GUTTER, 3), 255, dtype=torch.uint8)
        strip = torch.cat([piece for frame in frames for piece in (frame, gap)][:-1], dim=1)
        rows.append(Image.fromarray(strip.contiguous().numpy()))
    text = CAPTION if captions else 0
    size = max(row.width for row in rows), sum(row.height + text for row in rows) + GUTTER * (len(rows) - 1)
    sheet = Image.new("RGB", size, "white")
    draw, top = ImageDraw.Draw(sheet), 0
    texts = [_line(text) for text in captions]
    face = ImageFont.truetype(caption_font(texts), CAPTION - 8)
    for index, row in enumerate(rows):
        if index < len(texts):
            whole = caption = texts[index]
            while whole and face.getlength(caption) > size[0] - 8:
                whole = whole[:-1].rstrip()
                caption = whole + "…"
            draw.text((4, top + 3), caption, fill="black", font=face)
        sheet.paste(row, (0, top + text))
        top += row.height + text + GUTTER
    path = Path(path)
    with replacing(path) as fresh:
        sheet.save(fresh, format="PNG")
    return path


def check_clip(clip: Tensor) -> None:
    if clip.dtype != torch.uint8 or clip.ndim != 4 or clip.shape[-1] != 3:
        raise ValueError(f"A clip is uint8 F x H x W x 3, got {clip.dtype} of shape {tuple(clip.shape)}.")


def caption_font(texts: Iterable[str]) -> str:
    """The file of matplotlib's font; for letters that it lacks from Chinese on, of a font of this machine that is named after them."""
    from matplotlib import font_manager

    named = sorted(entry.fname for entry in font_manager.fontManager.ttflist if "CJK" in entry.name)
    wide = any(letter >= "\u2e80" for text in texts for letter in text)
    return named[0] if wide and named else str(font_manager.findfont("DejaVu Sans"))


def _line(text: str) -> str:
    """One line without controls, and without marks that only select an emoji's style."""
    letters = [one for one in " ".join(text.split()) if unicodedata.category(one) not in ("Cc", "Cf", "Cs")]
    return "".join(one for one in letters if not "\ufe00" <= one <= "\ufe0f")
