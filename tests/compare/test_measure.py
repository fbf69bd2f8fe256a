"""One run as a row: what it says is what happened."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sage_grpo.cli.compare import start as recipe
from sage_grpo.tools.compare import measure as lab
from sage_grpo.tools.compare.design import Arm, Suite
from sage_grpo.tools.compare.prepare import CompareJob, prepare
from trainer_zoo.toy import ToyModel

ARMS = {
    "sage": {},
    "branch": {},
    "two epochs": {"update.repeat": True, "update.updates_per_rollout": 3},
    "target": {"optimizer.target_kl": 0.01},
    "nft": {},
    "dance_grpo": {"update.updates_per_rollout": 2},
}

QUICK = ("two epochs", "nft", "dance_grpo")

MakeJob = Callable[..., CompareJob]


@pytest.fixture
def job_of(toy_suite: Suite) -> MakeJob:
    def make(name: str, **more: Any) -> CompareJob:
        start = name if name in ("branch", "nft", "dance_grpo") else "sage"
        arm = Arm(name=name, recipe=f"shapes/{start}", options=ARMS[name] | more)
        suite = replace(toy_suite, arms=(arm,), baseline=name, seeds=(1,), iterations=3, points=(2,))
        return prepare(suite, recipe)[0]

    return make


def run(job: CompareJob, bases: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return lab.measure(job, {} if bases is None else bases, **options)


@pytest.mark.parametrize("arm", [pytest.param(arm, marks=[] if arm in QUICK else pytest.mark.slow) for arm in ARMS])
def test_passes_are_the_samples_that_went_through_the_network(
    arm: str, job_of: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample with a graph costs three: forward, and twice as much backward. Evaluations are not counted, nor are clips that only ride in the
    micro-batch of one that is trained: the count is that of micro-batches of one."""
    counted, velocity, evaluate = {"cost": 0, "on": True}, ToyModel.velocity, lab.Trainer.evaluate
    held_out: list[int] = []

    def counting(self: Any, x: torch.Tensor, *words: Any, **more: Any) -> torch.Tensor:
        if counted["on"]:
            counted["cost"] += len(x) * (3 if torch.is_grad_enabled() else 1)
        return velocity(self, x, *words, **more)

    def quiet(self: Any, *words: Any) -> Any:
        counted["on"] = False
        held_out.append(len(self.held_out))
        found = evaluate(self, *words)
        counted["on"] = True
        return found

    monkeypatch.setattr(ToyModel, "velocity", counting)
    monkeypatch.setattr(lab.Trainer, "evaluate", quiet)
    row = run(replace(job_of(arm, **{"batch.micro_batch": 1}), unseen=True))
    assert row["status"] == "done"
    assert held_out == [4, 4, 4, 2]  # two prompts are evaluated; the others are left for the end
    own = row["evaluations"]["2"].keys()
    assert row["evaluations"]["3"].keys() == {*own, *(f"unseen/{name}" for name in own)} >= {"total", "bright"}
    assert row["passes"]["3"] == counted["cost"] > 0
    assert run(job_of(arm))["passes"] == row["passes"]
    assert row["passes"]["0"] == 0 < row["passes"]["2"] < row["passes"]["3"]


def test_another_model_evaluation_or_prompt_is_another_base_and_how_a_run_learns_is_not(job_of: MakeJob) -> None:
    config = job_of("sage").config

    def key(part: str, **fields: Any) -> str:
        return lab.base_key(replace(config, **{part: replace(getattr(config, part), **fields)}))

    (reward,) = config.rewards
    models = [{"path": "a/b"}, {"family": "trainer_zoo.other"}, {"guidance_scale": 3.0}, {"frames": 5}]
    keys = [
        lab.base_key(config),
        *(key("model", **change) for change in models),
        *(key("evaluate", **change) for change in ({"seed": 77}, {"steps": 9}, {"prompts": 1})),
        key("data", eval_prompts="others.txt"),
        key("batch", micro_batch=2),  # other sums, in the last digits
        lab.base_key(replace(config, rewards=[replace(reward, weights={"bright": 2.0})])),
    ]
    assert len(set(keys)) == len(keys)
    assert key("optimizer", lr=0.5) == key("kernel", eta=0.1) == lab.base_key(replace(config, seed=9)) == keys[0]


def test_a_run_that_diverges_is_a_result_with_what_it_had(job_of: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    step = lab.Trainer.step

    def diverges(self: Any) -> dict[str, float]:
        if self.state.iteration == 2:
            raise lab.Diverged("the gradient is nan")
        return step(self)

    monkeypatch.setattr(lab.Trainer, "step", diverges)
    row = run(job_of("sage"))
    assert (row["status"], row["error"], row["reached"]) == ("diverged", "Diverged: the gradient is nan", 2)
    assert list(row["evaluations"]) == ["0", "2"]


def test_scores_by_prompt_are_means_of_its_clips_and_none_where_one_failed() -> None:
    scored = [("a", 1.0, 0.5), ("b", 3.0, 0.25), ("a", 2.0, 1.0), ("b", None, 0.75)]
    rows = [{"prompt": name, "scores": {"total": total, "drift": far, "other": 1.0}} for name, total, far in scored]
    assert lab.by_prompt(rows) == {"total": [1.5, None], "drift": [0.75, 0.5]}
    for one in rows:
        one["scores"]["Overall"] = 7.0
    assert lab.by_prompt(rows)["Overall"] == [7.0, 7.0]
    assert lab.by_prompt([]) == {}


def replay(rows: int) -> SimpleNamespace:
    return SimpleNamespace(rows=rows, members=[None] * rows)


class Planned:
    """A plan of two ranks: two groups branch after 2 of 6 steps and after none of 4."""

    updates, shares, equalizer, chosen = 2, (None, None), {0: 0.5}, None
    groups = tuple(
        SimpleNamespace(shared_steps=at, schedule=SimpleNamespace(num_steps=n)) for at, n in ((2, 6), (0, 4))
    )

    def __init__(self, examples: bool = False) -> None:
        self.examples = examples

    def batches(self, rank: int) -> list[SimpleNamespace]:
        return [replay(3), replay(1)] if rank == 0 else [replay(5)]

    def group_of(self, batch: SimpleNamespace) -> SimpleNamespace:
        return self.groups[batch.rows == 5]

    def replays(self, rank: int, update: int) -> list[SimpleNamespace]:
        return [replay(10 ** (2 * rank + update))]

    def kl_replays(self, rank: int) -> dict[int, list[tuple[int, float]]]:
        return {0: [(0, 1.0)] * 20000, 1: [(0, 1.0)] * 20000}


def recording(**budgets: int) -> lab.Recording:
    """The observer of a trainer without a model: every iteration has the plan above."""
    rewards = [SimpleNamespace(title=title, counts=title == "r") for title in "wr"]
    config: Any = SimpleNamespace(iterations=4, rewards=rewards)
    state = SimpleNamespace(iteration=0, updates=0)
    trainer: Any = SimpleNamespace(config=config, state=state, plan=Planned())
    trainer.plan.iteration = 0
    record = lab.RunRecord(grid={0: {}})
    return lab.Recording(trainer, record, {}, budgets, set())


def test_costs_and_budgets_are_counted_after_every_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the clips, 9 an iteration: the last iteration within the budget is where the next one would leave it."""
    monkeypatch.setattr(lab, "references", lambda config, iteration, updates: [0, 2])
    one = recording(clips=18, passes=10**9)
    plan: Any = Planned()
    rollout, updates = 2 + (3 + 1) * 4 + 5 * 4, 3 * (1 + 100) + 5 * (10 + 1000) + 80000
    assert (lab.scored_clips(plan), lab.rollout_cost(plan), lab.update_cost(plan, [0, 2])) == (9, rollout, updates)
    each = rollout + updates
    for number in (1, 2, 3):
        one.trainer.state.iteration, one.trainer.state.updates = number, 2 * number
        one.after({"time/total": 2.0})
        assert one.points == ({2} if number > 1 else set())
    record = one.record
    assert (record.cost, record.scored, record.budgets) == (3 * each, 27, {"clips": 2})
    assert (record.seconds["iterations"], len(record.training), record.updates) == (6.0, 3, 6)
    assert record.grid == {0: {"weight": 0.5}}
    given: Any = Planned(examples=True)
    assert (lab.scored_clips(given), lab.rollout_cost(given)) == (0, 0)
    near = recording(clips=17)
    near.trainer.state.iteration = 1
    near.after({"time/total": 2.0})
    assert near.record.budgets == {"clips": 1}


def test_scores_stand_at_their_iteration_and_by_prompt_at_budgets_and_the_end() -> None:
    one = recording()
    one.record.budgets["clips"], one.record.cost, one.record.scored = 2, 7, 5
    found: Any = SimpleNamespace(
        metrics={"eval/w/TA": 9.0, "eval/r/TA": 1.0, "eval/r/TA/x": 2.0, "eval/total": math.nan},
        rows=[{"prompt": "p", "scores": {"total": 2.0}}],
    )
    for number in (1, 2, 4):
        one.keep(found, number)
    # A column asks for `TA` and means that of the reward that is trained on.
    scores = {"TA": 1.0, "TA/x": 2.0, "w/TA": 9.0, "r/TA": 1.0, "r/TA/x": 2.0, "total": None}
    assert one.record.evaluations == {"1": scores, "2": scores, "4": scores}
    assert (one.record.passes["4"], one.record.clips["4"]) == (7, 5)
    assert one.record.by_prompt == {point: {"total": [2.0]} for point in ("2", "4")}
    one.health_event(lab.SentinelEvent(iteration=3, name="late", action="warn", text=""))
    assert one.record.sentinel == [[3, "late", "warn"]]


def test_only_untrained_models_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    one, found = recording(), [object() for _ in range(3)]
    monkeypatch.setattr(lab, "base_key", lambda config: "base")
    one.trainer.evaluate = lambda after_batch: found.pop()  # type: ignore[assignment]
    first = one.evaluate()
    assert (one.evaluate(), one.bases) == (first, {"base": first})
    one.trainer.state.iteration = 1
    assert len({first, one.evaluate(), one.evaluate()}) == 3
    assert (list(one.bases), one.record.seconds["evaluate"] > 0) == (["base"], True)


def saved(trainer: Any, root: Path, made_by: Any = None, notes: list[str] | None = None) -> lab.SavedRun:
    return lab.SavedRun(trainer, lab.RunRecord(), root, made_by or {}, ([] if notes is None else notes).append)


def test_a_run_is_kept_at_its_points_and_where_the_last_is_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(lab.time, "monotonic", lambda: now[0])
    kept = saved(SimpleNamespace(), Path("x"))
    kept.points = {2}
    no, last, stopping = ({"last": last, "stopping": stopping} for last, stopping in ((0, 0), (1, 0), (0, 1)))
    asked = ((1, no), (2, no), (2, last), (2, stopping))
    assert [kept.due(number, **way) for number, way in asked] == [False, True, False, False]
    now[0] = 100.0 + lab.KEPT_EVERY
    assert not kept.due(1, **no)
    now[0] += 1
    assert [kept.due(1, **no), kept.due(1, **last)] == [True, False]


def test_a_full_disk_is_told_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, notes = list[Any](), list[str]()
    state = SimpleNamespace(iteration=5, sentinel=SimpleNamespace(good=2))
    trainer: Any = SimpleNamespace(state=state, save=lambda *words: done.append(words))
    trainer.config = SimpleNamespace(iterations=6)
    monkeypatch.setattr(lab.checkpoint, "prune", lambda *words, spare: done.append((*words, spare)))
    monkeypatch.setattr(lab.RunRecord, "state_dict", lambda self: {"cost": 3})
    place = saved(trainer, tmp_path, {"code": "1"}, notes)
    place.save(needed=True)
    written = (tmp_path, {"made_by": {"code": "1"}}, {"metrics.jsonl": b'{"cost": 3}'})
    assert done == [written, (tmp_path, 1, 5, 2)]  # what the sentinel may go back to stays

    def full(*words: Any) -> None:
        raise lab.checkpoint.SaveFailed("no space left")

    trainer.save = full
    place.save(needed=False)
    assert notes == ["iteration 5 could not be kept (no space left). The run continues."]
    with pytest.raises(lab.checkpoint.SaveFailed):  # a sentinel that is to go back there cannot do without
        place.save(needed=True)
    state.iteration = 6
    place.save(needed=True)  # what is over needs no going on


def test_what_would_lead_elsewhere_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing kept; the same code, another one, damage, and a checkpoint that the sentinel could not go back to."""
    made, notes, loaded = {"code": "1", "lab": "2"}, list[str](), list[Path]()
    state = SimpleNamespace(iteration=5, load=lambda folder, world: loaded.append(folder))
    trainer: Any = SimpleNamespace(state=state, world=None)
    kept = tmp_path / "000005"
    kept.mkdir()
    (kept / lab.RECORD).write_text('{"cost": 3}')
    meta: dict[str, Any] = {"made_by": made, "sentinel": {"good": None}}
    checkpoint = SimpleNamespace(recover=lambda root: None, read_meta=lambda folder: meta)
    checkpoint.newest_good = lambda root: kept if meta else None
    checkpoint.find_fault = lambda folder: f"{folder.name} is broken" if folder.name == "000002" else None
    checkpoint.continuing = lambda folder: nullcontext()
    monkeypatch.setattr(lab, "checkpoint", checkpoint)
    monkeypatch.setattr(lab.shutil, "rmtree", lambda root: notes.append("gone"))

    def resumed(made_by: dict[str, Any], root: Path = tmp_path) -> int:
        notes.clear()
        run = saved(trainer, root, made_by, notes)
        run.resume()
        return run.record.cost

    def refused(why: str, made_by: dict[str, Any] = made) -> None:
        assert resumed(made_by) == 0
        assert notes == [f"its saved state cannot be continued ({why}): the run starts again.", "gone"]

    assert resumed(made, tmp_path / "absent") == 0
    assert notes == []
    for good in (None, 3):
        meta["sentinel"]["good"] = good
        assert resumed(made) == 3
        assert notes == ["continues after iteration 5."]
    assert loaded == [kept] * 2
    refused("it was made by another lab, new", {**made, "lab": "3", "new": "4"})
    meta["sentinel"]["good"] = 2
    refused("the checkpoint that its sentinel may roll back to is damaged: 000002 is broken")
    meta.clear()
    refused("its checkpoints are damaged")
