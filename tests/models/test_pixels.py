"""Clips with a graph: what `decode` rounds, and their gradient."""

from __future__ import annotations

import pytest
import torch

from sage_grpo.models.spec import ModelSpec
from slowly import slow_but

KINDS = ("hunyuan15_t2v", "wan_t2v", "wan22_5b_t2v", "ltx", "sana_video", "hunyuan", "flux", "sd3", "qwen_image")


@pytest.mark.parametrize("kind", slow_but(KINDS, "hunyuan15_t2v", "wan_t2v"))
def test_pixels_are_what_decode_rounds_and_have_its_slope(kind: str, checkpoint) -> None:
    model = ModelSpec(path=str(checkpoint(kind))).load("cpu")
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(1, *model.latent_shape(), generator=draw)
    latents = z.clone().requires_grad_()
    clip = model.pixels(latents)
    decoded = model.decode(z)
    assert clip.shape == decoded.shape
    assert (clip.detach() - decoded.float()).abs().max() <= 0.51
    weight = torch.randn(clip.shape, generator=draw)
    (gradient,) = torch.autograd.grad((weight * clip).sum(), latents)
    direction = gradient / gradient.norm()
    with torch.no_grad():
        ends = [float((weight * model.pixels(z + step * direction)).double().sum()) for step in (-0.0005, 0.0005)]
    assert float(gradient.norm()) > 0
    assert (ends[1] - ends[0]) / 0.001 == pytest.approx(float(gradient.norm()), rel=0.05)
