"""Steps that do not explore may be cheap; those that do, their replays and evaluations are exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_branching import branching

from sage_grpo.data.prompts import Prompt
from sage_grpo.models import ModelError
from sage_grpo.models.cheap import CheapSpec
from sage_grpo.models.spec import LoraSpec
from sage_grpo.objectives.trust_region import TrustRegion
from sage_grpo.samplers.windows import Window
from sage_grpo.training.config import BatchConfig
from sage_grpo.training.planner import Planner, check_cheap
from sage_grpo.training.rollout import Rollout
from trainer_helpers import plan_of

WAYS = {
    "interval": CheapSpec(guidance=(0.3, 0.9)),
    "reused": CheapSpec(negative_every=2),
    "all": CheapSpec(guidance=(0.3, 0.97), negative_every=2),
}


def cheaply(make_config, cheap: CheapSpec, *, kind: str = "toy", **fields):
    given = {"steps": 9, "cheap": cheap}
    model = {"guidance_scale": 4.0} | ({"lora": LoraSpec(rank=4)} if kind != "toy" else {})
    window = fields.pop("window", Window(kind="drawn", at=[4]))
    free = TrustRegion(mode="none")
    config = branching(
        make_config, share=True, kind=kind, model=model, rollout=given, window=window, trust_region=free, **fields
    )
    return replace(config, model=replace(config.model, family="trainer_zoo.guided")) if kind == "toy" else config


def latents(rollout: Rollout) -> dict:
    return {member: row for batch, rows in rollout.latents for member, row in zip(batch.members, rows)}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("toy", "reused"),
        pytest.param("hunyuan15_t2v", "all", marks=pytest.mark.slow),
        pytest.param("wan22_t2v", "reused", marks=pytest.mark.slow),
    ],
)
def test_the_trained_step_is_exact(kind, way, make_config, make_trainer) -> None:
    runs = []
    for cheap in (CheapSpec(), WAYS[way]):
        trainer = make_trainer(cheaply(make_config, cheap, kind=kind))
        plan = plan_of(trainer)
        rollout = trainer.sample(plan)
        for replay, record in rollout.records.items():
            step = record.policy.step(replay.step, record.x, record.conditions)
            with torch.no_grad():
                again = step.gaussian.expand(len(replay.members)).log_prob(record.x_next)
            assert torch.equal(again.detach(), record.log_prob_old)
        runs.append((latents(rollout), trainer.evaluate().metrics))
        assert trainer.step()["ratio/first_log"] == 0.0
    (exact, judged), (cheap, also) = runs
    assert not any(torch.equal(exact[member], cheap[member]) for member in exact)
    assert judged == also


@pytest.mark.parametrize(
    ("way", "window"),
    [
        ("all", Window(kind="drawn", at=[2, 5], branches=2)),
        ("reused", Window(kind="drawn", at=[2, 5], branches=2)),
        ("interval", Window(kind="fixed", start=3, length=2)),
    ],
)
def test_passes_that_are_shared_are_those_of_each_alone(way, window, make_config, make_trainer) -> None:
    runs = []
    for share in (True, False):
        config = cheaply(make_config, WAYS[way], window=window)
        config = replace(config, rollout=replace(config.rollout, share=share))
        trainer = make_trainer(config)
        runs.append(latents(trainer.sample(plan_of(trainer))))
    for member, row in runs[0].items():
        torch.testing.assert_close(row, runs[1][member], rtol=1e-4, atol=1e-5)


def test_what_ranks_cannot_do_together_is_refused(make_config, make_trainer) -> None:
    """All ranks gather the weights for every pass."""
    trainer = make_trainer(cheaply(make_config, WAYS["reused"]))

    def on(ranks: int, at: list[int] | None, prompts: int, size: int = 3) -> Planner:
        batch, window = BatchConfig(prompts=prompts, group_size=size), Window(kind="drawn", at=at)
        config = cheaply(make_config, WAYS["reused"], window=window, batch=batch)
        return replace(trainer.planner, config=config, ranks=ranks)

    guided = trainer.model
    one_place = on(2, [3], 4)
    check_cheap(one_place.config, guided, one_place)
    plan = one_place.plan(0, [Prompt("")] * 4)
    assert plan.rollout_passes(0) == plan.rollout_passes(1)
    for planner in (on(2, [2, 4], 4), on(3, [3], 5), on(2, None, 1, size=4)):
        with pytest.raises(ModelError, match="need ranks that make the same passes"):
            check_cheap(planner.config, guided, planner)
