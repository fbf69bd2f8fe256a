"""The one distribution of the package, a diagonal Gaussian, and one step of any sampler: an affine Gaussian with three scalars."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gaussian:
    """Normal(mean, std^2) over latents.

    The first `batch_ndim` dimensions of `mean` index samples (and steps, when vectorized over them); the rest are
    latent dimensions. `std` has one value per sample, or one for all. Log-probability and KL are MEANS over the latent
    dimensions: the usual convention, which sets the scale of the clip range. Arithmetic is float32.
    """

    mean: Tensor
    std: Tensor
    batch_ndim: int = 1
    places: tuple[slice, ...] = ()
    """Parts of a row that have noise, each with its own log-probability in its own column; the rest equals the mean. Empty: the whole row, in one
    column."""

    def sample(self, noise: Tensor) -> Tensor:
        """`mean + std * noise`, for standard normal noise of the mean's shape."""
        _same_shape(noise, self.mean, "noise")
        if self.places:
            masked = torch.zeros_like(noise)
            for place in self.places:
                masked[:, place] = noise[:, place]
            noise = masked
        return self.mean + self._spread(self.std) * noise

    def expand(self, count: int) -> Gaussian:
        """The distributions of `count` samples, each repeated for equally many consecutive ones; self where there are `count` already."""
        std = self.std if self.std.ndim == 0 else expanded(self.std, count)
        return Gaussian(expanded(self.mean, count), std, self.batch_ndim, self.places)

    def log_prob(self, x: Tensor) -> Tensor:
        """Mean log-density over latent dimensions, with the full normalization, one value per sample (and part, where there are `places`)."""
        _same_shape(x, self.mean, "x")
        if self.places:
            return torch.stack(
                [Gaussian(self.mean[:, place], self.std).log_prob(x[:, place]) for place in self.places], dim=1
            )
        self._require_noise("log_prob")
        std = self.std.to(torch.float32)
        quadratic = self._mean_latent(((x - self.mean) / self._spread(std)).square())
        log_normaliser = torch.log(std).to(quadratic.device, non_blocking=True) + 0.5 * math.log(2.0 * math.pi)
        return -0.5 * quadratic - log_normaliser

    def kl(self, other: Gaussian) -> Tensor:
        _same_shape(other.mean, self.mean, "other.mean")
        self._require_noise("kl")
        other._require_noise("kl")
        std, std_other = self.std.to(torch.float32), other.std.to(torch.float32)
        quadratic = self._mean_latent(((self.mean - other.mean) / self._spread(std_other)).square())
        ratio = (std / std_other).to(quadratic.device)
        return 0.5 * (quadratic + ratio.square() - 1.0) - torch.log(ratio)

    def _spread(self, per_sample: Tensor) -> Tensor:
        """Give a per-sample tensor trailing dimensions, so that it broadcasts over the latent ones."""
        if per_sample.ndim == 0:  # a true scalar may stay on the CPU
            return per_sample
        return per_sample.to(self.mean.device).reshape(per_sample.shape + (1,) * (self.mean.ndim - per_sample.ndim))

    def _mean_latent(self, values: Tensor) -> Tensor:
        return values.flatten(self.batch_ndim).mean(-1) if values.ndim > self.batch_ndim else values

    def _require_noise(self, operation: str) -> None:
        if bool((self.std <= 0).any()):
            raise ValueError(
                f"Gaussian.{operation} needs std > 0, got a step with std = 0. Deterministic steps are sampled but "
                "never trained: leave them out of the trained steps."
            )


def expanded(rows: Tensor, count: int) -> Tensor:
    """`count` rows, of which equally many consecutive ones are each of the given. Their gradients are summed in a fixed order."""
    if len(rows) == count:
        return rows
    if len(rows) == 1:
        return rows.expand(count, *rows.shape[1:])  # no copy
    return rows.unsqueeze(1).expand(len(rows), count // len(rows), *rows.shape[1:]).flatten(0, 1)


def _same_shape(given: Tensor, expected: Tensor, name: str) -> None:
    if given.shape != expected.shape:
        raise ValueError(f"{name} has shape {tuple(given.shape)}, but the Gaussian's mean has {tuple(expected.shape)}.")


@dataclass(frozen=True)
class Transition:
    """x_next ~ Normal(a x + b v, std^2).

    The three fields have one shape: a scalar, or one value per sample (and step). Sampling, log-probability, KL,
    equalizer and inspector all derive from them; a sampler is nothing more.
    """

    a: Tensor
    b: Tensor
    std: Tensor

    def __call__(self, x: Tensor, v: Tensor) -> Gaussian:
        """The distribution of x_next at x with velocity v, in float32 whatever the network ran in."""
        if x.shape != v.shape:
            raise ValueError(f"x has shape {tuple(x.shape)} but v has {tuple(v.shape)}: a velocity has its x's shape.")
        x, v = x.to(torch.float32), v.to(torch.float32)
        mean = _like(self.a, x) * x + _like(self.b, x) * v
        return Gaussian(mean, self.std.to(torch.float32), batch_ndim=max(1, self.std.ndim))

    @property
    def sensitivity(self) -> Tensor:
        """|b| / std: the size of d(log-prob)/dv up to a constant; infinite for a deterministic step."""
        return self.b.abs() / self.std


def _like(scalar: Tensor, x: Tensor) -> Tensor:
    """Broadcast a per-sample coefficient over latent dimensions (a true scalar may stay on the CPU)."""
    scalar = scalar.to(torch.float32)
    if scalar.ndim == 0:
        return scalar
    return scalar.to(x.device).reshape(scalar.shape + (1,) * (x.ndim - scalar.ndim))
