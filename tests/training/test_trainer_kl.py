"""What the trust region does to updates: the step-wise term is inert in the first one and acts after it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sage_grpo.rl.kl_control import KlCoefficient
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.training.config import SurrogateConfig, UpdateConfig
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


@pytest.mark.parametrize("kind", ["toy", "hunyuan15_t2v"])
def test_dual_kl_has_no_velocity_gradient_in_the_first_inner_update_and_has_one_after_it(
    kind: str, make_config, make_trainer
) -> None:
    config = make_config(
        kind=kind, kl=STRONG, update=UpdateConfig(updates_per_rollout=3), rollout={"steps": 4},
        trust_region=TrustRegion(mode="dual", beta_position=0.0, beta_velocity=1.0),
    )  # fmt: skip
    trainer = make_trainer(config)
    for _ in range(2):
        trainer.log.clear()
        trainer.step()
        first, *later = trainer.log
        assert first["kl/velocity"] == 0.0
        assert first["gradient/kl_share"] == 0.0
        assert all(update["kl/velocity"] > 0 and update["gradient/kl_share"] > 0 for update in later)


def test_position_term_acts_from_the_second_update_on(make_config, make_trainer) -> None:
    trainer = make_trainer(make_config(kl=STRONG, trust_region=TrustRegion(mode="fixed")))
    trainer.step()
    trainer.step()
    assert [log["kl/position"] > 0 for log in trainer.log] == [False, True, True, True]
    assert trainer.log[0]["gradient/kl_share"] == 0.0 < trainer.log[-1]["gradient/kl_share"]


def test_a_strong_leash_keeps_the_policy_near_its_anchor(make_config, make_trainer) -> None:
    """The sign of the KL in the loss: minus (the paper's Eq. 43) would drive the policy away."""
    distance = []
    for coefficient in (0.0, 1e4):
        kl = KlCoefficient(kind="constant", lambda_min=0.0, lambda_max=coefficient)
        trainer = make_trainer(make_config(kl=kl, trust_region=TrustRegion(mode="fixed")))
        first = weights_of(trainer)
        for _ in range(6):
            trainer.step()
        distance.append(trainer.log[-1]["kl/position"])
        assert not same(first, weights_of(trainer))
    assert 0 < distance[1] < 0.5 * distance[0]


def test_paper_estimator_runs_and_needs_no_velocities(make_config, make_trainer) -> None:
    region = TrustRegion(mode="stepwise", estimator="log_ratio")
    trainer = make_trainer(make_config(kl=STRONG, trust_region=region))
    assert not trainer.objective.needs_v_old
    trainer.step()
    assert trainer.log[0]["kl/velocity"] == 0.0
    assert trainer.log[1]["kl/velocity"] != 0.0
    # It is no gradient-free zero: E[grad log pi] vanishes only on average, so this estimator acts (as noise) at once.
    assert trainer.log[0]["gradient/kl_share"] > 0


@pytest.mark.parametrize("surrogate", [SurrogateConfig(kind="kl_mask"), SurrogateConfig(centred=True)])
def test_surrogates_on_the_exact_kl_see_the_rollouts_velocities(surrogate, make_config, make_trainer) -> None:
    trainer = make_trainer(make_config(surrogate=surrogate, trust_region=TrustRegion(mode="none")))
    assert trainer.objective.needs_v_old
    metrics = trainer.step()
    assert metrics["ratio/first_log"] == 0.0
    assert metrics["ratio/largest_log"] > 0


def test_kl_mask_drops_moves_only_beyond_its_threshold(make_config, make_trainer) -> None:
    dropped = []
    for scale in (1e9, 1e-12):
        surrogate = SurrogateConfig(kind="kl_mask", kl_mask_scale=scale, equalize=False)
        trainer = make_trainer(make_config(surrogate=surrogate, trust_region=TrustRegion(mode="none")))
        trainer.step()
        dropped.append(trainer.log[1]["ratio/clip_fraction"])
    assert dropped[0] == 0.0 < dropped[1] < 1.0


def test_lambda_follows_its_ramp_over_updates(make_config, make_trainer) -> None:
    kl = KlCoefficient(kind="two_stage", lambda_min=0.0, lambda_max=1.0, warmup_updates=4)
    trainer = make_trainer(make_config(kl=kl))
    for _ in range(3):
        trainer.step()
    assert [log["kl/lambda"] for log in trainer.log] == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0, 1.0])


def test_ppo_tightens_and_the_papers_rule_relaxes_when_kl_is_high(make_config, make_trainer) -> None:
    after = {}
    for kind in ("ppo", "paper"):
        kl = KlCoefficient(kind=kind, lambda_min=1e-3, lambda_max=1e-1, warmup_updates=0, target=1e-12)
        trainer = make_trainer(make_config(kl=kl))
        trainer.state.kl.value = 1e-2
        for _ in range(3):
            trainer.step()
        after[kind] = trainer.log[-1]["kl/lambda"]
    assert after["paper"] < 1e-2 < after["ppo"]
