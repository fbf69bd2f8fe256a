"""Prompts from objects: what a prompt file means in a list, a dataset or a data frame."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sage_grpo.data.prompts import Prompt, load_prompts, prompts_of


class Frame:
    """What a pandas data frame is to us: iterated, it gives the names of its columns."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows[0])

    def iterrows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        return enumerate(self.rows)


def test_rows_are_what_they_are_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "p.csv"
    file.write_text("prompt,seed,worth\na cat,7,3\na dog,,4\n")
    rows = [{"prompt": "a cat", "seed": "7", "worth": "3"}, {"prompt": "a dog", "seed": "", "worth": "4"}]
    assert prompts_of(rows) == load_prompts(file)


def test_strings_prompts_and_mappings_may_be_mixed_and_come_from_a_generator() -> None:
    own = Prompt("a tree", 3)
    found = prompts_of(row for row in ["a cat", own, {"prompt": "the sea", "seed": np.int64(5)}])
    assert found == [Prompt("a cat"), own, Prompt("the sea", 5)]


def test_a_data_frame_gives_rows_not_columns_and_its_gaps_are_no_values() -> None:
    rows = [{"prompt": "a cat", "seed": np.float64(4.0), "image": np.nan}, {"prompt": "a dog", "seed": np.nan}]
    assert prompts_of(Frame(rows)) == [Prompt("a cat", 4), Prompt("a dog")]


def test_images_are_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    images = ["a.png", {"path": str(tmp_path / "a.png"), "bytes": None}]
    rows = [{"prompt": "x", "image": image} for image in images]
    assert [prompt.image for prompt in prompts_of(rows)] == [Path("a.png"), tmp_path / "a.png"]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("a cat", r"held_out must be rows, got 'a cat': give a list"),
        ({"train": ["a cat"], "test": []}, r"with the keys train, test: choose a split, such as dataset\['train'\]"),
        (7, "held_out must be rows, got a int, which gives none"),
        (["a cat", 7], "held_out, row 1: expected a text, or an object with a prompt, got 7"),
        ([{"text": "a cat", "promt": "x"}], r"held_out, row 0: there is no column prompt, only text, promt\. Call 'promt' prompt"),
        ([{"prompt": "a cat", "image": np.zeros(3)}], "row 0: image must be the path of a file, got a ndarray"),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_refused_by_its_row(rows: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        prompts_of(rows, "held_out")
