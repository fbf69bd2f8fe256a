"""Rollout and replay are one code path: the first log-ratio is exactly zero."""

from __future__ import annotations

import pytest
import torch

from sage_grpo.flow.kernels import Cps, Dance, Flow, Ode, Sage, SageExact
from sage_grpo.flow.schedule import Schedule
from sage_grpo.models.policy import Policy, integrate

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


@pytest.mark.parametrize(
    ("kind", "kernel", "level"),
    [
        ("hunyuan15_t2v", Sage(0.5), "attention"),
        ("wan_t2v", Flow(0.5), "all"),
        pytest.param("wan_t2v", Dance(0.5), "input", marks=pytest.mark.slow),
        ("wan_t2v", Cps(0.5), "attention"),
        pytest.param("hunyuan15_t2v", SageExact(0.5), "input", marks=pytest.mark.slow),
    ],
)
def test_first_log_ratio_is_exactly_zero(kind: str, kernel, level: str, fresh_model) -> None:
    ours = fresh_model(kind, guidance_scale=3.0)
    conditions = ours.encode(PROMPTS)
    ours.keep([level] * len(ours.blocks()))
    policy = Policy(ours, kernel, Schedule.shifted(4, 5.0))
    kept = roll_out(policy, conditions)
    assert len(kept) >= 3
    for index, x, x_next, log_prob_old in kept:
        log_prob = policy.step(index, x, conditions).gaussian.log_prob(x_next)
        assert log_prob.requires_grad
        assert torch.equal(log_prob.detach() - log_prob_old, torch.zeros(3))


def test_bfloat16_deviation_is_bounded(model) -> None:
    """Replay in the same batch is exact also in bfloat16; against float32 it is off by the format's own precision."""
    exact = model("hunyuan15_t2v", guidance_scale=1.0)
    rough = model("hunyuan15_t2v", guidance_scale=1.0, dtype="bfloat16", train=False)
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
