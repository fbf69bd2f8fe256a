"""One exploring step from a shared state, replayed once, is the same mathematics as replaying every member."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from double import CLOSE
from sage_grpo.flow.kernels import KernelSpec
from sage_grpo.flow.windows import Window
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.rl.kl_control import KlCoefficient
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.training.config import BatchConfig, OptimizerConfig, SurrogateConfig, UpdateConfig
from sage_grpo.training.update import loss_of, replay
from trainer_helpers import assert_alike, plan_of, watch_gradients

ETA = {"flow": 0.7, "dance": 0.4, "sage": 0.5, "cps": 0.5, "sage_exact": math.sqrt(2)}
SURROGATES = {
    "clip": SurrogateConfig(clip_range=2e-3),
    "mask": SurrogateConfig(kind="kl_mask", kl_mask_scale=1e-2),
    "centred": SurrogateConfig(clip_range=2e-3, centred=True),
    "scaled": SurrogateConfig(clip_range=1e-3, centred="scaled"),
}
FAILING = RewardSpec(name="trainer_toys:bright_but", options={"bad": [1, 6]}, batch_size=0, try_out=False)
STRONG = KlCoefficient(kind="constant", lambda_min=0.0, lambda_max=3.0)


def branching(make_config, *, share: bool, updates: int = 1, window: Window | None = None, **fields):
    rollout = {
        "steps": 5,
        "same_noise": True,
        "share": share,
        "window": window or Window(kind="drawn", at=[1, 2]),
        **fields.pop("rollout", {}),
    }
    return make_config(
        rollout=rollout,
        **{
            "kernel": KernelSpec(name="sage_exact", eta=math.sqrt(2)),
            "update": UpdateConfig(updates_per_rollout=updates, repeat=True),
            "kl": STRONG,
            "optimizer": OptimizerConfig(lr=3e-3, eps=1e-4, weight_decay=0.0),
            **fields,
        },
    )


def watch(trainer, iterations: int) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, float]]]:
    """Gradients of every update, and metrics of every update."""
    gradients = watch_gradients(trainer)
    for _ in range(iterations):
        assert trainer.step()["ratio/first_log"] == 0.0
    return gradients, trainer.log


def assert_same_run(shared, plain) -> None:
    """Both in float64 (`in_double`)."""
    for left, right in zip(*(run[0] for run in (shared, plain)), strict=True):
        assert_alike(left, right, CLOSE)
    for left, right in zip(*(run[1] for run in (shared, plain)), strict=True):
        assert left.keys() == right.keys()
        for name in left:
            if "gradient/raw" in name or "gradient/equalized" in name or "gradient/sent" in name:
                continue  # norms at the velocity: of one row for all members, or of a row for each
            assert left[name] == pytest.approx(right[name], rel=CLOSE, abs=1e-12), name


@pytest.mark.parametrize(
    ("surrogate", "kernel", "updates"),
    [
        ("clip", "sage_exact", 3),
        ("mask", "flow", 3),
        ("scaled", "cps", 3),
        ("centred", "dance", 3),
        ("clip", "sage", 1),
        ("scaled", "sage_exact", 1),
    ],
)
@pytest.mark.usefixtures("in_double")
def test_shared_replay_equals_the_plain_path(surrogate, kernel, updates, make_config, make_trainer) -> None:
    """Every kernel and surrogate, on and off policy, with masked members and both KL terms."""
    runs = []
    for share in (True, False):
        config = branching(
            make_config,
            share=share,
            updates=updates,
            kernel=KernelSpec(name=kernel, eta=ETA[kernel]),
            surrogate=SURROGATES[surrogate],
            rewards=[FAILING],
            batch=BatchConfig(prompts=2, group_size=4, micro_batch=3),
        )
        runs.append(watch(make_trainer(config), 2))
    assert_same_run(*runs)
    if updates > 1:
        assert any(log["ratio/largest_log"] > 1e-4 for log in runs[0][1])


@pytest.mark.usefixtures("in_double")
def test_the_gradient_at_the_velocity_is_the_formula(make_config, make_trainer) -> None:
    """At the first update: -(b / (D std)) mean of A_i e_i, times sqrt(D), whatever the size of the group."""
    config = branching(make_config, share=True, trust_region=TrustRegion(mode="none"))
    trainer = make_trainer(config)
    plan = plan_of(trainer)
    rollout = trainer.roll_out(plan)
    scored = trainer.studio.score(trainer.studio.decode(rollout), plan)
    advantages = trainer.advantages(scored)
    for item in trainer.items(plan, rollout, scored, advantages, 0):
        step = replay(item, torch.device("cpu"))
        step = replace(step, velocity=step.velocity)
        loss = loss_of(trainer.objective, item, step, kl_lambda=0.0)
        transition = item.record.policy.transition(item.step)
        noise = (item.record.x_next - step.gaussian.mean.detach()) / transition.std
        dims = trainer.objective.dims
        mean = (item.weight[:, None, None, None, None] * item.advantage[:, None, None, None, None] * noise).sum(0)
        expected = -(transition.b / (dims * transition.std)) * mean * math.sqrt(dims)
        torch.testing.assert_close(loss.raw[0], expected, rtol=CLOSE, atol=CLOSE)


def counted(trainer) -> Counter[str]:
    """Calls of the network, with and without gradients, in one iteration."""
    calls: Counter[str] = Counter()
    velocity = trainer.model.velocity

    def spied(x, sigma, conditions, **options):
        calls["graph" if torch.is_grad_enabled() else "plain"] += 1
        calls["rows"] += len(x)
        return velocity(x, sigma, conditions, **options)

    trainer.model.velocity = spied
    trainer.step()
    return calls


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("micro", [1, 2, 8])
def test_the_network_runs_as_often_as_the_plan_says(micro, branches, make_config, make_trainer) -> None:
    """Prefixes once a prompt, members from the branch on, one replay a group."""
    window = Window(kind="drawn", at=[1, 3], branches=branches)
    batch = BatchConfig(prompts=3, group_size=4, micro_batch=micro)
    config = branching(make_config, share=True, updates=2, window=window, batch=batch, rollout={"steps": 6})
    trainer = make_trainer(replace(config, trust_region=TrustRegion(mode="fixed")))
    plan = plan_of(trainer)
    calls = counted(trainer)
    # And the anchor's, from the second update on: in the first it is the live policy.
    assert calls["plain"] == plan.rollout_passes(0).total() + sum(plan.rounds[1:])
    # By hand: branch points of every prompt, its trunk once, and each member's own steps.
    trunk = members = replays = 0
    for number in range(3):
        points = [group.branch - 1 for group in plan.groups if group.number == number]
        assert len(points) == branches
        trunk += max(points) + 1
        members += sum((6 - point - 1) * math.ceil(4 / micro) for point in points)
        replays += branches
    if branches == 1:  # prompts that branch at the same step go side by side
        together = Counter(group.branch - 1 for group in plan.groups)
        trunk = sum((point + 1) * math.ceil(count / micro) for point, count in together.items())
        members = sum((6 - point - 1) * math.ceil(4 * count / micro) for point, count in together.items())
        replays = sum(math.ceil(count / micro) for count in together.values())
    assert calls["graph"] == sum(plan.rounds) == 2 * replays
    assert plan.rollout_passes(0).total() == trunk + members


@pytest.mark.parametrize("mode", ["none", "dual", "stepwise"])
@pytest.mark.parametrize("estimator", ["closed_form", "log_ratio"])
@pytest.mark.usefixtures("in_double")
def test_groups_side_by_side_learn_as_groups_apart(mode, estimator, make_config, make_trainer) -> None:
    """The same noise, losses, metrics and weights, whether a pass holds one group or all that go the same way."""
    runs = []
    for micro in (1, 8):
        batch = BatchConfig(prompts=4, group_size=4, micro_batch=micro)
        config = branching(
            make_config, share=True, updates=2, window=Window(kind="drawn", at=[1, 2]), batch=batch,
            trust_region=TrustRegion(mode=mode, estimator=estimator), surrogate=SurrogateConfig(centred=mode == "none"),
            optimizer=OptimizerConfig(lr=3e-3, eps=1e-4, weight_decay=0.0, max_kl=1e4),
        )  # fmt: skip
        trainer = make_trainer(config)
        plan = plan_of(trainer)
        assert max(replay.rows for replay in plan.replays(0, 0)) == (1 if micro == 1 else 2)
        runs.append(watch(trainer, 2))
    assert_same_run(*runs)


def test_members_of_a_group_share_what_comes_before_the_branch_and_nothing_after(make_config, make_trainer) -> None:
    trainer = make_trainer(branching(make_config, share=True, window=Window(kind="drawn", at=[2])))
    plan = plan_of(trainer)
    rollout = trainer.roll_out(plan)
    assert sum(len(record.x) for record in rollout.records.values()) == 2
    for record in rollout.records.values():
        assert len(record.x_next) == 4 * len(record.x)
    for _, latents in rollout.latents:
        assert not any(torch.equal(a, b) for a, b in itertools.combinations(latents, 2))


@pytest.mark.parametrize("solver", ["euler", "ab2"])
def test_own_numbers_of_steps_before_and_after(solver, make_config, make_trainer) -> None:
    rollout = {"steps": 10, "before_steps": 2, "after_steps": 3, "solver": solver}
    window = Window(kind="drawn", at=[4, 7])
    trainer = make_trainer(branching(make_config, share=True, window=window, rollout=rollout))
    plan = plan_of(trainer)
    grid = trainer.planner.grid.sigmas
    for group in plan.groups:
        assert group.schedule.num_steps == 6
        (step,) = group.trained[0]
        assert step == 2
        assert group.label(step) in (4, 7)
        assert [float(s) for s in group.schedule.pair(step)] == grid[group.label(step) :][:2].tolist()
        assert (float(group.schedule.sigmas[0]), float(group.schedule.sigmas[-1])) == (1.0, 0.0)
    calls = counted(trainer)
    assert calls["plain"] == plan.rollout_passes(0).total()  # in the first update the anchor is the live policy
    labels = {name[-3:] for log in trainer.log for name in log if name.startswith("gradient/raw/")}
    assert labels <= {"004", "007"}


@pytest.mark.usefixtures("in_double")
def test_a_window_of_several_steps_shares_its_first(make_config, make_trainer) -> None:
    """MixGRPO with one start noise: the first step of the window is replayed once a group, the others member by member."""
    window = Window(kind="fixed", start=1, length=2)
    runs = []
    for share in (True, False):
        config = branching(make_config, share=share, window=window, updates=2)
        trainer = make_trainer(config)
        if share:
            plan = plan_of(trainer)
            replays = plan.replays(0, 0)
            assert {(r.step, r.shared): sum(o.rows for o in replays if o.step == r.step) for r in replays} == {
                (1, True): 2,
                (2, False): 8,
            }
        runs.append(watch(trainer, 1))
    assert_same_run(*runs)
