"""Prompts are encoded once, shared, cached by content, and each sample keeps its own image."""

from __future__ import annotations

import pytest
import torch

import tiny
from sage_grpo.models import ModelError, family
from sage_grpo.models.spec import ModelSpec

SIGMA = torch.tensor(0.5)


@pytest.fixture
def loads(monkeypatch) -> list[str]:
    """Names of the encoders that get loaded."""
    seen = []
    original = family.load_component

    def spy(folder, index, name, dtype):
        seen.append(name)
        return original(folder, index, name, dtype)

    monkeypatch.setattr(family, "load_component", spy)
    return seen


def test_equal_prompts_share_one_object(fresh_model) -> None:
    a, b, c = fresh_model("wan_t2v").encode(["a cat", "a dog", "a cat"])
    assert a is c
    assert a is not b
    assert a.negative is b.negative


def test_second_run_needs_no_text_encoder(fresh_model, tmp_path, loads) -> None:
    first = fresh_model("hunyuan15_t2v", cache=str(tmp_path)).encode(['a cat "x"'])[0]
    assert loads == ["text_encoder", "text_encoder_2"]
    second = fresh_model("hunyuan15_t2v", cache=str(tmp_path)).encode(['a cat "x"'])[0]
    assert len(loads) == 2
    for ours, theirs in ((first.tensors, second.tensors), (first.negative, second.negative)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_cache_depends_on_all_that_matters(fresh_model, tmp_path, loads) -> None:
    def count(**fields) -> int:
        fresh_model("wan_t2v", cache=str(tmp_path), **fields).encode(["a cat"])
        return len(list(tmp_path.rglob("*.safetensors")))

    assert count(guidance_scale=1.0) == 1
    assert count(guidance_scale=1.0) == 1
    assert count(guidance_scale=2.0) == 2
    assert count(guidance_scale=2.0, negative_prompt="bad") == 3
    assert count(guidance_scale=1.0, dtype="bfloat16", train=False) == 4  # an encoder of another precision
    other = tiny.build("wan_t2v", tmp_path / "other weights", seed=1)  # same shapes, other text encoder
    ModelSpec(path=str(other), cache=str(tmp_path / "c"), guidance_scale=1.0).load("cpu").encode(["a cat"])
    moved = other.rename(tmp_path / "moved")
    before = len(loads)
    ModelSpec(path=str(moved), cache=str(tmp_path / "c"), guidance_scale=1.0).load("cpu").encode(["a cat"])
    assert len(loads) == before  # where a checkpoint lies does not matter
    ModelSpec(path=str(moved), cache=str(tmp_path), guidance_scale=1.0).load("cpu").encode(["a cat"])
    assert len(loads) == before + 1  # what is in it does


def test_broken_cache_file_is_replaced(fresh_model, tmp_path) -> None:
    ours = fresh_model("wan_t2v", cache=str(tmp_path), guidance_scale=1.0)
    expected = ours.encode(["a cat"])[0].tensors["text"]
    (file,) = tmp_path.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:20])
    again = fresh_model("wan_t2v", cache=str(tmp_path), guidance_scale=1.0)
    with pytest.warns(UserWarning, match="damaged"):
        assert torch.equal(again.encode(["a cat"])[0].tensors["text"], expected)
    assert file.stat().st_size > 20


def test_default_cache_is_the_users_folder(fresh_model, tmp_path) -> None:
    fresh_model("wan_t2v", cache="auto", guidance_scale=1.0).encode(["a cat"])
    assert list((tmp_path / "cache" / "sage-grpo" / "conditioning").rglob("*.safetensors"))


def test_encoders_unload_and_come_back(fresh_model, loads) -> None:
    ours = fresh_model("wan_t2v", guidance_scale=1.0)
    a = ours.encode(["a cat"])[0]
    ours.unload_text()
    assert ours.pipe.text_encoder is None
    assert ours.encode(["a cat"])[0] is a
    assert ours.pipe.text_encoder is None
    ours.encode(["a dog"])
    assert loads == ["text_encoder", "text_encoder"]
    ours.place("text", "cpu")


def test_only_valid_tokens_are_kept(model) -> None:
    ours = model("hunyuan15_t2v")
    short, long = ours.encode(["cat", "a cat that runs"])
    assert len(long.tensors["text"]) - len(short.tensors["text"]) == len("a cat that runs") - len("cat")
    assert "glyphs" not in short.tensors
    assert "image" not in short.tensors


def test_too_long_prompts_are_cut_as_in_the_pipeline(model) -> None:
    assert len(model("wan_t2v").encode(["x" * 2000])[0].tensors["text"]) == 512
    assert len(model("hunyuan15_t2v").encode(["x" * 2000])[0].tensors["text"]) == 1000


@pytest.mark.parametrize("kind", ["hunyuan15_i2v", "wan_i2v", "wan22_i2v"])
def test_every_sample_uses_its_own_image(kind: str, model) -> None:
    ours = model(kind, guidance_scale=2.0)
    images = [tiny.image(1), tiny.image(2)]
    x = torch.randn(1, *ours.latent_shape()).repeat(2, 1, 1, 1, 1)
    with torch.no_grad():
        together = ours.velocity(x, SIGMA, ours.encode(["a cat"] * 2, images))
        alone = [ours.velocity(x[:1], SIGMA, ours.encode(["a cat"], [image])) for image in images]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)
    assert (together[0] - together[1]).abs().max() > 1e-2


def test_images_and_models_must_fit(model) -> None:
    with pytest.raises(ModelError, match="needs one image per prompt"):
        model("wan_i2v").encode(["a cat"])
    with pytest.raises(ModelError, match="starts from text"):
        model("wan_t2v").encode(["a cat"], [tiny.image()])
    with pytest.raises(ModelError, match="uint8 H x W x 3"):
        model("wan_i2v").encode(["a cat"], [torch.zeros(3, 4, 4)])
    with pytest.raises(ModelError, match="2 prompts but 1 images"):
        model("wan_i2v").encode(["a", "b"], [tiny.image()])
