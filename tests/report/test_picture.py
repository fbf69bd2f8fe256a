"""Pictures and videos of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import needs
from report_zoo import fake_run
from sage_grpo.tools.report.picture import Z95, draw_run, slug


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


def test_a_prompt_becomes_part_of_a_name() -> None:
    assert slug("A/../b: <c>") == "a-b-c"
    assert slug("红色的圆" * 20) == "红色的圆" * 8  # 96 bytes of three for a letter
    assert slug("ab" * 48) == "ab" * 24
    assert slug("a" * 47 + " b") == "a" * 47
    assert slug("///") == "clip"
