"""Group-relative advantages: their formula in numpy, what masks and groups may change, and what has no answer."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from sage_grpo.objectives.advantage import decoupled_advantage, group_advantage

GROUPS = torch.tensor([2, 0, 0, 1, 2, 1, 2, 0, 1, 0])
"""Members of a group need not be neighbors."""
SCALES = ("group", "global", "none")


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(10, generator=torch.Generator().manual_seed(seed)) + 3.0 * GROUPS


def by_hand(rewards: np.ndarray, ok: np.ndarray, scale: str, eps: float) -> np.ndarray:
    """(reward - mean of its group) / (population std + eps), where the global std is that of all raw rewards, as the code of FlowGRPO,
    DiffusionNFT and AWM computes it. A clip without a reward counts in no statistic."""
    found = np.zeros(10)
    for group in range(3):
        own = ok & (GROUPS.numpy() == group)
        spread = {"group": np.std(rewards[own]) + eps, "global": np.std(rewards[ok]) + eps, "none": 1.0}[scale]
        found[own] = (rewards[own] - np.mean(rewards[own])) / spread
    return found


CASES = list(itertools.product(SCALES, [(), (4, 7), (0, 4, 6)], [1e-6, 0.5]))
"""Scales, failed clips (of two groups; a whole group), and what is added to the std."""


@pytest.mark.parametrize(("scale", "failed", "eps"), CASES)
@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:Degrees of freedom", "ignore:invalid value")
def test_advantages_are_those_of_the_formula(scale: str, failed: tuple[int, ...], eps: float) -> None:
    rewards, ok = drawn(3), np.ones(10, dtype=bool)
    for place, lost in zip(failed, itertools.cycle((math.nan, math.inf))):
        rewards[place], ok[place] = lost, False
    options = {"scale": scale, "eps": eps}
    expected = by_hand(rewards.double().numpy(), ok, scale, eps)
    found = group_advantage(rewards, GROUPS, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    masked = group_advantage(drawn(3), GROUPS, valid=torch.from_numpy(ok), **options)
    assert torch.equal(masked, found)
    bound = float(np.abs(expected).max()) / 2
    np.testing.assert_allclose(
        group_advantage(rewards, GROUPS, clip=bound, **options), expected.clip(-bound, bound), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(("scale", "failed", "eps"), CASES)
@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:Degrees of freedom", "ignore:invalid value")
def test_decoupled_advantages_are_gdpos(scale: str, failed: tuple[int, ...], eps: float) -> None:
    parts, weights = {"a": 100 * drawn(1), "b": drawn(2), "idle": drawn(4)}, {"a": 2.0, "b": -0.5}
    ok = np.ones(10, dtype=bool)
    for place in failed:
        parts["b"][place], ok[place] = math.nan, False
    valid = torch.ones(10, dtype=torch.bool)
    valid[9] = ok[9] = False
    rows = {name: part.double().numpy() for name, part in parts.items()}
    total = sum(weight * by_hand(rows[name], ok, scale, eps) for name, weight in weights.items())
    expected = total / (math.sqrt((total**2).sum() / ok.sum()) + eps)
    options = {"valid": valid, "scale": scale, "eps": eps}
    np.testing.assert_allclose(decoupled_advantage(parts, weights, GROUPS, **options), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        decoupled_advantage(parts, weights, GROUPS, clip=0.5, **options), expected.clip(-0.5, 0.5), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(("scale", "value"), [("group", 0.1), ("global", 1e6), ("none", -3.7)])
def test_a_group_without_spread_or_with_one_survivor_gives_exactly_zero(scale: str, value: float) -> None:
    rewards, groups = torch.tensor([value] * 4 + [0.0, 1.0, value, math.nan]), torch.tensor([0] * 4 + [1, 1, 7, 7])
    advantage = group_advantage(rewards, groups, scale=scale)  # type: ignore[arg-type]
    assert (advantage != 0).tolist() == [False] * 4 + [True, True, False, False]


def test_spreads_of_a_millionth_are_halved_unless_told() -> None:
    """The default eps, where it shows: the std is 1e-6."""
    rewards, groups = torch.tensor([0.0, 2e-6], dtype=torch.float64), torch.tensor([0, 0])
    assert group_advantage(rewards, groups).tolist() == pytest.approx([-0.5, 0.5], abs=1e-6)
    found = decoupled_advantage({"a": rewards}, {"a": 1e-6}, groups)  # each of the two divisions halves
    assert found.tolist() == pytest.approx([-1 / 3, 1 / 3], abs=1e-6)


def test_what_has_no_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="None of the 2 rewards is valid"):
        group_advantage(torch.tensor([math.nan, math.nan]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"not computed: \['VQQ'\]; there are \['VQ'\]"):
        decoupled_advantage({"VQ": drawn(0)}, {"VQQ": 1.0}, GROUPS)
