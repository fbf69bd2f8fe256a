"""`sage-grpo generate --bench`: clips that are whole are kept; names that suites look for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sage_grpo.cli.generate import Options, run
from sage_grpo.generation import bench
from sage_grpo.generation.bench import VBENCH2, clips_of
from sage_grpo.generation.generate import GenerateSpec
from sage_grpo.models.spec import ModelSpec
from sage_grpo.run.saved import Weights
from sage_grpo.types import VideoSpec


@pytest.fixture(scope="module")
def wan(checkpoint) -> Path:
    return checkpoint("wan_t2v")


def options(wan: Path, tmp_path: Path, text: str = "a cat\na dog\n", **fields) -> Options:
    (tmp_path / "list.txt").write_text(text)
    spec = ModelSpec(path=str(wan), cache=None, guidance_scale=1.0)
    fields = {"bench": "vbench", "prompts": str(tmp_path / "list.txt"), "seed": 5, **fields}
    return Options(model=spec, out=str(tmp_path / "out"), progress=False, steps=1, batch=2, **fields)


def test_what_is_whole_is_kept_and_the_rest_is_made_again(wan, tmp_path, capsys, monkeypatch) -> None:
    made: list[tuple[str, int]] = []
    video = VideoSpec(frames=5, height=32, width=48)

    def sample(options: Options, model: Any, clips: list[Any]) -> Iterator[Any]:
        for first in range(0, len(clips), options.batch):
            some = clips[first : first + options.batch]
            made.extend((clip.file, clip.seed) for clip in some)
            yield some, torch.zeros(len(some), 5, 32, 48, 3, dtype=torch.uint8), None

    monkeypatch.setattr(bench, "sample", sample)
    monkeypatch.setattr(bench, "AT_ONCE", 3)
    monkeypatch.setattr(Weights, "load", lambda weights: SimpleNamespace(video=video))
    given, out = options(wan, tmp_path), tmp_path / "out"
    files = [f"a {animal}-{index}.mp4" for animal in ("cat", "dog") for index in range(5)]
    assert run(given) == 0
    assert made == list(zip(files, range(5, 15)))
    assert capsys.readouterr().out == f"10 clips in {out}\n"
    assert sorted(file.name for file in out.iterdir()) == files  # and nothing that a suite would take for a clip
    made.clear()
    whole = (out / files[1]).read_bytes()
    (out / files[1]).write_bytes(whole[: len(whole) // 2])
    (out / files[7]).unlink()
    assert run(given) == 0
    assert made == [(files[1], 6), (files[7], 12)]
    assert capsys.readouterr().out == f"10 clips in {out}, 8 of them from before\n"


def test_a_lists_own_seeds_win(wan, tmp_path) -> None:
    (tmp_path / "p.csv").write_text("prompt,seed\na cat,70\na dog,\na bird,0\n")
    given = options(wan, tmp_path, prompts=str(tmp_path / "p.csv"))
    seeds = [clip.seed for clip in bench.clips_of(given)]
    assert seeds == [*range(70, 75), *range(10, 15), *range(5)]


def files(bench: Any, file: Path) -> list[str]:
    return [clip.file for clip in clips_of(GenerateSpec(bench=bench, prompts=str(file)))]


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
    with pytest.raises(ValueError, match="Two prompts have one file name"):
        files("vbench2", put("p.json", twins))


@pytest.mark.parametrize("text", ["a cat / a dog", "a\\b", "a\x07b", "ä" * 124])
def test_prompts_that_cannot_be_file_names_are_refused_by_name(text: str, put) -> None:
    with pytest.raises(ValueError, match=r"for the prompt .*, which cannot be"):
        files("vbench", put("p.json", [text]))


def test_rewritten_prompts_keep_the_names_of_the_list(put) -> None:
    given = {"bench": "vbench", "prompts": str(put("p.txt", "a\nb\n"))}
    clips = clips_of(GenerateSpec(**given, rewrites=str(put("r.txt", "a long a\na long b\n"))))[::5]
    assert [(clip.file, clip.prompt.text) for clip in clips] == [("a-0.mp4", "a long a"), ("b-0.mp4", "a long b")]
    with pytest.raises(ValueError, match="1 rewritten prompts for 2 prompts"):
        clips_of(GenerateSpec(**given, rewrites=str(put("r.txt", "a long a\n"))))


def test_a_suite_needs_its_list() -> None:
    with pytest.raises(FileNotFoundError, match="no prompt file a cat"):
        clips_of(GenerateSpec(bench="vbench", prompts="a cat"))
