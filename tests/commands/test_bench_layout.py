"""The names and numbers of clips that public suites look for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sage_grpo.clips.bench import VBENCH2, layout, read_lists, remark
from sage_grpo.data.prompts import Prompt


def files(bench: str, *lists: Path) -> list[str]:
    return [slot.file for slot in layout(bench, read_lists([str(file) for file in lists]))]


@pytest.fixture
def put(tmp_path: Path):
    def put(name: str, content: object) -> Path:
        file = tmp_path / name
        file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return file

    return put


def test_vbench_has_five_clips_of_a_prompt_and_25_of_those_that_are_filtered(put) -> None:
    info = [
        {"prompt_en": "a stop sign, still", "dimension": ["temporal_flickering"]},
        {"prompt_en": "A dog; runs.", "dimension": ["color"]},
        {"prompt_en": "A dog; runs.", "dimension": ["scene"]},
    ]
    found = files("vbench", put("VBench_full_info.json", info))
    assert found == [f"a stop sign, still-{i}.mp4" for i in range(25)] + [f"A dog; runs.-{i}.mp4" for i in range(5)]
    assert len(files("vbench", put("temporal_flickering.txt", "a stop sign\n"))) == 25
    plain = put("all_dimension.txt", "a cat\n")
    assert files("vbench", plain) == [f"a cat-{i}.mp4" for i in range(5)]
    assert "VBench wants 25" in remark("vbench", read_lists(str(plain)))
    assert remark("vbench", read_lists(str(put("VBench_full_info.json", info)))) == ""


def test_vbench2_has_a_folder_a_dimension_and_the_first_180_characters(put) -> None:
    long = "a" * 179 + "bc"
    info = [{"prompt_en": long, "dimension": ["Diversity"]}, {"prompt_en": long, "dimension": ["Mechanics"]}]
    found = files("vbench2", put("VBench2_full_info.json", info))
    name = long[:180]
    assert found == [f"Diversity/{name}-{i}.mp4" for i in range(20)] + [f"Mechanics/{name}-{i}.mp4" for i in range(3)]
    assert files("vbench2", put("Material.txt", "glass\n")) == [f"Material/glass-{i}.mp4" for i in range(3)]
    assert len(VBENCH2) == 18
    with pytest.raises(ValueError, match=r"no dimension 'Materials'.*Did you mean 'Material'"):
        files("vbench2", put("Materials.txt", "glass\n"))
    twins = [{"prompt_en": long, "dimension": ["Material"]}, {"prompt_en": long + "d", "dimension": ["Material"]}]
    with pytest.raises(ValueError, match="two prompts have one file name"):
        files("vbench2", put("p.json", twins))


def test_suites_that_count_their_clips(put, tmp_path: Path) -> None:
    assert files("evalcrafter", put("prompt700.txt", "a\nb\na\n")) == ["0000.mp4", "0001.mp4", "0002.mp4"]
    assert files("evalcrafter", put("metadata.json", {"0007": {"prompt": "a"}})) == ["0007.mp4"]
    (tmp_path / "lists").mkdir()
    put("lists/1_consistent_attr.txt", "a\nb\n")
    put("lists/7_numeracy.txt", "c\n")
    found = files("t2v_compbench", tmp_path / "lists")
    assert found == ["consistent_attr/0001.mp4", "consistent_attr/0002.mp4", "numeracy/0001.mp4"]
    one = put("prompts.json", [{"caption": "a"}, {"caption": "b"}])
    assert files("phygenbench", one) == ["output_video_1.mp4", "output_video_2.mp4"]
    assert files("videophy", one) == ["0001.mp4", "0002.mp4"]
    with pytest.raises(ValueError, match="give --prompts one file"):
        files("evalcrafter", one, put("more.txt", "c\n"))


@pytest.mark.parametrize("text", ["a cat / a dog", "a\\b", "a\x07b", "ä" * 124])
def test_prompts_that_cannot_be_file_names_are_refused_by_name(text: str, put) -> None:
    with pytest.raises(ValueError, match=r"for the prompt .*, which cannot be"):
        files("vbench", put("p.json", [text]))
    assert files("evalcrafter", put("p.json", [text])) == ["0000.mp4"]
    with pytest.raises(ValueError, match="which cannot be"):
        files("evalcrafter", put("p.json", {"../up/": "a"}))


def test_rewritten_prompts_keep_the_names_of_the_list(put) -> None:
    entries = read_lists(str(put("p.txt", "a\nb\n")))
    slots = layout("evalcrafter", entries, [Prompt("a long a"), Prompt("a long b")])
    found = [(slot.file, slot.prompt.text, slot.text) for slot in slots]
    assert found == [("0000.mp4", "a", "a long a"), ("0001.mp4", "b", "a long b")]
    with pytest.raises(ValueError, match="1 rewritten prompts for 2 prompts"):
        layout("evalcrafter", entries, [Prompt("a long a")])


def test_a_suite_needs_its_list(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs the suite's list as a file"):
        read_lists("a cat")
    with pytest.raises(ValueError, match="no list of prompts"):
        read_lists(str(tmp_path))
