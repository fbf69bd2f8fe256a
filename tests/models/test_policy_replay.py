"""Rollout and replay are one code path: the first log-ratio is exactly zero."""

from __future__ import annotations

import pytest
import torch

from sage_grpo.flow.kernels import Cps, Dance, Flow, Ode, Sage, SageExact
from sage_grpo.flow.schedule import Schedule
from sage_grpo.models.policy import Policy, integrate
from sage_grpo.models.spec import LoraSpec
from slowly import slow_but

KERNELS = [Flow(0.5), Dance(0.5), Sage(0.5), Cps(0.5), SageExact(0.5)]
PROMPTS = ["a cat", "a small dog", "a cat"]


def roll_out(policy: Policy, conditions, seed: int = 0):
    """States and log-probabilities of the trained steps, without gradients."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((len(conditions), *policy.model.latent_shape()), generator=generator)
    kept = []
    with torch.no_grad():
        for index in range(policy.schedule.num_steps):
            gaussian = policy.step(index, x, conditions).gaussian
            if not policy.is_noisy(index):
                x = gaussian.mean
                continue
            x_next = gaussian.sample(torch.randn(x.shape, generator=generator))
            kept.append((index, x, x_next, gaussian.log_prob(x_next)))
            x = x_next
    return kept


@pytest.mark.parametrize("kept", slow_but(["all", "attention", "input"], "attention"))
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
def test_first_log_ratio_is_exactly_zero(kernel, kept: str, replay_model) -> None:
    ours, conditions = replay_model
    ours.keep([kept] * len(ours.blocks()))
    policy = Policy(ours, kernel, Schedule.shifted(4, 5.0))
    kept = roll_out(policy, conditions)
    assert len(kept) >= 3
    for index, x, x_next, log_prob_old in kept:
        log_prob = policy.step(index, x, conditions).gaussian.log_prob(x_next)
        assert log_prob.requires_grad
        assert torch.equal(log_prob.detach() - log_prob_old, torch.zeros(3))


@pytest.fixture(scope="module", params=["hunyuan15_t2v", "wan_t2v"])
def replay_model(request, model):
    ours = model(request.param, guidance_scale=3.0)
    yield ours, ours.encode(PROMPTS)
    ours.keep(["all"] * len(ours.blocks()))


@pytest.mark.parametrize("kind", ["hunyuan15_t2v", "wan_t2v"])
@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)], ids=["all weights", "lora"])
def test_what_blocks_keep_does_not_change_gradients(kind: str, lora: LoraSpec | None, fresh_model) -> None:
    ours = fresh_model(kind, lora=lora)
    x, conditions = torch.randn(2, *ours.latent_shape()), ours.encode(PROMPTS[:2])
    gradients = []
    for levels in (("all", "all"), ("input", "input"), ("attention", "attention"), ("attention", "all")):
        ours.keep(levels)
        ours.network.zero_grad()
        ours.velocity(x, torch.tensor(0.6), conditions).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in ours.trainable().values()])
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other))


@pytest.mark.parametrize("fields", [{"train": False}, {}], ids=["bf16 weights", "float32 master weights"])
def test_bfloat16_deviation_is_bounded(fields: dict, model) -> None:
    """Replay in the same batch is exact also in bfloat16; against float32 it is off by the format's own precision."""
    exact = model("hunyuan15_t2v", guidance_scale=1.0)
    rough = model("hunyuan15_t2v", guidance_scale=1.0, dtype="bfloat16", **fields)
    prompts = ["a cat", "a small dog"]  # no quotes: the glyph projection is 2048 wide, and a CPU's bfloat16 is slow
    conditions = rough.encode(prompts)
    policy = Policy(rough, Sage(0.5), Schedule.shifted(2, 5.0))
    kept = roll_out(policy, conditions)
    assert len(kept) == 2
    for index, x, x_next, log_prob_old in kept:
        with torch.no_grad():
            again = policy.step(index, x, conditions).gaussian.log_prob(x_next)
            sigma = policy.schedule.pair(index)[0]
            v, v_exact = rough.velocity(x, sigma, conditions), exact.velocity(x, sigma, exact.encode(prompts))
        assert torch.equal(again, log_prob_old)
        error = ((v - v_exact).norm() / v_exact.norm()).item()
        assert 1e-5 < error < 0.02  # measured: 0.006 to 0.007; zero would mean that bfloat16 was not used


def test_bfloat16_log_ratio_in_another_batch_is_bounded(model) -> None:
    """Replaying in other micro-batches than the rollout's is not exact; this is how far off it gets."""
    rough = model("hunyuan15_t2v", guidance_scale=1.0, dtype="bfloat16", train=False)
    conditions = rough.encode(["a cat"] * 3)
    policy = Policy(rough, Sage(0.5), Schedule.shifted(2, 5.0))
    kept = roll_out(policy, conditions)
    assert len(kept) == 2
    for index, x, x_next, log_prob_old in kept:
        with torch.no_grad():
            alone = torch.cat(
                [
                    policy.step(index, x[i : i + 1], conditions[:1]).gaussian.log_prob(x_next[i : i + 1])
                    for i in range(3)
                ]
            )
        assert (alone - log_prob_old).abs().max() < 6e-3  # measured: 6e-4, six times the paper's clip range


def test_master_weights_stay_float32(fresh_model) -> None:
    ours = fresh_model("hunyuan15_t2v", guidance_scale=1.0, dtype="bfloat16")
    v = ours.velocity(torch.randn(1, *ours.latent_shape()), torch.tensor(0.5), ours.encode(["a cat"]))
    v.sum().backward()
    assert v.dtype == torch.float32
    assert {p.dtype for p in ours.trainable().values()} == {torch.float32}
    assert {p.grad.dtype for p in ours.trainable().values()} == {torch.float32}


def test_steps_outside_the_window_are_the_ode(model) -> None:
    ours = model("wan_t2v", guidance_scale=1.0)
    schedule = Schedule.shifted(4, 5.0).exploring([False, True, False, False])
    policy = Policy(ours, Sage(0.5), schedule)
    assert [policy.is_noisy(index) for index in range(4)] == [False, True, False, False]
    x, conditions = torch.randn(1, *ours.latent_shape()), ours.encode(["a cat"])
    with torch.no_grad():
        first = policy.step(0, x, conditions).gaussian
        euler = Policy(ours, Ode(), schedule).step(0, x, conditions).gaussian
    assert float(first.std) == 0
    assert torch.equal(first.mean, euler.mean)
    with pytest.raises(ValueError, match="stochastic"):
        integrate(policy, x, conditions)


def test_guidance_is_selectable(model) -> None:
    ours = model("wan_t2v", guidance_scale=4.0)
    x, conditions, sigma = torch.randn(1, *ours.latent_shape()), ours.encode(["a cat"]), torch.tensor(0.5)
    with torch.no_grad():
        guided = ours.velocity(x, sigma, conditions)
        plain = ours.velocity(x, sigma, conditions, guidance=1.0)
        doubled = ours.velocity(x, sigma, conditions, guidance=2.0)
    torch.testing.assert_close(guided - plain, 3 * (doubled - plain), rtol=1e-3, atol=1e-5)
    assert ours.spec.training_guidance is None
    assert type(ours.spec)(guidance_in_training=False).training_guidance == 1.0
