"""A run with workers is equal to the run without, whichever worker did which task."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from in_process_pool import with_workers
from sage_grpo.distributed.spec import RaySpec
from sage_grpo.models.lora import LoraSpec
from sage_grpo.models.network.attention import processors
from sage_grpo.models.spec import ModelSpec
from sage_grpo.recipes import methods
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.samplers.windows import Window
from sage_grpo.training import inputs
from sage_grpo.training.config import BatchConfig
from sage_grpo.types import Conditioning
from sage_grpo.workers.messages import WorkerError, moved
from sage_grpo.workers.ray_pool import Worker, measured_attention
from trainer_helpers import resume, same, weights_of

ITERATIONS = 2


@pytest.fixture
def config(make_config):
    made = make_config(model={"lora": LoraSpec(rank=2)}, rollout={"steps": 3})
    return replace(made, batch=BatchConfig(prompts=3, group_size=2, micro_batch=2))


def on_ray(config, **spec):
    return replace(config, rollout=replace(config.rollout, on="ray", ray=RaySpec(**spec)))


def wrong_of(worker, task):
    return "wrong" * (worker == "wrong")


def figures(row):
    return {name: value for name, value in row.items() if not name.startswith(("time/", "crew/"))}


def run(trainer, iterations=ITERATIONS):
    rows = [figures(trainer.step()) for _ in range(iterations)]
    return rows, weights_of(trainer)


def assert_alike(one, other):
    assert one[0] == other[0]
    assert same(one[1], other[1])


_ALONE = []


@pytest.fixture
def alone(config, make_trainer):
    if not _ALONE:
        _ALONE.append(run(make_trainer(config)))
    return _ALONE[0]


def test_clips_come_back_in_order(config, make_trainer, monkeypatch) -> None:
    """Of groups sampled together, micro-batches are not in the order of groups."""
    window = Window(kind="drawn", at=[0, 1])
    rollout = replace(config.rollout, window=window, same_noise=True, steps=4)
    batch = BatchConfig(prompts=6, group_size=2, micro_batch=2)
    mixed = replace(config, rollout=rollout, batch=batch, kernel=replace(config.kernel, name="sage_exact"))
    mixed = replace(mixed, update=replace(mixed.update, updates_per_rollout=1))
    alone, others = make_trainer(mixed), with_workers(monkeypatch, on_ray(mixed), "a", "b")
    disorder = False
    for _ in range(2):
        assert figures(alone.step()) == figures(others.step())
        assert torch.equal(alone.clips.videos, others.clips.videos)
        order = [member.group for task in alone.plan.tasks() for member in others.engine.scored(task)]
        disorder |= order != [member.group for member in alone.engine.scored(alone.plan)]
    assert disorder, "tasks were the whole in order: nothing was tried"


def test_workers_make_the_same_run(config, alone, monkeypatch) -> None:
    trainer, ticks, settled = with_workers(monkeypatch, on_ray(config), "a", "b"), [], []
    monkeypatch.setattr("sage_grpo.workers.ray_pool.settle", settled.append)
    monkeypatch.setattr(trainer.engine.clock, "ticker", lambda total: lambda: ticks.append(total))
    assert_alike(run(trainer), alone)
    assert ticks.count(3) >= 3 * ITERATIONS, "a tick for every part"
    assert {worker for worker, _ in trainer.workers.pool.done} == {"a", "b"}
    assert len(trainer.workers.pool.done) == len(settled) == ITERATIONS * 3, "copies have ended before they are sent"
    wanted = {"crew/gap": 0.0, "crew/staleness": 0, "crew/workers": 2}
    assert {name: trainer.workers.row[name] for name in wanted} == wanted
    assert len(trainer.workers.pool.weights) == ITERATIONS, "once for all tasks of an iteration"


@pytest.mark.parametrize("method", [methods.nft, methods.adjoint])
def test_objectives_that_do_not_explore_are_the_same_run(config, make_trainer, monkeypatch, method) -> None:
    """Without a ratio, a worker is checked by the log-probability of a target."""
    steps = replace(config.rollout, steps=4)
    made = method(replace(config, rollout=steps, update=replace(config.update, updates_per_rollout=1)))
    made = replace(
        made,
        objective=replace(made.objective, levels=2),
        rewards=[RewardSpec(name="worker_rewards:smooth", options={"differentiable": True})],
    )
    if method is methods.nft:  # the policy that samples is not the newest
        made = replace(made, objective=replace(made.objective, old_decay=0.5))
    trainer = with_workers(monkeypatch, on_ray(made), "a")
    assert_alike(run(trainer), run(make_trainer(made)))
    assert trainer.workers.row["crew/gap"] == 0.0
    wrong = with_workers(monkeypatch, on_ray(made), "wrong", outcome=wrong_of)
    with pytest.raises(WorkerError, match="that wrong sampled differs"):
        wrong.step()


def test_a_dead_worker_costs_only_its_task(config, alone, monkeypatch) -> None:
    draw, died = random.Random(0), []
    outcome = lambda worker, task: "dies" * (draw.random() < 0.6 and not died.append(task))  # noqa: E731
    trainer = with_workers(monkeypatch, on_ray(config), "a", "b", outcome=outcome)
    assert_alike(run(trainer), alone)
    assert died


def test_a_wrong_worker_ends_the_run(config, monkeypatch) -> None:
    trainer = with_workers(monkeypatch, on_ray(config), "a", "wrong", outcome=wrong_of)
    with pytest.raises(WorkerError, match=r"that wrong sampled differs by 0.05 from .* \(rollout.ray.limit\)"):
        trainer.step()


def stale(config, by):
    return replace(config, rollout=replace(config.rollout, staleness=by))


def test_old_weights_here_and_on_workers_are_the_same_run(config, make_trainer, monkeypatch) -> None:
    here, fresh = make_trainer(stale(config, 2)), run(make_trainer(config), 3)
    rows = [here.step() for _ in range(3)]
    assert [row["crew/staleness"] for row in rows] == [0.0, 1.0, 2.0]
    assert all("ratio/first_log" not in row for row in rows), "it is 0 only where nothing is old"
    assert rows[2]["ratio/std"] > fresh[0][2]["ratio/std"]
    assert not same(weights_of(here), fresh[1])
    workers = with_workers(monkeypatch, stale(on_ray(config), 2), "a", "b")
    assert_alike(run(workers, 3), ([figures(row) for row in rows], weights_of(here)))
    assert workers.workers.row["crew/gap"] == 0.0, "ratios are checked with the weights that sampled"
    workers.close()
    assert not any(thread.is_alive() for thread in workers.workers._threads)


def employed(config, make_trainer, monkeypatch, where):
    if where == "workers":
        return with_workers(monkeypatch, stale(on_ray(config), 2), "a")
    return make_trainer(stale(config, 2))


@pytest.mark.parametrize("where", ["here", "workers"])
def test_clips_of_discarded_weights_are_discarded(config, make_trainer, monkeypatch, where, tmp_path) -> None:
    trainer = employed(replace(config, iterations=6), make_trainer, monkeypatch, where)
    trainer.step()
    good = trainer.save(tmp_path / "kept")
    trainer.step()
    assert trainer.workers.row["crew/staleness"] == 1.0
    trainer.state.go_back(good, trainer.world)
    for old in (0.0, 1.0):
        trainer.step()
        assert trainer.workers.row["crew/staleness"] == old
    trainer.close()


@pytest.mark.parametrize("where", ["here", pytest.param("workers", marks=pytest.mark.slow)])
def test_a_run_with_old_weights_is_continued_with_them(config, make_trainer, monkeypatch, where, tmp_path) -> None:
    config = replace(config, iterations=4)
    whole = make_trainer(stale(config, 2))
    rows = [figures(whole.step()) for _ in range(4)]
    first = employed(config, make_trainer, monkeypatch, where)
    found = [figures(first.step()) for _ in range(2)]
    first.save(tmp_path / "kept")
    first.close()
    second = employed(config, make_trainer, monkeypatch, where)
    resume(second, tmp_path / "kept")
    found += [figures(second.step()) for _ in range(2)]
    second.close()
    assert_alike((found, weights_of(second)), (rows, weights_of(whole)))


def test_conditions_that_are_one_object_stay_one() -> None:
    shared = torch.ones(2)
    one, other = Conditioning({"text": shared}), Conditioning({"text": shared})
    there = moved({0: one, 1: one, 2: other}, torch.device("meta"))
    assert there[0] is there[1]
    assert there[2] is not there[0]
    assert there[2].tensors["text"] is there[0].tensors["text"]


@pytest.mark.parametrize(("card", "taken"), [("cpu", "_native_math"), ("another card", "native")])
def test_a_worker_on_the_same_card_takes_the_trainers_attention(card, taken, make_config, checkpoint) -> None:
    """Measured a second time, beside other processes, another kernel could win, and clips would differ in their last bits."""
    model = ModelSpec(path=str(checkpoint("wan_t2v")), lora=LoraSpec(rank=2), cache=None, device="cpu")
    config = replace(make_config(), model=model)
    trainers = inputs.load_model(config, torch.device("cpu"))
    assert measured_attention(trainers) == ("cpu", "native")
    native = replace(config, model=replace(config.model, attention="native"))
    assert measured_attention(inputs.load_model(native, torch.device("cpu"))) is None
    worker = Worker(config, 1, torch.get_num_threads(), [], (card, "_native_math"))
    assert worker.engine.model.attention == taken
    assert {one._attention_backend.value for one in processors(worker.engine.model.network)} == {taken}
