"""LTXConditionPipeline: a first frame is the stock pipeline's, also for checkpoints that name the older one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from diffusers.pipelines.ltx import pipeline_ltx_condition as module
from PIL import Image
from stock_run import CLOSE, PROMPTS

import tiny
from sage_grpo.models import ModelError
from sage_grpo.models.policy import Policy, integrate
from sage_grpo.models.spec import ModelSpec
from sage_grpo.plan.architecture import find_architecture
from sage_grpo.samplers.kernels import Ode, SageExact
from sage_grpo.samplers.schedule import Schedule

KIND = "ltx_condition"
FORMAT = {"frames": 33, "height": 32, "width": 64}


def stock(folder, ours, x: torch.Tensor, picture: torch.Tensor) -> torch.Tensor:
    """The pipeline's latents from the noise x, with the mean of what its VAE says of the picture, to which it adds no noise."""
    pipe = tiny.shared_pipeline(folder)
    conditions = [module.LTXVideoCondition(image=Image.fromarray(picture.numpy()))]
    size = {"num_frames": FORMAT["frames"], "height": FORMAT["height"], "width": FORMAT["width"]}
    options = {**size, "frame_rate": ours.video.fps, "guidance_scale": 4.0, "num_inference_steps": 2}
    options |= {"image_cond_noise_scale": 0.0, "output_type": "latent", "negative_prompt": "blurry"}
    distribution = type(pipe.vae.encode(torch.zeros(1, 3, 1, 32, 64)).latent_dist)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distribution, "sample", lambda self, generator=None: self.mode())
        patch.setattr(module, "randn_tensor", lambda *arguments, **kwargs: x.clone())
        return pipe(conditions=conditions, prompt=PROMPTS[0], **options).frames


@pytest.mark.usefixtures("in_double")
def test_a_first_frame_is_the_pipelines_and_stays(checkpoint, model) -> None:
    ours = model(KIND, guidance_scale=4.0, negative_prompt="blurry", **FORMAT)
    x, picture = torch.randn(1, *ours.latent_shape()), tiny.image(0, 48, 80)
    conditions = ours.encode(PROMPTS[:1], [picture])
    y = integrate(Policy(ours, Ode(), Schedule(ours.sigmas(2))), x, conditions)
    torch.testing.assert_close(y, stock(checkpoint(KIND), ours, x, picture), **CLOSE)
    explored = Policy(ours, SageExact(), Schedule(ours.sigmas(3)))
    y = integrate(explored, x, conditions, lambda index: torch.randn_like(x))
    torch.testing.assert_close(y[0, :, :1], conditions[0].tensors["condition"].to(y))
    v = ours.velocity(x, ours.sigmas(3)[1], conditions)
    fixed = torch.autograd.grad(v[:, :, :1].sum(), list(ours.trainable().values()), allow_unused=True)
    assert all(one is None or not one.any() for one in fixed)


def test_a_checkpoint_that_names_the_older_pipeline_can_be_run_in_this_one(checkpoint, model, tmp_path) -> None:
    folder = tiny.variant(checkpoint(KIND), tmp_path / "ltx")
    index = json.loads((folder / "model_index.json").read_text())
    tiny.write(folder / "model_index.json", {**index, "_class_name": "LTXPipeline"})
    plain = ModelSpec(path=str(folder), cache=None, train=False, guidance_scale=1.0, **FORMAT)
    asked = replace(plain, options={"condition_pipeline": 1})
    named, ours, older = model(KIND, train=False, guidance_scale=1.0, **FORMAT), asked.load("cpu"), plain.load("cpu")
    x, sigma = torch.randn(1, *ours.latent_shape()), torch.tensor(0.6)
    one, other, third = (found.velocity(x, sigma, found.encode(["a cat"])) for found in (named, ours, older))
    assert torch.equal(one, other)
    assert not torch.equal(one, third)
    assert torch.equal(ours.sigmas(6), named.sigmas(6))
    assert torch.equal(find_architecture(asked).model.sigmas(6), named.sigmas(6))
    assert not torch.equal(find_architecture(plain).model.sigmas(6), named.sigmas(6))
    ours.save(tmp_path / "out", merged=True)
    assert "LTXConditionPipeline.from_pretrained(" in (tmp_path / "out" / "README.md").read_text()


def test_what_does_not_fit_is_refused(model) -> None:
    ours = model(KIND, train=False, **FORMAT)
    with pytest.raises(ModelError, match="leave last_image out"):
        ours.encode(["a cat"], [torch.stack([tiny.image()] * 2)])
    with pytest.raises(ModelError, match="guidance_rescale is for clips from text"):
        model(KIND, train=False, options={"guidance_rescale": 0.5}).encode(["a cat"], [tiny.image()])
    with pytest.raises(ModelError, match="at least 1, got 0"):
        ours.sigmas(0)
    torch.testing.assert_close(ours.sigmas(6, 3.0), 3 * ours.sigmas(6) / (1 + 2 * ours.sigmas(6)))
