"""README's gallery from the clips of examples/blind_look: prompts in columns; before training, tuned and with a fooled reward in rows.

python research/benchmarks/gallery.py
"""

from __future__ import annotations

from pathlib import Path

import av
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parents[2]
CLIPS = ROOT / "examples" / "blind_look"
OUT = ROOT / "docs" / "images" / "gallery.webp"
PROMPTS = (28, 3, 10, 29, 17)
"""Chosen from the 32 because the rows differ visibly; in the last one tuning itself loses the star's points."""
ROWS = {"base": "before\ntraining", "branch": "tuned", "hacked": "fooled\nreward"}
SIDE, GAP, LEFT, TOP, TEXT = 144, 6, 74, 84, 12


def main() -> None:
    """Draw every frame and write an animation that loops."""
    texts = (CLIPS / "prompts.txt").read_text(encoding="utf-8").splitlines()
    clips = {(row, prompt): frames(CLIPS / row / f"{prompt:04d}.mp4") for row in ROWS for prompt in PROMPTS}
    font = ImageFont.load_default(TEXT)
    size = (LEFT + len(PROMPTS) * (SIDE + GAP), TOP + len(ROWS) * (SIDE + GAP))
    ground = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(ground)
    for column, prompt in enumerate(PROMPTS):
        text = wrapped(texts[prompt], font)
        draw.multiline_text((LEFT + column * (SIDE + GAP), TOP - 3), text, "black", font, anchor="ld", spacing=2)
    for row, title in enumerate(ROWS.values()):
        place = (LEFT - 8, TOP + row * (SIDE + GAP) + SIDE // 2)
        draw.multiline_text(place, title, "black", font, anchor="rm", align="right", spacing=2)
    pictures = []
    for moment in range(min(map(len, clips.values()))):
        pictures.append(ground.copy())
        for row, name in enumerate(ROWS):
            for column, prompt in enumerate(PROMPTS):
                clip = clips[name, prompt][moment].resize((SIDE, SIDE), Image.Resampling.LANCZOS)
                pictures[-1].paste(clip, (LEFT + column * (SIDE + GAP), TOP + row * (SIDE + GAP)))
    pictures[0].save(OUT, save_all=True, append_images=pictures[1:], duration=125, loop=0, quality=72, method=6)


def frames(file: Path) -> list[Image.Image]:
    """All frames of a clip."""
    with av.open(str(file)) as container:
        return [frame.to_image() for frame in container.decode(video=0)]


def wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """`text` in lines that are no wider than a clip."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) > SIDE and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(lines)


if __name__ == "__main__":
    main()
