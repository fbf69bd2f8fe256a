"""A rollout without noise is the diffusers pipeline: same latents, same video, for every supported pipeline."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

import tiny
from sage_grpo.flow.kernels import Ode, SageExact
from sage_grpo.flow.schedule import Schedule
from sage_grpo.models.policy import Policy, integrate

PROMPTS = ["a cat", 'a dog holds a sign "hi" and runs']
NEGATIVE = "blurry"
STEPS = 2


def stock(folder, kind: str, x: torch.Tensor, scale: float, picture: torch.Tensor):
    """The pipeline's last latents, its video and what its VAE was given."""
    pipe = tiny.pipeline(folder)
    pipe.vae.enable_slicing()  # the stock HunyuanVideo-1.5 VAE crashes for batches
    options = {"num_frames": 5, "num_inference_steps": STEPS}
    if kind.startswith("hunyuan15"):
        pipe.guider.guidance_scale = scale
        # Less padding than the 1,985 tokens of the real thing: test_packed has those.
        pipe.tokenizer_max_length, pipe.tokenizer_2_max_length, pipe.vision_num_semantic_tokens = 60, 40, 9
    else:
        options["guidance_scale"] = scale
    if kind.endswith("i2v"):
        options["image"] = Image.fromarray(picture.numpy())
    if kind != "hunyuan15_i2v":  # which derives its size from the image
        options |= {"height": 32, "width": 32}
    seen = {}
    decode, step = pipe.vae.decode, pipe.scheduler.step

    def spy_decode(z, **kwargs):
        seen["z"] = z
        return decode(z, **kwargs)

    def spy_step(*arguments, **kwargs):
        seen["latents"] = step(*arguments, **kwargs)[0]
        return (seen["latents"],)

    pipe.vae.decode, pipe.scheduler.step = spy_decode, spy_step
    prompts = {"prompt": PROMPTS, "negative_prompt": [NEGATIVE] * len(PROMPTS)}
    video = pipe(**prompts, latents=x, output_type="pt", **options).frames
    return pipe.scheduler.sigmas, seen["latents"], video, seen["z"]


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_ode_rollout_is_the_pipeline(kind: str, scale: float, checkpoint, model) -> None:
    ours = model(kind, guidance_scale=scale, negative_prompt=NEGATIVE)
    picture = tiny.image(3, 48, 48)
    x = torch.randn(2, *ours.latent_shape())
    sigmas, latents, video, z = stock(checkpoint(kind), kind, x, scale, picture)

    conditions = ours.encode(PROMPTS, [picture] * 2 if kind.endswith("i2v") else None)
    policy = Policy(ours, Ode(), Schedule(sigmas))
    y = integrate(policy, x, conditions)
    torch.testing.assert_close(y, latents, rtol=1e-5, atol=2e-5)
    # Prompts matter by far more than that, so the tolerance proves something.
    other = integrate(policy, x, conditions[::-1])
    assert (y - other).abs().max() > 1e-3

    # The VAE gets the pipeline's own numbers (scaled once), and pixels are the same but for ties in rounding.
    torch.testing.assert_close(ours._to_vae(latents), z, rtol=0, atol=0)
    expected = (video.permute(0, 1, 3, 4, 2) * 255).round().to(torch.uint8)
    off = (ours.decode(latents).int() - expected.int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() < 1e-3


def test_eta_zero_is_the_ode(model) -> None:
    ours = model("wan_t2v", guidance_scale=1.0)
    x, conditions, schedule = torch.randn(1, *ours.latent_shape()), ours.encode(["a cat"]), Schedule.shifted(4, 5.0)
    ode = integrate(Policy(ours, Ode(), schedule), x, conditions)
    still = integrate(Policy(ours, SageExact(eta=0.0), schedule), x, conditions)
    torch.testing.assert_close(still, ode, rtol=1e-5, atol=1e-5)


def test_shifted_schedule_is_hunyuans_own_grid(checkpoint) -> None:
    pipe = tiny.pipeline(checkpoint("hunyuan15_t2v"))
    import numpy as np

    pipe.scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, 11)[:-1])
    torch.testing.assert_close(Schedule.shifted(10, 5.0).sigmas, pipe.scheduler.sigmas, rtol=0, atol=1e-7)


def test_defaults_come_from_the_checkpoint(model) -> None:
    ours = model("hunyuan15_t2v")
    assert (ours.guidance_scale, ours.shift) == (3.0, 5.0)
    assert (ours.video.frames, ours.video.height, ours.video.width, ours.video.fps) == (5, 32, 32, 8.0)
    assert model("hunyuan15_t2v", shift=7.0, guidance_scale=2.0, frames=9).latent_shape() == (4, 3, 4, 4)
    assert model("wan_t2v").guidance_scale == 5.0


def test_two_experts_share_the_noise_range(model) -> None:
    high, low = model("wan22_t2v", guidance_scale=1.0), model("wan22_t2v", guidance_scale=1.0, expert="low")
    x = torch.randn(1, *high.latent_shape())
    condition = high.encode(["a cat"])
    for sigma, expert in ((0.9, high), (0.8, high), (0.79, low), (0.1, low)):
        sigma = torch.tensor(sigma)
        assert torch.equal(high.velocity(x, sigma, condition), low.velocity(x, sigma, condition))
        assert [high.trains(sigma), low.trains(sigma)] == [expert is high, expert is low]
        v = expert.velocity(x, sigma, condition)
        assert v.requires_grad
        assert not (low if expert is high else high).velocity(x, sigma, condition).requires_grad
    schedule = Schedule.shifted(6, 1.0)
    both = [Policy(m, SageExact(), schedule).trained_steps for m in (high, low)]
    assert both == [(0, 1), (2, 3, 4)]  # the last step of sage_exact has no noise


def test_second_guidance_scale_applies_to_low_noise(model) -> None:
    plain, two = model("wan22_t2v", guidance_scale=3.0), model("wan22_t2v", guidance_scale=3.0, guidance_scale_2=1.0)
    x, c = torch.randn(1, *plain.latent_shape()), plain.encode(["a cat"])
    low, high = torch.tensor(0.3), torch.tensor(0.9)
    assert torch.equal(plain.velocity(x, high, c), two.velocity(x, high, c))
    assert torch.equal(plain.velocity(x, low, c, guidance=1.0), two.velocity(x, low, c))
