"""Which runs have an anchor, when it is renewed, and the average that is evaluated."""

from __future__ import annotations

import pytest
import torch

from double import CLOSE
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.training.anchor import Ema
from sage_grpo.training.config import AnchorConfig, OptimizerConfig, UpdateConfig
from trainer_helpers import same, weights_of


@pytest.mark.parametrize(
    ("mode", "every"), [("none", 0), ("stepwise", 0), ("fixed", None), ("fixed_dual", None), ("moving", 3), ("dual", 3)]
)
def test_an_anchor_is_where_a_mode_has_one_and_renewed_where_it_moves(mode, every, make_config, make_trainer) -> None:
    trainer = make_trainer(make_config(trust_region=TrustRegion(mode=mode), anchor=AnchorConfig(every=3)))
    anchor, first = trainer.state.anchor, weights_of(trainer)
    assert (0 if anchor is None else anchor.every) == every
    if anchor is not None:
        trainer.step()
        trainer.step()  # four updates
        assert same(anchor.copies, first) == (every is None)
        assert not same(anchor.copies, weights_of(trainer))
        assert sum(log["anchor/renewed"] for log in trainer.log) == bool(every)


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
