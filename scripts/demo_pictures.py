"""The pictures of the miniature in docs/images, from real runs: `python scripts/demo_pictures.py docs/images runs/branch runs/sage`.

Of the first run before_after.webp (moving pairs of held-out clips) and demo.png (what `sage-grpo demo` draws at its end); report-*.webp is the report
of all, in Chromium; shapes.png is the base model alone. The runs of the committed ones:

    sage-grpo train --recipe shapes/branch --iterations 45 --evaluate.every 45 --evaluate.prompts 128 --evaluate.show 16 --out runs/branch
    sage-grpo train --recipe shapes/sage --iterations 30 --evaluate.every 45 --evaluate.prompts 128 --evaluate.show 16 --out runs/sage
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from sage_grpo import generate
from sage_grpo.tools.report.page import write_report
from sage_grpo.tools.report.picture import draw_run, lettered, side_by_side
from sage_grpo.tools.report.run_data import RunData, read_run
from sage_grpo.utils.safe_io import replacing
from sage_grpo.utils.video import contact_sheet, read_video

PAIRS = (2, 4, 12, 15, 5, 7)
"""Held-out clips by their place: four that gained, one whose cross became rounder, and one that lost its cross."""
PROMPTS = (
    "a large red circle moves right quickly on a white background",
    "a small blue square moves up slowly on a sand background",
    "a large yellow triangle bounces quickly on a navy background",
    "a large green cross moves left quickly on a white background",
    "a large cyan ring loops around slowly on a grey background",
    "a small magenta circle bounces slowly on a sand background",
)


def main(out: Path, runs: list[Path]) -> None:
    """Write all of them."""
    print(animate(read_run(runs[0]), out / "before_after.webp", places=PAIRS, columns=3, short=128))
    print(draw_run(runs[0], out / "demo.png"))
    clips = generate(list(PROMPTS), steps=20, batch=6)
    print(contact_sheet(out / "shapes.png", list(clips.videos), PROMPTS, columns=9, cell=96))
    with tempfile.TemporaryDirectory() as place:
        page = write_report(runs, Path(place) / "report.html").as_uri()
        screens(page, out)


def animate(run: RunData, file: Path, *, places: Sequence[int], columns: int = 2, short: int = 128) -> Path:
    """Pairs of a run (by their place) as one animated WebP, each under its prompt: for a page that plays no videos."""
    line = max(14, short // 8)
    pairs = run.pairs(0, max(places) + 1)
    prompts = [textwrap.wrap(pairs[place][0], int(4.8 * short / line)) for place in places]
    tiles = []
    for place, lines in zip(places, prompts):
        (base, fps), (tuned, _) = (read_video(clip) for clip in pairs[place][1:])
        both = side_by_side(base, tuned, short)
        width = both.shape[2]
        blank = [""] * (max(map(len, prompts)) - len(lines))
        above = torch.cat([lettered(width, line, {text: width / 2}) for text in (*blank, *lines)])
        tiles.append(F.pad(torch.cat([above.expand(len(both), -1, -1, -1), both], 1), (0, 0, 8, 8, 6, 8), value=255))
    rows = [torch.cat(tiles[start : start + columns], dim=2) for start in range(0, len(tiles), columns)]
    return moving(torch.cat(rows, dim=1), file, fps)


def moving(clip: Tensor, file: Path, fps: float) -> Path:
    """A clip as an animated WebP."""
    frames = [Image.fromarray(frame.numpy()) for frame in clip]
    milliseconds = [round(1000 / fps)] * (len(frames) - 1) + [700]  # it stands still before it starts again
    with replacing(file) as fresh:
        frames[0].save(
            fresh, "WEBP", save_all=True, append_images=frames[1:], duration=milliseconds, loop=0, quality=85, method=6
        )
    return file


def screens(page: str, out: Path) -> None:
    """The report on a desk, in the dark and on a phone."""
    from playwright.sync_api import sync_playwright

    views = {
        "report-gallery": ("#/gallery", "light", 1280, 900),
        "report-dark": ("#/overview", "dark", 1280, 1200),
        "report-phone": ("#/overview", "light", 390, 844),
    }
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (tab, scheme, width, height) in views.items():
            opened = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            opened.goto(page + tab)
            opened.wait_for_timeout(3000)
            picture = opened.screenshot()
            Image.open(io.BytesIO(picture)).convert("RGB").save(out / f"{name}.webp", quality=85, method=6)
            print(out / f"{name}.webp")
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), [Path(run) for run in sys.argv[2:]])
