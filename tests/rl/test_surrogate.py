"""Surrogates: gradients where they should be, none where the trust region removes them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernel_cases import STOCHASTIC, grid, law
from sage_grpo.rl.surrogate import (
    centred_log_ratio,
    clip_range,
    clipped_surrogate,
    kl_masked_surrogate,
    scaled_surrogate,
)


def _gradient(log_ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    log_ratio = log_ratio.clone().requires_grad_()
    clipped_surrogate(log_ratio, advantage, clip=clip).loss.sum().backward()
    assert log_ratio.grad is not None
    return log_ratio.grad


@law
@given(log_ratio=st.floats(-1.0, 1.0), advantage=st.floats(-5.0, 5.0), clip=st.floats(0.01, 0.5))
def test_the_clipped_loss_is_ppos_and_its_flag_tells_where_the_gradient_is_gone(
    log_ratio: float, advantage: float, clip: float
) -> None:
    ratio = math.exp(log_ratio)
    for edge in (1 - clip, 1 + clip):
        if abs(ratio - edge) < 1e-5:
            return
    terms = clipped_surrogate(torch.tensor([log_ratio]), torch.tensor([advantage]), clip=clip)
    bounded = min(max(ratio, 1 - clip), 1 + clip)
    assert float(terms.loss) == pytest.approx(-min(ratio * advantage, bounded * advantage), abs=1e-5)
    gradient = float(_gradient(torch.tensor([log_ratio]), torch.tensor([advantage]), clip))
    if bool(terms.inactive):
        assert gradient == 0
    else:
        assert gradient == pytest.approx(-ratio * advantage, abs=1e-5)


def test_a_replayed_rollout_has_ratio_exactly_one_at_every_step_of_every_kernel() -> None:
    """The same code path samples and replays, so the first update sees the plain policy gradient."""
    torch.manual_seed(0)
    network = torch.nn.Linear(6, 6)
    sigmas = grid(10, 5.0).float()
    for kind in STOCHASTIC:
        kernel, x = kind(eta=0.5), torch.randn(4, 6)
        for p, q in itertools.pairwise(sigmas):
            step = kernel(p, q)
            with torch.no_grad():
                old = step(x, network(x))
                x_next = old.sample(torch.randn_like(x))
                log_prob_old = old.log_prob(x_next) if float(step.std) > 0 else None
            if log_prob_old is not None:
                log_prob = step(x, network(x)).log_prob(x_next)
                terms = clipped_surrogate(log_prob - log_prob_old, torch.ones(4), clip=1e-6)
                assert torch.equal(terms.ratio, torch.ones(4))
                assert not terms.inactive.any()
                assert torch.equal(terms.loss.detach(), -torch.ones(4))
            x = x_next


def test_the_clip_range_follows_the_noise_of_a_mean_over_dimensions() -> None:
    assert clip_range(576_576) == pytest.approx(1e-4, rel=2e-3)
    assert clip_range(100) / clip_range(400) == pytest.approx(2.0)
    torch.manual_seed(0)
    spread = []
    for dims in (100, 1600):  # log-ratio of two Gaussians whose means differ by 0.1 std
        noise = torch.randn(2000, dims)
        spread.append(float((-0.5 * ((noise - 0.1) ** 2 - noise**2)).mean(1).std()))
    assert spread[0] / spread[1] == pytest.approx(clip_range(100) / clip_range(1600), rel=0.1)
    for dims, c in ((0, 0.1), (10, 0.0)):
        with pytest.raises(ValueError, match="clip_range needs dims >= 1 and c > 0"):
            clip_range(dims, c)


def test_the_kl_mask_drops_only_aggressive_moves_that_are_already_far() -> None:
    log_ratio = torch.tensor([0.1, -0.1, 0.1, -0.1, 0.1, -0.1], requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0])
    kl = torch.tensor([2.0, 2.0, 2.0, 2.0, 0.5, 0.5])
    terms = kl_masked_surrogate(log_ratio, advantage, kl, tau=1.0)
    assert terms.inactive.tolist() == [True, True, False, False, False, False]
    terms.loss.sum().backward()
    expected = torch.where(terms.inactive, 0.0, -advantage * log_ratio.detach().exp())
    torch.testing.assert_close(log_ratio.grad, expected)


def test_centring_removes_the_bias_of_the_log_ratio() -> None:
    torch.manual_seed(0)
    dims, shift = 64, 0.5
    noise = torch.randn(20_000, dims)
    log_ratio = (-0.5 * ((noise - shift) ** 2 - noise**2)).mean(1)  # samples of the OLD policy
    kl = torch.full((20_000,), 0.5 * shift**2)
    error = float(log_ratio.std()) / math.sqrt(20_000)
    assert float(log_ratio.mean()) == pytest.approx(-0.5 * shift**2, abs=4 * error)
    assert float(log_ratio.mean()) < -10 * error
    assert float(centred_log_ratio(log_ratio, kl).mean()) == pytest.approx(0, abs=4 * error)


def test_centring_adds_no_gradient_of_its_own() -> None:
    kl = torch.tensor([0.3], requires_grad=True)
    log_ratio = torch.tensor([0.1], requires_grad=True)
    centred_log_ratio(log_ratio, kl).sum().backward()
    assert kl.grad is None
    assert log_ratio.grad is not None


def test_ranges_must_be_positive() -> None:
    with pytest.raises(ValueError, match="clip must be positive"):
        clipped_surrogate(torch.zeros(1), torch.ones(1), clip=0.0)
    with pytest.raises(ValueError, match="tau must be positive"):
        kl_masked_surrogate(torch.zeros(1), torch.ones(1), torch.zeros(1), tau=0.0)


def test_the_range_falls_with_the_root_of_the_dimensions() -> None:
    assert clip_range(1, 0.5) == 0.5
    assert clip_range(16, 0.5) == 0.125
    for dims, c in ((0, 1.0), (4, 0.0), (4, -1.0)):
        with pytest.raises(ValueError, match="dims >= 1 and c > 0"):
            clip_range(dims, c)


def test_the_clipped_loss_by_hand() -> None:
    """Ratios above and below the range 0.75 to 1.25 and within, with advantages of both signs, small ones, and none."""
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.125, 1.5, 0.5, 1.5, 0.5])
    advantage = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0, 0.5, -0.5, 0.0, 0.0])
    terms = clipped_surrogate(ratio.log().requires_grad_(), advantage, clip=0.25)
    expected = [-2.5, 3.0, -1.0, 1.5, -2.25, -0.625, 0.375, 0.0, 0.0]
    assert terms.loss.tolist() == pytest.approx(expected, abs=1e-6)
    assert terms.inactive.tolist() == [True, False, False, True, False, True, True, False, False]
    assert terms.ratio is not None
    assert not terms.ratio.requires_grad


def test_the_masked_loss_by_hand() -> None:
    """Dropped where the KL has reached tau and the ratio has moved to where the advantage points; one that has not moved stays."""
    ratio = torch.tensor([1.5, 1.5, 1.5, 0.5, 0.5, 0.5, 1.0, 1.0, 1.5, 0.5])
    advantage = torch.tensor([2.0, 0.5, -2.0, -2.0, -0.5, 2.0, 2.0, -2.0, 0.0, 0.0])
    for kl, dropped in ((0.5, False), (1.0, True), (2.0, True)):
        terms = kl_masked_surrogate(ratio.log().requires_grad_(), advantage, torch.full_like(ratio, kl), tau=1.0)
        inactive = [dropped and index in (0, 1, 3, 4) for index in range(len(ratio))]
        assert terms.inactive.tolist() == inactive
        plain = (-ratio * advantage).tolist()
        assert terms.loss.tolist() == pytest.approx([0.0 if gone else value for gone, value in zip(inactive, plain)])
        assert terms.ratio is not None
        assert not terms.ratio.requires_grad


def test_the_scaled_loss_by_hand() -> None:
    """exp(std (log r + KL)) is clipped; the loss is divided by std; the KL has a gradient of its own."""
    std = torch.tensor(0.5)
    wanted = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.125])  # the scaled ratio
    advantage = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0])
    kl = torch.full((5,), 0.25).requires_grad_()
    log_ratio = (wanted.log() / 0.5 - 0.25).requires_grad_()
    terms = scaled_surrogate(log_ratio, advantage, kl, std=std, clip=0.25)
    assert terms.loss.tolist() == pytest.approx([-5.0, 6.0, -2.0, 3.0, -4.5], abs=1e-5)
    assert terms.inactive.tolist() == [True, False, False, True, False]
    assert terms.ratio is not None
    assert terms.ratio.tolist() == pytest.approx(wanted.tolist(), abs=1e-6)
    terms.loss.sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == pytest.approx([0.0, 3.0, -1.0, 0.0, -2.25], abs=1e-5)
    assert torch.equal(log_ratio.grad, kl.grad)


def test_the_scaled_loss_tells_ratios_apart_that_float32_does_not() -> None:
    """Clip ranges of full size are 1e-7: three of float32's last places at 1."""
    log_ratio = torch.tensor([0.9e-7, 1.1e-7, -0.9e-7, -1.1e-7])
    terms = scaled_surrogate(
        log_ratio, torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.zeros(4), std=torch.tensor(1.0), clip=1e-7
    )
    assert terms.inactive.tolist() == [False, True, False, True]
