"""What a class must be to be a kernel by its import path, and which of its fields are filled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from sage_grpo.config.ranges import Share
from sage_grpo.samplers.kernels import EXACT, KERNELS, Dance, KernelSpec, find_kernel, takes_sigma_max, unfit_eta
from sage_grpo.samplers.schedule import Schedule


@dataclass(frozen=True)
class Whole:
    eta: Share
    sigma_max: float | None
    first: float = 0.0
    second: float = 0.0
    other: list = field(default_factory=list)
    leaves_noise: ClassVar[bool] = False

    def __call__(self, sigma, sigma_next):
        return Dance(self.eta)(sigma, sigma_next)


class Inherits(Whole): ...


class NoDataclass:
    leaves_noise, __call__ = True, Whole.__call__


@dataclass(frozen=True)
class Silent:
    __call__ = Whole.__call__


@dataclass(frozen=True)
class Uncallable:
    leaves_noise: ClassVar[bool] = True


@dataclass(frozen=True)
class Needy(Silent):
    first: float
    leaves_noise: ClassVar[bool] = True


instance = Whole(0.5, None)


def build(name: str, **options: float) -> object:
    return KernelSpec(name=f"test_own_kernels:{name}", **options).build(Schedule.shifted(4, 2.0))


@pytest.mark.parametrize("name", ["Whole", "Inherits"])
def test_fields_are_filled_by_their_names(name: str) -> None:
    grid = Schedule.shifted(4, 2.0)
    found = build(name, eta=0.25, sigma_max=0.75)
    assert (found.eta, found.sigma_max, found.other) == (0.25, 0.75, [])
    assert (found.first, found.second) == (float(grid.sigmas[0]), float(grid.sigmas[1]))
    alone = KernelSpec(name=f"test_own_kernels:{name}", eta=0.25, sigma_max=0.75).build()
    assert (alone.first, alone.second) == (0.0, 0.0)


def test_the_range_of_eta_is_the_kernels_own() -> None:
    with pytest.raises(
        ValueError, match=r"^kernel\.eta must be in \[0, 1\], got 1\.25\. That is the range of test_own"
    ):
        build("Whole", eta=1.25, sigma_max=0.5)
    assert unfit_eta("cps", 1.25) == "kernel.eta must be in [0, 1], got 1.25. That is the range of cps."
    assert [name for name in KERNELS if unfit_eta(name, 1.25)] == ["cps"]
    assert [name for name in KERNELS if takes_sigma_max(name)] == ["sage", "sage_exact"]
    assert EXACT == "cps or sage_exact"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("test_own_kernels:NoDataclass", "it must be a dataclass with `leaves_noise"),
        ("test_own_kernels:instance", "it must be a dataclass with `leaves_noise"),
        ("test_own_kernels:Silent", "it must be a dataclass with `leaves_noise"),
        ("test_own_kernels:Uncallable", "it has no __call__"),
        ("test_own_kernels:Needy", "nothing fills its field 'first': give it a default"),
        ("test_own_kernels:Wole", "has no 'Wole'. Did you mean 'Whole'?"),
        ("test_own_kernel:Whole", "kernel.name 'test_own_kernel:Whole': there is no module test_own_kernel"),
        ("sag", "kernel.name must be one of ode, flow, linear, dance, sage, cps, sage_exact, or your own as module:Class, got 'sag'."),
        ("sag", "Did you mean 'sage'?"),
    ],
)  # fmt: skip
def test_what_is_not_a_kernel_is_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError) as refused:
        find_kernel(name)
    assert said in str(refused.value)
