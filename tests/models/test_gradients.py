"""The order of gradients, one graph for a compiled network, and precision of what is trained."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import tiny
from sage_grpo.models import guidance
from sage_grpo.models.experts import unread_parameters
from sage_grpo.models.guidance import one_after_another
from sage_grpo.models.lora import match_targets

SIGMA = torch.tensor(0.9)


def test_branches_one_after_another_give_the_same_gradient() -> None:
    network, x = nn.Linear(3, 3), torch.randn(5, 3)
    arrivals = []
    network.weight.register_post_accumulate_grad_hook(lambda p: arrivals.append(p.grad.clone()))

    def gradient(separate: bool) -> torch.Tensor:
        network.zero_grad()
        first, second = network(x), network(x + 1)
        if separate:
            first, second = one_after_another(first, second)
        v = second + 6.0 * (first - second)
        (at_v,) = torch.autograd.grad(v.square().sum(), v, retain_graph=True)
        assert not arrivals  # asking at the velocity touches no weight
        v.backward(at_v)
        return network.weight.grad.clone()

    joint, joint_arrivals = gradient(False), len(arrivals)
    arrivals.clear()
    torch.testing.assert_close(gradient(True), joint)
    assert joint_arrivals == 1
    assert len(arrivals) == 2  # the first branch's gradient is in its place before the second's begins


@pytest.mark.parametrize(
    "kind",
    ["hunyuan15_i2v", "wan_t2v", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("flux2", "sd3", "z_image"))],
)
def test_adapted_modules_without_gradient_are_known(kind: str, fresh_model) -> None:
    """Also those whose gradient is exactly zero: the last block may compute what nothing reads. And no other is left out."""
    ours = fresh_model(kind, guidance_scale=1.0)
    ours.transformer.requires_grad_(True)
    images = [tiny.image()] if 0 not in ours.pictures else None
    v = ours.velocity(torch.randn(1, *ours.latent_shape()), SIGMA, ours.encode(["a dog runs"], images))
    v.backward(torch.randn_like(v))
    silent = {name for name, p in ours.transformer.named_parameters() if p.grad is None or not p.grad.any()}
    targets = match_targets(ours.transformer, ours.traits.lora_targets, ours.traits.blocks)
    unread, adapted = unread_parameters(ours, ours.transformer), {f"{name}.weight" for name in targets}
    assert unread & adapted == silent & adapted
    assert unread <= silent


@pytest.mark.parametrize(("kind", "together"), [("hunyuan15_t2v", False), ("wan_t2v", True)])
def test_without_the_negatives_gradient_it_is_a_constant(kind: str, together: bool, model, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(guidance, "runs_together", lambda device, tokens: asked.append(tokens) or together)
    ours, scale, probe = model(kind, guidance_scale=3.0, negative_prompt="a dog"), 3.0, None
    x, conditions = torch.randn(2, *ours.latent_shape()), ours.encode(["a cat", "a bat"])
    whole = ours.velocity(x, SIGMA, conditions).detach()
    probe = torch.randn_like(whole)

    def gradients(v: torch.Tensor) -> dict[str, torch.Tensor]:
        ours.network.zero_grad(set_to_none=True)
        v.backward(probe)
        found = {name: p.grad.clone() for name, p in ours.trainable().items()}
        ours.network.zero_grad(set_to_none=True)
        return found

    monkeypatch.setattr(ours, "spec", replace(ours.spec, negative_gradient=False))
    v = ours.velocity(x, SIGMA, conditions)
    with torch.no_grad():
        assert torch.equal(ours.velocity(x, SIGMA, conditions), v.detach())
    assert torch.equal(v.detach(), whole)
    alone = ours.velocity(x, SIGMA, conditions, guidance=1.0)  # the conditional branch
    assert set(asked) == {4 * ours.tokens}  # two clips, two branches
    found, expected = gradients(v), gradients(scale * alone + (whole - scale * alone).detach())
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4, msg=name)


def test_the_negative_branch_keeps_nothing_for_a_backward_pass_that_it_does_not_have(model, monkeypatch) -> None:
    ours, graphs = model("wan_t2v", guidance_scale=3.0), []
    forward = ours._forward
    monkeypatch.setattr(ours, "spec", replace(ours.spec, negative_gradient=False))
    monkeypatch.setattr(ours, "_forward", lambda *given: graphs.append(torch.is_grad_enabled()) or forward(*given))
    ours.velocity(torch.randn(1, *ours.latent_shape()), SIGMA, ours.encode(["a cat"]))
    assert graphs == [False, True]
