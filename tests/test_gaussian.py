"""The Gaussian agrees with torch.distributions, per latent dimension."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

from kernel_cases import law
from sage_grpo.gaussian import Gaussian, expanded


@law
@given(
    batch=st.integers(1, 4),
    dims=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    log_std=st.floats(-6, 3),
    seed=st.integers(0, 1000),
)
def test_log_prob_and_kl_agree_with_torch_distributions(batch: int, dims: list[int], log_std: float, seed: int) -> None:
    torch.manual_seed(seed)
    shape = (batch, *dims)
    mean, mean_other, noise = torch.randn(shape), torch.randn(shape), torch.randn(shape)
    std = torch.exp(log_std + 0.3 * torch.randn(batch))
    std_other = std * torch.exp(0.2 * torch.randn(batch))
    wide = (batch,) + (1,) * len(dims)
    ours, other = Gaussian(mean, std), Gaussian(mean_other, std_other)
    theirs = Normal(mean.double(), std.double().view(wide).expand(shape))
    theirs_other = Normal(mean_other.double(), std_other.double().view(wide).expand(shape))
    x = ours.sample(noise)
    torch.testing.assert_close(x, mean + std.view(wide) * noise)
    log_prob = theirs.log_prob(x.double()).flatten(1).mean(1)
    torch.testing.assert_close(ours.log_prob(x).double(), log_prob, rtol=1e-4, atol=1e-4)
    kl = kl_divergence(theirs, theirs_other).flatten(1).mean(1)
    torch.testing.assert_close(ours.kl(other).double(), kl, rtol=1e-4, atol=1e-5)


def test_one_std_for_all_samples_equals_one_std_per_sample() -> None:
    torch.manual_seed(0)
    mean, x = torch.randn(3, 2, 5), torch.randn(3, 2, 5)
    shared, each = Gaussian(mean, torch.tensor(0.3)), Gaussian(mean, torch.full((3,), 0.3))
    assert torch.equal(shared.log_prob(x), each.log_prob(x))
    assert torch.equal(shared.sample(x), each.sample(x))
    assert torch.equal(shared.kl(Gaussian(x, shared.std)), each.kl(Gaussian(x, each.std)))


def test_two_batch_dimensions_keep_steps_and_samples_apart() -> None:
    torch.manual_seed(0)
    mean, x, std = torch.randn(4, 3, 6, 2), torch.randn(4, 3, 6, 2), torch.rand(4, 3) + 0.1
    both = Gaussian(mean, std, batch_ndim=2).log_prob(x)
    assert both.shape == (4, 3)
    for step in range(4):
        torch.testing.assert_close(both[step], Gaussian(mean[step], std[step]).log_prob(x[step]))


def test_log_prob_is_a_mean_so_it_does_not_grow_with_the_number_of_dimensions() -> None:
    small, large = torch.zeros(1, 4), torch.zeros(1, 4096)
    std = torch.tensor(0.5)
    assert Gaussian(small, std).log_prob(small).item() == pytest.approx(Gaussian(large, std).log_prob(large).item())


def test_a_low_precision_sample_is_judged_in_float32() -> None:
    mean, x = torch.zeros(2, 8), torch.ones(2, 8, dtype=torch.bfloat16)
    assert Gaussian(mean, torch.tensor(0.5)).log_prob(x).dtype == torch.float32


@pytest.mark.parametrize("call", ["log_prob", "kl"])
def test_a_deterministic_step_has_no_density(call: str) -> None:
    mean = torch.zeros(2, 3)
    gaussian = Gaussian(mean, torch.tensor([0.5, 0.0]))
    with pytest.raises(ValueError, match="std = 0"):
        getattr(gaussian, call)(gaussian if call == "kl" else mean)


def test_shapes_that_would_broadcast_by_accident_are_refused() -> None:
    gaussian = Gaussian(torch.zeros(2, 3), torch.tensor(1.0))
    with pytest.raises(ValueError, match="noise has shape"):
        gaussian.sample(torch.zeros(3))
    with pytest.raises(ValueError, match="x has shape"):
        gaussian.log_prob(torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"other\.mean has shape"):
        gaussian.kl(Gaussian(torch.zeros(3), torch.tensor(1.0)))


def test_the_log_density_of_a_standard_normal_by_hand() -> None:
    """One dimension, std 2, one std off the mean; samples without latent dimensions are their own mean."""
    expected = -0.5 - math.log(2.0) - 0.5 * math.log(2.0 * math.pi)
    law = Gaussian(torch.zeros(3), torch.tensor(2.0))
    assert law.log_prob(torch.full((3,), 2.0)).tolist() == pytest.approx([expected] * 3, abs=1e-6)


def test_the_shape_that_is_wrong_is_named() -> None:
    law, other = Gaussian(torch.zeros(2, 3), torch.ones(2)), Gaussian(torch.zeros(2, 4), torch.ones(2))
    said = r"has shape \(2, 4\), but the Gaussian's mean has \(2, 3\)"
    for call in (lambda: law.log_prob(other.mean), lambda: law.kl(other), lambda: law.sample(other.mean)):
        with pytest.raises(ValueError, match=said):
            call()


def test_a_kl_needs_noise_on_both_sides() -> None:
    noisy, still = Gaussian(torch.zeros(2, 3), torch.ones(2)), Gaussian(torch.zeros(2, 3), torch.tensor([1.0, 0.0]))
    for one, other in ((noisy, still), (still, noisy)):
        with pytest.raises(ValueError, match="kl needs std > 0"):
            one.kl(other)


@pytest.mark.parametrize(("rows", "count"), [(3, 3), (1, 4), (2, 6), (3, 6)])
def test_laws_are_shared_out_to_consecutive_samples(rows: int, count: int) -> None:
    mean, std = torch.arange(rows * 2.0).reshape(rows, 2), torch.arange(rows) + 1.0
    of = [index * rows // count for index in range(count)]
    found = Gaussian(mean, std, batch_ndim=1).expand(count)
    assert torch.equal(found.mean, mean[of])
    assert torch.equal(found.std, std[of])
    assert found.batch_ndim == 1
    assert Gaussian(mean, torch.tensor(2.0)).expand(count).std.ndim == 0


def test_laws_that_cannot_be_shared_out_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="5 samples cannot be shared out evenly to 2 rows"):
        expanded(torch.zeros(2, 3), 5)
