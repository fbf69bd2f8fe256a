"""Draw the pictures of docs/study.md: a study of the shapes world with simulated raters, photographed in Chromium.

python scripts/study_pictures.py docs/images
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import tempfile
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]

from PIL import Image  # noqa: E402
from playwright.sync_api import sync_playwright  # noqa: E402

from browser.conftest import FLAGS, find_chromium  # noqa: E402
from sage_grpo.data.prompts import Prompt  # noqa: E402
from sage_grpo.tools.study.making import StudyPlan, invite, make, open_study  # noqa: E402
from sage_grpo.utils.video import write_mp4  # noqa: E402
from sage_grpo.worlds.shapes.render import render, to_uint8  # noqa: E402
from sage_grpo.worlds.shapes.scene import random_scenes  # noqa: E402
from studies import serving  # noqa: E402

STRENGTH = {"SAGE-GRPO": 1.3, "FlowGRPO": 0.55, "base": 0.0}
FRAMES, HEIGHT, WIDTH = 25, 320, 512
SIZES = {
    "desktop": {"viewport": {"width": 1280, "height": 860}},
    "dark": {"viewport": {"width": 1280, "height": 860}, "color_scheme": "dark"},
    "phone": {
        "viewport": {"width": 390, "height": 844},
        "is_mobile": True,
        "has_touch": True,
        "device_scale_factor": 2,
    },
}


def clips(root: Path) -> tuple[dict[str, Path], list[Prompt]]:
    """Perfect renders, and two methods that blur and flicker."""
    scenes = random_scenes(8, torch.Generator().manual_seed(4), split="all")
    clean = render(scenes, FRAMES, HEIGHT, WIDTH)
    generator = torch.Generator().manual_seed(0)
    for name, noise in (("SAGE-GRPO", 0.0), ("FlowGRPO", 0.03), ("base", 0.07)):
        for place, clip in enumerate(clean):
            coarse = torch.randn(FRAMES, 3, HEIGHT // 32, WIDTH // 32, generator=generator)
            rough = torch.nn.functional.interpolate(coarse, size=(HEIGHT, WIDTH), mode="bilinear")
            channels_last = rough.permute(0, 2, 3, 1) if clip.shape[-1] == 3 else rough
            shown = to_uint8((clip + noise * channels_last)[None])[0]
            write_mp4(root / name / f"{place:04d}.mp4", shown, 16)
    return {name: root / name for name in STRENGTH}, [Prompt(text) for text in scenes.texts()]


def rate(study: Path, tokens: list[str]) -> None:
    """Votes by a Bradley-Terry model with ties. The first rater is in the middle, the last one does not look."""
    with contextlib.closing(open_study(study)) as store:
        methods, rng = store.study.methods, random.Random(3)
        for token in tokens:
            rater = store.rater_of(token)
            assert rater is not None
            tasks = {row[0]: row[1:] for row in store._read(
                "SELECT name, left_method, right_method, left_degraded, right_degraded FROM tasks WHERE rater = ?", (rater,))}  # fmt: skip
            while asked := store.ask(rater):
                left, right, left_spoilt, right_spoilt = tasks[asked[0].name]
                if token == tokens[0] and store.progress()[rater][0] > 9 and {left, right} == {0, 2}:
                    break
                gap = STRENGTH[methods[left]] - STRENGTH[methods[right]] + 9 * (right_spoilt - left_spoilt)
                answers = {}
                for place, name in enumerate(store.study.dimensions):
                    chance = 1 / (1 + math.exp(-gap * (1.3, 1.9, 0.8)[place]))
                    tie = left == right and left_spoilt == right_spoilt
                    answers[name] = (
                        "tie"
                        if tie or (rng.random() < 0.18 and abs(gap) < 2)
                        else "left"
                        if rng.random() < chance
                        else "right"
                    )
                if token == tokens[-1]:
                    answers = {name: rng.choice(["left", "right"]) for name in answers}
                store.vote(rater, asked[0].name, asked[0].name, answers)
        store._db.execute("UPDATE tasks SET shown = shown - 8 - abs(random() % 9000) / 1000.0 WHERE shown IS NOT NULL")


def main(out: Path) -> None:
    """Make the study, vote, and photograph both pages at three sizes."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        methods, prompts = clips(root)
        admin, _ = make(
            root / "study", StudyPlan(title="Which video is better?", methods=methods, prompts=prompts, seed=2, checks=0.2)
        )
        with contextlib.closing(open_study(root / "study")) as store:
            tokens = [invite(store)[1] for _ in range(7)]
        rate(root / "study", tokens)
        with serving(root / "study") as server, sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=find_chromium(), args=list(FLAGS))
            for size, options in SIZES.items():
                for page, token in (("rate", tokens[0]), ("results", admin)):
                    context = browser.new_context(**options)
                    shot = context.new_page()
                    shot.goto(f"http://127.0.0.1:{server.port}/{page}#{token}")
                    if page == "rate":
                        shot.wait_for_timeout(1000)
                        shot.keyboard.press("3")
                        shot.evaluate("() => { scrollTo(0, 0); play(false); $('seek').value = 400; seek(); }")
                        shot.wait_for_timeout(500)
                    else:
                        shot.wait_for_selector("#main:not([hidden])")
                    file = out / f"study-{page}-{size}.png"
                    shot.screenshot(path=file, full_page=size != "phone")
                    Image.open(file).convert("RGB").quantize(256).save(file, optimize=True)
                    context.close()
            browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
