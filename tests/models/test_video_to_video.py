"""Video-to-video is its stock pipeline: the clip is noised to the level of the strength, and the last steps of the grid are made from there."""

from __future__ import annotations

from dataclasses import replace

import diffusers
import pytest
import torch
from PIL import Image
from stock_run import CLOSE, PROMPTS, fields_of, seeded

import tiny
from sage_grpo.models.policy import Policy, build_solver, integrate, solve, started
from sage_grpo.models.schedulers import steps_from_noise
from sage_grpo.samplers.kernels import Ode
from sage_grpo.samplers.schedule import Schedule

SIZE = {"height": 32, "width": 48}
CLIP = torch.stack([tiny.image(seed, 32, 48) for seed in range(5)])
STEPS, STRENGTH = 5, 0.7
"""Of the stock pipeline, which then makes int(5 x 0.7) of them."""


def stock(folder, **call) -> torch.Tensor:
    parts = tiny.shared_pipeline(folder).components
    names = ("tokenizer", "text_encoder", "transformer", "vae", "scheduler")
    pipe = diffusers.WanVideoToVideoPipeline(**{name: parts[name] for name in names})
    pipe.set_progress_bar_config(disable=True)
    frames = [Image.fromarray(frame.numpy()) for frame in CLIP]
    given = {"num_inference_steps": STEPS, "guidance_scale": 4.0, "negative_prompt": ["blurry"] * 2, **SIZE, **call}
    return pipe(video=frames, prompt=PROMPTS, generator=seeded(), output_type="latent", **given).frames


@pytest.mark.parametrize("solver", ["euler", pytest.param("checkpoint", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("in_double")
def test_a_sample_is_the_pipelines(solver: str, checkpoint, fresh_model) -> None:
    kind, steps = "wan_t2v" if solver == "euler" else "wan_unipc_t2v", int(STEPS * STRENGTH)
    ours, folder = fresh_model(kind, **fields_of(kind, 4.0), options={"strength": STRENGTH}), checkpoint(kind)
    conditions = [
        replace(one, source=ours.abilities.start.source("clip", lambda: CLIP)) for one in ours.encode(PROMPTS)
    ]
    noise = torch.randn(2, *ours.latent_shape(), generator=seeded(), dtype=torch.float32)
    x = started(noise, ours.sigmas(steps)[0], conditions)
    y = solve(ours, build_solver(ours, solver, steps), x, conditions)
    torch.testing.assert_close(y, stock(folder, strength=STRENGTH), **CLOSE)
    grid = ours.sigmas(steps)
    assert len(grid) == steps + 1
    assert torch.equal(grid, ours.schedule.sigmas(STEPS)[-len(grid) :])
    assert 0.5 < grid[0] < 1
    if solver == "euler":
        assert torch.equal(y, integrate(Policy(ours, Ode(), Schedule(grid)), x, conditions))
    for other in (x + 1e-3, x.flip(0)):  # the start matters by far more than the tolerance
        assert (solve(ours, build_solver(ours, solver, steps), other, conditions) - y).abs().max() > 1e-4


def test_steps_are_those_that_are_made() -> None:
    for strength in (0.01, 0.3, 0.55, 0.7, 0.8, 1.0):
        for steps in range(1, 60):
            whole = steps_from_noise(steps, strength)
            assert int(whole * strength) == steps
            assert int((whole - 1) * strength) < steps
    assert steps_from_noise(40, 0.8) == 50
    assert steps_from_noise(40, None) == 40
