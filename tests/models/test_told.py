"""What the network is told is what the stock pipeline tells it: text where a prompt is empty, its length, its timestep in bfloat16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from stock_run import CLOSE, fields_of, slow, start, stock

import tiny
import tiny_families
from sage_grpo.models import ModelError
from sage_grpo.models.policy import build_solver, solve
from sage_grpo.models.spec import ModelSpec

PROMPT = "A cat jumps"


@pytest.mark.parametrize("kind", ["wan_t2v", *slow("ltx")])
@pytest.mark.usefixtures("in_double")
def test_an_empty_negative_prompt_is_the_pipelines(kind: str, checkpoint, fresh_model, monkeypatch) -> None:
    """LTX-Video attends to the padding then, Wan to its zeros: finite, and so it is here."""
    ours = fresh_model(kind, **fields_of(kind, 4.0) | {"negative_prompt": ""})
    silent = tiny_families.byte_level()  # marks neither beginning nor end of a text: an empty prompt is no token at all
    assert not silent("").input_ids
    for pipe in (ours.pipe, tiny.shared_pipeline(checkpoint(kind))):
        monkeypatch.setattr(pipe, "tokenizer", silent)
    x = start(ours)[:1]
    run = stock(checkpoint(kind), kind, x, 4.0, [PROMPT], steps=2, negative_prompt="")
    y = solve(ours, build_solver(ours, "euler", 2), x, ours.encode([PROMPT]))
    assert y.isfinite().all()
    torch.testing.assert_close(y, run.latents, **CLOSE)
    ours.spec = replace(ours.spec, negative_prompt="blurry")
    other = solve(ours, build_solver(ours, "euler", 2), x, ours.encode([PROMPT + "!"]))
    assert (y - other).abs().max() > 1e-3


def test_no_text_at_all_is_refused_by_name(fresh_model, monkeypatch) -> None:
    ours = fresh_model("qwen_image", guidance_scale=4.0, train=False)
    with monkeypatch.context() as patch:
        patch.setattr(ours.pipe, "prompt_template_encode_start_idx", 10_000)
        with pytest.raises(ModelError, match=r"into .* tokens, of which the pipeline crops 10000: nothing is left"):
            ours.encode([PROMPT])
    monkeypatch.setattr(ours, "_encode", lambda prompt, image: {"text": torch.zeros(len(prompt), 16)})
    with pytest.raises(
        ModelError, match=r"Nothing of the prompt '' .*\"text\" has shape \(0, 16\).*model\.negative_prompt"
    ):
        ours.encode([PROMPT])


def test_flux_pads_text_as_its_authors_do(checkpoint, fresh_model, tmp_path) -> None:
    given = {"guidance_scale": 1.0, "train": False, "cache": str(tmp_path / "cache")}
    cases = (
        ("flux", {}, 512),
        *(("flux_plain", {"text_tokens": count} if count else {}, count or 256) for count in (0, 64, 0)),
    )
    for kind, options, tokens in cases:
        ours = fresh_model(kind, options=options, **given)
        assert len(ours.encode([PROMPT])[0].tensors["text"]) == tokens
        assert ours.choices["text tokens"].startswith(f"{tokens} (")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**tiny_families.DYNAMIC)
    dev = tiny.variant(checkpoint("flux_plain"), tmp_path / "flux", scheduler=scheduler)
    assert ModelSpec(path=str(dev), cache=None, train=False).load("cpu").text_tokens == 512


class Told(Exception):
    """What a network is given."""


@pytest.mark.parametrize("kind", ["flux", "flux2", "qwen_image", "wan_t2v"])
def test_timesteps_in_bfloat16(kind: str, checkpoint) -> None:
    """FLUX and Qwen-Image round them as their pipelines do; others have float32 (docs/models.md). Guidance that is an input is rounded by all."""
    scale = 3.3 if kind == "flux" else 1.0
    spec = ModelSpec(path=str(checkpoint(kind)), cache=None, dtype="bfloat16", train=False, guidance_scale=scale)
    ours = spec.load("cpu")

    def network(**given: Any) -> None:
        raise Told(given["timestep"], given.get("guidance"))

    ours.network, ours._running = network, lambda sigma: network
    conditions = ours.encode([PROMPT])
    with pytest.raises(Told) as told:
        ours.velocity(torch.randn(1, *ours.latent_shape()), torch.tensor(0.9545), conditions)
    timestep, guidance = told.value.args
    rounds = kind in ("flux", "flux2", "qwen_image")
    wanted = torch.tensor([956.0], dtype=torch.bfloat16) / 1000 if rounds else torch.tensor([954.5])
    torch.testing.assert_close(timestep, wanted, rtol=1e-6, atol=0)
    if kind == "flux":
        assert guidance.item() == pytest.approx(3.3, rel=1e-2)
