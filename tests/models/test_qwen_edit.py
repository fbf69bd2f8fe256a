"""Qwen-Image-Edit is its stock pipeline, learns, and saves what diffusers loads."""

from __future__ import annotations

import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as module
from PIL import Image

import double
import tiny
from sage_grpo.flow.kernels import Ode, Sage
from sage_grpo.flow.schedule import Schedule
from sage_grpo.models import ModelError
from sage_grpo.models.policy import Policy, integrate
from sage_grpo.models.spec import LoraSpec

KIND, AREA = "qwen_image_edit", 64 * 64
SMALL = {"options": {"picture_pixels": AREA}, "height": 32, "width": 48}
PROMPTS = ["make it red", "add a dog"]


@pytest.mark.usefixtures("in_double")
def test_ode_rollout_is_the_pipeline(checkpoint, model, monkeypatch) -> None:
    ours = model(KIND, guidance_scale=4.0, negative_prompt="blurry", train=False, **SMALL)
    pipe, picture = tiny.pipeline(checkpoint(KIND)), tiny.image(3, 40, 80)
    real = module.calculate_dimensions
    monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: real(AREA, ratio))
    x = torch.randn(1, *ours.latent_shape(), generator=torch.Generator().manual_seed(7))
    flat = x[:, :, 0]
    images = pipe(
        image=Image.fromarray(picture.numpy()),
        prompt=PROMPTS[:1],
        negative_prompt=["blurry"],
        true_cfg_scale=4.0,
        num_inference_steps=3,
        height=32,
        width=48,
        latents=pipe._pack_latents(flat, *flat.shape),
        output_type="latent",
    ).images
    monkeypatch.undo()
    latents = pipe._unpack_latents(images, 32, 48, pipe.vae_scale_factor)
    torch.testing.assert_close(ours.sigmas(3), pipe.scheduler.sigmas.float(), rtol=0, atol=1e-6)
    policy = Policy(ours, Ode(), Schedule(ours.sigmas(3)))
    y = integrate(policy, x, ours.encode(PROMPTS[:1], [picture]))
    torch.testing.assert_close(y, latents, rtol=double.CLOSE, atol=double.CLOSE)
    for prompt, image in ((PROMPTS[1], picture), (PROMPTS[0], tiny.image(4, 40, 80))):
        assert (integrate(policy, x, ours.encode([prompt], [image])) - y).abs().max() > 1e-3


def test_replays_are_exact_and_every_parameter_learns(model) -> None:
    ours = model(KIND, guidance_scale=1.0, **SMALL)
    conditions = ours.encode(PROMPTS, [tiny.image(1, 40, 80), tiny.image(2, 64, 32)])  # of two shapes
    policy = Policy(ours, Sage(0.5), Schedule(ours.sigmas(3)))
    x = torch.randn(2, *ours.latent_shape())
    with torch.no_grad():
        before = policy.step(1, x, conditions).gaussian.log_prob(x)
    log_prob = policy.step(1, x, conditions).gaussian.log_prob(x)
    assert torch.equal(log_prob.detach(), before)
    log_prob.sum().backward()
    assert not [name for name, p in ours.trainable().items() if p.grad is None or not p.grad.any()]
    ours.network.zero_grad()


def test_a_picture_is_needed_and_a_size_is_told(model) -> None:
    ours = model(KIND, guidance_scale=1.0, train=False, **SMALL)
    with pytest.raises(ModelError, match="needs one image per prompt"):
        ours.encode(["make it red"])
    with pytest.raises(ModelError, match="picture_pixels is a whole number from 1024"):
        model(KIND, options={"picture_pixels": 0.5})


@pytest.mark.slow
def test_a_lora_loads_in_diffusers(checkpoint, fresh_model, tmp_path) -> None:
    ours = fresh_model(KIND, guidance_scale=1.0, lora=LoraSpec(rank=2, alpha=3.0), **SMALL)
    with torch.no_grad():
        for parameter in ours.trainable().values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours.save(tmp_path / "lora")
    ours.save(tmp_path / "whole", merged=True)
    pipe = tiny.pipeline(checkpoint(KIND))
    pipe.load_lora_weights(str(tmp_path / "lora"))
    adapted = {name.replace(".default_0.", ".default."): p for name, p in pipe.transformer.named_parameters()}
    assert all(torch.equal(adapted[name], p) for name, p in ours.trainable().items())
    whole = tiny.pipeline(tmp_path / "whole")
    conditions, x = ours.encode(PROMPTS[:1], [tiny.image(1)]), torch.randn(1, *ours.latent_shape())
    with torch.no_grad():
        v = ours.velocity(x, torch.tensor(0.6), conditions)
        ours.network = whole.transformer.eval()
        torch.testing.assert_close(ours.velocity(x, torch.tensor(0.6), conditions), v, rtol=1e-4, atol=1e-5)
