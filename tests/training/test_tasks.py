"""Runs whose prompts name their rewards, with schedules and gates: advantages of mixed batches, resuming, refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from wiring_table import BY_GRADIENT, changed

from sage_grpo.data.sources import PromptSource
from sage_grpo.plan.description import describe
from sage_grpo.plan.show import opening
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.spec import Gate, RewardSpec
from sage_grpo.run import identity
from sage_grpo.run.session import run
from sage_grpo.tools.doctor import machine
from sage_grpo.training.config import AdvantageConfig, DataConfig, TrainConfig
from sage_grpo.training.inputs import load_sources
from sage_grpo.training.scoring import Scores, advantages_of

ROUTES = [("a",), ("b", "c"), ("a",), ("b", "c")]
GROUPS = torch.arange(4).repeat_interleave(4)
LABELS = "abc"


def composite(**options: Any) -> CompositeReward:
    specs = [
        RewardSpec(name="trainer_toys:bright", label=label, weights={"bright": weight}, **options)
        for label, weight in zip(LABELS, (1.0, 2.0, -1.0), strict=True)
    ]
    return CompositeReward([*specs, RewardSpec(name="trainer_toys:bright", label="seen", metric_only=True)])


def scored(reward: CompositeReward, failed: tuple[int, ...] = ()) -> Scores:
    """Two tasks whose rewards differ a hundredfold; the part that is only logged has failed everywhere."""
    draw = torch.Generator().manual_seed(0)
    parts = {f"{label}/bright": torch.randn(16, generator=draw) for label in LABELS}
    parts["a/bright"] = 100 * parts["a/bright"] + 1000
    parts["seen/bright"] = torch.full((16,), math.nan)
    of_a = (GROUPS == 0) | (GROUPS == 2)
    for label in LABELS:
        parts[f"{label}/bright"][~of_a if label == "a" else of_a] = math.nan
    for place in failed:
        parts["a/bright" if of_a[place] else "c/bright"][place] = math.nan
    total = torch.where(of_a, parts["a/bright"], 2 * parts["b/bright"] - parts["c/bright"])
    return Scores(GROUPS, torch.arange(4).repeat(4), total, parts, {})


@pytest.mark.parametrize("failed", [(), (1, 6), (0, 1, 2, 3, 9)])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("scale", ["group", "global", "none"])
def test_tasks_of_one_batch_have_the_advantages_that_each_has_alone(
    scale: str, decoupled: bool, failed: tuple[int, ...]
) -> None:
    """Also where a reward failed, for some clips or a whole group."""
    reward = composite()
    config = AdvantageConfig(scale=scale, decoupled=decoupled)  # type: ignore[arg-type]
    scores = scored(reward, failed)
    found = advantages_of(config, reward, (), scores, ROUTES)
    for route in set(ROUTES):
        own = torch.tensor([ROUTES[group] == route for group in GROUPS.tolist()])
        alone = CompositeReward(
            [
                RewardSpec(name="trainer_toys:bright", label=one, weights={"bright": reward.weights[f"{one}/bright"]})
                for one in route
            ]
        )
        single = scores.of(own)
        if len(route) == 1:
            single = replace(single, parts={"bright": single.parts[f"{route[0]}/bright"]})
        expected = advantages_of(config, alone, (), single)
        assert torch.equal(found[own], expected)
        assert expected.abs().max() > 0
    for place in failed:
        assert found[place] == 0


def test_a_task_that_failed_as_a_whole_has_no_advantage_and_the_others_keep_theirs() -> None:
    reward = composite()
    config = AdvantageConfig()
    whole, lost = scored(reward), scored(reward, tuple(range(4)) + tuple(range(8, 12)))
    found, of_a = advantages_of(config, reward, (), lost, ROUTES), (GROUPS == 0) | (GROUPS == 2)
    assert not found[of_a].any()
    assert torch.equal(found[~of_a], advantages_of(config, reward, (), whole, ROUTES)[~of_a])


@pytest.mark.parametrize("decoupled", [False, True])
def test_parts_that_rewards_judge_have_a_column_in_a_mixed_batch_too(decoupled: bool) -> None:
    reward = composite(judges="video")
    config = AdvantageConfig(decoupled=decoupled)
    found = advantages_of(config, reward, ["video", "audio"], scored(reward), ROUTES)
    reward.judges_parts = False
    assert torch.equal(found[:, 0], advantages_of(config, reward, (), scored(reward), ROUTES))
    assert not found[:, 1].any()


def test_advantages_have_the_weights_of_the_iteration_and_what_gates_leave() -> None:
    """The decoupled ones and those of a part are made from the parts, not from the total."""
    specs = [
        RewardSpec(name="trainer_toys:bright", label="a", schedule=[[0, 0.0], [2, 1.0]]),
        RewardSpec(name="trainer_toys:bright", label="b", gate=Gate(part="a/bright", floor=2.0)),
    ]
    reward = CompositeReward(specs)
    parts = {"a/bright": torch.tensor([1.0, 2.0, 3.0, 4.0]), "b/bright": torch.tensor([9.0, 1.0, 2.0, 1.0])}
    scores = Scores(torch.zeros(4, dtype=torch.long), torch.arange(4), torch.zeros(4), parts, {})
    reward.judges_parts = True
    plain = AdvantageConfig(scale="none", clip=None)
    for iteration, factor in ((0, 0.0), (1, 0.5), (None, 1.0)):
        counted = factor * parts["a/bright"] + torch.tensor([0.0, 1.0, 2.0, 1.0])
        found = advantages_of(plain, reward, ["x"], scores, (), iteration)
        torch.testing.assert_close(found[:, 0], counted - counted.mean())
        found = advantages_of(replace(plain, decoupled=True), reward, ["x"], scores, (), iteration)
        torch.testing.assert_close(found[:, 0], (counted - counted.mean()) / counted.std(correction=0))


@pytest.fixture
def mixed(make_config, tmp_path: Path) -> TrainConfig:
    """Two tasks by weight, one of which names its rewards; one reward comes later, and one counts above a floor."""
    (tmp_path / "a.txt").write_text("a cat\na bird\nthe sea\n")
    rows = [{"prompt": prompt, "rewards": ["dim"]} for prompt in ("a red dog", "a tree")]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sources = [PromptSource(path=str(tmp_path / "a.txt"), weight=2.0), PromptSource(path=str(tmp_path / "b.jsonl"))]
    return make_config(
        iterations=6,
        data=DataConfig(prompts=sources, eval_prompts=str(tmp_path / "b.jsonl")),
        rewards=[
            RewardSpec(
                name="trainer_toys:two_parts",
                weights={"level": 1.0, "texture": 1.0},
                gate=Gate(part="level", floor=0.49),
                overlap=True,
            ),
            RewardSpec(
                name="trainer_toys:bright", label="dim", weights={"bright": -1.0}, schedule=[[1, 0.5], [4, 1.0]]
            ),
        ],
    )


def test_advantages_reach_the_update_with_tasks_and_iteration(mixed: TrainConfig, make_trainer) -> None:
    trainer = make_trainer(replace(mixed, advantage=AdvantageConfig(scale="none", decoupled=True)))
    plan = trainer.planner.plan(2, trainer.state.stream.take(2))
    scores = trainer.score(trainer.sample(plan), plan)
    routes = [prompt.rewards for prompt in plan.prompts]
    assert set(routes) == {(), ("dim",)}
    found = trainer.advantages(scores, plan)
    assert torch.equal(found, advantages_of(trainer.config.advantage, trainer.reward, (), scores, routes, 2))
    assert not torch.equal(found, advantages_of(trainer.config.advantage, trainer.reward, (), scores, routes, None))
    total = scores.parts["bright"] * -(0.5 + 0.5 / 3)
    own = torch.tensor([routes[group] == ("dim",) for group in scores.groups.tolist()])
    torch.testing.assert_close(scores.total[own], total[own])
    assert torch.equal(scores.parts["level"].isnan(), own), "scored as clips are decoded, in a thread of its own"


def test_gradients_know_tasks_and_iteration(mixed: TrainConfig, make_trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"rewards": [replace(mixed.rewards[1], options={"differentiable": True})], **BY_GRADIENT}
    trainer = make_trainer(changed(mixed, {name: one for name, one in options.items() if "[]" not in name}))
    plan = trainer.planner.plan(2, trainer.state.stream.take(2))
    asked: list[Any] = []

    def gradient(latents: torch.Tensor, pixels: Any, text: str, fps: float, metadata: Any, *about: Any) -> torch.Tensor:
        asked.append(about)
        return latents

    monkeypatch.setattr(trainer.reward, "gradient", gradient)
    trainer.engine.differentiate(plan, trainer.sample(plan))
    assert set(asked) == {((), 2), (("dim",), 2)}


def rows_of(out: str) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    clocks = ("time/", "memory/", "eval_seconds", "sentinel/seconds")
    return [{name: value for name, value in row.items() if not name.startswith(clocks)} for row in rows]


def test_a_run_of_several_tasks_resumes_to_the_bit(mixed: TrainConfig, tmp_path: Path) -> None:
    whole, parts = (replace(mixed, out=str(tmp_path / name)) for name in ("whole", "parts"))
    evaluate = replace(mixed.evaluate, every=0)
    run(replace(whole, evaluate=evaluate), quiet=True)
    run(replace(parts, evaluate=evaluate, iterations=3), quiet=True)
    run(replace(parts, evaluate=evaluate), quiet=True)
    first, second = (
        {row["iteration"]: row for row in rows_of(one.out) if "reward/total" in row} for one in (whole, parts)
    )
    assert first.keys() == second.keys() == set(range(1, 7))
    for number, row in first.items():
        assert row == {name: second[number][name] for name in row}, number
    changed = replace(mixed.data, prompts=[replace(mixed.data.sources[0], weight=1.0), mixed.data.sources[1]])
    prints = [identity.identify(one, load_sources(one))["prompts"] for one in (mixed, replace(mixed, data=changed))]
    assert prints[0] != prints[1]
    for rewards in (
        [mixed.rewards[0], replace(mixed.rewards[1], schedule=[])],
        [replace(mixed.rewards[0], gate=None), mixed.rewards[1]],
    ):
        with pytest.raises(ValueError, match="rewards"):
            run(replace(parts, evaluate=evaluate, rewards=rewards), quiet=True)


def test_runs_of_earlier_versions_had_neither_schedule_nor_gate(mixed: TrainConfig) -> None:
    plain = [{"name": "clip", "weights": {"a": 1.0}, "label": "", "metric_only": False, "judges": "", "options": {}}]
    now = identity.plain([vars(RewardSpec(name="clip", weights={"a": 1.0}))])
    assert not identity.differences({"rewards": plain}, {"rewards": now})
    assert identity.differences({"rewards": plain}, {"rewards": [{**now[0], "schedule": [[0, 0.5]]}]})
    assert identity.differences({"rewards": plain}, {"rewards": [{**now[0], "weights": {"a": 1.0, "b": 1.0}}]})


def test_a_run_says_what_its_rewards_do(mixed: TrainConfig) -> None:
    assert mixed.rewards_over_time == [
        "reward two_parts: all parts but level count as 0 where level < 0.49",
        "reward dim: weights x 0.5 at iteration 1, x 1 at iteration 4",
    ]
    gate = Gate(part="VQ", floor=0.2, only=["TA"])
    shapes = RewardSpec(name="shapes", weights={"TA": 1.0}, schedule=[[0, 0.5], [4, 1.0]], gate=gate)
    said = "reward shapes: weights x 0.5 at iteration 0, x 1 at iteration 4; TA count as 0 where VQ < 0.2"
    assert said in opening(TrainConfig(rewards=[shapes]), 1)
    assert said in machine.settings(describe(TrainConfig(rewards=[shapes])), []).value
    assert not TrainConfig().rewards_over_time


def test_iterations_without_any_reward_are_refused() -> None:
    def config(*schedules: list[list[float]]) -> TrainConfig:
        return TrainConfig(
            iterations=5,
            rewards=[
                RewardSpec(name="shapes", label=str(n), weights={"TA": 1.0}, schedule=one)
                for n, one in enumerate(schedules)
            ],
        )

    config([[0, 0.0], [2, 1.0]], [[0, 1.0], [2, 0.0]])
    with pytest.raises(ValueError, match="leave no reward at iteration 0,"):
        config([[0, 0.0], [2, 1.0]])
    with pytest.raises(ValueError, match="leave no reward at iteration 3,"):
        config([[0, 1.0], [3, 0.0], [4, 1.0]])
    with pytest.raises(ValueError, match="leave no reward after the last point"):
        config([[0, 1.0], [9, 0.0]])
    with pytest.raises(ValueError, match="a gate has no gradient"):
        replace(
            TrainConfig(rewards=[RewardSpec(name="shapes", weights={"TA": 1.0}, gate=Gate(part="VQ", floor=0.0))]),
            objective=replace(TrainConfig().objective, kind="gradient", draw="last"),
            kernel=replace(TrainConfig().kernel, name="ode"),
        )
