"""The order of gradients, one graph for a compiled network, and precision of what is trained."""

from __future__ import annotations

import torch
from torch import nn

from sage_grpo.models.family import FamilyModel
from sage_grpo.models.gradients import one_after_another
from sage_grpo.models.spec import ModelSpec

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


def test_without_gradients_nothing_happens() -> None:
    x = torch.randn(2)
    assert one_after_another(x, x)[0] is x


def test_guided_velocities_use_it(model) -> None:
    """A weight that both branches read gets its gradient in two portions."""
    ours = model("hunyuan15_t2v", guidance_scale=3.0)
    weight = next(p for name, p in ours.trainable().items() if "transformer_blocks.0.ff.net.2.weight" in name)
    arrivals = []
    handle = weight.register_post_accumulate_grad_hook(lambda p: arrivals.append(1))
    v = ours.velocity(torch.randn(1, *ours.latent_shape()), SIGMA, ours.encode(["a cat"]))
    v.sum().backward()
    handle.remove()
    ours.network.zero_grad(set_to_none=True)
    assert len(arrivals) == 2


def test_the_expert_that_is_not_trained_is_kept_in_half_the_bytes(fresh_model) -> None:
    ours = fresh_model("wan22_t2v", dtype="bfloat16", guidance_scale=1.0, expert="low")
    assert {p.dtype for p in ours.trainable().values()} == {torch.float32}
    (other,) = ours.others
    assert other is ours.pipe.transformer
    assert other.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
    x, conditions = torch.randn(1, *ours.latent_shape()), ours.encode(["a cat"])
    for sigma in (0.95, 0.3):
        assert torch.isfinite(ours.velocity(x, torch.tensor(sigma), conditions)).all()


def test_a_network_that_will_be_sharded_stays_in_cpu_memory(checkpoint, monkeypatch) -> None:
    placed = []
    monkeypatch.setattr(FamilyModel, "place", lambda self, part, device: placed.append(part))
    spec = ModelSpec(path=str(checkpoint("hunyuan15_t2v")), cache=None)
    spec.load("cpu", sharded=True)
    assert placed == ["vae"]
    spec.load("cpu")
    assert placed == ["vae", "vae", "network"]
