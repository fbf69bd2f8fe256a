"""The package's own prompts, and public lists by file."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from sage_grpo.data.prompts import load_prompts
from sage_grpo.run.preflight import check_files
from sage_grpo.training.config import DataConfig, TrainConfig
from sage_grpo.training.inputs import load_sources, prompts_from


def test_names_stand_for_the_sets_and_bring_their_held_out_part() -> None:
    config = TrainConfig(data=DataConfig(prompts="starter"))
    check_files(config)
    assert [len(prompts) for prompts in load_sources(config)] == [160, 40]
    assert prompts_from("starter_eval") == load_prompts("starter_eval")
    other = TrainConfig(data=DataConfig(prompts="starter", eval_prompts="shapes"))
    assert load_sources(other)[1] == prompts_from("shapes")
    with pytest.raises(ValueError, match="held out and never trained on"):
        DataConfig(prompts="starter_eval")
    with pytest.raises(ValueError, match="is what is trained on"):
        DataConfig(prompts="starter", eval_prompts="starter")


def write(folder: Path, text: str, name: str = "p.json") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_lists_of_public_suites_are_read(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # their column names are no misspelled ones of ours
        for name, text, prompts in (
            ("p.json", '[{"prompt_en": "a cat", "dimension": ["color"]}]', [("a cat", {"dimension": ["color"]})]),
            (
                "p.json",
                '{"0000": {"prompt": "a cat"}, "1": "a dog"}',
                [("a cat", {"id": "0000"}), ("a dog", {"id": "1"})],
            ),
            ("p.csv", "caption,states\nit melts,solid\n", [("it melts", {"states": "solid"})]),
            ("p.json", '[{"prompt": "a", "caption": "b"}, "c"]', [("a", {"caption": "b"}), ("c", {})]),
        ):
            found = load_prompts(write(tmp_path, text, name))
            assert [(prompt.text, dict(prompt.metadata)) for prompt in found] == prompts


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "is not JSON"),
        ("3", "must hold a list of prompts"),
        ('[{"text": "a"}]', "entry 1: there is no column prompt"),
    ],
)
def test_documents_that_are_no_lists_of_prompts_are_refused(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        load_prompts(write(tmp_path, text))
