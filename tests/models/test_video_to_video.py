"""Video-to-video is its stock pipeline: the clip is noised to the level of the strength, and the last steps of the grid are made from there."""

from __future__ import annotations

import json
from dataclasses import replace

import diffusers
import pytest
import torch
from PIL import Image

import double
import tiny
from sage_grpo.flow.kernels import Ode
from sage_grpo.flow.schedule import Schedule
from sage_grpo.models.policy import Policy, build_solver, integrate, solve, started
from sage_grpo.models.schedulers import steps_from_noise
from sage_grpo.models.spec import LoraSpec, ModelSpec

PROMPTS = ["a cat", "a dog runs"]
CLOSE = {"rtol": double.CLOSE, "atol": double.CLOSE}
SIZE = {"height": 32, "width": 48}
CLIP = torch.stack([tiny.image(seed, 32, 48) for seed in range(5)])
STEPS, STRENGTH = 5, 0.7
"""Of the stock pipeline, which then makes int(5 x 0.7) of them."""


def stock(folder, **call) -> torch.Tensor:
    """The latents that the pipeline makes of the clip for both prompts."""
    parts = tiny.shared_pipeline(folder).components
    names = ("tokenizer", "text_encoder", "transformer", "vae", "scheduler")
    pipe = diffusers.WanVideoToVideoPipeline(**{name: parts[name] for name in names})
    pipe.set_progress_bar_config(disable=True)
    frames = [Image.fromarray(frame.numpy()) for frame in CLIP]
    given = {"num_inference_steps": STEPS, "guidance_scale": 4.0, "negative_prompt": ["blurry"] * 2, **SIZE, **call}
    generator = torch.Generator().manual_seed(7)
    return pipe(video=frames, prompt=PROMPTS, generator=generator, output_type="latent", **given).frames


def load(folder, **fields):
    known = {"cache": None, "train": False, "negative_prompt": "blurry", "guidance_scale": 4.0, **SIZE}
    return ModelSpec(path=str(folder), **{**known, **fields}).load("cpu")


def start(ours, steps: int):
    """Where our samples start, and their conditions."""
    conditions = [replace(one, source=ours.source("clip", lambda: CLIP)) for one in ours.encode(PROMPTS)]
    noise = torch.randn(2, *ours.latent_shape(), generator=torch.Generator().manual_seed(7), dtype=torch.float32)
    return started(noise, ours.sigmas(steps)[0], conditions), conditions


@pytest.mark.parametrize("solver", ["euler", pytest.param("checkpoint", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("in_double")
def test_a_sample_is_the_pipelines(solver: str, checkpoint) -> None:
    """With the grid of FlowMatchEuler, and with the multistep solver of the published checkpoints."""
    folder = checkpoint("wan_t2v" if solver == "euler" else "wan_unipc_t2v")
    ours, steps = load(folder, options={"strength": STRENGTH}), int(STEPS * STRENGTH)
    x, conditions = start(ours, steps)
    y = solve(ours, build_solver(ours, solver, steps), x, conditions)
    torch.testing.assert_close(y, stock(folder, strength=STRENGTH), **CLOSE)
    grid = ours.sigmas(steps)
    assert len(grid) == steps + 1
    assert torch.equal(grid, ours.stock_sigmas(STEPS)[-len(grid) :])
    assert 0.5 < grid[0] < 1
    if solver == "euler":
        assert torch.equal(y, integrate(Policy(ours, Ode(), Schedule(grid)), x, conditions))
    for other in (x + 1e-3, x.flip(0)):  # the start matters by far more than the tolerance
        assert (solve(ours, build_solver(ours, solver, steps), other, conditions) - y).abs().max() > 1e-4


@pytest.mark.slow
@pytest.mark.usefixtures("in_double")
def test_a_saved_video_to_video_folder_has_the_pipelines_strength(checkpoint, tmp_path) -> None:
    folder = tiny.variant(checkpoint("wan_t2v"), tmp_path / "wan")
    index = json.loads((folder / "model_index.json").read_text())
    tiny.write(folder / "model_index.json", {**index, "_class_name": "WanVideoToVideoPipeline"})
    ours = load(folder)
    assert ours.strength == 0.8
    x, conditions = start(ours, 4)
    y = solve(ours, build_solver(ours, "euler", 4), x, conditions)
    torch.testing.assert_close(y, stock(checkpoint("wan_t2v")), **CLOSE)


@pytest.mark.parametrize("merged", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_lines_of_a_card_load_the_export(merged: bool, checkpoint, fresh_model, tmp_path) -> None:
    ours = fresh_model("wan_t2v", options={"strength": STRENGTH}, lora=LoraSpec(rank=2))
    with torch.no_grad():
        for parameter in ours.trainable().values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours.save(tmp_path / "out", merged=merged)
    card, names = (tmp_path / "out" / "README.md").read_text(), {}
    assert "from clips with strength 0.7." in card
    base = checkpoint("wan_t2v")
    lines = card.split("```python\n")[1].split("```")[0].replace(f"path/to/{base.name}", str(base))
    exec(lines.replace("path/to/this/folder", str(tmp_path / "out")), names)
    pipe = names["pipe"]
    assert type(pipe) is diffusers.WanVideoToVideoPipeline
    x, sigma, condition = torch.randn(1, *ours.latent_shape()), torch.tensor(0.6), ours.encode(["a cat"])
    with torch.no_grad():
        wanted = ours.velocity(x, sigma, condition, guidance=1.0)
        ours.network, ours.transformer = ours._adapted(pipe.transformer), pipe.transformer
        torch.testing.assert_close(ours.velocity(x, sigma, condition, guidance=1.0), wanted, rtol=1e-4, atol=1e-5)


def test_steps_are_those_that_are_made() -> None:
    for strength in (0.01, 0.3, 0.55, 0.7, 0.8, 1.0):
        for steps in range(1, 60):
            whole = steps_from_noise(steps, strength)
            assert int(whole * strength) == steps
            assert int((whole - 1) * strength) < steps
    assert steps_from_noise(40, 0.8) == 50
    assert steps_from_noise(40, None) == 40


def test_without_a_strength_samples_start_from_noise(model) -> None:
    ours = model("wan_t2v", guidance_scale=1.0)
    noise, conditions = torch.randn(1, *ours.latent_shape()), ours.encode(["a cat"])
    assert ours.strength is None
    assert started(noise, ours.sigmas(3)[0], conditions) is noise
    assert ours.sigmas(3)[0] == 1
