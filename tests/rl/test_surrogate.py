"""Surrogates: gradients where they should be, none where the trust region removes them."""

from __future__ import annotations

import pytest
import torch

from sage_grpo.rl.surrogate import (
    centred_log_ratio,
    clip_range,
    clipped_surrogate,
    kl_masked_surrogate,
    scaled_surrogate,
)


def test_centring_adds_the_kl_and_no_gradient_of_its_own() -> None:
    """Under the old policy the log-ratio is minus the KL on average."""
    kl, log_ratio = torch.tensor([0.25], requires_grad=True), torch.tensor([-0.5], requires_grad=True)
    centred = centred_log_ratio(log_ratio, kl)
    assert centred.tolist() == [-0.25]
    centred.sum().backward()
    assert kl.grad is None
    assert log_ratio.grad is not None


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
    log_ratio = ratio.log().requires_grad_()
    terms = clipped_surrogate(log_ratio, advantage, clip=0.25)
    expected = [-2.5, 3.0, -1.0, 1.5, -2.25, -0.625, 0.375, 0.0, 0.0]
    assert terms.loss.tolist() == pytest.approx(expected, abs=1e-6)
    assert terms.inactive.tolist() == [True, False, False, True, False, True, True, False, False]
    assert terms.ratio is not None
    assert not terms.ratio.requires_grad
    terms.loss.sum().backward()
    torch.testing.assert_close(log_ratio.grad, torch.where(terms.inactive, 0.0, -ratio * advantage))


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
