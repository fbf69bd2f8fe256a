"""The package's own prompts, and public lists by file."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from sage_grpo.data.prompts import load_prompts
from sage_grpo.session.preflight import check_files
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


@pytest.mark.parametrize(("name", "near"), [("starter-eval", "starter_eval")])
def test_misspelt_names_are_pointed_out(name: str, near: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"Did you mean '{near}'"):
        prompts_from(name)
    with pytest.raises(FileNotFoundError, match=f"(?s)data.prompts {name}.*Did you mean '{near}'"):
        check_files(TrainConfig(data=DataConfig(prompts=name)))


def write(folder: Path, text: str, name: str = "p.json") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_lists_of_public_suites_are_read(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # their column names are no misspelt ones of ours
        (vbench,) = load_prompts(
            write(tmp_path, '[{"prompt_en": "a cat", "dimension": ["color"], "auxiliary_info": {}}]')
        )
        cat, dog = load_prompts(
            write(tmp_path, '{"0000": {"prompt": "a cat", "attributes": {"count": "1"}}, "0001": "a dog"}')
        )
        (physics,) = load_prompts(write(tmp_path, '[{"caption": "it falls", "main_category": "Force"}]'))
        (table,) = load_prompts(write(tmp_path, "caption,states\nit melts,solid\n", "p.csv"))
        both, plain = load_prompts(write(tmp_path, '[{"prompt": "a", "caption": "b"}, "c"]'))
    assert (vbench.text, dict(vbench.metadata)) == ("a cat", {"dimension": ["color"], "auxiliary_info": {}})
    assert (cat.text, dict(cat.metadata)) == ("a cat", {"id": "0000", "attributes": {"count": "1"}})
    assert (dog.text, dict(dog.metadata)) == ("a dog", {"id": "0001"})
    assert (physics.text, dict(physics.metadata)) == ("it falls", {"main_category": "Force"})
    assert (table.text, dict(table.metadata)) == ("it melts", {"states": "solid"})
    assert (both.text, dict(both.metadata), plain.text) == ("a", {"caption": "b"}, "c")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "is not JSON"),
        ("3", "must hold a list of prompts"),
        ("[3]", "entry 1: expected an object"),
        ('[{"text": "a"}]', "entry 1: there is no column prompt"),
    ],
)
def test_documents_that_are_no_lists_of_prompts_are_refused(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        load_prompts(write(tmp_path, text))
