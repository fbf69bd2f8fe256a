"""Known errors of the paper and of the official code, one test each: the wrong formula fails, ours holds.

`docs/method.md` has the same list in words. Errors of other layers (resume, anchors, decoding) are tested where they live.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from kernel_cases import final_variance, grid
from sage_grpo.objectives.advantage import decoupled_advantage, group_advantage
from sage_grpo.objectives.policy_gradient import clipped_surrogate, equalizing_weights
from sage_grpo.objectives.trust_region import TrustRegion, closed_form_kl
from sage_grpo.samplers.kernels import Cps, Flow, Ode, Sage, SageExact
from sage_grpo.samplers.path import interpolate, velocity
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.samplers.transition import Gaussian
from sage_grpo.training.kl_coefficient import KlCoefficient, KlController


def _paper_steps() -> tuple[Tensor, Tensor]:
    sigmas = grid(20, 5.0)
    return sigmas[:-1], sigmas[1:]


def _measured_gradient_norms(step) -> Tensor:
    torch.manual_seed(0)
    v = torch.randn(len(step.a), 20_000, requires_grad=True)
    gaussian = step(torch.randn_like(v), v)
    gaussian.log_prob(gaussian.sample(torch.randn_like(v)).detach()).sum().backward()
    assert v.grad is not None
    return v.grad.norm(dim=1).double()


# The paper ---------------------------------------------------------------------------------------------------------


def test_paper_eq3_divides_by_the_wrong_sigma() -> None:
    torch.manual_seed(0)
    x0, eps, sigma = torch.randn(5).double(), torch.randn(5).double(), 0.8
    x, v = interpolate(x0, eps, sigma), velocity(x0, eps)
    as_printed = (x - x0) / (1 - sigma)
    assert float((as_printed - v).abs().max()) > 1
    torch.testing.assert_close((x - x0) / sigma, v)
    torch.testing.assert_close(x - sigma * v, x0)


def test_paper_eq7_moves_away_from_the_data_with_a_positive_dt() -> None:
    x0, eps, p, q = torch.zeros(4), torch.ones(4), 0.8, 0.6
    x, v = interpolate(x0, eps, p), velocity(x0, eps)
    as_printed = x + v * (p - q)
    assert float(as_printed[0]) > float(x[0])  # noisier than before
    torch.testing.assert_close(Ode()(p, q)(x[None], v[None]).mean[0], interpolate(x0, eps, q))


def test_paper_eq7_score_lacks_one_minus_sigma_on_x0() -> None:
    x0, sigma = torch.tensor([1.5, -0.5]).double(), 0.4
    x = torch.tensor([0.3, 0.9], dtype=torch.float64, requires_grad=True)
    marginal = Normal((1 - sigma) * x0, sigma)
    (truth,) = torch.autograd.grad(marginal.log_prob(x).sum(), x)
    as_printed = -(x.detach() - x0) / sigma**2
    assert float((as_printed - truth).abs().max()) > 1
    v = (x.detach() - x0) / sigma
    torch.testing.assert_close(
        -(x.detach() + (1 - sigma) * v) / sigma, truth
    )  # -eps / sigma, as samplers/path.py has it


@pytest.mark.parametrize("equation", ["eq11_fixed", "eq13_moving"])
def test_paper_eq11_and_eq13_divide_by_the_variance_twice(equation: str) -> None:
    torch.manual_seed(0)
    step = Sage(eta=0.5)(0.9, 0.8)
    x, v, v_ref = torch.randn(1, 50), torch.randn(1, 50), torch.randn(1, 50)
    mean, mean_ref = step(x, v).mean, step(x, v_ref).mean
    truth = float(kl_divergence(Normal(mean, step.std), Normal(mean_ref, step.std)).mean())
    variance = float(step.std) ** 2
    as_printed = float((mean - mean_ref).square().mean()) / (2 * variance**2)
    assert as_printed == pytest.approx(truth / variance, rel=1e-3)  # too large by 1 / Sigma
    assert as_printed > 5 * truth
    mode = "fixed" if equation == "eq11_fixed" else "moving"
    terms = TrustRegion(mode=mode).penalty(  # type: ignore[arg-type]
        v=v, v_old=v, v_reference=v_ref, sensitivity=step.sensitivity, clips=1
    )
    assert float(terms.total) == pytest.approx(truth, rel=1e-4)


def test_paper_eq15_estimates_the_kl_from_old_to_new_not_from_new_to_old() -> None:
    torch.manual_seed(0)
    samples = 200_000
    old = Gaussian(torch.zeros(samples, 1), torch.tensor(1.0))
    new = Gaussian(torch.full((samples, 1), 0.5), torch.tensor(2.0))
    x = old.sample(torch.randn(samples, 1))
    estimate = float((old.log_prob(x) - new.log_prob(x)).mean())
    assert estimate == pytest.approx(float(old.kl(new)[0]), abs=0.01)
    assert abs(estimate - float(new.kl(old)[0])) > 0.3


def _kl_after_feedback(kind: str, target: float) -> float:
    """A policy whose KL falls as lambda grows, under the feedback; returns its last KL."""
    config = KlCoefficient(kind=kind, lambda_min=1e-3, lambda_max=10.0, warmup_updates=0, target=target)  # type: ignore[arg-type]
    controller = KlController(config)
    controller.value = 1.0
    for _ in range(300):
        kl = 0.2 / controller.value
        controller.observe(kl)
    return kl


def test_paper_eq42_relaxes_when_kl_is_high_and_never_reaches_its_target() -> None:
    for target in (0.1, 0.5):  # the KL starts at 0.2: too high, then too low
        assert 0.4 * target < _kl_after_feedback("ppo", target) < 1.7 * target
        kl = _kl_after_feedback("paper", target)
        assert kl < 0.1 * target or kl > 10 * target  # it runs to a clamp instead


def test_paper_eq43_with_minus_lambda_kl_would_maximise_the_kl() -> None:
    sensitivity = torch.tensor(2.0)
    v_reference = torch.zeros(1, 4)
    region = TrustRegion(mode="moving")

    def descend(sign: float) -> float:
        v = torch.full((1, 4), 0.1, requires_grad=True)
        for _ in range(20):
            kl = region.penalty(v=v, v_old=v, v_reference=v_reference, sensitivity=sensitivity, clips=1).total
            assert kl is not None
            (gradient,) = torch.autograd.grad(sign * kl.sum(), v)
            v = (v - 0.1 * gradient).detach().requires_grad_()
        return float(closed_form_kl(v.detach(), v_reference, sensitivity))

    start = float(closed_form_kl(torch.full((1, 4), 0.1), v_reference, sensitivity))
    assert descend(-1.0) > 10 * start
    assert descend(+1.0) < 0.1 * start


def test_paper_eq8_leaves_out_b_so_one_over_std_is_not_the_gradient() -> None:
    p, q = _paper_steps()
    step = Sage(eta=0.5)(p, q)
    measured = _measured_gradient_norms(step)
    ours, as_printed = measured / step.sensitivity, measured * step.std
    assert float(ours.max() / ours.min()) < 1.1  # proportional
    assert float(as_printed.max() / as_printed.min()) > 20
    # Most of the imbalance comes from the step size that the shift makes, not from the noise.
    span, span_of_noise = (float(values.max() / values.min()) for values in (step.sensitivity, 1 / step.std))
    assert span == pytest.approx(148, abs=1)
    assert span_of_noise < 7


def test_paper_eq32_predicts_the_wrong_trend_for_a_shifted_schedule() -> None:
    p, q = _paper_steps()
    p, q = p[1:], q[1:]  # at sigma = 1 the printed norm is 0
    step = Flow(eta=0.5)(p, q)
    measured = _measured_gradient_norms(step)
    as_printed = ((1 - p) / (p * (p - q))).sqrt()
    ratio = measured / as_printed
    assert float(ratio.max() / ratio.min()) > 15
    ratio = measured / step.sensitivity
    assert float(ratio.max() / ratio.min()) < 1.1


def test_paper_preserves_the_marginal_does_not_hold_for_the_discretised_sage_kernel() -> None:
    for steps, residual in ((10, 0.0222), (20, 0.0066), (40, 0.0018)):
        assert final_variance(Sage(), grid(steps, 5.0), 0.0) == pytest.approx(residual, abs=6e-5)
        assert final_variance(SageExact(), grid(steps, 5.0), 0.0) == 0.0
    # ... at every step, not only at the end: point data at sigma_next should have variance sigma_next^2
    sigmas = grid(20, 5.0)
    for kernel, exact in ((Sage(), False), (SageExact(), True)):
        p, q = sigmas[:-1], sigmas[1:]
        step = kernel(p, q)
        after = (step.a * p + step.b).square() + step.std.square()
        gap = float((after - q.square()).abs().max())
        assert gap < 1e-12 if exact else gap > 5e-3


# The official code -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shift", "steps"), [(7.0, 50), (9.0, 39)])
def test_official_one_sided_clamp_is_nan_for_a_large_shift_with_many_steps(shift: float, steps: int) -> None:
    sigmas = Schedule.shifted(steps, shift).sigmas
    assert float(sigmas[1]) > 0.997
    p, q = sigmas[:-1].clamp(max=0.997), sigmas[1:]  # only one end
    variance = torch.log((1 - q) / (1 - p)) - (p - q)
    assert float(variance[0]) < 0
    assert torch.isnan(variance.sqrt()).any()
    for kernel in (Sage(), SageExact(), SageExact(sigma_max=0.997)):
        step = kernel(sigmas[:-1], sigmas[1:])
        assert all(torch.isfinite(value).all() for value in (step.a, step.b, step.std))
    assert float(Sage()(sigmas[0], sigmas[1]).std) == 0.0  # inside the clamp: sampled, never trained
    assert float(SageExact()(sigmas[0], sigmas[1]).std) > 0.0
    below = grid(steps - 2, shift)
    p, q = below[:-1].clamp(max=0.997), below[1:]
    variance = torch.log((1 - q) / (1 - p)) - (p - q)
    torch.testing.assert_close(Sage(eta=1.0)(below[:-1], q).std.square(), variance, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("kernel", [Sage(), Flow()], ids=lambda kernel: type(kernel).__name__)
def test_official_last_step_leaves_its_noise_in_the_video(kernel) -> None:
    schedule = Schedule.shifted(20, 5.0)
    quiet = schedule.exploring(schedule.stochastic, deterministic_last=True)
    for grid_of_steps, silent in ((schedule, False), (quiet, True)):
        torch.manual_seed(0)
        x = torch.randn(20_000, 1)  # every clip is the point 0, so v = x / sigma is the perfect network
        for index, explores in enumerate(grid_of_steps.stochastic):
            p, q = grid_of_steps.pair(index)
            x = (kernel if explores else Ode())(p, q)(x, x / p).sample(torch.randn_like(x))
        assert float(x.std()) < 1e-6 if silent else float(x.std()) > 0.07


def test_official_stepwise_kl_is_inert_with_one_update_per_rollout() -> None:
    torch.manual_seed(0)
    step = Sage(eta=0.5)(0.9, 0.8)
    x, v_old, noise = torch.randn(2, 6), torch.randn(2, 6), torch.randn(2, 6)
    log_prob = []
    v = v_old.clone().requires_grad_()
    for sign in (1, -1):  # a noise and its mirror image: their mean is the expectation of anything odd
        x_next = step(x, v_old).sample(sign * noise)
        log_prob.append((step(x, v_old).log_prob(x_next), step(x, v).log_prob(x_next)))
    exact = TrustRegion(mode="stepwise").penalty(v=v, v_old=v_old, v_reference=v, sensitivity=step.sensitivity, clips=2)
    estimated = sum((old - new).sum() for old, new in log_prob)  # Eq. 15
    for total in (exact.total.sum(), estimated):  # type: ignore[union-attr]
        (gradient,) = torch.autograd.grad(total, v, retain_graph=True)
        assert float(gradient.abs().max()) < 1e-5
    # On policy the ratio is 1 as well, so the clip never binds. From the second update on, the term is alive.
    assert not clipped_surrogate(log_prob[0][1] - log_prob[0][0], torch.ones(2), clip=1e-9).inactive.any()
    moved = (v_old + 0.1).requires_grad_()
    closed_form_kl(moved, v_old, step.sensitivity).sum().backward()
    assert float(moved.grad.abs().min()) > 1e-3  # type: ignore[union-attr]


def test_official_kl_of_flow_is_off_by_dt() -> None:
    torch.manual_seed(0)
    p, q = 0.7, 0.62
    step = Flow(eta=0.5)(p, q)
    x, v, v_ref = torch.randn(1, 40), torch.randn(1, 40), torch.randn(1, 40)
    mean, mean_ref = step(x, v).mean, step(x, v_ref).mean
    diffusion = 0.5 * math.sqrt(p / (1 - p))  # without sqrt(dt) it is not the step's standard deviation
    without_dt = float((mean - mean_ref).square().mean()) / (2 * diffusion**2)
    truth = float(kl_divergence(Normal(mean, step.std), Normal(mean_ref, step.std)).mean())
    assert without_dt == pytest.approx((p - q) * truth, rel=1e-4)
    assert float(closed_form_kl(v, v_ref, step.sensitivity)) == pytest.approx(truth, rel=1e-4)


def test_official_equaliser_of_cps_does_not_equalise() -> None:
    sigmas = grid(20, 5.0)[:-1]  # the last step of cps has no noise
    p, q = sigmas[:-1], sigmas[1:]
    step = Cps(eta=0.5)(p, q)
    measured = _measured_gradient_norms(step)
    wrong = {"1 / std": 1 / step.std, "sage's norm": Sage(eta=0.5)(p, q).sensitivity}
    for norm in wrong.values():
        flat = measured * equalizing_weights(norm)
        assert float(flat.max() / flat.min()) > 1.4
    flat = measured * equalizing_weights(step.sensitivity)
    assert float(flat.max() / flat.min()) < 1.1


def test_official_counts_failed_rewards_as_zero() -> None:
    groups = torch.zeros(4, dtype=torch.long)
    rewards = torch.tensor([-3.0, -4.0, -5.0, math.nan])  # a reward model with negative scores, and one failure
    as_zero = group_advantage(rewards.nan_to_num(0.0), groups)
    assert float(as_zero.argmax()) == 3  # the failed clip would be the one to imitate
    advantage = group_advantage(rewards, groups)
    assert float(advantage[3]) == 0.0
    torch.testing.assert_close(advantage[:3], group_advantage(rewards[:3], groups[:3]))


def test_official_falls_back_to_a_plain_mean_for_a_misspelt_reward_name() -> None:
    parts = {"VQ": torch.tensor([1.0, 2.0]), "MQ": torch.tensor([2.0, 1.0])}
    with pytest.raises(ValueError, match="were not computed: \\['MG'\\]"):
        decoupled_advantage(parts, {"VQ": 1.0, "MG": 1.0}, torch.zeros(2, dtype=torch.long))


def test_the_table_of_known_errors_names_tests_that_exist() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "method.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 15
    assert named <= set(globals())
