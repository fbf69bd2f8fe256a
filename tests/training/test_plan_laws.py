"""Laws of a plan and of what samples it: who replays what, which passes are one, where windows lie, and by what noise is keyed."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from sage_grpo.data.prompts import Prompt
from sage_grpo.objectives.base import NoisedClips
from sage_grpo.objectives.options import ObjectiveSpec
from sage_grpo.recipes.methods import adjoint, nft
from sage_grpo.samplers.kernels import KernelSpec
from sage_grpo.samplers.noise import keyed_noise
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.samplers.windows import Window
from sage_grpo.training.config import BatchConfig, OptimizerConfig, RolloutConfig, TrainConfig, UpdateConfig
from sage_grpo.training.lockstep import Lockstep
from sage_grpo.training.planner import Planner
from trainer_helpers import plan_of

PROMPTS = [Prompt(text) for text in ("a", "b", "c", "d")]
EXACT = KernelSpec(name="sage_exact", eta=math.sqrt(2))
"""A kernel whose last step can be trained."""
ONCE = UpdateConfig(updates_per_rollout=1)


def planner_of(
    make_config,
    *,
    ranks: int = 1,
    micro_batch: int = 8,
    update: UpdateConfig | None = None,
    kernel: KernelSpec = EXACT,
    grid: Schedule | None = None,
    **rollout,
) -> Planner:
    config = replace(
        make_config(),
        kernel=kernel,
        rollout=RolloutConfig(**{"steps": 6, "same_noise": True, **rollout}),
        batch=BatchConfig(prompts=len(PROMPTS), group_size=2, micro_batch=micro_batch),
        update=update or UpdateConfig(updates_per_rollout=2),
    )
    grid = grid or Schedule.shifted(config.rollout.steps, 3.0)
    return Planner(config, grid, kernel.build(grid), lambda sigma: True, ranks)


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 8), (1, 3), (2, 4)])
def test_every_member_replays_what_its_own_group_trains(ranks: int, micro_batch: int, make_config) -> None:
    """Groups that explore at the same steps may train them in other updates: windows of three steps, dealt out to two updates."""
    window = Window(kind="drawn", at=[1, 2], length=3)
    update = UpdateConfig(updates_per_rollout=2, permute_steps=True)
    planner = planner_of(make_config, ranks=ranks, micro_batch=micro_batch, update=update, window=window)
    differ = False
    for iteration in range(3):
        plan = planner.plan(iteration, PROMPTS)
        ways = {(group.shared_steps, group.trained) for group in plan.groups}
        differ |= len(ways) > len({branch for branch, _ in ways})
        for number in range(plan.updates):
            wanted = Counter(
                (group.index, member, group.label(step))
                for group in plan.groups
                for member in range(plan.group_size)
                for step in group.trained[number]
            )
            found = Counter(
                (member.group, member.index, plan.groups[member.group].label(replay.step))
                for rank in range(ranks)
                for replay in plan.replays(rank, number)
                for member in replay.members
            )
            assert found == wanted, (iteration, number)
    assert differ, "no two groups of one window trained its steps in another order"


@pytest.mark.parametrize("trained_fraction", [1.0, 0.5])
@pytest.mark.parametrize("kind", ["grpo", "nft", "gradient"])
def test_ranks_run_the_same_expert_at_every_turn(kind: str, trained_fraction: float, make_config) -> None:
    """With both experts trained: a rank at the high one while another is at the low one would wait for ever. Every own replay has one turn
    that counts, the others run on own states, and what is carried back from a clip meets its last steps first."""
    planner = planner_of(make_config, ranks=3, window=Window(kind="drawn", at=[0, 1, 3], length=2))
    config = replace(planner.config, optimizer=OptimizerConfig(lr=1e-3, max_kl=1.0))
    if kind != "grpo":
        config = {"nft": nft, "gradient": adjoint}[kind](make_config())
        levels = 1 if kind == "nft" else 2
        config = replace(config, objective=replace(config.objective, levels=levels), batch=planner.config.batch)
    config = replace(config, batch=replace(config.batch, trained_fraction=trained_fraction))
    planner = replace(planner, config=config, network=lambda sigma: int(sigma < 0.8))
    spared, borrowed = 0, 0
    for iteration in range(3):
        plan = planner.foresee(planner.plan(iteration, PROMPTS))
        for update in range(plan.updates):
            turns = [Lockstep(plan).replays(rank, update) for rank in range(3)]
            assert len({tuple(one.network for one in row) for row in turns}) == 1
            for rank, row in enumerate(turns):
                own = plan.replays(rank, update)
                assert sorted(map(repr, own)) == sorted(repr(one.replay) for one in row if one.counts)
                for one in row:
                    assert plan.network_of(one.replay) == one.network
                    assert one.states in plan.replayable(rank, update)
                    able = {plan.network_of(state) for state in plan.replayable(rank, update)}
                    assert (one.replay == one.states) == (one.network in able), "others' steps only for want of own"
                spared += sum(not one.counts for one in row)
                borrowed += sum(one.replay != one.states for one in row)
                if kind == "gradient":  # within a clip from its end to its beginning
                    for members in {one.replay.members for one in row if one.counts}:
                        steps = [one.replay.step for one in row if one.counts and one.replay.members == members]
                        assert steps == sorted(steps, reverse=True)
        gauges = [Lockstep(plan).kl_probes(rank) for rank in range(3)]
        assert len({tuple(one.network for one in row) for row in gauges}) == 1
    assert spared
    assert borrowed


def test_the_equaliser_is_of_all_steps_that_may_be_drawn(make_config) -> None:
    """Not of those of this iteration: a step would weigh more or less by what other prompts happen to draw."""
    planner = planner_of(make_config, update=ONCE, window=Window(kind="drawn"))
    plans = [planner.plan(iteration, PROMPTS[:2]) for iteration in range(3)]
    assert len({group.shared_steps for plan in plans for group in plan.groups}) > 2
    for plan in plans:
        assert plan.equalizer == plans[0].equalizer
        assert plan.equalizer.keys() == set(planner.candidates())


def test_gauges_of_an_iteration_cover_the_steps_in_proportion(make_config) -> None:
    """Each step is measured by its share of the groups, to the nearest whole number, in every iteration and not only on average."""
    planner = planner_of(make_config, window=Window(), same_noise=False)
    config = replace(
        planner.config, optimizer=OptimizerConfig(lr=1e-3, target_kl=0.1), batch=BatchConfig(prompts=9, group_size=2)
    )
    planner = replace(planner, config=config)
    square = {s: float(planner.kernel(*planner.grid.pair(s)).sensitivity) ** 2 for s in planner.trainable([True] * 6)}
    share = {step: 9 * value / sum(square.values()) for step, value in square.items()}
    for iteration in range(3):
        plan = planner.plan(iteration, [Prompt(str(n)) for n in range(9)])
        counts = Counter(group.kl_probe.step for group in plan.groups if group.kl_probe is not None)
        assert all(math.floor(share[step]) <= counts[step] <= math.ceil(share[step]) for step in share), (counts, share)


def rolled_out(make_config, make_trainer, **rollout):
    config = make_config(rollout={"steps": 10, "same_noise": True, **rollout}, update=ONCE, kernel=EXACT)
    trainer = make_trainer(config)
    plan = plan_of(trainer)
    return trainer, plan, trainer.sample(plan)


@pytest.mark.parametrize(("share", "before"), [(True, 3), (False, 2)])
def test_exploration_noise_goes_by_the_step_of_the_runs_own_grid(share, before, make_config, make_trainer) -> None:
    """However many steps are taken before it: else runs with other numbers of them would not explore alike."""
    window = Window(kind="drawn", at=[4, 7], length=2)
    trainer, plan, rollout = rolled_out(make_config, make_trainer, share=share, before_steps=before, window=window)
    shape, seen = trainer.model.latent_shape(), set()
    for replay, record in rollout.records.items():
        step = record.policy.step(replay.step, record.x, record.conditions)
        law = step.gaussian.expand(len(replay.members))
        noise = (record.x_next - law.mean) / law.std
        for member, row in zip(replay.members, noise.detach()):
            label = plan.groups[member.group].label(replay.step)
            seen.add(label)
            expected = keyed_noise(shape, "step", trainer.config.seed, 0, member.group, member.index, label)
            torch.testing.assert_close(row, expected, rtol=0.0, atol=1e-2)  # another key is off by whole numbers
    assert seen <= {4, 5, 7, 8}
    assert len(seen) > 1


def test_a_step_that_would_hold_too_much_noise_is_neither_explored_nor_trained_and_that_is_told(make_config) -> None:
    """On a grid whose last but one value is near 0, as SD3's and that of Wan with FlowMatchEuler."""
    low = Schedule(torch.tensor([1.0, 0.9, 0.75, 0.5, 0.3, 0.01, 0.0]))

    def planner(kernel: str = "sage", grid: Schedule = low, **rollout) -> Planner:
        given = {"same_noise": False, **rollout}
        return planner_of(make_config, kernel=KernelSpec(name=kernel), grid=grid, update=ONCE, **given)

    for given, last in (({}, 3), ({"deterministic_last": True}, 4), ({"deterministic_last": False}, 5)):
        (group,) = planner(**given).plan(0, PROMPTS[:1]).groups
        assert sorted(group.trained[0]) == list(range(last + 1))
        assert {step for step, flag in enumerate(group.schedule.stochastic[:-1]) if flag} == set(group.trained[0]) - {5}
    assert sorted(planner("sage_exact").plan(0, PROMPTS[:1]).labels(0)) == [0, 1, 2, 3, 4]  # its last step has no noise
    assert planner(window=Window(kind="drawn")).candidates() == [0, 1, 2, 3]
    assert "step 4 is deterministic" in planner().unexplored()
    for quiet in ({"deterministic_last": True}, {"kernel": "sage_exact"}, {"grid": Schedule.shifted(6, 3.0)}):
        assert planner(**quiet).unexplored() is None
    for window, told in (  # only what a window covers is told
        (Window(kind="fixed", start=0, length=3), False),
        (Window(kind="fixed", start=3, length=2), True),
        (Window(kind="random", length=2, stop=4), False),
        (Window(kind="sliding", length=2, start=4, stop=6), True),
        (Window(kind="drawn", at=[1, 2, 3]), False),
        (Window(kind="drawn"), True),
        (Window(kind="drawn", at=[1, 3], length=2), True),
    ):
        assert (planner(window=window).unexplored() is not None) == told


@pytest.mark.parametrize(
    ("rollout", "micro_batch", "tasks"),
    [
        ({"same_noise": False}, 3, 2),  # micro-batches hold parts of neighboring groups
        ({"window": Window(kind="drawn", at=[2])}, 2, 2),  # two prompts walk side by side
        ({"window": Window(kind="drawn", at=[1, 3]), "share": False}, 2, 4),
        ({"window": Window(kind="drawn", at=[1, 2], length=3)}, 4, None),
    ],
)
def test_tasks_together_are_the_whole_rollout(rollout: dict, micro_batch: int, tasks: int | None, make_config) -> None:
    planner = planner_of(make_config, micro_batch=micro_batch, update=ONCE, **rollout)
    planner = replace(planner, config=replace(planner.config, optimizer=OptimizerConfig(lr=1e-3, max_kl=1.0)))
    for iteration in range(2):
        plan = planner.plan(iteration, PROMPTS)
        parts = plan.tasks()
        assert tasks is None or len(parts) == tasks
        assert Counter(one for part in parts for one in part.sampled(0)) == Counter(plan.sampled(0))
        assert Counter(one for part in parts for one in part.replayable(0, 0)) == Counter(plan.replayable(0, 0))
        assert {replay: rows for part in parts for replay, rows in part.kl_replays(0).items()} == plan.kl_replays(0)
        for part in parts:
            owned = {group: len(members) for group, members in part.members(0).items()}
            assert set(owned.values()) == {plan.group_size}, "a group is whole, so that rewards may compare its clips"


METHODS_THAT_DRAW = {
    "a share of the steps": ({"window": Window()}, replace(ONCE, step_fraction=0.4), None),
    "windows": ({"window": Window(kind="drawn")}, ONCE, None),
    "steps of windows": ({"window": Window(kind="drawn", at=[1], length=3)}, replace(ONCE, step_fraction=0.4), None),
    "a window": ({"window": Window(kind="random", length=2)}, ONCE, None),
    "orders": ({"window": Window()}, UpdateConfig(updates_per_rollout=2), None),
    "levels": ({}, ONCE, {"kind": "sft", "draw": "schedule", "levels": 2}),
    "strata": ({}, ONCE, {"kind": "sft", "draw": "strata", "levels": 3}),
    "steps of a gradient": ({}, ONCE, {"kind": "gradient", "levels": 2}),
    "predictions": ({}, ONCE, {"kind": "gradient", "levels": 1, "draw": "last", "predict": 0.9}),
}


def without_sde(config: TrainConfig, **objective: object) -> TrainConfig:
    return replace(
        config,
        objective=ObjectiveSpec(**objective),
        surrogate=replace(config.surrogate, equalize=False),
        kernel=KernelSpec(name="ode"),
        rollout=replace(config.rollout, same_noise=False),
        trust_region=replace(config.trust_region, mode="none"),
    )


@pytest.mark.parametrize(("share", "count"), [(0.05, 1), (0.7, 4)])
def test_repeated_updates_train_a_share_of_the_steps_but_one_at_least(share: float, count: int, make_config) -> None:
    update = UpdateConfig(updates_per_rollout=2, repeat=True, step_fraction=share, permute_steps=False)
    for group in planner_of(make_config, update=update, window=Window()).plan(0, PROMPTS).groups:
        first, again = group.trained
        assert (len(first), list(first)) == (count, sorted(again))


@pytest.mark.parametrize("kind", METHODS_THAT_DRAW)
def test_what_is_drawn_goes_by_the_seed_and_the_iteration_and_is_drawn_again_alike(kind: str, make_config) -> None:
    rollout, update, objective = METHODS_THAT_DRAW[kind]
    planner = planner_of(make_config, update=update, **rollout)
    config = planner.config if objective is None else without_sde(planner.config, **objective)

    def drawn(seed: int, first: int) -> list[object]:
        own = replace(planner, config=replace(config, seed=seed))
        groups = [group for number in range(first, first + 5) for group in own.plan(number, PROMPTS).groups]
        levels = [one.levels and (one.levels.labels, one.levels.schedule.sigmas.tolist()) for one in groups]
        return [(one.trained, one.schedule.stochastic, at) for one, at in zip(groups, levels)]

    if objective is not None:
        groups = replace(planner, config=config).plan(0, PROMPTS).groups
        assert {one.noise()["offset"] for one in groups} == {0}, "on the run's own grid"
    assert drawn(0, 0) == drawn(0, 0)
    assert len({repr(drawn(*key)) for key in ((0, 0), (1, 0), (0, 5))}) == 3
    if objective is not None or kind == "steps of windows":
        assert len({repr(one) for one in drawn(0, 0)[:4]}) > 1, "prompts draw for themselves"


@pytest.mark.parametrize(
    ("fields", "before", "after"),
    [
        ({}, 2, 3),
        ({"before_steps": 1}, 1, 3),
        ({"before_steps": 4, "after_steps": 5}, 4, 5),
    ],
)
def test_steps_around_a_window_are_as_many_as_asked(fields: dict, before: int, after: int, make_config) -> None:
    planner = planner_of(make_config, steps=7, window=Window(kind="fixed", start=2, length=2), **fields)
    for group in planner.plan(0, PROMPTS).groups:
        assert group.schedule.exploring_range() == (before, before + 2)
        assert group.schedule.num_steps == before + 2 + after
        assert sorted(step for part in group.trained for step in part) == [before, before + 1]
        assert [group.label(before), group.offset] == [2, 2 - before]


def test_a_gradient_is_carried_from_the_clip_backwards_and_a_prediction_ends_the_way(make_config) -> None:
    base = planner_of(make_config, steps=4, same_noise=False, update=ONCE)
    sigmas = base.grid.sigmas.tolist()
    ode = replace(base, config=without_sde(base.config, kind="gradient", levels=2))
    assert [len(one.shares[0]) for one in (base, ode)] == [1, len(PROMPTS)], "each learns at levels of its own"

    def groups(trains=lambda sigma: True, **objective: object) -> list:
        config = without_sde(base.config, **{"kind": "gradient", "draw": "last", **objective})
        planner = replace(base, config=config, trains=trains)
        return [group for number in range(12) for group in planner.plan(number, PROMPTS).groups]

    for group in groups(levels=2):
        assert (group.levels.labels, group.trained, group.schedule.sigmas.tolist()) == ((2, 3), ((1, 0),), sigmas)
        assert group.levels.schedule.sigmas.tolist() == [*sigmas[2:4], 0.0]
    ends = {0.2: {3}, 0.5: {2, 3}, 1.0: {0, 1, 2, 3}, 0.01: {3}}
    for share, steps in ends.items():
        found = groups(levels=1, predict=share)
        assert {group.levels.labels[0] for group in found} == steps
        assert all(group.schedule.sigmas.tolist() == [*sigmas[: group.levels.labels[0] + 1], 0.0] for group in found)
    low = groups(lambda sigma: sigma < 0.8, draw="schedule", levels=2)
    assert {group.levels.labels for group in low} == {(2, 3)}
    every = {group.levels.labels for group in groups(draw="schedule", levels=2)}
    assert every == {(a, b) for b in range(4) for a in range(b)}
    for trains, levels in ((lambda sigma: sigma > 0.9, 1), (lambda sigma: True, 5)):
        with pytest.raises(ValueError, match=rf"levels is {levels}, but the trained network runs at steps \["):
            groups(trains, levels=levels)
    # Levels that only some draws have room for are refused at the first iteration, whatever it draws.
    for draw in ("last", "schedule"):
        config = without_sde(base.config, kind="gradient", draw=draw, predict=0.5, levels=4)
        for seed in range(8):
            with pytest.raises(
                ValueError, match=r"levels is 4, but the trained network runs at steps \[0, 1, 2\] of the 3"
            ):
                replace(base, config=replace(config, seed=seed)).check()


def test_levels_are_steps_of_the_trained_network() -> None:
    grid = Schedule(torch.tensor([1.0, 0.8, 0.4, 0.0]))
    for trains, labels in ((lambda sigma: sigma < 0.9, (1, 2)), (lambda sigma: sigma > 0.5, (0, 1))):
        spec = ObjectiveSpec(kind="nft", draw="schedule", levels=2)
        assert NoisedClips(spec).targets(grid, trains, random.Random(0)).labels == labels


def test_only_steps_of_the_trained_network_are_trained_and_steps_have_their_equalisers(make_config) -> None:
    planner = planner_of(make_config, window=Window(), same_noise=False)
    low = replace(planner, trains=lambda sigma: sigma < 0.85)
    assert [low.grid.sigmas[step] < 0.85 for step in range(6)].index(True) == low.trainable([True] * 6)[0] == 3
    assert low.trainable([False] * 4 + [True] * 2) == [4]
    laws = {step: planner.kernel(*planner.grid.pair(step)) for step in range(5)}
    for by, size in (("sensitivity", lambda law: float(law.sensitivity)), ("std", lambda law: 1 / float(law.std))):
        surrogate = replace(planner.config.surrogate, equalize_by=by)
        weights = replace(planner, config=replace(planner.config, surrogate=surrogate)).plan(0, PROMPTS).equalizer
        products = [weights[step] * size(law) for step, law in laws.items()]
        assert products == pytest.approx([products[0]] * 5)
    plain = replace(planner.config, surrogate=replace(surrogate, equalize=False))
    assert set(replace(planner, config=plain).plan(0, PROMPTS).equalizer.values()) == {1.0}
    with pytest.raises(
        ValueError, match=r"window\.at names step 9, but with rollout\.steps 6 it may be 0, 1, 2, 3, 4:"
    ):
        planner_of(make_config, window=Window(kind="drawn", at=[9])).check()
    assert planner_of(make_config, window=Window(kind="drawn", length=2)).candidates() == [0, 1, 2, 3, 4]
    drawn = planner_of(make_config, window=Window(kind="drawn"), update=ONCE)
    drawn = replace(drawn, config=replace(drawn.config, seed=1))
    starts = [group.label(group.shared_steps - 1) for group in drawn.plan(2, PROMPTS).groups]
    assert starts == drawn.config.rollout.window.draw(drawn.candidates(), 4, 2, 1)
    none = replace(planner, trains=lambda sigma: False)
    with pytest.raises(ValueError, match="No step of the rollout can be trained"):
        none.check()
    two = planner_of(make_config, window=Window(kind="drawn"))
    with pytest.raises(ValueError, match="drawn, but no step can be trained"):
        replace(two, trains=lambda sigma: False).check()
    levels = replace(planner, config=without_sde(planner.config, kind="nft", levels=7))
    with pytest.raises(ValueError, match=r"objective.levels is 7, but the trained network runs at 6 step"):
        levels.check()
