"""What the trust region and the equaliser do to updates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sage_grpo.rl.kl_control import KlCoefficient
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.training.config import BatchConfig, SurrogateConfig, UpdateConfig
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


@pytest.mark.parametrize("kind", ["toy", pytest.param("hunyuan15_t2v", marks=pytest.mark.slow)])
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


def test_paper_estimator_runs_and_needs_no_velocities(make_config, make_trainer) -> None:
    region = TrustRegion(mode="stepwise", estimator="log_ratio")
    trainer = make_trainer(make_config(kl=STRONG, trust_region=region))
    assert not trainer.objective.needs_v_old
    trainer.step()
    assert trainer.log[0]["kl/velocity"] == 0.0
    assert trainer.log[1]["kl/velocity"] != 0.0
    # It is no gradient-free zero: E[grad log pi] vanishes only on average, so this estimator acts (as noise) at once.
    assert trainer.log[0]["gradient/kl_share"] > 0


def norms(metrics: dict[str, float], kind: str) -> list[float]:
    return [value for name, value in metrics.items() if name.startswith(f"gradient/{kind}/")]


@pytest.mark.parametrize("kind", ["toy", pytest.param("wan_t2v", marks=pytest.mark.slow)])
def test_equalized_norms_are_level_where_raw_ones_are_not(kind: str, make_config, make_trainer) -> None:
    config = make_config(
        kind=kind,
        model={"shift": 5.0},
        rollout={"steps": 20, "deterministic_last": False},
        batch=BatchConfig(prompts=2, group_size=6, micro_batch=12),
        update=UpdateConfig(updates_per_rollout=1),
        trust_region=TrustRegion(mode="none"),
    )
    metrics = make_trainer(config).step()
    raw, equalized = norms(metrics, "raw"), norms(metrics, "equalized")
    assert len(raw) == len(equalized) == 20
    assert max(raw) / min(raw) > 10
    assert max(equalized) / min(equalized) < 3
    # The median step keeps its weight: the equaliser does not change the size of the update as a whole.
    assert sorted(equalized)[10] == pytest.approx(sorted(raw)[10], rel=0.5)


def test_as_printed_steps_are_weighed_by_their_std(make_config, make_trainer) -> None:
    """1/std divided out: weights are in the ratios of the steps' std, whatever |b| is."""
    trainer = make_trainer(make_config(surrogate=SurrogateConfig(equalize_by="std"), rollout={"steps": 12}))
    metrics, planner = trainer.step(), trainer.planner
    weights = {
        int(name.rpartition("/")[2]): metrics[name] / metrics[name.replace("equalized", "raw")]
        for name in metrics
        if name.startswith("gradient/equalized/")
    }
    std = {step: float(planner.kernel(*planner.grid.pair(step)).std) for step in weights}
    shares = [weights[step] / std[step] for step in weights]
    assert len(shares) > 2
    assert shares == pytest.approx([shares[0]] * len(shares), rel=1e-4)
