"""A plan with workers: tasks, seconds, and the bottleneck."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sage_grpo.config.parsing import parse
from sage_grpo.distributed.spec import RaySpec
from sage_grpo.models.lora import LoraSpec
from sage_grpo.plan import hardware
from sage_grpo.plan.costs import forecast, worker_costs
from sage_grpo.recipes import recipe
from sage_grpo.training.config import BatchConfig, TrainConfig

ROOT = Path(__file__).parents[2]


def config_of(workers: int = 2, **rollout: object) -> TrainConfig:
    base = recipe("shapes/branch")
    return replace(
        base,
        model=replace(base.model, lora=LoraSpec(rank=4)),
        batch=BatchConfig(prompts=4, group_size=4, micro_batch=1),
        rollout=replace(base.rollout, on="ray", ray=RaySpec(workers=workers), **rollout),
    )


def crew(config: TrainConfig) -> SimpleNamespace:
    found = forecast(config, hardware.cpu(), gpus=1)
    return SimpleNamespace(**worker_costs(found, found) or {})


def test_workers_share_the_sampling_and_staleness_hides_it() -> None:
    one, two, many = crew(config_of(1)), crew(config_of(2)), crew(config_of(8))
    assert (one.tasks, one.rounds, two.rounds, many.rounds) == (4, 4, 2, 1)
    assert two.sampling_seconds == pytest.approx(one.sampling_seconds / 2)
    assert two.iteration_seconds == pytest.approx(two.sampling_seconds + two.updating_seconds)
    assert crew(config_of(2, staleness=1)).iteration_seconds == max(two.sampling_seconds, two.updating_seconds)
    assert "4 workers have nothing to do" in many.bottleneck
    assert worker_costs(*[forecast(recipe("shapes/branch"), hardware.cpu(), gpus=1)] * 2) is None


def measured(row: int, *more: str) -> tuple[TrainConfig, dict]:
    found = json.loads(
        (ROOT / "research" / "benchmarks" / "results" / "workers_h200.jsonl").read_text().splitlines()[row]
    )
    words = [*found["command"], *more]
    words[words.index("--model.path") + 1] = "somebody/HunyuanVideo-1.5-Diffusers-480p_t2v"
    return parse(TrainConfig, words, prog="plan", defaults=recipe("hunyuan15_lora/branch"), recipes=True), found


@pytest.mark.parametrize("row", [0, 1], ids=["fitted", "another"])
def test_a_small_clip_that_is_not_compiled_takes_what_was_measured(row: int) -> None:
    """Kernels that are started one by one are what it costs: without a floor the plan said a quarter of it. The floor was fitted to the first row."""
    config, found = measured(row)
    whole = forecast(config, hardware.find("h200"))
    said = {phase.name: phase.seconds for phase in whole.phases}
    assert said == pytest.approx(found["plan"]["phases"])
    for name in ("rollout", "update"):
        assert said[name] == pytest.approx(found["runs"]["one process"][f"time/{name}"], rel=0.1 if row == 0 else 0.25)
    compiled = replace(config, model=replace(config.model, compile=True))
    quick = forecast(compiled, whole.hardware, architecture=whole.architecture)
    assert quick.phases[0].seconds < said["rollout"] / 3
