"""The package's own prompts, and public lists by file."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from sage_grpo.data.prompts import SETS, Prompt, load_prompts
from sage_grpo.session.preflight import check_files
from sage_grpo.training.config import DataConfig, TrainConfig
from sage_grpo.training.inputs import load_sources, prompts_from

SMALL = {
    "a",
    "an",
    "the",
    "of",
    "in",
    "on",
    "at",
    "to",
    "and",
    "with",
    "from",
    "its",
    "it",
    "is",
    "as",
    "while",
    "that",
    "by",
}


def words(prompt: Prompt) -> set[str]:
    return set(re.findall(r"[a-z]+", prompt.text.lower())) - SMALL


def test_the_two_sets_have_all_categories_and_nothing_in_common() -> None:
    train, held_out = (load_prompts(name) for name in SETS)
    counts = [Counter(prompt.metadata["category"] for prompt in prompts) for prompts in (train, held_out)]
    assert (set(counts[0].values()), set(counts[1].values())) == ({16}, {4})
    assert counts[0].keys() == counts[1].keys()
    assert len(counts[0]) == 10
    texts = [prompt.text for prompt in (*train, *held_out)]
    assert len(set(texts)) == len(texts) == 200
    for one, other in product(train, held_out):  # nor the same scene in other words
        shared = words(one) & words(other)
        assert len(shared) < 0.4 * min(len(words(one)), len(words(other))), (one.text, other.text)


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


@pytest.mark.parametrize(
    ("name", "near"), [("startr", "starter"), ("starter-eval", "starter_eval"), ("shape", "shapes")]
)
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
        ('{"prompt": "a"}\n{"prompt": "b"}', r"One object a line is \.jsonl"),
        ("3", "must hold a list of prompts"),
        ("[3]", "entry 1: expected an object"),
        ('{"0001": null}', "'0001': expected an object"),
        ('[{"text": "a"}]', "entry 1: there is no column prompt"),
        ('[{"prompt_en": " "}]', "entry 1: the prompt is empty"),
        ("[]", "holds no prompts"),
    ],
)
def test_documents_that_are_no_lists_of_prompts_are_refused(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        load_prompts(write(tmp_path, text))
