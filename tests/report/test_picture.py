"""Pictures and videos of a run, call by call and pixel by pixel, without drawing one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch

from sage_grpo.tools.report import picture
from sage_grpo.tools.report.picture import Z95, lettered, side_by_side, slug, strip

ROWS = [
    {"iteration": 0, "eval/total": 1.0, "eval/total_stderr": 0.5, "eval/odd": 0.0, "eval/new": -1.0},
    {"iteration": 4, "eval/total": 2.0, "eval/total_stderr": 0.25, "eval/odd": 3.0, "eval/new": None},
    {"iteration": 8, "eval/total": 3.0, "eval/total_stderr": None},
]


def test_a_curve_has_its_points_and_its_band() -> None:
    axis = MagicMock(lines=[1, 2])
    picture._curve(axis, ROWS, ["eval/odd", "eval/none", "eval/total", "eval/new"], "Title", "unit")
    name, low, high = {"markersize": 5}, [1.0 - Z95 * 0.5, 2.0 - Z95 * 0.25], [1.0 + Z95 * 0.5, 2.0 + Z95 * 0.25]
    assert axis.mock_calls == [
        call.plot((0, 4), (0.0, 3.0), label="odd", color="#96700a", marker="o", **name),
        call.plot((0, 4, 8), (1.0, 2.0, 3.0), label="total", color="#1d1f23", marker="D", **name),
        call.plot((0,), (-1.0,), label="new", color="#c22f70", marker="^", **name),
        call.fill_between((0, 4), low, high, color="#1d1f23", alpha=0.1, lw=0, label="total, 95% interval"),
        call.set_title("Title"), call.set_xlabel("iteration"), call.set_ylabel("unit"),
        call.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, columnspacing=1.2, handlelength=1.6),
    ]  # fmt: skip
    axis = MagicMock(lines=[1])
    picture._curve(axis, ROWS, ["eval/odd", "eval/new"], "T", "u", log=True)
    assert axis.mock_calls == [
        call.plot((4,), (3.0,), label="odd", color="#96700a", marker="o", markersize=5),
        call.set_yscale("log"), call.set_title("T"), call.set_xlabel("iteration"), call.set_ylabel("u"),
    ]  # fmt: skip
    for count, marker in ((24, "o"), (25, "")):
        axis = MagicMock(lines=[])
        picture._curve(axis, [{"iteration": at, "a/x": 1.0} for at in range(count)], ["a/x"], "", "")
        assert axis.plot.call_args.kwargs["marker"] == marker


@pytest.mark.parametrize(("kl", "names"), [(0.5, ["kl/position", "kl/velocity"]), (0.0, ["gradient/norm"])])
def test_a_run_has_three_axes(kl: float, names: list[str], monkeypatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(picture, "_curve", lambda *given, **named: drawn.append((*given, named)))
    rows = [{"iteration": 1, "kl/position": kl, "kl/velocity": kl, "kl/total": kl}]
    run = SimpleNamespace(evaluations=ROWS, rows=rows)
    picture._curves(["left", "middle", "right"], run)  # type: ignore[arg-type]
    last = (
        ("Trust region", "KL (nats per dimension)", {"log": True}) if kl else ("Gradient", "norm before clipping", {})
    )
    assert drawn == [
        ("left", ROWS, ["eval/total", "eval/new", "eval/odd"], "Held-out prompts", "score", {}),
        ("middle", rows, ["reward/total"], "Rollouts (exploring)", "reward", {}),
        ("right", rows, names, *last),
    ]


def test_frames_of_clips_stand_over_one_another(monkeypatch) -> None:
    """Two clips of five frames of 4 x 6, of which three are shown; the tuned one is shorter, and shows its last."""
    shade = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1).expand(5, 4, 6, 3)
    clips = {Path("old"): (10 + shade, 8.0), Path("new"): (20 + shade[:3], 8.0)}
    monkeypatch.setattr(picture, "read_video", clips.get)
    axes = [MagicMock(), MagicMock()]
    figure = MagicMock()
    figure.subplots.return_value.flat = axes
    letters = SimpleNamespace(show=str.upper, remark="a remark")
    picture._before_after(figure, [("a " * 70, Path("old"), Path("new"))], 3, letters)  # type: ignore[list-item]
    assert figure.subplots.call_args == call(1, 2, squeeze=False)
    assert figure.supxlabel.call_args == call("a remark", fontsize=11, color="#6b7280")
    (image,) = axes[0].imshow.call_args.args
    assert image.shape == (4 + 2 + 4, 3 * 6 + 2 * 2, 3)
    rows = [[10, 255, 12, 255, 14]] * 4 + [[255] * 5] * 2 + [[20, 255, 22, 255, 22]] * 4
    assert image[:, :, 0][:, [0, 6, 8, 14, 16]].tolist() == rows
    assert axes[0].imshow.call_args.kwargs == {"interpolation": "nearest"}
    grey, apart = {"color": "#6b7280"}, {"ha": "right", "va": "center", "rotation": 90}
    times = [
        call.text((place + 0.5) * 22 / 3, 2.06 * 4 + 2, text, ha="center", va="top", fontsize=11, **grey)
        for place, text in enumerate(("0.00 s", "0.25 s", "0.50 s"))
    ]
    title = "\n".join(["A " * 28 + "A", "A " * 24 + "A …"])
    assert axes[0].mock_calls[2:] == [
        call.set_title(title, fontsize=13, fontweight="normal", parse_math=False),
        call.text(-0.22, 2.0, "base", **grey, **apart),
        call.text(-0.22, 8.0, "tuned", color="#1368aa", **apart),
        *times,
    ]
    assert [axis.mock_calls[0] for axis in axes] == [call.axis("off")] * 2
    wide = strip(torch.zeros(2, 1, 48, 3, dtype=torch.uint8))
    assert wide.shape == (1, 2 * 48 + 3, 3)


@pytest.mark.parametrize("pairs", [0, 3])
def test_a_picture_is_as_high_as_its_clips(pairs: int, monkeypatch, tmp_path: Path) -> None:
    figure, top, drawn = MagicMock(), MagicMock(), []
    figure.subfigures.return_value = (top, "bottom")
    library = MagicMock(**{"pyplot.figure.return_value": figure})
    made = library.pyplot.figure
    monkeypatch.setitem(sys.modules, "matplotlib", library)
    letters = SimpleNamespace(show=str, remark="", families=["sans"])
    monkeypatch.setattr(picture, "lettering", lambda texts: letters)
    monkeypatch.setattr(picture, "_curves", lambda axes, run: drawn.append(axes))
    monkeypatch.setattr(picture, "_before_after", lambda *given: drawn.append(given))
    found = [("a", Path("x"), Path("y"))] * pairs
    run = SimpleNamespace(name="run", rows=[{"iteration": 9}], evaluations=[], clips={3: [], 9: []})
    run.pairs = lambda first, most: found * (first == 3) * (most == 4)
    monkeypatch.setattr(picture, "read_run", lambda out: run)
    assert picture.draw_run(Path("run"), tmp_path / "p.png") == tmp_path / "p.png"
    lines = (pairs + 1) // 2
    assert made.call_args == call(figsize=(14, 4.7 + 3.1 * lines), dpi=100, layout="constrained")
    assert figure.get_layout_engine.return_value.set.call_args == call(w_pad=0.12, h_pad=0.1, wspace=0.03)
    assert figure.suptitle.call_args.args == ("run: 9 iterations",)
    assert figure.suptitle.call_args.kwargs["parse_math"] is False
    place = top if pairs else figure
    assert place.subplots.call_args == call(1, 3)
    assert drawn[0] is place.subplots.return_value
    assert figure.subfigures.called == bool(pairs)
    if pairs:
        assert figure.subfigures.call_args == call(2, 1, height_ratios=(4.4, 3.1 * lines))
        assert drawn[1][:3] == ("bottom", found, 5)
    run.evaluations = [{"iteration": 12}]
    picture.draw_run(Path("run"), tmp_path / "p.png")
    assert figure.suptitle.call_args.args == ("run: 12 iterations",)
    run.rows = run.evaluations = []
    with pytest.raises(FileNotFoundError, match=r"no metrics\.jsonl with rows"):
        picture.draw_run(Path("run"), tmp_path / "p.png")


def test_two_clips_in_one_frame() -> None:
    """Enlarged to about the size that is asked for, the gap a fiftieth, words over the middle of each clip, and the shorter one stands still."""
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
    """And what an earlier end of the run has left goes, but nobody else's files."""
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
