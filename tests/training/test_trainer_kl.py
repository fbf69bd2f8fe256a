"""What the trust region and the equaliser do to updates."""

from __future__ import annotations

from dataclasses import replace

from sage_grpo.rl.kl_control import KlCoefficient
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.training.config import UpdateConfig
from trainer_helpers import same, weights_of

STRONG = KlCoefficient(kind="constant", lambda_min=0.0, lambda_max=10.0)


def train(trainer, iterations: int = 2) -> dict:
    for _ in range(iterations):
        trainer.step()
    return weights_of(trainer)


def test_known_error_stepwise_kl_is_inert_with_one_update_per_rollout(make_config, make_trainer) -> None:
    """The official code's default: the "velocity control" changes not one bit of the weights, however strong it is."""
    once, twice = UpdateConfig(updates_per_rollout=1), UpdateConfig(updates_per_rollout=2)
    for update, inert in ((once, True), (twice, False)):
        config = make_config(update=update, kl=STRONG)
        without = train(make_trainer(replace(config, trust_region=TrustRegion(mode="none"))))
        stepwise = train(make_trainer(replace(config, trust_region=TrustRegion(mode="stepwise"))))
        assert same(without, stepwise) == inert
