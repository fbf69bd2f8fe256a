"""The preference of one clip to another: the formula, its gradient, and which clips of a group are chosen."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from sage_grpo.objectives.advantage import best, best_against_worst, best_and_worst
from sage_grpo.objectives.base import PreferencePair
from sage_grpo.objectives.build import build
from sage_grpo.objectives.options import ObjectiveSpec
from sage_grpo.objectives.preference import Preference, dpo_lead, dpo_loss
from sage_grpo.objectives.supervised import Supervised

BETA = 3.0


def draw(seed: int) -> torch.Tensor:
    return torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_formula(v: torch.Tensor, v_ref: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """-log sigmoid(-beta / 2 (gap of the better clip - gap of the worse)), as it is printed; row 0 is the better clip."""
    gap = ((v - target) ** 2).mean((1, 2)) - ((v_ref - target) ** 2).mean((1, 2))
    return -torch.nn.functional.logsigmoid(-0.5 * BETA * (gap[0] - gap[1]))


def by_clips(v: torch.Tensor, v_ref: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The same as a mean over clips, each of which takes the other's error for a constant."""
    excess = Preference().partner_excess(v, v_ref, target)
    lead = dpo_lead(excess, excess.detach().flip(0), torch.tensor([1.0, -1.0]), beta=BETA)
    return dpo_loss(lead).loss.mean()


def test_loss_and_gradient_are_those_of_the_pair() -> None:
    v, v_ref, target = (draw(seed).requires_grad_() for seed in (1, 2, 3))
    wanted, found = by_formula(v, v_ref, target), by_clips(v, v_ref, target)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, v), torch.autograd.grad(wanted, v))


def test_at_the_reference_the_loss_is_log_2_and_pulls_both_ways_alike() -> None:
    v, target = draw(1).requires_grad_(), draw(3)
    loss = by_clips(v, v.detach(), target)
    assert float(loss.detach()) == pytest.approx(math.log(2))
    (gradient,) = torch.autograd.grad(loss, v)
    sides = torch.tensor([1.0, -1.0])[:, None, None]
    torch.testing.assert_close(gradient, BETA / 4 * sides * 2 * (v.detach() - target) / 12)


def test_what_is_logged_of_a_pair_keeps_no_graph() -> None:
    objective = Preference(ObjectiveSpec(kind="dpo", beta=BETA))
    v, pair = draw(1).requires_grad_(), PreferencePair([0, 1], [1, 0], torch.tensor([1.0, -1.0]), torch.zeros(2))
    step = SimpleNamespace(velocity=v, velocity_reference=draw(2), x_next=draw(3), sigma=0.5, pair=pair)
    terms = objective.loss(step)
    assert terms.loss.requires_grad
    assert not any(value.requires_grad for value in terms.metrics.values())
    assert torch.equal(terms.metrics["preference/accuracy"], (terms.metrics["preference/lead"] > 0).double())


def test_flow_matching_is_the_mean_square() -> None:
    v, target = draw(1), draw(2)
    terms = Supervised().loss(SimpleNamespace(velocity=v, x_next=target))
    torch.testing.assert_close(terms.loss, ((v - target) ** 2).mean((1, 2)))
    assert not terms.inactive.any()


ALL = [True] * 4
ROW = [0.1, 0.9, 0.5, 0.3]


def trained(values: list, valid: list, count: int) -> list:
    return build(ObjectiveSpec()).choose(values, valid, SimpleNamespace(trained=count))


@pytest.mark.parametrize(
    ("choose", "values", "valid", "count", "chosen"),
    [
        (best_against_worst, ROW, ALL, 1, [(1, 0)]),
        (best_against_worst, ROW, ALL, 9, [(1, 0), (2, 3)]),
        (best_against_worst, ROW, [True, False, True, True], 1, [(2, 0)]),
        (best_against_worst, [0.5, 0.5, 0.5], [True] * 3, 1, []),
        (best_against_worst, [0.0, 0.5, 0.5, 1.0], ALL, 2, [(3, 0)]),
        (best_against_worst, [0.5, 0.7], [False, True], 1, []),
        (best, ROW, ALL, 1, [1]),
        (best, ROW, ALL, 2, [1, 2]),
        (best, ROW, [True, False, True, True], 1, [2]),
        (best, [0.5, 0.5, 0.5], [True] * 3, 1, []),  # the best are better than the worst
        (best, [0.5, 0.5, 0.7], [True] * 3, 2, [2]),
        (best, [0.5, 0.5], [True] * 2, 2, []),
        (best, [1.0], [True], 1, [0]),
        (best_and_worst, [9.0, -9.0, 0.0, 1.0, 2.0, 3.0], [False] * 2 + ALL, 2, [2, 5]),
        (best_and_worst, [9.0, -9.0, 0.0, 1.0, 2.0, 3.0], [False] * 2 + ALL, 6, [2, 3, 4, 5]),
        (trained, ROW, [True, False, True, True], 2, [(0,), (2,)]),
        (best_and_worst, ROW, [False] * 4, 2, []),
        (best_and_worst, ROW, [True] + [False] * 3, 4, [0]),
        (best_and_worst, [1.0] * 6, [True] * 6, 4, [0, 1, 4, 5]),  # equal ones in order, and so alike everywhere
        (best_and_worst, [0.0, 1.0, 1.0, 1.0], ALL, 2, [0, 3]),
        (best_and_worst, [3.0, 2.0, 1.0, 0.0], ALL, 2, [0, 3]),
    ],
)
def test_which_clips_are_chosen(choose, values: list, valid: list, count: int, chosen: list) -> None:
    assert choose(values, valid, count) == chosen


def test_a_clip_in_no_pair_has_no_lead() -> None:
    lead = dpo_lead(torch.tensor([0.3, 0.3]), torch.tensor([0.1, 0.3]), torch.tensor([0.0, 0.0]), beta=BETA)
    assert lead.tolist() == [0.0, 0.0]
