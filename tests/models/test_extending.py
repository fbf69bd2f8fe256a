"""A new family needs one module with `load`, and nothing else has to know of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from sage_grpo.flow.kernels import Ode, SageExact
from sage_grpo.flow.schedule import Schedule
from sage_grpo.models.base import VelocityModel
from sage_grpo.models.policy import Policy, integrate
from sage_grpo.models.spec import ModelSpec

HERE = Path(__file__).parent


@pytest.fixture
def toy(monkeypatch, tmp_path):
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "toy.py").write_text((HERE / "toy_family.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    yield ModelSpec(family="my_package.toy").load()
    for name in ("my_package", "my_package.toy"):
        sys.modules.pop(name, None)


def test_a_family_takes_under_65_lines(toy) -> None:
    assert isinstance(toy, VelocityModel)
    assert len((HERE / "toy_family.py").read_text().splitlines()) < 65


def test_it_samples_its_data(toy) -> None:
    conditions = toy.encode(["four"])
    x = torch.randn(1, *toy.latent_shape())
    schedule = Schedule.shifted(200, 1.0)
    y = integrate(Policy(toy, Ode(), schedule), x, conditions)
    # The data have mean 4 and variance 1, so the flow carries noise to noise + 4.
    torch.testing.assert_close(y, x + 4, rtol=0, atol=0.05)
    assert torch.equal(toy.decode(torch.full_like(x, 7.0)), torch.full((1, 1, 2, 2, 3), 7, dtype=torch.uint8))


def test_it_learns_through_the_policy(toy) -> None:
    policy = Policy(toy, SageExact(), Schedule.shifted(4, 1.0))
    x, conditions = torch.randn(2, *toy.latent_shape()), toy.encode(["a", "b"])
    step = policy.step(1, x, conditions)
    step.gaussian.log_prob(step.gaussian.sample(torch.randn_like(x)).detach()).sum().backward()
    assert toy.network.bias.grad is not None


def test_the_guide_names_all_of_the_protocol() -> None:
    guide = (HERE.parents[1] / "docs" / "extending.md").read_text()
    members = {name for name in vars(VelocityModel) if not name.startswith("_")} | set(VelocityModel.__annotations__)
    missing = {name for name in members if not re.search(rf"`{name}\b", guide)}
    assert not missing
