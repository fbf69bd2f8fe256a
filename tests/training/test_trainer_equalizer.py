"""The temporal gradient equaliser at the paper's schedule, measured on the gradients themselves."""

from __future__ import annotations

import pytest

from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.training.config import BatchConfig, SurrogateConfig, UpdateConfig


def norms(metrics: dict[str, float], kind: str) -> list[float]:
    return [value for name, value in metrics.items() if name.startswith(f"gradient/{kind}/")]


@pytest.mark.parametrize("kind", ["toy", "wan_t2v"])
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


def test_a_cap_limits_the_weights(make_config, make_trainer) -> None:
    ratio = {}
    for cap in (None, 2.0):
        surrogate = SurrogateConfig(equalize_cap=cap)
        metrics = make_trainer(make_config(surrogate=surrogate, rollout={"steps": 12})).step()
        ratio[cap] = max(e / r for e, r in zip(norms(metrics, "equalized"), norms(metrics, "raw")))
    assert ratio[None] > 2.0 == pytest.approx(ratio[2.0])


def test_off_means_off(make_config, make_trainer) -> None:
    metrics = make_trainer(make_config(surrogate=SurrogateConfig(equalize=False))).step()
    assert norms(metrics, "equalized") == norms(metrics, "raw")


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
