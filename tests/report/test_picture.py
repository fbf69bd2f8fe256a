"""Pictures and videos of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import needs
from report_zoo import fake_run
from sage_grpo.tools.report import picture
from sage_grpo.tools.report.picture import Z95, draw_run, lettered, side_by_side, slug


def drawn(run: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pyplot = needs.module("matplotlib.pyplot")
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    assert draw_run(run, file) == file
    assert file.read_bytes().startswith(b"\x89PNG")
    return figures[-1]


@pytest.mark.filterwarnings("ignore:.*(font|letters|drawn)")
def test_a_picture_has_curves_and_clips_before_and_after(tmp_path: Path, monkeypatch) -> None:
    figure = drawn(fake_run(tmp_path / "run"), tmp_path / "p.png", monkeypatch)
    assert figure.get_suptitle() == "run: 4 iterations"
    top, bottom = figure.subfigs
    left, middle, right = top.axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in left.lines}
    assert list(lines) == ["total", "TA", "drift"]
    means = lines["total"][1]
    assert lines["total"][0] == [0, 2, 4]
    assert lines["TA"][1] == [mean / 2 for mean in means]
    band = left.collections[0].get_paths()[0].vertices[:, 1]
    assert [band.min(), band.max()] == pytest.approx([min(means) - Z95 * 0.01, max(means) + Z95 * 0.01])
    assert [axis.get_title(loc="left") for axis in (left, middle, right)] == [
        "Held-out prompts", "Rollouts (exploring)", "Trust region"
    ]  # fmt: skip
    assert right.get_yscale() == "log"
    clips = [axis for axis in bottom.axes if axis.images]
    assert len(clips) == len(bottom.axes) == 4
    image = clips[0].images[0].get_array()
    assert image.shape == (32 + 2 + 32, 5 * 32 + 4 * 2, 3)
    assert int(image[0, 0].max()) < int(image[-1, 0].max())  # base above, tuned below, whose ground is lighter
    texts = [text.get_text() for text in clips[0].texts]
    assert texts == ["base", "tuned", "0.00 s", "0.25 s", "0.50 s", "0.62 s", "0.88 s"]


@pytest.mark.filterwarnings("ignore:.*(font|letters|drawn)")
def test_a_run_without_clips_kl_or_rows_is_drawn_as_far_as_it_is(tmp_path: Path, monkeypatch) -> None:
    run = fake_run(tmp_path / "run", kl=0.0)
    for file in (run / "videos").iterdir():
        file.unlink()
    font = SimpleNamespace(families=["DejaVu Sans"], show=str.upper, remark="letters are missing")
    monkeypatch.setattr(picture, "lettering", lambda texts: font)
    with pytest.warns(UserWarning, match=r"p\.png: letters are missing"):
        figure = drawn(run, tmp_path / "p.png", monkeypatch)
    assert figure.axes[2].get_title(loc="left") == "Gradient"
    assert not figure.subfigs
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(FileNotFoundError, match=r"no metrics\.jsonl with rows"):
        draw_run(run, tmp_path / "p.png")


def test_two_clips_in_one_frame() -> None:
    left, right = (torch.full((count, 32, 32, 3), shade, dtype=torch.uint8) for count, shade in ((2, 10), (5, 20)))
    left[1, 0, 0] = 99
    held = side_by_side(left, right, short=128)
    assert held.shape == (5, 14 + 128, 128 + 3 + 128 + 1, 3), "one more column, white: an odd number cannot be encoded"
    assert held[4, 14, :5, 0].tolist() == [99] * 4 + [10]
    assert held[:, -1, [0, 127, 128, 130, 131, 258, 259], 0].tolist() == [[10, 10, 255, 255, 20, 20, 255]] * 5
    ink = [place for place in range(held.shape[2]) if int(held[0, :14, place].min()) < 100]
    for first, last in ((0, 128), (131, 259)):
        own = [place for place in ink if first <= place < last]
        assert abs((min(own) + max(own)) / 2 - (first + 64)) < 4
    small = side_by_side(*[torch.zeros(1, 15, 40, 3, dtype=torch.uint8)] * 2, short=14)
    assert small.shape == (1, 14 + 15 + 1, 40 + 2 + 40, 3)
    assert lettered(30, 20, {}).shape == (20, 30, 3)
    assert bool((lettered(30, 20, {}) == 255).all())


def test_base_is_left_and_tuned_is_right(monkeypatch, tmp_path: Path) -> None:
    written: list[Any] = []
    monkeypatch.setattr(picture, "read_video", lambda file: (file.name, 8.0 if file.name == "old" else 9.0))
    monkeypatch.setattr(picture, "side_by_side", lambda left, right: (left, right))
    monkeypatch.setattr(picture, "write_mp4", lambda file, clip, fps: written.append((file, clip, fps)) or file)
    for name in ("07-gone.mp4", "mine.mp4", "00-a-cat.mp4"):
        (tmp_path / name).write_bytes(b"")
    pairs = [("A cat", Path("old"), Path("new"))]
    run = SimpleNamespace(clips={0: [], 4: []}, pairs=lambda first, most: pairs * (first == 0) * (most == 8))
    assert picture.write_pairs(run, tmp_path) == [tmp_path / "00-a-cat.mp4"]  # type: ignore[arg-type]
    assert written == [(tmp_path / "00-a-cat.mp4", ("old", "new"), 8.0)]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["00-a-cat.mp4", "mine.mp4"]
    for clips in ({0: []}, {2: [], 4: []}):
        assert picture.write_pairs(SimpleNamespace(clips=clips), tmp_path) == []  # type: ignore[arg-type]


def test_a_prompt_becomes_part_of_a_name() -> None:
    assert slug("A/../b: <c>") == "a-b-c"
    assert slug("红色的圆" * 20) == "红色的圆" * 8  # 96 bytes of three for a letter
    assert slug("ab" * 48) == "ab" * 24
    assert slug("a" * 47 + " b") == "a" * 47
    assert slug("///") == "clip"
