"""One run as a row: what it says is what happened."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sage_grpo.crew.studio import Studio
from sage_grpo.lab import measure as lab
from sage_grpo.lab.design import Arm, Suite
from sage_grpo.lab.prepare import Job, prepare
from sage_grpo.recipes import recipe
from sage_grpo.rewards.spec import RewardSpec
from trainer_zoo.toy import ToyModel

ARMS = {
    "sage": {},
    "branch": {},
    "mix_grpo": {"rollout.window.every": 1},
    "two epochs": {"update.repeat": True, "update.updates_per_rollout": 3},
    "fixed": {"trust_region.mode": "fixed"},
    "target": {"optimizer.target_kl": 0.01},
    "nft": {},
}


MakeJob = Callable[[str], Job]


@pytest.fixture
def job_of(toy_suite: Suite) -> MakeJob:
    """arm -> its job, with the toy model."""

    def make(name: str) -> Job:
        start = name if name in ("branch", "mix_grpo", "nft") else "sage"
        arm = Arm(name=name, recipe=f"shapes/{start}", options=ARMS[name])
        suite = replace(toy_suite, arms=(arm,), baseline=name, seeds=(1,), iterations=3, points=(2,))
        return prepare(suite, recipe)[0]

    return make


def run(job: Job, bases: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Its row."""
    return lab.measure(job, {} if bases is None else bases, lambda done: None, **options)


@pytest.mark.parametrize("arm", ARMS)
def test_passes_are_the_samples_that_went_through_the_network(
    arm: str, job_of: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample with a graph costs three: forward, and twice as much backward. Evaluations are not counted."""
    counted, velocity, evaluate = {"cost": 0, "on": True}, ToyModel.velocity, lab.Trainer.evaluate

    def counting(self: Any, x: torch.Tensor, *words: Any, **more: Any) -> torch.Tensor:
        if counted["on"]:
            counted["cost"] += len(x) * (3 if torch.is_grad_enabled() else 1)
        return velocity(self, x, *words, **more)

    def quiet(self: Any, *words: Any) -> Any:
        counted["on"] = False
        found = evaluate(self, *words)
        counted["on"] = True
        return found

    monkeypatch.setattr(ToyModel, "velocity", counting)
    monkeypatch.setattr(lab.Trainer, "evaluate", quiet)
    row = run(job_of(arm))
    assert row["status"] == "done"
    assert row["passes"]["3"] == counted["cost"] > 0
    assert row["passes"]["0"] == 0 < row["passes"]["2"] < row["passes"]["3"]


@pytest.mark.slow
def test_a_row_has_the_curve_of_a_run_and_is_the_same_every_time(job_of: MakeJob) -> None:
    bases: dict[str, Any] = {}
    first, again = run(job_of("sage"), bases), run(job_of("sage"), bases)  # the second knows the base from the first
    alone = run(job_of("sage"))
    times = ("seconds",)
    assert [{k: v for k, v in row.items() if k not in times} for row in (again, alone)] == 2 * [
        {k: v for k, v in first.items() if k not in times}
    ]
    assert list(first["evaluations"]) == ["0", "2", "3"]
    assert first["evaluations"]["0"]["total"] != first["evaluations"]["3"]["total"]
    assert (first["reached"], first["updates"]) == (3, 6)
    assert first["training"]["iteration"] == [1, 2, 3]
    assert len(first["training"]["reward/total"]) == 3
    assert not [name for name in first["training"] if name.startswith("time/")]
    assert len(bases) == 1
    assert first["settings"]["batch.prompts"] == 2


def test_where_two_rewards_have_a_part_of_one_name_the_plain_name_is_the_trained_ones(
    job_of: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column asks for `sharpness`; a second reward with such a part must not empty it."""
    asked: list[str] = []
    unlabelled = lab.unlabelled
    monkeypatch.setattr(lab, "unlabelled", lambda scores, title: asked.append(title) or unlabelled(scores, title))
    job = job_of("sage")
    trained = RewardSpec(
        name="video_stats", label="trained", weights={"sharpness": 1.0}, options={"parts": ["sharpness"]}
    )
    rewards = [replace(trained, label="watching", metric_only=True), trained]
    job = replace(job, config=replace(job.config, rewards=rewards))
    row, sampled = run(job), run(replace(job, kind="rollout"))
    assert (row["status"], sampled["status"]) == ("done", "done"), (row["error"], sampled["error"])
    assert set(asked) == {"trained"}
    for scores in (*row["evaluations"].values(), *sampled["evaluations"].values()):
        assert scores["sharpness"] == scores["trained/sharpness"] == scores["watching/sharpness"]
    assert unlabelled({"a/TA/size": 1.0, "a/TA": 2.0, "ab/TA": 3.0, "TA": 4.0}, "a") == {"TA/size": 1.0, "TA": 2.0}


@pytest.mark.slow
def test_runs_that_start_alike_share_their_base(job_of: MakeJob) -> None:
    bases: dict[str, Any] = {}
    first = run(job_of("sage"), bases)
    (known,) = bases
    bases[known] = replace(bases[known], metrics={"eval/total": 77.0})
    row = run(job_of("branch"), bases)  # learns otherwise, starts from the same
    assert row["evaluations"]["0"] == {"total": 77.0}
    assert row["evaluations"]["2"]["total"] != first["evaluations"]["2"]["total"]
    assert list(bases) == [known]


def test_another_model_evaluation_or_prompt_is_another_base_and_how_a_run_learns_is_not(job_of: MakeJob) -> None:
    config = job_of("sage").config

    def key(part: str, **fields: Any) -> str:
        return lab.base_key(replace(config, **{part: replace(getattr(config, part), **fields)}))

    (reward,) = config.rewards
    keys = [
        lab.base_key(config),
        *(
            key("model", **change)
            for change in ({"path": "a/b"}, {"family": "trainer_zoo.other"}, {"guidance_scale": 3.0}, {"frames": 5})
        ),
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


def test_only_sampling_scores_the_rollouts_and_leaves_the_weights(
    toy_suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    score = Studio.score

    def watched(self: Any, videos: torch.Tensor, plan: Any, **given: Any) -> Any:
        scored = score(self, videos, plan, **given)
        seen.append(scored.total)
        return scored

    monkeypatch.setattr(Studio, "score", watched)
    job, *_ = prepare(replace(toy_suite, kind="rollout", seeds=(1,)), recipe)
    row = run(job)
    total = torch.cat(seen)
    assert len(total) == 16  # two batches of two prompts x four
    assert row["evaluations"] == {"2": {"bright": pytest.approx(float(total.mean())), "total": pytest.approx(float(total.mean())), "clips": 16}}  # fmt: skip
    assert row["updates"] == 0
    assert row["passes"]["2"] == 2 * 8 * 5


def test_long_curves_are_thinned_to_means_of_blocks() -> None:
    rows = [{"reward/total": float(n), "time/total": 1.0, "gradient/raw/001": 1.0} for n in range(7)]
    curve = lab.blocks(rows, most=3)
    assert curve == {"iteration": [3, 6, 7], "reward/total": [1.0, 4.0, 6.0]}
    assert lab.blocks([{"reward/total": float("nan")}])["reward/total"] == [None]
    assert len(lab.blocks(rows * 20)["iteration"]) <= lab.BLOCKS


def test_scores_by_prompt_are_means_of_its_clips_and_none_where_one_failed() -> None:
    scored = [("a", 1.0, 0.5), ("b", 3.0, 0.25), ("a", 2.0, 1.0), ("b", None, 0.75)]
    rows = [
        {"prompt": prompt, "scores": {"total": total, "drift": drift, "other": 1.0}} for prompt, total, drift in scored
    ]
    assert lab.by_prompt(rows) == {"total": [1.5, None], "drift": [0.75, 0.5]}
    for one in rows:
        one["scores"]["Overall"] = 7.0
    assert lab.by_prompt(rows)["Overall"] == [7.0, 7.0]
    assert lab.by_prompt([]) == {}


def test_norms_by_step_are_means_beside_what_is_predicted() -> None:
    rows = [{"gradient/raw/002": 1.0, "gradient/sent/002": 5.0}, {"gradient/raw/002": 3.0, "gradient/raw/007": 9.0}, {}]
    found = lab.by_step(rows, {2: {"std": 0.5}, 1: {"std": math.nan}})
    assert found == {"1": {"std": None}, "2": {"std": 0.5, "raw": 2.0, "sent": 5.0}}
    assert list(found) == ["1", "2"]


def test_a_run_is_evaluated_after_its_last_iteration_within_a_budget(job_of: MakeJob) -> None:
    """With scores by prompt there and at the end; the budgets themselves are part of a run's key."""
    plain = run(replace(job_of("sage"), points=(0, 1, 2, 3)))
    job = replace(job_of("sage"), points=(0, 3), budgets={"passes": 2 * plain["passes"]["1"] - 1, "clips": 16})
    found = run(job)
    assert found["budgets"] == {"passes": 1, "clips": 2}  # the second to the last clip
    assert (found["passes"], found["evaluations"]) == (plain["passes"], plain["evaluations"])
    assert found["clips"] == {"0": 0, "1": 8, "2": 16, "3": 24}
    assert list(found["by_prompt"]) == ["1", "2", "3"]
    for point, scores in found["by_prompt"].items():
        assert sum(scores["total"]) / len(scores["total"]) == pytest.approx(
            found["evaluations"][point]["total"], abs=1e-4
        )


def test_a_processor_without_a_name_is_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.Path, "is_file", lambda self: False)
    monkeypatch.setattr(lab.platform, "machine", lambda: "riscv64")
    for name in ("", "a processor"):
        monkeypatch.setattr(lab.platform, "processor", lambda name=name: name)
        assert lab._processor() == (name or "riscv64")
