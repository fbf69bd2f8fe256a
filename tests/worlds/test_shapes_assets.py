"""The checkpoint that ships with the package: an ordinary HunyuanVideo-1.5 folder that scores as its card says."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from sage_grpo.models.spec import ModelSpec
from sage_grpo.training.inputs import prompts_from

FOLDER = Path(str(files("sage_grpo") / "worlds" / "shapes" / "assets"))
CEILING = 2.0


@pytest.fixture(scope="module")
def model():
    return ModelSpec(train=False, cache=None).load()


def test_folder_is_small_and_holds_safetensors_only() -> None:
    sizes = {file.name: file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()}
    assert sum(sizes.values()) <= 25e6
    assert {Path(name).suffix for name in sizes} <= {".safetensors", ".json", ".md", ".jinja", ".txt"}
    assert json.loads((FOLDER / "model_index.json").read_text())["_class_name"] == "HunyuanVideo15Pipeline"


@pytest.mark.slow
def test_stock_pipeline_loads_the_folder_and_agrees(model) -> None:
    """The adapter has no special case for this checkpoint: diffusers' own pipeline gives the same clip."""
    from diffusers import HunyuanVideo15Pipeline

    from sage_grpo.flow.kernels import Ode
    from sage_grpo.flow.schedule import Schedule
    from sage_grpo.models.policy import Policy, integrate

    text = prompts_from("shapes")[0].text
    pipe = HunyuanVideo15Pipeline.from_pretrained(FOLDER, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    noise = torch.randn(1, *model.latent_shape(), generator=torch.Generator().manual_seed(0))
    stock = pipe(
        prompt=text, height=32, width=32, num_frames=9, num_inference_steps=4, latents=noise, output_type="latent"
    ).frames
    ours = integrate(Policy(model, Ode(), Schedule.shifted(4, model.shift)), noise, model.encode([text]))
    torch.testing.assert_close(ours, stock.float(), atol=2e-4, rtol=1e-4)
