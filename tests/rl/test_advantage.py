"""Group-relative advantages: statistics per group, masks, and what has no answer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from double import double
from kernel_cases import law
from sage_grpo.rl.advantage import decoupled_advantage, group_advantage

GROUPS = torch.tensor([0, 0, 0, 0, 7, 7, 7, 7])


def _rewards(seed: int = 0, size: int = 8) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_every_group_gets_mean_zero_and_population_std_one() -> None:
    advantage = group_advantage(_rewards(), GROUPS)
    for group in (advantage[:4], advantage[4:]):
        assert float(group.mean()) == pytest.approx(0, abs=1e-6)
        assert float(group.std(correction=0)) == pytest.approx(1, abs=1e-4)
    rewards = _rewards()[:4].double()
    by_hand = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
    torch.testing.assert_close(advantage[:4], by_hand.float())


@law
@given(
    scale=st.floats(0.1, 100.0),
    offset=st.floats(-100.0, 100.0),
    order=st.permutations(range(8)),
    seed=st.integers(0, 50),
)
def test_units_of_the_reward_and_order_of_the_rollouts_do_not_matter(
    scale: float, offset: float, order: list[int], seed: int
) -> None:
    rewards = _rewards(seed).double()
    base = group_advantage(rewards, GROUPS)
    moved = group_advantage(scale * rewards + offset, GROUPS)
    torch.testing.assert_close(moved, base, rtol=1e-3, atol=1e-3)
    shuffled = group_advantage(rewards[order], GROUPS[order])
    torch.testing.assert_close(shuffled, base[order])


@law
@given(bad=st.lists(st.booleans(), min_size=8, max_size=8), seed=st.integers(0, 50))
def test_a_failed_rollout_is_as_if_it_had_never_been(bad: list[bool], seed: int) -> None:
    failed = torch.tensor(bad)
    rewards = _rewards(seed)
    for group in (GROUPS == 0, GROUPS == 7):
        if int((group & ~failed).sum()) < 2:
            failed = failed & ~group
    broken = rewards.masked_fill(failed, math.nan)
    advantage = group_advantage(broken, GROUPS)
    assert (advantage[failed] == 0).all()
    alive = group_advantage(rewards[~failed], GROUPS[~failed])
    torch.testing.assert_close(advantage[~failed], alive)
    torch.testing.assert_close(group_advantage(rewards, GROUPS, valid=~failed), advantage)


def test_infinite_rewards_are_masked_like_failed_ones() -> None:
    rewards = torch.tensor([1.0, 2.0, math.inf, 3.0, 1.0, -math.inf, 0.0, 2.0])
    advantage = group_advantage(rewards, GROUPS)
    assert torch.isfinite(advantage).all()
    assert advantage[2] == advantage[5] == 0


@pytest.mark.parametrize("scale", ["group", "global", "none"])
@pytest.mark.parametrize("value", [0.1, 1e6, -3.7])
def test_a_group_without_spread_gives_exactly_zero(scale: str, value: float) -> None:
    rewards = torch.cat([torch.full((4,), value), _rewards()[:4]])
    advantage = group_advantage(rewards, GROUPS, scale=scale)  # type: ignore[arg-type]
    assert (advantage[:4] == 0).all()
    assert (advantage[4:] != 0).any()


def test_a_group_with_one_survivor_gives_zero() -> None:
    rewards = torch.tensor([5.0, math.nan, math.nan, math.nan, 1.0, 2.0, 3.0, 4.0])
    assert (group_advantage(rewards, GROUPS)[:4] == 0).all()


def test_scales_differ_as_they_say() -> None:
    rewards = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 10.0, 0.0, 10.0])
    none = group_advantage(rewards, GROUPS, scale="none")
    assert none.tolist() == [-0.5, 0.5, -0.5, 0.5, -5.0, 5.0, -5.0, 5.0]
    together = math.sqrt((2 * 1 + 2 * 100) / 8 - 2.75**2)  # of all eight, around the mean of all
    torch.testing.assert_close(group_advantage(rewards, GROUPS, scale="global"), none / (together + 1e-6))
    assert group_advantage(rewards, GROUPS).abs().tolist() == pytest.approx([1.0] * 8, abs=1e-4)
    alive = torch.tensor([True, True, False, False, True, True, True, True])
    masked = group_advantage(rewards, GROUPS, valid=alive, scale="global")
    torch.testing.assert_close(masked[alive], none[alive] / (math.sqrt(201 / 6 - 3.5**2) + 1e-6))


@pytest.mark.parametrize("failed", [False, True])
def test_the_global_scale_is_the_std_of_all_raw_rewards_as_authors_compute_it(failed: bool) -> None:
    """FlowGRPO's, DiffusionNFT's and AWM's code: (reward - mean of its prompt) / (std of all rewards + 1e-4), by numpy in float64.

    A clip without a reward counts in no statistic; theirs cannot fail.
    """
    with double():
        generator = torch.Generator().manual_seed(3)
        groups = torch.tensor([2, 0, 0, 1, 2, 1, 2, 0, 1, 0])
        rewards = torch.randn(10, generator=generator) + 3.0 * groups  # easy prompts and hard ones
        ok = np.ones(10, dtype=bool)
        if failed:
            rewards[4], ok[4], ok[7] = math.nan, False, False
        found = group_advantage(rewards, groups, valid=torch.from_numpy(ok), scale="global", eps=1e-4).numpy()
    raw, prompts, expected = rewards.numpy(), groups.numpy(), np.zeros(10)
    std = np.std(raw[ok])
    for prompt in np.unique(prompts):
        own = ok & (prompts == prompt)
        expected[own] = (raw[own] - np.mean(raw[own])) / (std + 1e-4)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_decoupled_advantages_are_gdpos_whatever_the_level_of_a_reward() -> None:
    """GDPO: every reward by the mean and std of its group, the weighted sum by the std of the batch. What all clips of a reward have in
    common, or those of one prompt, cancels."""
    groups, parts = torch.arange(3).repeat_interleave(4), {"a": _rewards(1, 12), "b": _rewards(2, 12)}
    found = decoupled_advantage(parts, {"a": 1.0, "b": 0.5}, groups)
    total = torch.zeros(3, 4, dtype=torch.float64)
    for name, weight in (("a", 1.0), ("b", 0.5)):
        rows = parts[name].double().view(3, 4)
        total += weight * (rows - rows.mean(1, keepdim=True)) / (rows.std(1, correction=0, keepdim=True) + 1e-6)
    torch.testing.assert_close(
        found.double(), (total / (total.std(correction=0) + 1e-6)).flatten(), rtol=1e-5, atol=1e-6
    )
    moved = {"a": parts["a"] + 8.0 * groups, "b": parts["b"]}
    torch.testing.assert_close(decoupled_advantage(moved, {"a": 1.0, "b": 0.5}, groups), found, rtol=1e-4, atol=1e-5)


def test_clip_bounds_the_advantage() -> None:
    rewards = torch.tensor([100.0] + [0.0] * 99)
    groups = torch.zeros(100, dtype=torch.long)
    assert float(group_advantage(rewards, groups).max()) > 5
    assert float(group_advantage(rewards, groups, clip=5.0).max()) == 5.0
    assert float(group_advantage(-rewards, groups, clip=5.0).min()) == -5.0
    for sign in (1.0, -1.0):
        parts = {"a": sign * rewards, "b": sign * rewards}
        clipped = decoupled_advantage(parts, {"a": 1.0, "b": 1.0}, groups, clip=5.0)
        assert float((sign * clipped).max()) == 5.0


def _normalised(total: torch.Tensor, ok: torch.Tensor | None = None) -> torch.Tensor:
    valid = total if ok is None else total[ok]
    return total / (valid.std(correction=0) + 1e-6)


def test_decoupled_normalisation_keeps_a_small_reward_audible() -> None:
    loud, quiet = _rewards(1) * 100, _rewards(2) * 0.01
    weights = {"loud": 1.0, "quiet": 1.0}
    decoupled = decoupled_advantage({"loud": loud, "quiet": quiet}, weights, GROUPS)
    expected = group_advantage(loud, GROUPS) + group_advantage(quiet, GROUPS, eps=1e-6)
    torch.testing.assert_close(decoupled, _normalised(expected))
    summed = group_advantage(loud + quiet, GROUPS)
    silent = group_advantage(loud, GROUPS)
    assert float((summed - silent).abs().max()) < 1e-2  # the plain sum does not hear it
    assert float((decoupled - silent).abs().max()) > 0.3


def test_decoupled_weights_scale_their_terms_and_a_failed_part_fails_the_rollout() -> None:
    a, b = _rewards(1), _rewards(2)
    b[3] = math.nan
    ok = torch.isfinite(b)
    advantage = decoupled_advantage({"a": a, "b": b}, {"a": 2.0, "b": 0.5}, GROUPS)
    expected = 2 * group_advantage(a, GROUPS, valid=ok) + 0.5 * group_advantage(b, GROUPS, valid=ok)
    torch.testing.assert_close(advantage, _normalised(expected, ok))
    assert advantage[3] == 0


@pytest.mark.parametrize(
    ("rewards", "groups", "message"),
    [
        ([], [], "there is no group"),
        ([[1.0, 2.0]], [[0, 0]], "one non-empty row"),
        ([math.nan, math.nan], [0, 0], "None of the 2 rewards is valid"),
        ([1.0, 2.0, 3.0], [0, 0, 1], r"Groups \[1\] have a single member"),
        ([1.0], [0], r"Groups \[0\] have a single member"),
        ([1.0, 2.0], [0], "one value per rollout"),
    ],
)
def test_what_has_no_answer_is_refused(rewards: list, groups: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantage(torch.tensor(rewards), torch.tensor(groups, dtype=torch.long))


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="scale must be 'group', 'global' or 'none', got 'batch'"):
        group_advantage(_rewards(), GROUPS, scale="batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"not computed: \['VQQ'\]; there are \['VQ'\]"):
        decoupled_advantage({"VQ": _rewards()}, {"VQQ": 1.0}, GROUPS)
    with pytest.raises(ValueError, match="one value per rollout"):
        group_advantage(_rewards(), GROUPS, valid=torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize("count", [1, 4, 9])
def test_decoupled_advantages_do_not_grow_with_the_number_of_rewards(count: int) -> None:
    """GDPO's last step is a normalisation over the batch: without it correlated rewards add up to 1, 4, 9."""
    torch.manual_seed(0)
    groups = torch.arange(8).repeat_interleave(6)
    shared = torch.randn(48)
    parts = {f"r{number}": shared * (number + 1.0) for number in range(count)}
    advantage = decoupled_advantage(parts, dict.fromkeys(parts, 1.0), groups)
    assert float(advantage.std(correction=0)) == pytest.approx(1.0, abs=1e-4)
    assert float(advantage.mean()) == pytest.approx(0.0, abs=1e-5)


def test_decoupled_normalisation_leaves_masked_rollouts_out() -> None:
    torch.manual_seed(1)
    groups = torch.arange(4).repeat_interleave(6)
    parts = {"a": torch.randn(24), "b": torch.randn(24)}
    valid = torch.ones(24, dtype=torch.bool)
    valid[[1, 7, 8]] = False
    advantage = decoupled_advantage(parts, {"a": 1.0, "b": 2.0}, groups, valid=valid)
    assert bool((advantage[~valid] == 0).all())
    assert float(advantage[valid].square().mean().sqrt()) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("group", [-1 / 1.5, 1 / 1.5, -3 / 3.5, 3 / 3.5]),
        ("global", [value / (math.sqrt(6) + 0.5) for value in (-1, 1, -3, 3)]),
        ("none", [-1.0, 1.0, -3.0, 3.0]),
    ],
)
def test_eps_is_added_to_the_std_and_not_to_the_variance(scale: str, expected: list[float]) -> None:
    """By hand, with an eps that counts: groups of std 1 and 3, and sqrt(6) of all four."""
    rewards, groups = torch.tensor([4.0, 6.0, 0.0, 6.0]), torch.tensor([0, 0, 1, 1])
    advantage = group_advantage(rewards, groups, scale=scale, eps=0.5)  # type: ignore[arg-type]
    assert advantage.tolist() == pytest.approx(expected, rel=1e-6)
    terms = torch.tensor(expected, dtype=torch.float64)
    decoupled = decoupled_advantage({"a": rewards}, {"a": 2.0}, groups, scale=scale, eps=0.5)  # type: ignore[arg-type]
    by_hand = 2 * terms / ((2 * terms).square().mean().sqrt() + 0.5)
    assert decoupled.tolist() == pytest.approx(by_hand.tolist(), rel=1e-6)


@pytest.mark.parametrize("scale", ["group", "global", "none"])
def test_a_group_that_failed_wholly_is_zero_and_leaves_the_others_alone(scale: str) -> None:
    rewards, groups = torch.tensor([1.0, 3.0, math.nan, math.nan]), torch.tensor([0, 0, 1, 1])
    found = group_advantage(rewards, groups, scale=scale)  # type: ignore[arg-type]
    assert found[2:].tolist() == [0.0, 0.0]
    assert torch.equal(found[:2], group_advantage(rewards[:2], groups[:2], scale=scale))  # type: ignore[arg-type]


def test_spreads_of_a_millionth_are_halved_unless_told() -> None:
    """The default eps, where it shows: the std is 1e-6."""
    rewards, groups = torch.tensor([0.0, 2e-6], dtype=torch.float64), torch.tensor([0, 0])
    assert group_advantage(rewards, groups).tolist() == pytest.approx([-0.5, 0.5], abs=1e-6)
    assert group_advantage(rewards, groups, eps=3e-6).tolist() == pytest.approx([-0.25, 0.25], abs=1e-6)
