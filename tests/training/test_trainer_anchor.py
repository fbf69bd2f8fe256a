"""The anchor is the policy of N updates ago, to the bit, and a copy never leaks into the live weights."""

from __future__ import annotations

import pytest
import torch

from double import CLOSE
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.training.anchor import Ema
from sage_grpo.training.config import AnchorConfig, OptimizerConfig, UpdateConfig
from trainer_helpers import same, weights_of


def history(trainer, iterations: int) -> tuple[list[dict], list[dict]]:
    """Weights and anchor after every optimizer update, the start included."""
    weights = [weights_of(trainer)]
    anchors = [{name: copy.clone() for name, copy in trainer.state.anchor.copies.items()}]
    advance = trainer._advance

    def watched(metrics: dict[str, float]) -> None:
        advance(metrics)
        weights.append(weights_of(trainer))
        anchors.append({name: copy.clone() for name, copy in trainer.state.anchor.copies.items()})

    trainer._advance = watched
    for _ in range(iterations):
        trainer.step()
    return weights, anchors


@pytest.mark.parametrize("kind", ["toy", pytest.param("wan_t2v", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["moving", "dual"])
def test_moving_anchor_is_the_policy_at_its_last_renewal(kind: str, mode: str, make_config, make_trainer) -> None:
    config = make_config(
        kind=kind, trust_region=TrustRegion(mode=mode), anchor=AnchorConfig(every=3), rollout={"steps": 4}
    )
    weights, anchors = history(make_trainer(config), 4)
    assert len(weights) == 9
    for update, anchor in enumerate(anchors):
        assert same(anchor, weights[update - update % 3])
    assert not same(weights[0], weights[3])


@pytest.mark.parametrize("mode", ["fixed", "fixed_dual"])
def test_fixed_anchor_never_renews(mode: str, make_config, make_trainer) -> None:
    config = make_config(trust_region=TrustRegion(mode=mode), anchor=AnchorConfig(every=1))
    trainer = make_trainer(config)
    weights, anchors = history(trainer, 3)
    assert all(same(anchor, weights[0]) for anchor in anchors)
    assert not same(weights[0], weights[-1])
    assert sum(log["anchor/renewed"] for log in trainer.log) == 0


@pytest.mark.usefixtures("in_double")
def test_ema_follows_its_recursion_and_is_what_evaluation_sees(make_config, make_trainer) -> None:
    decay = 0.75
    config = make_config(
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0, ema=decay), update=UpdateConfig(updates_per_rollout=1)
    )
    trainer = make_trainer(config)
    expected = weights_of(trainer)
    for _ in range(3):
        trainer.step()
        expected = {name: torch.lerp(expected[name], p, 1 - decay) for name, p in weights_of(trainer).items()}
    assert isinstance(trainer.state.ema, Ema)
    assert all(torch.allclose(trainer.state.ema.copies[name], expected[name], rtol=0, atol=CLOSE) for name in expected)
    live = weights_of(trainer)
    averaged = trainer.evaluate().metrics
    assert same(weights_of(trainer), live)
    with trainer.state.ema.applied():
        trainer.state.ema, kept = None, trainer.state.ema
        assert trainer.evaluate().metrics == averaged
        trainer.state.ema = kept
