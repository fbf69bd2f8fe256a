"""`sage-grpo generate --bench`: base and tuned from the same seeds, kept when they are whole, never mixed; names that suites look for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sage_grpo.cli.generate import Options, run
from sage_grpo.data.prompts import Prompt
from sage_grpo.generation import bench
from sage_grpo.generation.bench import VBENCH2, layout, read_lists, remark
from sage_grpo.models.spec import LoraSpec, ModelSpec
from sage_grpo.run.saved import Weights
from sage_grpo.samplers.kernels import KernelSpec


@pytest.fixture(scope="module")
def wan(checkpoint) -> Path:
    return checkpoint("wan_t2v")


@pytest.fixture
def lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a LoRA, which nobody reads."""
    monkeypatch.setattr("sage_grpo.models.lora.read_header", lambda folder: None)
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "pytorch_lora_weights.safetensors").write_bytes(b"tuned")
    return tmp_path / "lora"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Samples of a model that takes no time: model, file and seed."""
    found: list[tuple[str, str, int]] = []
    video = SimpleNamespace(frames=5, height=32, width=48, fps=8.0)

    def sample(options: Options, model: Any, clips: list[Any]) -> Iterator[Any]:
        for first in range(0, len(clips), options.batch):
            some = clips[first : first + options.batch]
            found.extend((model.name, clip.file, clip.seed) for clip in some)
            yield some, torch.zeros(len(some), 5, 32, 48, 3, dtype=torch.uint8), None

    monkeypatch.setattr(bench, "sample", sample)

    def load(weights: Weights) -> Any:
        return SimpleNamespace(video=video, name="base" if weights.lora is None else "tuned")

    monkeypatch.setattr(Weights, "load", load)
    return found


def options(wan: Path, tmp_path: Path, text: str = "a cat\na dog\n", **fields) -> Options:
    (tmp_path / "list.txt").write_text(text)
    spec = ModelSpec(path=str(wan), cache=None, guidance_scale=1.0)
    fields = {"bench": "evalcrafter", "prompts": str(tmp_path / "list.txt"), "seed": 5, **fields}
    return Options(model=spec, out=str(tmp_path / "out"), progress=False, steps=1, batch=2, **fields)


def test_what_is_whole_is_kept_and_the_rest_is_made_again(wan, lora, tmp_path, made, capsys, monkeypatch) -> None:
    monkeypatch.setattr(bench, "AT_ONCE", 1)
    given, out, files = options(wan, tmp_path, lora=str(lora)), tmp_path / "out", ("0000.mp4", "0001.mp4")
    assert run(given) == 0
    assert made == [(name, file, seed) for name in ("base", "tuned") for file, seed in zip(files, (5, 6))]
    assert capsys.readouterr().out == f"base: 2 clips in {out / 'base'}\ntuned: 2 clips in {out / 'tuned'}\n"
    for name in ("base", "tuned"):  # and nothing that a suite would take for a clip
        assert sorted(file.name for file in (out / name).iterdir()) == [*files]
    record = json.loads((out / "bench.json").read_text())
    assert [tuple(clip.values()) for clip in record["clips"]] == [("0000.mp4", "a cat", 5), ("0001.mp4", "a dog", 6)]
    assert record["video"] == {"frames": 5, "height": 32, "width": 48}
    made.clear()
    whole = (out / "base" / "0001.mp4").read_bytes()
    (out / "base" / "0001.mp4").write_bytes(whole[: len(whole) // 2])
    (out / "tuned" / "0000.mp4").unlink()
    assert run(given) == 0
    assert made == [("base", "0001.mp4", 6), ("tuned", "0000.mp4", 5)]
    assert f"base: 2 clips in {out / 'base'}, 1 of them from before\n" in capsys.readouterr().out
    monkeypatch.setattr(Weights, "load", lambda *_: pytest.fail("there is nothing to make"))
    assert run(given) == 0
    (out / "tuned" / "0000.mp4").rename(out / "tuned" / "other.mp4")
    with pytest.raises(ValueError, match=r"1 clips are not in .*tuned under their names, such as '0000\.mp4'"):
        bench._check_names(out / "tuned", list(bench.clips_of(given)))


def test_a_judge_that_reads_a_table_gets_one(wan, tmp_path, made) -> None:
    run(options(wan, tmp_path, bench="videophy"))
    rows = [f"{(tmp_path / 'out/base').resolve()}/000{n}.mp4,{text}" for n, text in ((1, "a cat"), (2, "a dog"))]
    assert (tmp_path / "out" / "base.csv").read_text() == "\n".join(["videopath,caption", *rows, ""])


def test_clips_of_other_settings_are_not_mixed(wan, lora, tmp_path, made) -> None:
    given = options(wan, tmp_path)
    run(given)
    for file, text in (("others.txt", "a cat\na bird\n"), ("long.txt", "a cat\na dog, much longer\n")):
        (tmp_path / file).write_text(text)
    for other, says in (
        (replace(given, steps=2), "steps"),
        (replace(given, seed=6), "prompts"),
        (replace(given, prompts=str(tmp_path / "others.txt")), "prompts"),
        (replace(given, rewrites=str(tmp_path / "long.txt")), "prompts"),
        (replace(given, solver="ab2"), "solver"),
        (replace(given, kernel=KernelSpec(name="ode", eta=0.1)), "kernel.eta"),
        (replace(given, deterministic_last=False), "deterministic_last"),
        (replace(given, model=replace(given.model, guidance_scale=2.0)), "model.guidance_scale"),
    ):
        with pytest.raises(ValueError, match=f"other settings:\n  {says}: .*\nChoose"):  # that, and nothing else
            run(other)
    assert run(replace(given, lora=str(lora), batch=1)) == 0  # the base is there, the tuned clips come to it
    (lora / "pytorch_lora_weights.safetensors").write_bytes(b"other")
    with pytest.raises(ValueError, match=r"weights\.tuned"):
        run(replace(given, lora=str(lora)))


def test_the_average_and_the_weights_themselves_are_not_mixed(wan, tmp_path) -> None:
    """They lie in one checkpoint."""
    given, checkpoint = options(wan, tmp_path), tmp_path / "000004"
    checkpoint.mkdir()
    (checkpoint / "weights.safetensors").write_bytes(b"both")
    claim = partial(bench._claim, tmp_path / "out", given, bench.clips_of(given))
    average = Weights(given.model, checkpoint=checkpoint, ema=True)
    claim({"tuned": average})
    claim({"tuned": average})
    with pytest.raises(ValueError, match=r"other settings:\n  weights\.tuned"):
        claim({"tuned": replace(average, ema=False)})
    (checkpoint / "weights.safetensors").write_bytes(b"of another iteration")
    with pytest.raises(ValueError, match=r"other settings:\n  weights\.tuned"):
        claim({"tuned": average})


def test_what_was_tuned_is_known_after_the_base_alone(wan, tmp_path) -> None:
    given, folder = options(wan, tmp_path), tmp_path / "lora"
    folder.mkdir()
    (folder / "weights.safetensors").write_bytes(b"first")
    claim = partial(bench._claim, tmp_path / "out", given, bench.clips_of(given))
    tuned = Weights(replace(given.model, lora=LoraSpec(path=str(folder))))  # as a run exported it
    both = {"base": Weights(given.model), "tuned": tuned}
    for those in (both, {"base": both["base"]}, both, {"base": both["base"]}):
        claim(those)
    (folder / "weights.safetensors").write_bytes(b"of another run")
    with pytest.raises(ValueError, match=r"other settings:\n  weights\.tuned"):
        claim(both)


def test_the_record_says_what_the_model_was_given(wan, tmp_path) -> None:
    (tmp_path / "long.txt").write_text("a cat\na dog, much longer\n")
    given = options(wan, tmp_path, rewrites=str(tmp_path / "long.txt"))
    record = bench._claim(tmp_path / "out", given, bench.clips_of(given), {})
    given_of = {clip["prompt"]: clip.get("given") for clip in record["clips"]}
    assert given_of == {"a cat": None, "a dog": "a dog, much longer"}


def test_clips_from_other_pictures_are_not_mixed(wan, tmp_path) -> None:
    for name, content in (("a.png", b"cat"), ("b.png", b"dog"), ("same/a.png", b"cat")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)

    def claim(image: str) -> None:
        (tmp_path / "p.csv").write_text(f"prompt,image\na cat,{image}\n")
        given = options(wan, tmp_path, prompts=str(tmp_path / "p.csv"))
        bench._claim(tmp_path / "out", given, bench.clips_of(given), {})

    claim("a.png")
    claim("same/a.png")  # the picture counts, not its place
    with pytest.raises(ValueError, match=r"other settings:\n  prompts"):
        claim("b.png")
    (tmp_path / "a.png").write_bytes(b"another cat")
    with pytest.raises(ValueError, match=r"other settings:\n  prompts"):
        claim("a.png")


def test_a_lists_own_seeds_win(wan, tmp_path) -> None:
    (tmp_path / "p.csv").write_text("prompt,seed\na cat,70\na dog,\na bird,0\n")
    given = options(wan, tmp_path, bench="vbench", prompts=str(tmp_path / "p.csv"))
    seeds = [clip.seed for clip in bench.clips_of(given)]
    assert seeds == [*range(70, 75), *range(10, 15), *range(5)]


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
