"""The samplers of the field as functions (sigma, sigma_next) -> Transition.

Two families cover them all. The Itô family takes a step variance w and adds Itô's drift correction; the coefficient-preserving family keeps the mixture
(1 - sigma_next) x0 + sigma_next noise exact and only decides how much of the noise is fresh, through a correlation rho.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, ClassVar, Literal, Protocol, TypeAlias, cast, get_args

import torch
from torch import Tensor

from sage_grpo.config.ranges import NotNegative, Range, Share, checked, faults, ranged, type_hints
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.samplers.transition import Transition
from sage_grpo.utils.imports import import_object
from sage_grpo.utils.suggest import did_you_mean

Sigma: TypeAlias = float | Tensor
OfGrid = Annotated[float, Range(0, 1, open_below=True)]
"""A sigma of the grid."""


class Kernel(Protocol):
    """A sampler: the distribution of one step. A frozen dataclass, whose fields are its settings with their limits as types: `eta` and
    `sigma_max` of the configuration, `first` and `second`, the first sigmas of the run's grid."""

    leaves_noise: ClassVar[bool]
    """True if a last step to sigma_next = 0 leaves its noise in the video (the Itô family)."""

    def __call__(self, sigma: Sigma, sigma_next: Sigma) -> Transition:
        """The transition from sigma to sigma_next < sigma."""


@dataclass(frozen=True)
class Ode:
    """The deterministic Euler step of the probability-flow ODE."""

    leaves_noise: ClassVar[bool] = False

    def __call__(self, sigma: Sigma, sigma_next: Sigma) -> Transition:
        p, q, dtype = _pair(sigma, sigma_next)
        return _cast(torch.ones_like(p), q - p, torch.zeros_like(p), dtype)


@dataclass(frozen=True)
@ranged
class _Ito(ABC):
    eta: NotNegative = 0.5
    """Exploration scale."""
    leaves_noise: ClassVar[bool] = True

    def __call__(self, sigma: Sigma, sigma_next: Sigma) -> Transition:
        p, q, dtype = _pair(sigma, sigma_next)
        w = self.variance(p, q)
        half = w / (2.0 * p)
        return _cast(1.0 - half, (q - p) - half * (1.0 - p), torch.sqrt(w), dtype)

    @abstractmethod
    def variance(self, p: Tensor, q: Tensor) -> Tensor:
        """w of the step from sigma p to q."""


@dataclass(frozen=True)
class Dance(_Ito):
    """DanceGRPO: constant diffusion eta. Its off-manifold variance grows with the number of steps."""

    def variance(self, p: Tensor, q: Tensor) -> Tensor:
        return self.eta**2 * (p - q)


@dataclass(frozen=True)
class Flow(_Ito):
    """FlowGRPO: diffusion eta sqrt(s / (1 - s)), taken at the step's start as if it were constant."""

    first: OfGrid = 1.0
    """First sigma of the grid. The diffusion is infinite at 1, and huge just below it, where some schedulers start (DPM-Solver: 0.999875): the
    grid's first step takes the diffusion at sigma_next."""

    def variance(self, p: Tensor, q: Tensor) -> Tensor:
        denominator = 1.0 - torch.where(p >= self.first, q, p)
        return self.eta**2 * p / denominator * (p - q)


@dataclass(frozen=True)
class Linear(_Ito):
    """FlowGRPO on Wan, and Flash-GRPO: diffusion eta sigma_1 s, which falls to 0 with s. Their released code runs eta 1."""

    second: OfGrid = 1.0

    def variance(self, p: Tensor, q: Tensor) -> Tensor:
        return (self.eta * self.second * p) ** 2 * (p - q)


@dataclass(frozen=True)
class Sage(_Ito):
    """SAGE-GRPO: the diffusion of Flow, integrated over the step (the paper's Eq. 5)."""

    sigma_max: Annotated[float, Range(0, 1, open_below=True, open_above=True)] = 1.0 - 3e-3
    """The integral diverges at sigma = 1: both ends of the interval are clamped here."""

    def variance(self, p: Tensor, q: Tensor) -> Tensor:
        """w = eta^2 [log((1 - q)/(1 - p)) - (p - q)] over the clamped interval [q, p]."""
        p_clamped, q_clamped = p.clamp(max=self.sigma_max), q.clamp(max=self.sigma_max)
        length = p_clamped - q_clamped
        # Clamping only one end makes the integral negative, hence NaN, whenever sigma_next > sigma_max.
        w = self.eta**2 * (torch.log1p(length / (1.0 - p_clamped)) - length)
        return w.clamp(min=0.0)


@dataclass(frozen=True)
@ranged
class Cps:
    """Coefficient-preserving sampling: a fixed share of the noise is renewed at every step."""

    eta: Share = 0.5
    """Share of fresh noise as an angle: rho = cos(eta pi / 2)."""
    leaves_noise: ClassVar[bool] = False

    def __call__(self, sigma: Sigma, sigma_next: Sigma) -> Transition:
        p, q, dtype = _pair(sigma, sigma_next)
        angle = torch.full_like(p, self.eta * math.pi / 2)
        return _coefficient_preserving(p, q, torch.cos(angle), torch.sin(angle), dtype)


@dataclass(frozen=True)
@ranged
class SageExact:
    """The paper's SDE integrated exactly over the step for a fixed predicted x0; also published as "Precise" (arXiv 2605.23522).

    The noise part is an Ornstein-Uhlenbeck process with unit stationary variance, so the correlation over a step is
    exp(-(eta^2 / 2)(logit sigma - logit sigma_next)). No clamp, no NaN for any schedule, no noise left at the end.
    """

    eta: NotNegative = 0.5
    """Exploration scale; 0 is the Euler ODE."""
    sigma_max: OfGrid | None = None
    """Optional clamp of the interval, as in Sage; None needs none."""
    leaves_noise: ClassVar[bool] = False

    def __call__(self, sigma: Sigma, sigma_next: Sigma) -> Transition:
        p, q, dtype = _pair(sigma, sigma_next)
        limit = 1.0 if self.sigma_max is None else self.sigma_max
        p_clamped, q_clamped = p.clamp(max=limit), q.clamp(max=limit)
        rate = self.eta**2 / 2
        if rate == 0:  # the ODE; 0 * infinity at sigma = 1 would be NaN
            log_rho = torch.zeros_like(p)
        else:
            # Equal clamped ends mean no noise, also where both logits are infinite.
            gap = torch.where(p_clamped == q_clamped, 0.0, torch.logit(q_clamped) - torch.logit(p_clamped))
            log_rho = rate * gap
        fresh = torch.sqrt(-torch.expm1(2.0 * log_rho))
        return _coefficient_preserving(p, q, torch.exp(log_rho), fresh, dtype)


LARGE_ETA = 1.5
"""From here on an exploration scale is a mistake more often than a choice."""
KernelName = Literal["ode", "flow", "linear", "dance", "sage", "cps", "sage_exact"]
KERNELS: dict[str, type[Ode | Flow | Linear | Dance | Sage | Cps | SageExact]] = dict(
    zip(get_args(KernelName), (Ode, Flow, Linear, Dance, Sage, Cps, SageExact), strict=True)
)
EXACT = " or ".join(name for name, kind in KERNELS.items() if not kind.leaves_noise and kind is not Ode)
"""Kernels that hold exactly the right amount of noise, for advice."""


def find_kernel(name: str) -> type[Kernel]:
    if ":" not in name:
        if name not in KERNELS:
            raise ValueError(
                f"kernel.name must be one of {', '.join(KERNELS)}, or your own as module:Class, got {name!r}."
                f"{did_you_mean(name, KERNELS)}"
            )
        return KERNELS[name]
    kind = import_object(name, "kernel.name")
    if not (isinstance(kind, type) and is_dataclass(kind) and isinstance(getattr(kind, "leaves_noise", None), bool)):
        fault = "it must be a dataclass with `leaves_noise: ClassVar[bool]`"
    elif not any("__call__" in vars(base) for base in kind.__mro__):
        fault = "it has no __call__(self, sigma, sigma_next)"
    else:
        needed = [one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING]
        strange = [one for one in needed if one not in ("eta", "sigma_max")]
        fault = f"nothing fills its field {strange[0]!r}: give it a default" if strange else ""
    if fault:
        raise ValueError(f"kernel.name {name!r} is not a kernel: {fault}; see docs/extending.md.")
    return cast(type[Kernel], kind)


def unfit_eta(name: str, eta: float) -> str:
    """The reason why a kernel rejects an eta, as a sentence; empty where it accepts it."""
    fault = next(faults(find_kernel(name), {"eta": eta}, "kernel."), "")
    return f"{fault} That is the range of {name}." if fault else ""


def takes_sigma_max(name: str) -> bool:
    return "sigma_max" in type_hints(find_kernel(name))


@checked
class KernelSpec:
    """The sampler of the exploring steps."""

    name: KernelName | str = "sage"
    """Sampler name, or your own as module:Class (docs/extending.md)."""
    eta: Annotated[float, Range(0, 10)] = 0.5
    """Exploration scale: 0 to 1 for cps, ignored by ode; above 1.5 a warning appears."""
    sigma_max: OfGrid | None = None
    """Upper clamp of the noise level (sage, sage_exact); None is the sampler's default."""

    def __post_init__(self) -> None:
        if ":" in self.name:
            return  # the kernel's code may be missing where a configuration is only read
        if fault := unfit_eta(self.name, self.eta):
            raise ValueError(fault)
        if "eta" in type_hints(find_kernel(self.name)) and self.eta > LARGE_ETA:
            warnings.warn(
                f"kernel.eta is {self.eta:g}: the methods use 0.2 to 1.2, and more buries the video in noise. Look at "
                f"`sage-grpo inspect --kernels {self.name} --eta {self.eta:g}` first.",
                stacklevel=3,
            )

    def build(self, grid: Schedule | None = None) -> Kernel:
        """The kernel itself, for the grid of a run: some laws depend on where the grid starts. None is a grid from exactly 1."""
        kind = find_kernel(self.name)
        if self.sigma_max is not None and not takes_sigma_max(self.name):
            clamped = " and ".join(filter(takes_sigma_max, KERNELS))
            raise ValueError(f"kernel.sigma_max applies to {clamped}, not to {self.name}: leave it out.")
        given = {"eta": self.eta, "sigma_max": self.sigma_max}
        if grid is not None:
            given |= {"first": float(grid.sigmas[0]), "second": float(grid.sigmas[1])}
        options = {name: given[name] for name in type_hints(kind) if given.get(name) is not None}
        if wrong := list(faults(kind, options, "kernel.")):
            raise ValueError(f"{wrong[0]} That is the range of {self.name}.")
        return kind(**options)


def _coefficient_preserving(p: Tensor, q: Tensor, rho: Tensor, fresh: Tensor, dtype: torch.dtype) -> Transition:
    """The coefficient-preserving family; `fresh` is sqrt(1 - rho^2), given apart to keep its precision.

    The textbook forms a = (1 - q) + q rho and b = -p (1 - q) + (1 - p) q rho are written around the Euler step, so that
    rho = 1 gives it to the last bit.
    """
    renewed = q * (1.0 - rho)
    return _cast(1.0 - renewed, (q - p) - (1.0 - p) * renewed, q * fresh, dtype)


def _cast(a: Tensor, b: Tensor, std: Tensor, dtype: torch.dtype) -> Transition:
    return Transition(a=a.to(dtype), b=b.to(dtype), std=std.to(dtype))


def _pair(sigma: Sigma, sigma_next: Sigma) -> tuple[Tensor, Tensor, torch.dtype]:
    """Both ends in float64 (differences of logarithms cancel badly in float32), and the dtype of the answer."""
    p, q = torch.as_tensor(sigma), torch.as_tensor(sigma_next)
    from_double = any(isinstance(s, Tensor) and s.dtype == torch.float64 for s in (sigma, sigma_next))
    p, q = torch.broadcast_tensors(p.to(torch.float64), q.to(torch.float64))
    bad = ~((p <= 1) & (q >= 0) & (q < p)).reshape(-1)
    if bool(bad.any()):
        first = int(bad.nonzero()[0, 0])
        raise ValueError(
            f"A step needs 1 >= sigma > sigma_next >= 0, got sigma = {float(p.reshape(-1)[first]):g} and "
            f"sigma_next = {float(q.reshape(-1)[first]):g}. Sampling goes from noise (1) down to data (0)."
        )
    return p, q, torch.float64 if from_double else torch.float32
