"""`sage-grpo generate --bench`: base and tuned from the same seeds, kept when they are whole, never mixed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_grpo.clips import bench, generate
from sage_grpo.commands.generate import Options, run
from sage_grpo.flow.kernels import KernelSpec
from sage_grpo.folder.saved import Weights
from sage_grpo.models.spec import LoraSpec, ModelSpec
from sage_grpo.video import read_video


@pytest.fixture(scope="module")
def wan(checkpoint) -> Path:
    return checkpoint("wan_t2v")


@pytest.fixture(scope="module")
def lora(wan, tmp_path_factory) -> Path:
    trained = ModelSpec(path=str(wan), cache=None, lora=LoraSpec(rank=2)).load("cpu")
    with torch.no_grad():
        for parameter in trained.trainable().values():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    folder = tmp_path_factory.mktemp("lora") / "lora"
    trained.save(folder)
    return folder


def options(wan: Path, tmp_path: Path, text: str = "a cat\na dog\n", **fields) -> Options:
    (tmp_path / "list.txt").write_text(text)
    spec = ModelSpec(path=str(wan), cache=None, guidance_scale=1.0)
    fields = {"bench": "evalcrafter", "prompts": str(tmp_path / "list.txt"), "seed": 5, **fields}
    return Options(model=spec, out=str(tmp_path / "out"), progress=False, steps=1, batch=2, **fields)


def apart(one: torch.Tensor, other: torch.Tensor) -> int:
    """Grey levels between two clips, before they are encoded. Rows of one batch are the same to the bit; of another batch a pixel may
    stand at the edge of a level, and round the other way."""
    return int((one.int() - other.int()).abs().max())


@pytest.mark.slow
def test_base_and_tuned_are_the_clips_of_plain_generate(wan, lora, tmp_path, written) -> None:
    given = options(wan, tmp_path, lora=str(lora))
    assert run(given) == 0
    plain = replace(given, bench=None, prompts=["a cat", "a dog"], out=str(tmp_path / "plain"))
    run(replace(plain, lora=None))
    run(replace(plain, out=str(tmp_path / "plain_tuned")))
    for name, folder in (("base", "plain"), ("tuned", "plain_tuned")):
        made = tmp_path / "out" / name
        files = sorted(file.name for file in made.iterdir())
        assert files == ["0000.mp4", "0001.mp4"]  # and nothing that a suite would take for a clip
        for file, plain_file in zip(files, ("0000-a-cat.mp4", "0001-a-dog.mp4")):
            assert apart(written[made / file], written[tmp_path / folder / plain_file]) == 0
            assert read_video(made / file)[0].shape == written[made / file].shape
    base, tuned = (written[tmp_path / "out" / name / "0000.mp4"] for name in ("base", "tuned"))
    assert apart(base, tuned) > 5
    record = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [(clip["file"], clip["prompt"], clip["seed"]) for clip in record["clips"]] == [
        ("0000.mp4", "a cat", 5),
        ("0001.mp4", "a dog", 6),
    ]


@pytest.mark.slow
def test_what_is_whole_is_kept_and_the_rest_is_made_again(wan, lora, tmp_path, monkeypatch, written) -> None:
    run(options(wan, tmp_path, lora=str(lora)))
    out = tmp_path / "out"
    before = dict(written)
    written.clear()
    kept = (out / "base" / "0000.mp4").stat().st_mtime_ns
    whole = (out / "base" / "0001.mp4").read_bytes()
    (out / "base" / "0001.mp4").write_bytes(whole[: len(whole) // 2])
    (out / "base" / ".0001.mp4.tmp").write_bytes(b"half")
    (out / "tuned" / "0000.mp4").unlink()
    made: list[str] = []
    sample = generate.sample
    monkeypatch.setattr(bench, "sample", lambda o, m, c: made.extend(clip.file for clip in c) or sample(o, m, c))
    assert run(options(wan, tmp_path, lora=str(lora))) == 0
    assert made == ["0001.mp4", "0000.mp4"]
    assert set(written) == {out / "base" / "0001.mp4", out / "tuned" / "0000.mp4"}
    assert max(apart(clip, before[file]) for file, clip in written.items()) <= 1
    assert read_video(out / "base" / "0001.mp4")[0].shape == before[out / "base" / "0001.mp4"].shape
    assert (out / "base" / "0000.mp4").stat().st_mtime_ns == kept
    monkeypatch.setattr(ModelSpec, "load", lambda *_: pytest.fail("there is nothing to make"))
    assert run(options(wan, tmp_path, lora=str(lora))) == 0


@pytest.mark.slow
def test_clips_of_other_settings_are_not_mixed(wan, lora, tmp_path) -> None:
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
    other = Path(shutil.copytree(lora, tmp_path / "lora"))
    (file,) = other.glob("*.safetensors")
    save_file({name: tensor * 2 for name, tensor in load_file(file).items()}, file)
    with pytest.raises(ValueError, match=r"weights\.tuned"):
        run(replace(given, lora=str(other)))


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
    both = {
        "base": Weights(given.model),
        "tuned": Weights(replace(given.model, lora=LoraSpec(path=str(folder)))),  # as a run exported it
    }
    claim(both)
    claim({"base": both["base"]})
    claim(both)
    claim({"base": both["base"]})
    (folder / "weights.safetensors").write_bytes(b"of another run")
    with pytest.raises(ValueError, match=r"other settings:\n  weights\.tuned"):
        claim(both)


def test_the_record_says_what_the_model_was_given(wan, tmp_path) -> None:
    (tmp_path / "long.txt").write_text("a cat\na dog, much longer\n")
    given = options(wan, tmp_path, rewrites=str(tmp_path / "long.txt"))
    record = bench._claim(tmp_path / "out", given, bench.clips_of(given), {})
    assert [(clip["prompt"], clip.get("given")) for clip in record["clips"]] == [
        ("a cat", None),
        ("a dog", "a dog, much longer"),
    ]


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
    seeds = [
        clip.seed for clip in bench.clips_of(options(wan, tmp_path, bench="vbench", prompts=str(tmp_path / "p.csv")))
    ]
    assert seeds == [70, 71, 72, 73, 74, 10, 11, 12, 13, 14, 0, 1, 2, 3, 4]
