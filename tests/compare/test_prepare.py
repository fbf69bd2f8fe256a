"""From suites to jobs: settings arrive, mistakes are named before anything runs, keys tell runs apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sage_grpo.cli import compare
from sage_grpo.cli.compare import start as recipe
from sage_grpo.config.parsing import ConfigError
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.preflight import preflight
from sage_grpo.tools.compare.design import Arm, Suite
from sage_grpo.tools.compare.prepare import key_of, prepare
from sage_grpo.training.config import TrainConfig


def suite(*arms: Arm, **fields: Any) -> Suite:
    start = {"name": "s", "title": "", "question": "", "arms": arms, "baseline": arms[0].name, "seeds": (5, 6)}
    return Suite(**{**start, **fields})


def test_settings_arrive_in_their_order_and_are_told() -> None:
    own = {"optimizer.lr": "2e-5", "rewards": [{"name": "video_stats"}]}
    arms = (
        Arm(name="a", recipe="shapes/sage", options={"kernel.eta": 0.7}),
        Arm(name="b", recipe="shapes/branch", options=own, iterations=9),
    )
    jobs = prepare(suite(*arms, options={"kernel.eta": 0.3, "evaluate.prompts": 7}, iterations=3), recipe)
    assert [(job.arm, job.seed) for job in jobs] == [("b", 5), ("a", 5), ("b", 6), ("a", 6)]  # by seed, long ones first
    b, a = jobs[0].config, jobs[1].config
    assert (a.kernel.eta, a.iterations, a.seed, a.evaluate.prompts) == (0.7, 3, 5, 7)
    assert (b.kernel.eta, b.iterations, b.optimizer.lr, [r.name for r in b.rewards]) == (0.3, 9, 2e-5, ["video_stats"])
    assert (a.batch.micro_batch, a.model.options, a.model.cache) == (128, {"pad_text": 20}, None)  # the model is small
    assert not a.model.vae_slicing
    (large,) = prepare(suite(Arm(name="a", recipe="wan/sage"), seeds=(1,)), recipe)
    assert replace(large.config, seed=0, out="x") == replace(recipe("wan/sage"), seed=0, out="x")
    told = {"kernel.eta": 0.7, "iterations": 3, "evaluate.prompts": 7, "evaluate.steps": 20}
    assert jobs[1].settings == {**told, "evaluate.per_prompt": 1, "evaluate.seed": 1234}


@pytest.mark.parametrize(
    ("start", "options", "said"),
    [
        ("shapes/sagee", {}, r"Arm 'x': There is no recipe 'shapes/sagee'.*Did you mean 'shapes/sage'"),
        ("sage", {"optimizer.lr": -1}, r"Arm 'x': optimizer.lr must be positive"),
        ("sage", {"seed": 3}, r"seed cannot be compared: the seeds are the suite's"),
        ("sage", {"keep.videos": 3}, r"keep.videos cannot be compared"),
        ("sage", {"data.prompts": "absent.txt"}, r"(?s)Arm 'x': A file.*absent\.txt.*Made first, by MAKE\.$"),
    ],
)
def test_mistakes_of_an_arm_are_named_before_anything_runs(start: str, options: dict[str, Any], said: str) -> None:
    arm = Arm(name="x", recipe=start, options=options)
    with pytest.raises(ConfigError, match=said) as refused:
        prepare(suite(arm, notes="Made first, by MAKE."), recipe, preflight)
    assert ("MAKE" in str(refused.value)) == ("absent" in said)


def test_lists_that_are_repeated_or_long_are_one_list() -> None:
    words = [
        "shapes/sage",
        "--vary",
        "optimizer.lr=1e-4,2e-4",
        "--vary=kernel.eta=1",
        "--set",
        "a=1",
        "b=2",
        "--seeds",
        "2",
    ]
    told = ["shapes/sage", "--seeds", "2", "--vary", "optimizer.lr=1e-4,2e-4", "kernel.eta=1", "--set", "a=1", "b=2"]
    assert compare.defaults(words) == (None, told)


def test_keys_are_as_old_as_rows() -> None:
    """Rows of a reward without judges have no such field, and they have one that is gone: with either all would be made anew."""
    plain = TrainConfig(rewards=[RewardSpec(name="shapes")])
    assert key_of(plain, (0, 45), "train") == "c913547b2766d3cb"
    judged = TrainConfig(rewards=[RewardSpec(name="shapes", judges=["a"])])
    assert key_of(judged, (0, 45), "train") != "c913547b2766d3cb"


def test_an_arm_with_other_steps_branches_where_training_would() -> None:
    arm = Arm(name="x", recipe="shapes/branch", options={"rollout.steps": 9})
    (job, *_) = prepare(suite(arm), recipe)
    assert job.config.rollout.window.at == [3]
    assert job.settings.items() >= {"rollout.steps": 9, "rollout.window.at": [3]}.items()


CHANGES: dict[str, Any] = {
    "seed": 1,
    "iterations": 46,
    **{
        part: replace(getattr(recipe("shapes/sage"), part), **{field: value})
        for part, field, value in (
            ("model", "path", "another"), ("data", "prompts", "scenes"), ("batch", "group_size", 8), ("rollout", "steps", 7),
            ("kernel", "eta", 0.6), ("kl", "lambda_max", 1e-3), ("optimizer", "lr", 1e-3), ("evaluate", "steps", 7), ("advantage", "clip", 9.0),
        )
    },
}  # fmt: skip
"""One field of every part that decides what a run computes."""


def test_a_key_goes_by_what_is_computed_and_by_nothing_else() -> None:
    config = recipe("shapes/sage")
    key = key_of(config, (0, 45), "train")
    shown = {"keep": replace(config.keep, videos=1), "evaluate": replace(config.evaluate, show=1)}
    assert key_of(replace(config, out="elsewhere", **shown), (0, 45), "train") == key
    budgets = ({"passes": 9}, {"passes": 8}, {"clips": 9}, {"unseen": True})
    others = [
        *(key_of(replace(config, **{name: value}), (0, 45), "train") for name, value in CHANGES.items()),
        key_of(replace(config, rewards=[replace(config.rewards[0], weights={"TA": 1.0})]), (0, 45), "train"),
        key_of(config, (0, 20, 45), "train"),
        key_of(config, (0, 45), "rollout"),
        *(key_of(config, (0, 45), "train", more) for more in budgets),
    ]
    assert len({key, *others}) == 1 + len(others)
    assert key_of(TrainConfig(), (), "train") == key_of(replace(TrainConfig(), out="x"), (), "train")
