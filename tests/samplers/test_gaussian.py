"""The Gaussian by hand and against torch.distributions, per latent dimension."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from sage_grpo.samplers.transition import Gaussian


@pytest.mark.parametrize("dims", [(), (5,), (2, 3, 4)])
@pytest.mark.parametrize("shared", [True, False])
def test_log_prob_and_kl_agree_with_torch_distributions(dims: tuple[int, ...], shared: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    mean, other, noise = (torch.randn(3, *dims, generator=generator) for _ in range(3))
    stds = [torch.tensor(0.3), torch.tensor(0.7)] if shared else [torch.tensor([0.1, 1.0, 4.0]), torch.tensor(0.5)]
    wide = [std.double().view(-1, *[1] * len(dims)) for std in stds]
    ours, theirs = Gaussian(mean, stds[0]), Normal(mean.double(), wide[0].expand_as(mean))
    x = ours.sample(noise)
    torch.testing.assert_close(x, mean + wide[0].float() * noise)
    assert ours.log_prob(x.bfloat16()).dtype == torch.float32
    torch.testing.assert_close(
        ours.log_prob(x).double(), theirs.log_prob(x.double()).view(3, -1).mean(1), rtol=1e-5, atol=1e-5
    )
    kl = kl_divergence(theirs, Normal(other.double(), wide[1].expand_as(mean))).view(3, -1).mean(1)
    torch.testing.assert_close(
        ours.kl(Gaussian(other, stds[1].expand(stds[0].shape))).double(), kl, rtol=1e-5, atol=1e-5
    )


def test_the_log_density_of_a_standard_normal_by_hand() -> None:
    expected = -0.5 - math.log(2.0) - 0.5 * math.log(2.0 * math.pi)
    law = Gaussian(torch.zeros(3), torch.tensor(2.0))
    assert law.log_prob(torch.full((3,), 2.0)).tolist() == pytest.approx([expected] * 3, abs=1e-6)


def test_two_batch_dimensions_keep_steps_and_samples_apart() -> None:
    torch.manual_seed(0)
    mean, x, std = torch.randn(4, 3, 6, 2), torch.randn(4, 3, 6, 2), torch.rand(4, 3) + 0.1
    both = Gaussian(mean, std, batch_ndim=2).log_prob(x)
    assert both.shape == (4, 3)
    for step in range(4):
        torch.testing.assert_close(both[step], Gaussian(mean[step], std[step]).log_prob(x[step]))


def test_only_places_have_noise_and_each_has_a_log_probability_of_its_own() -> None:
    law = Gaussian(torch.arange(10.0).view(2, 5), torch.tensor([0.5, 2.0]), places=(slice(0, 2), slice(3, 5)))
    x = law.sample(torch.ones(2, 5))
    assert (x - law.mean).tolist() == [[0.5, 0.5, 0, 0.5, 0.5], [2.0, 2.0, 0, 2.0, 2.0]]
    x[1, 4] += 2
    found = law.log_prob(x)
    apart = [Gaussian(law.mean[:, place], law.std).log_prob(x[:, place]) for place in law.places]
    assert torch.equal(found, torch.stack(apart, 1))
    assert found[1, 0] > found[1, 1]
    assert law.expand(4).places == law.places


def test_shapes_that_would_broadcast_and_steps_without_noise_are_refused() -> None:
    law, wide, still = (
        Gaussian(torch.zeros(2, dims), torch.tensor(std)) for dims, std in ((3, [1.0, 1.0]), (4, [1.0, 1.0]), (3, [1.0, 0.0]))
    )  # fmt: skip
    said = r"has shape \(2, 4\), but the Gaussian's mean has \(2, 3\)"
    for call in (lambda: law.log_prob(wide.mean), lambda: law.kl(wide), lambda: law.sample(wide.mean)):
        with pytest.raises(ValueError, match=said):
            call()
    for call in (lambda: law.kl(still), lambda: still.kl(law), lambda: still.log_prob(law.mean)):
        with pytest.raises(ValueError, match="needs std > 0"):
            call()


@pytest.mark.parametrize(("rows", "count"), [(3, 3), (1, 4), (2, 6), (3, 6)])
def test_laws_are_shared_out_to_consecutive_samples(rows: int, count: int) -> None:
    mean, std = torch.arange(rows * 2.0).reshape(rows, 2), torch.arange(rows) + 1.0
    of = [index * rows // count for index in range(count)]
    found = Gaussian(mean, std, batch_ndim=1).expand(count)
    assert torch.equal(found.mean, mean[of])
    assert torch.equal(found.std, std[of])
    assert found.batch_ndim == 1
    assert Gaussian(mean, torch.tensor(2.0)).expand(count).std.ndim == 0
