"""An objective by its import path trains, with options of its own; what is not one is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sage_grpo.objectives.build import build
from sage_grpo.objectives.options import ObjectiveSpec
from sage_grpo.objectives.trust_region import TrustRegion
from trainer_helpers import same, weights_of

OWN = "objectives.own_objective:RatioRegression"


def test_an_objective_of_ones_own_trains_by_its_formula(make_config, make_trainer) -> None:
    """Away from the rollout's policy each clip's weights move by the slope of its own loss."""
    config = make_config(trust_region=TrustRegion(mode="none"))
    runs = []
    for temperature in (0.01, 0.02):
        spec = ObjectiveSpec(kind=OWN, options={"temperature": temperature})
        trainer = make_trainer(replace(config, objective=spec))
        rows = [trainer.step() for _ in range(2)]
        runs.append((weights_of(trainer), rows))
    (first, rows), (second, doubled) = runs
    assert not same(first, second)
    assert "ratio/mean" not in rows[0]
    # In the first update the ratio is 1, so the gap is the temperature times |A|, and the gradient is proportional to it.
    one, two = (run[0] for run in (rows, doubled))
    assert two["regression/gap"] == pytest.approx(2 * one["regression/gap"], rel=0.2)
    assert two["gradient/norm"] > 1.5 * one["gradient/norm"]


def test_options_are_checked_by_name_and_range() -> None:
    assert build(ObjectiveSpec(kind=OWN)).temperature == 0.01
    for options, message in (
        ({"temprature": 1.0}, r"no option 'temprature'; it takes temperature\. Did you mean"),
        ({"temperature": -1.0}, r"objective\.options\.temperature must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            build(ObjectiveSpec(kind=OWN, options=options))
    for name, message in (
        ("NoLoss", "has no loss"),
        ("LossTerms", "is not an objective"),
        ("Nothing", "has no 'Nothing'"),
    ):
        with pytest.raises(ValueError, match=message):
            build(ObjectiveSpec(kind=f"objectives.own_objective:{name}"))
    for spec, message in (
        ({"kind": "sugorate"}, "Did you mean"),
        ({"options": {"a": 1}}, "for objectives of your own"),
    ):
        with pytest.raises(ValueError, match=message):
            ObjectiveSpec(**spec)


def test_a_shared_state_takes_a_loss_that_ignores_the_probabilities(make_config, make_trainer) -> None:
    """The norms by clip of states that clips share come from the log-probability; a loss without it has none."""
    shared = {"same_noise": True}
    config = make_config(rollout=shared, objective=ObjectiveSpec(kind=OWN), trust_region=TrustRegion(mode="none"))
    assert torch.isfinite(torch.tensor(make_trainer(config).step()["gradient/norm"]))


def test_a_log_probability_that_rollouts_would_not_record_is_refused() -> None:
    with pytest.raises(ValueError, match="rollouts record the sampler's"):
        build(ObjectiveSpec(kind="objectives.own_objective:OtherRatio"))
