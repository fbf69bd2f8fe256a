"""The model of the embedded world: small pieces and safe files; it is an ordinary HunyuanVideo-1.5 folder."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import torch

from sage_grpo.models.spec import ModelSpec
from sage_grpo.training.inputs import prompts_from
from world_laws import is_a_small_folder

FOLDER = Path(str(files("sage_grpo") / "worlds" / "shapes" / "assets"))


def test_the_folder_is_small_and_holds_safetensors_only() -> None:
    is_a_small_folder(FOLDER, 25e6)


@pytest.mark.slow
def test_stock_pipeline_loads_the_folder_and_agrees() -> None:
    """The adapter has no special case for this checkpoint: diffusers' own pipeline gives the same clip."""
    from diffusers import HunyuanVideo15Pipeline

    from sage_grpo.models.policy import Policy, integrate
    from sage_grpo.samplers.kernels import Ode
    from sage_grpo.samplers.schedule import Schedule

    model = ModelSpec(train=False, cache=None).load()
    text = prompts_from("shapes")[0].text
    pipe = HunyuanVideo15Pipeline.from_pretrained(FOLDER, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    noise = torch.randn(1, *model.latent_shape(), generator=torch.Generator().manual_seed(0))
    stock = pipe(
        prompt=text, height=32, width=32, num_frames=9, num_inference_steps=4, latents=noise, output_type="latent"
    ).frames
    ours = integrate(Policy(model, Ode(), Schedule.shifted(4, model.shift)), noise, model.encode([text]))
    torch.testing.assert_close(ours, stock.float(), atol=2e-4, rtol=1e-4)
