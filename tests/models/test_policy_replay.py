"""Steps that explore, and those that do not."""

from __future__ import annotations

import pytest
import torch

from sage_grpo.flow.kernels import Ode, Sage
from sage_grpo.flow.schedule import Schedule
from sage_grpo.models.policy import Policy, integrate


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
