"""metrics.jsonl survives kills; TensorBoard gets scalars and moving pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sage_grpo.train.config import LogConfig
from sage_grpo.train.metrics import Journal, Metrics, TensorBoard, read_rows


def fill(file: Path, iterations: int, *, keep_until: int | None = None) -> None:
    journal = Journal(file, keep_until=keep_until)
    for iteration in range(iterations):
        journal.write(iteration, {"reward/total": iteration / 2})
    journal.close()


def test_rows_round_trip(tmp_path: Path) -> None:
    fill(tmp_path / "m.jsonl", 3)
    assert read_rows(tmp_path / "m.jsonl") == [{"iteration": n, "reward/total": n / 2} for n in range(3)]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_line_that_a_kill_cut_short_is_dropped(cut: int, tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    fill(file, 4)
    file.write_bytes(file.read_bytes()[:-cut])
    whole = 4 if cut == 1 else 3  # only the newline is missing: the row is whole
    assert len(read_rows(file)) == whole
    journal = Journal(file, keep_until=9)
    journal.write(7, {"a": 1.0})
    journal.close()
    lines = file.read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [*range(whole), 7]


def test_rows_after_the_resume_point_are_computed_again(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    fill(file, 6)
    Journal(file, keep_until=2).close()
    assert [row["iteration"] for row in read_rows(file)] == [0, 1, 2]


def test_a_fresh_start_keeps_nothing(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    fill(file, 6)
    Journal(file, keep_until=None).close()
    assert read_rows(file) == []


def test_json_has_no_nan(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    journal = Journal(file, keep_until=None)
    journal.write(1, {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 1.5})
    journal.close()

    def refuse(token: str) -> None:
        raise AssertionError(token)

    row = json.loads(file.read_text(), parse_constant=refuse)
    assert row == {"iteration": 1, "a": None, "b": None, "c": None, "d": 1.5}


def test_tensorboard_holds_scalars_and_an_animation(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path, purge_from=None)
    board.write(1, {"reward/total": 0.25})
    board.write(2, {"reward/total": 0.5})
    clips = torch.randint(0, 256, (2, 3, 8, 8, 3), dtype=torch.uint8)
    board.show(2, "held_out", clips, ["a", "b"], 8.0)
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/total")] == [(1, 0.25), (2, 0.5)]
    (picture,) = events.Images("held_out")
    assert picture.step == 2
    from io import BytesIO

    from PIL import Image

    with Image.open(BytesIO(picture.encoded_image_string)) as image:
        assert image.format == "GIF"
        assert image.n_frames == 3
        assert image.width == 2 * image.height  # two clips side by side


def test_tensorboard_forgets_what_is_computed_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for purge, value in ((None, 1.0), (3, 2.0)):
        board = TensorBoard(tmp_path, purge_from=purge)
        for iteration in range(purge or 1, 5):
            board.write(iteration, {"a": value})
        board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("a")] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_a_run_that_starts_anew_hides_the_events_of_one_that_never_got_to_a_checkpoint(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for value in (1.0, 2.0):
        metrics = Metrics.open(tmp_path, LogConfig(), {}, resumed_at=None)
        metrics.write(0, {"a": value})
        metrics.write(1, {"a": value})
        metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("a")] == [(0, 2.0), (1, 2.0)]
    assert [row["a"] for row in read_rows(tmp_path / "metrics.jsonl")] == [2.0, 2.0]


@pytest.mark.parametrize("extra", ["wandb", "trackio"])
def test_a_missing_tracker_names_its_extra(extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(ValueError, match=rf"pip install 'sage-grpo\[{extra}\]'"):
        Metrics.open(tmp_path, LogConfig(tensorboard=False, **{extra: "project"}), {}, resumed_at=None)
