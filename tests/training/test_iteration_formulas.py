"""The small functions of an iteration, each against numbers worked out by hand: no model runs here."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from sage_grpo.data.groups import Member, share_out
from sage_grpo.data.prompts import Prompt
from sage_grpo.distributed.spec import Layout
from sage_grpo.distributed.world import World
from sage_grpo.models.policy import Policy, Step
from sage_grpo.models.spec import ModelSpec
from sage_grpo.objectives.base import NoiseLevels, ReplayedStep
from sage_grpo.objectives.build import build
from sage_grpo.objectives.options import ObjectiveSpec
from sage_grpo.objectives.trust_region import TrustRegion
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.member import Failure, RewardFailure
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.samplers.kernels import KernelSpec
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.training import evaluate, parts, reference, update
from sage_grpo.training import loss as losses
from sage_grpo.training.config import AdvantageConfig, BatchConfig, DataConfig, EvalConfig, SurrogateConfig
from sage_grpo.training.engine import RolloutEngine
from sage_grpo.training.lockstep import Lockstep
from sage_grpo.training.loss import needs_velocity_old
from sage_grpo.training.plan import Group, KlProbe, Plan, Replay
from sage_grpo.training.reference import OldPolicy, PastWeights, ReferencePolicy, Snapshot
from sage_grpo.training.rollout import NoiseKeys, Record
from sage_grpo.training.scoring import ScoredClips, Scores, advantages_of, check_groups, preferred
from sage_grpo.training.update import Updater
from sage_grpo.types import Sound, VideoSpec
from sage_grpo.workers.messages import _joined
from trainer_helpers import plan_of

# Scores -------------------------------------------------------------------------------------------------------------


def test_sheets_are_joined_and_put_into_the_order_of_groups() -> None:
    def scores(rows: list[list[float]], failed: list[int], *failures: Failure) -> Scores:
        groups, indices, total, x, y = torch.tensor(rows).double().unbind(1)
        parts = {"a/x": x, "b/y": y}
        return Scores(groups.long(), indices.long(), total, parts, dict(zip("ab", failed)), list(failures))

    nan = math.nan
    one = scores([[1.0, 0, 5, 2, 3], [0, 1, nan, nan, 4]], [1, 0], Failure("a", 1, "p", "why"))
    two = scores([[0.0, 0, 7, 1, 6], [1, 1, 8, 0, 8]], [0, 2])
    both = Scores.joined([one, two])
    assert (both.failed, len(both.failures)) == ({"a": 1, "b": 2}, 1)
    found = both.gathered(World(), 0.5, torch.float32)
    assert (found.groups.tolist(), found.indices.tolist()) == ([0, 0, 1, 1], [0, 1, 0, 1])
    torch.testing.assert_close(found.total, torch.tensor([7.0, nan, 5, 8]), equal_nan=True)
    assert found.parts["b/y"].tolist() == [6, 4, 3, 8]
    assert (found.valid.tolist(), found.failed) == ([True, False, True, True], {"a": 1, "b": 2})
    assert "why" in found.report
    assert replace(two, failed={"a": 0, "b": 0}).gathered(World(), 0.5).report == ""
    ranks = SimpleNamespace(gather=lambda rows: rows, texts=lambda text: [text, text])
    assert len(one.gathered(ranks, 0.5).failures) == 2, "one reward's failures are those of all ranks"
    with pytest.raises(RewardFailure, match="1 of 4 clips"):
        both.gathered(World(), 0.2)


def test_clips_of_one_worker_are_put_into_the_order_of_the_whole() -> None:
    sound = Sound(torch.tensor([[[3.0]], [[4.0]]]), 7)
    clips = ScoredClips(torch.zeros(0, 9, 4, 4, 3), preferred(1, 2), thumbnails=torch.tensor([1.0, 2.0]), sound=sound)
    found = _joined([clips], [1, 0])
    assert (found.videos.shape, found.thumbnails.tolist()) == ((0, 9, 4, 4, 3), [2.0, 1.0])
    assert (found.sound.waves.flatten().tolist(), found.sound.rate) == ([4.0, 3.0], 7)


def test_of_given_clips_the_first_of_a_row_is_the_better_one() -> None:
    pairs = preferred(2, 2)
    assert (pairs.groups.tolist(), pairs.indices.tolist()) == ([0, 0, 1, 1], [0, 1, 0, 1])
    assert pairs.total.tolist() == [1.0, -1.0, 1.0, -1.0]
    assert preferred(2, 1).total.tolist() == [1.0, 1.0]


def test_rewards_that_compare_need_whole_groups() -> None:
    def refused(groups: int, size: int, ranks: int = 1, sequence: int = 1) -> list[str]:
        said: list[str] = []
        shares = share_out([Member(g, i) for g in range(groups) for i in range(size)], 2, world_size=ranks)
        world = World(size=ranks, layout=Layout(1, ranks, sequence))
        check_groups(SimpleNamespace(refuse_comparing=said.append), shares, size, "So and so.", world)
        return said

    assert refused(4, 2) == refused(4, 2, ranks=2) == refused(3, 3, ranks=3) == []
    assert refused(4, 1) == ["there is one clip a prompt. So and so."]
    assert refused(3, 2, ranks=2) == ["2 ranks share 2 clips of a prompt. So and so."] * 2
    assert refused(1, 2, sequence=2) == ["2 sequence-parallel processes share a group's clips. Set parallel.sp 1."]


def test_an_evaluation_says_what_every_clip_scored() -> None:
    nan = math.nan
    prompts = [Prompt("a", seed=7), Prompt("b")]
    total, parts = torch.tensor([1.0, nan, 2.0, 6.0]), {"x": torch.tensor([4.0, 5.0, nan, 6.0])}
    scored = Scores(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]), total, parts, {"r": 1})
    stderr = math.sqrt(14 / 3) / math.sqrt(3)
    metrics = {"eval/x": 5.0, "eval/total": 3.0, "eval/total_stderr": pytest.approx(stderr), "eval/failed": 1.0}
    assert evaluate._means(scored) == {**metrics, "eval/failed/r": 1.0}
    rows = evaluate._rows(scored, prompts, 5, [Member(0, 1), Member(1, 0)])
    names = [(row["prompt"], row["noise"], row["clip"]) for row in rows]
    assert names == [("a", "7", None), ("a", "8", 0), ("b", "5/1/0", 1), ("b", "5/1/1", None)]
    assert rows[1]["scores"] == {"total": None, "x": 5.0}
    assert rows[2]["scores"] == {"total": 2.0, "x": None}


# Snapshots ----------------------------------------------------------------------------------------------------------


def weight(*values: float) -> dict[str, nn.Parameter]:
    return {"w": nn.Parameter(torch.tensor(values))}


def move(params: dict[str, nn.Parameter], *values: float) -> None:
    params["w"].data.copy_(torch.tensor(values))


@pytest.mark.parametrize("offload", [False, True])
def test_what_is_offloaded_waits_in_cpu_memory(offload: bool, make_config) -> None:
    """On the meta device nothing is left of a tensor that stays there."""
    params = {"w": nn.Parameter(torch.ones(1, device="meta"))}
    if not offload:
        assert ReferencePolicy(params, every=1, offload=offload).copies["w"].is_meta
    config = make_config(rollout={"offload": offload, "storage": "bfloat16" if offload else "float32"})
    model = SimpleNamespace(device=torch.device("cuda:7"))
    found = RolloutEngine.storage.fget(
        SimpleNamespace(config=config, model=model, planner=SimpleNamespace(objective=config.build_objective()))
    )
    assert found.device == torch.device("cpu" if offload else "cuda:7")
    assert found.dtype == (torch.bfloat16 if offload else torch.float32)


def test_snapshots_are_applied_renewed_averaged_and_taken_back() -> None:
    params = weight(1.0, 2.0)
    kept, ema = Snapshot(params), Snapshot(params)
    move(params, 5.0, 6.0)
    with kept.applied():
        assert params["w"].tolist() == [1.0, 2.0]
    assert params["w"].tolist() == [5.0, 6.0]
    ema.follow(0.75)
    assert ema.copies["w"].tolist() == [2.0, 3.0]
    kept.take_back(0.25)  # a quarter of the way is kept
    assert params["w"].tolist() == [2.0, 3.0]
    kept.renew()
    assert kept.copies["w"].tolist() == [2.0, 3.0]
    for lags in (False, True):
        old = OldPolicy(params, lags=lags, samples=True, offload=False)
        move(params, 4.0, 7.0)
        old.begin()
        assert old.copies["w"].tolist() == ([2.0, 3.0] if lags else [4.0, 7.0])
        move(params, 6.0, 9.0)
        old.follow(0.75)
        assert old.copies["w"].tolist() == ([3.0, 4.5] if lags else [4.5, 7.5])
        move(params, 2.0, 3.0)


def test_weights_are_promised_to_iterations_and_forgotten_once_they_sampled(monkeypatch) -> None:
    monkeypatch.setattr(reference, "Snapshot", lambda params, *, offload: Snapshot(params) if offload else None)
    params = weight(0.0)
    past, seen = PastWeights(params), []
    for due in range(4):
        move(params, float(due))
        found = past.promise(due, range(due + 1, due + 3))
        seen.append({number: (since, float(one.copies["w"])) for number, (since, one) in found.items()})
    assert seen[0] == {0: (0, 0.0), 1: (0, 0.0), 2: (0, 0.0)}
    assert seen[1] == {1: (0, 0.0), 2: (0, 0.0), 3: (1, 1.0)}
    assert seen[3] == {3: (1, 1.0), 4: (2, 2.0), 5: (3, 3.0)}
    assert past.state_dict() == {"4": 2, "5": 3}
    assert {name: float(value) for name, value in past.tensors().items()} == {"past/2/w": 2.0, "past/3/w": 3.0}
    again = PastWeights(params)
    again.load_state_dict(past.state_dict())
    assert (again.since, set(again.weights)) == (past.since, {2, 3})
    past.forget()
    assert (past.state_dict(), past.tensors()) == ({}, {})


# Noise --------------------------------------------------------------------------------------------------------------


def group_of(index: int = 0, seed: int | None = None, **fields: object) -> Group:
    given = {"schedule": Schedule(torch.tensor([1.0, 0.75, 0.5, 0.0]), (True, False, True)), "offset": 2}
    given |= {"trained": ((0,), (2,)), "shared": True, **fields}
    return Group(index=index, prompt=Prompt("a", seed=seed), **given)


def test_noise_is_another_where_a_part_of_its_key_is() -> None:
    shape, keys, member = (3,), NoiseKeys(0, 5), Member(1, 2)
    starts = [(keys, 4, 2, None), (NoiseKeys(1, 5), 4, 2, None), (NoiseKeys(0, 6), 4, 2, None), (keys, 3, 2, None)]
    starts += [(keys, 4, 0, None), (keys, 4, 2, 5), (keys, 4, 2, 6), (keys, 4, 0, 6)]
    free = [one.start(group_of(group, seed), Member(group, index), shape) for one, group, index, seed in starts]
    assert len({tuple(one.tolist()) for one in free}) == len(free)
    same = [
        (free[6], NoiseKeys(3, 8).start(group_of(0, seed=6), member, shape)),  # a prompt's own seed
        (free[4], NoiseKeys(0, 5, same_start=True).start(group_of(4), member, shape)),
    ]
    assert all(torch.equal(*pair) for pair in same)
    each = [(one, member, 3, "step") for one in (keys, NoiseKeys(1, 5), NoiseKeys(0, 6))]
    each += [(keys, Member(1, 3), 3, "step"), (keys, Member(2, 2), 3, "step"), (keys, member, 4, "step")]
    steps = [one.step([m], step, shape, kind) for one, m, step, kind in [*each, (keys, member, 3, "fresh")]]
    assert len({tuple(one[0].tolist()) for one in steps}) == len(steps)
    pair = [Member(1, 0), Member(1, 2)]
    apart, alike = keys.fresh(pair, 3, shape), NoiseKeys(0, 5, same_fresh=True).fresh(pair, 3, shape)
    assert torch.equal(apart[1], steps[-1][0])
    assert not torch.equal(apart[0], apart[1])
    assert torch.equal(alike[0], alike[1])
    assert torch.equal(alike[0], apart[0])


# Plans --------------------------------------------------------------------------------------------------------------


def test_a_group_labels_its_steps_by_the_runs_own_grid() -> None:
    group = group_of()
    assert (group.shared_steps, group.label(2), group.sigma(2)) == (1, 4, 0.5)
    assert group_of(shared=False).shared_steps == 0
    assert group.noise() == {"sigmas": [1.0, 0.75, 0.5, 0.0], "stochastic": [True, False, True], "offset": 2}
    levels = NoiseLevels(Schedule(torch.tensor([0.9, 0.3, 0.0])), (0, 2), KernelSpec(name="sage").build(), visited=True)
    fresh = group_of(offset=0, levels=levels)
    assert [fresh.label(n) for n in (0, 1)] == [0, 2]
    assert fresh.sigma(1) == pytest.approx(0.3)
    assert [fresh.length(n) for n in (0, 1)] == [-0.25, -0.5]
    changes = [{"offset": 1}, {"trained": ((0,), (1,))}, {"shared": False}]
    changes += [{"schedule": Schedule(sigmas)} for sigmas in (torch.tensor([1.0, 0.5, 0.0]), group.schedule.sigmas)]
    assert group.path_key == group_of(3).path_key
    assert all(group_of(**change).path_key != group.path_key for change in changes)


def rounds(plan: Plan) -> list[int]:
    return [len(Lockstep(plan).replays(0, update)) for update in range(plan.updates)]


def test_clips_that_are_chosen_say_what_is_skipped_and_who_stands_against_whom() -> None:
    members = [Member(g, i) for g in range(3) for i in range(2)]
    plan = Plan(0, tuple(group_of(n, n) for n in range(3)), 2, {2: 1.0, 4: 1.0}, share_out(members, 2, apart=True))
    assert (plan.skipped, plan.updates, plan.labels(1), rounds(plan)) == (0, 2, [4], [3, 3])
    chosen = frozenset(members[:1]), frozenset(members[1:3])
    some = replace(plan, chosen=chosen, pairs=((members[0], members[1]),))
    assert (some.skipped, rounds(some)) == (1, [1, 2])
    assert some.partners == {members[0]: (1, members[1]), members[1]: (-1, members[0])}
    assert [replay.members for replay in some.replays(0, 1)] == [tuple(members[:2]), tuple(members[2:4])]
    nothing = replace(plan, chosen=(frozenset(), frozenset()))
    assert (nothing.skipped, rounds(nothing)) == (3, [1, 1])
    assert [(one.counts, one.states) for one in Lockstep(nothing).replays(0, 0)] == [(False, plan.replayable(0, 0)[0])]
    probed = replace(nothing, groups=tuple(group_of(n, n, kl_probe=KlProbe(0, 2.0)) for n in range(3)))
    assert list(probed.kl_replays(0).values()) == [[(0, 2.0)]] * 3
    assert [Replay(0, tuple(members[:3]), shared=shared).rows for shared in (True, False)] == [2, 3]
    given = replace(plan, examples=True)
    assert (plan.rollout_passes(0).total(), given.rollout_passes(0).total()) == (3 * (1 + 2), 0)


# Losses -------------------------------------------------------------------------------------------------------------


def test_an_objective_scales_by_its_dimensions_and_knows_what_it_needs() -> None:
    free, plain = TrustRegion(mode="none"), SurrogateConfig(clip_scale=0.5)
    one = build(ObjectiveSpec(), plain)
    assert (one.scale(16), one.clip_range(16), needs_velocity_old(one, free)) == (4.0, 0.125, False)
    assert build(ObjectiveSpec(kind="gradient", draw="last", levels=1), plain).scale(16) == 1.0
    assert build(ObjectiveSpec(), SurrogateConfig(clip_range=0.3)).clip_range(16) == 0.3
    for surrogate, region, needs in (
        (SurrogateConfig(centred=True), free, True),
        (SurrogateConfig(kind="kl_mask"), free, True),
        (plain, TrustRegion(mode="dual"), True),
        (plain, TrustRegion(mode="fixed"), False),
    ):
        assert needs_velocity_old(build(ObjectiveSpec(), surrogate), region) == needs
    for surrogate, kl, inactive in (
        (plain, None, [False, True]),
        (SurrogateConfig(kind="kl_mask", kl_mask_scale=0.8), torch.tensor([0.04, 0.06]), [False, True]),
    ):
        zeros, states = torch.zeros(2), torch.zeros(2, 16)
        step = ReplayedStep(
            velocity=states,
            velocity_old=states,
            velocity_reference=states,
            x_next=states,
            log_prob=torch.tensor([1.12, 1.13]).log(),
            log_prob_old=zeros,
            advantage=torch.ones(2),
            sigma=0.5,
            std=torch.ones(()),
            kl_old=kl,
        )
        assert build(ObjectiveSpec(), surrogate).loss(step).inactive.tolist() == inactive
    v, target = torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 1.0]])
    weigher = build(ObjectiveSpec(kind="sft"))
    at = replace(step, velocity=v, x_next=target)
    assert float(weigher.loss(at).loss) == 2.5
    pairs = build(ObjectiveSpec(kind="dpo"))
    assert float(pairs.partner_excess(v, torch.zeros(1, 2), target)) == 2.5 - 0.5


KERNEL, SCHEDULE = KernelSpec(name="dance", eta=0.5).build(), Schedule(torch.tensor([1.0, 0.5, 0.0]), (True, True))
PLACES = (slice(0, 1), slice(1, 3))
X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


def test_a_part_is_seen_as_if_it_were_all_and_gradients_go_back_to_their_places() -> None:
    policy, x = Policy(SimpleNamespace(), KERNEL, SCHEDULE, None, PLACES), X  # type: ignore[arg-type]
    logs = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    record = Record(policy, (), x, x + 1, x + 2, logs)
    advantage, weight = torch.tensor([[1.0, -1.0], [2.0, -2.0]]), torch.tensor([0.5, 0.25])
    item = losses.TrainItem(record, 0, 0, advantage, weight, 1.0, v_reference=x + 3)
    part = parts.StatePart("sound", PLACES[1], 1, 0.5)
    seen, step = part.view(item, Step(policy.at(0, x, x).gaussian, x))
    assert part.dims == 2
    found = seen.record
    for more, values in enumerate((found.x, found.x_next, found.v_old, seen.v_reference)):
        assert torch.equal(values, x[:, 1:] + more)
    assert torch.equal(found.log_prob_old, logs[:, 1])
    assert (seen.advantage.tolist(), seen.weight.tolist()) == ([-1.0, -2.0], [0.25, 0.125])
    torch.testing.assert_close(step.gaussian.mean, policy.transition(0)(x, x).mean[:, 1:])
    bare = losses.TrainItem(Record(policy, (), x, x, None, None), 0, 0, torch.tensor([3.0, 4.0]), weight, 1.0)
    one = part.view(bare, Step(step.gaussian, x))[0]
    assert one.advantage.tolist() == [3.0, 4.0]
    assert one.record.v_old is one.record.log_prob_old is one.v_reference is None
    other = parts.StatePart("rest", slice(0, 0), 0, 0.5)
    gradients = [torch.ones(2, 2), torch.zeros(2, 0)]
    assert parts.joined(gradients, [part, other], x).tolist() == [[0, 1, 1]] * 2


class Known(SimpleNamespace):
    device, spec = torch.device("cpu"), ModelSpec(deterministic=False)

    def velocity(self, x: Tensor, sigma: Tensor, conditions: object, *, guidance: float | None = None) -> Tensor:
        return self.weights * 1.0


def replayed(places: tuple[slice, ...] = (), **fields: object) -> tuple[Known, losses.TrainItem, Tensor]:
    model = Known(weights=nn.Parameter(torch.tensor([[1.0, -1.0, 2.0], [0.5, 3.0, -2.0]])))
    policy = Policy(model, KERNEL, SCHEDULE, None, places)  # type: ignore[arg-type]
    noise = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.25, -0.5]])
    with torch.no_grad():
        law = policy.step(0, X, ()).gaussian
        x_next = law.sample(noise)
        record = Record(policy, (), X, x_next, model.weights.detach() - 0.1, law.log_prob(x_next))
    item = losses.TrainItem(record, 0, 7, torch.tensor([2.0, -1.0]), torch.tensor([0.25, 0.75]), 3.0)
    return model, replace(item, **fields), noise


@pytest.mark.parametrize(
    ("centred", "exponent"),
    [(False, lambda kl, std: 0.0), (True, lambda kl, std: kl), ("scaled", lambda kl, std: kl * std)],
)
def test_a_loss_is_minus_the_weighed_advantage_times_the_ratio(centred, exponent) -> None:
    _, item, noise = replayed()
    objective = build(ObjectiveSpec(), SurrogateConfig(clip_range=9.0, centred=centred))
    region = TrustRegion(mode="none")
    step, law = losses.replay(item, torch.device("cpu")), item.record.policy.transition(0)
    loss = losses.loss_of(objective, region, item, step, kl_lambda=9.0)
    kl = 0.5 * float(law.sensitivity) ** 2 * 0.1**2
    ratio = math.exp(exponent(kl, float(law.std)))
    assert loss.terms.ratio.tolist() == pytest.approx([ratio] * 2, rel=1e-5)
    if centred != "scaled":  # whose loss is divided by the std again
        assert float(loss.value) == pytest.approx(-ratio * (0.25 * 2 - 0.75), rel=1e-5)
    assert (loss.log_ratio.tolist(), loss.kl.total, sum(loss.metrics.values())) == ([0.0, 0.0], None, 0.0)
    torch.testing.assert_close(loss.policy, 3 * loss.raw)
    assert torch.equal(loss.total, loss.policy)
    if not centred:  # the gradient of a log-probability: b noise / (std D), times sqrt(D)
        slope = -torch.tensor([0.25 * 2, -0.75])[:, None] * float(law.b / law.std) / math.sqrt(3)
        torch.testing.assert_close(loss.raw, slope * noise)


def test_where_the_old_policy_is_the_policy_it_has_no_gradient() -> None:
    model, item, _ = replayed()
    objective = build(ObjectiveSpec(kind="nft", beta=0.5), SurrogateConfig())
    found = []
    for v_old in (None, model.weights.detach().clone()):
        one = replace(item, record=replace(item.record, v_old=v_old))
        step = losses.replay(one, torch.device("cpu"))
        loss = losses.loss_of(objective, TrustRegion(mode="none"), one, step, kl_lambda=0.0)
        found.append(loss.raw)
        assert torch.equal(loss.squares[0], loss.policy.square().sum())
    assert found[0].any()
    assert torch.equal(*found)


def test_the_kl_pulls_by_its_formula_and_is_not_equalised() -> None:
    """sqrt(D) lambda w sensitivity^2 (position (v - anchor) + velocity (v - old)) / D."""
    model, item, _ = replayed(v_reference=torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]))
    region = TrustRegion(mode="dual", beta_position=1.5, beta_velocity=0.5)
    objective = build(ObjectiveSpec(), SurrogateConfig())
    loss = losses.loss_of(objective, region, item, losses.replay(item, torch.device("cpu")), kl_lambda=0.5)
    square = float(item.record.policy.transition(0).sensitivity) ** 2
    pull = 1.5 * (model.weights.detach() - item.v_reference) + 0.5 * 0.1
    expected = 0.5 * item.weight[:, None] * square * pull / math.sqrt(3)
    torch.testing.assert_close(loss.trust, expected)
    torch.testing.assert_close(loss.total, loss.policy + expected)
    assert float(loss.squares[1]) == pytest.approx(float(expected.square().sum()))
    at = replace(item, v_reference=None)
    still = losses.loss_of(objective, region, at, losses.replay(at, torch.device("cpu")), kl_lambda=0.5)
    assert not still.kl.position.any()


def test_parts_have_each_a_loss_of_their_own_dimensions_and_a_column_of_advantages() -> None:
    advantage = torch.tensor([[2.0, 1.0], [-1.0, 4.0]])
    model, item, noise = replayed(PLACES, advantage=advantage)
    both = [parts.StatePart("a", PLACES[0], 0, 0.5), parts.StatePart("b", PLACES[1], 1, 0.5)]
    objective, region = build(ObjectiveSpec(), SurrogateConfig(clip_range=9.0)), TrustRegion(mode="none")
    sharding = SimpleNamespace(scale=2.0, begin=lambda: None, synchronize=lambda: None)
    updater = SimpleNamespace(objective=objective, region=region, sharding=sharding, parts=both, model=model)
    tally = Updater.accumulate(updater, [item], 1.0)
    law = item.record.policy.transition(0)
    slope = -2.0 * 0.5 * 3 * item.weight[:, None] * advantage * float(law.b / law.std)
    expected = torch.cat([slope[:, :1] * noise[:, :1], slope[:, 1:] * noise[:, 1:] / math.sqrt(2)], 1)
    torch.testing.assert_close(model.weights.grad, expected)
    sent = float(expected.square().sum()) / 4
    found = {kind: float(tally.sums[f"gradient/{kind}/007"]) for kind in losses.KINDS}
    assert found == pytest.approx({"raw": sent / 9, "equalized": sent, "sent": sent}, rel=1e-5)
    assert float(tally.sums["gradient/policy"]) == pytest.approx(sent, rel=1e-5)
    assert float(tally.sums["gradient/kl"]) == 0.0
    loss = -3 * 0.5 * float((item.weight[:, None] * advantage).sum())
    assert float(tally.sums["loss/policy"]) == pytest.approx(loss)
    # The largest ratio of an update is that of all its items, of clips that count.
    old = item.record.log_prob_old
    for gaps in ((0.5, 0.1, 5.0), (0.1, 0.5, 5.0)):
        items = [replace(item, record=replace(item.record, log_prob_old=old - gap)) for gap in gaps]
        items[2] = replace(items[2], weight=torch.zeros(2))
        tally = Updater.accumulate(updater, items, 1.0)
        assert float(tally.largest_log_ratio) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("places", [(), PLACES[1:]])
def test_the_kl_of_a_path_is_the_weighed_mean_over_groups_of_what_explores(places: tuple[slice, ...]) -> None:
    """Velocities are off by 0.1 in the first number and by 0.2 in the others; of two groups one is measured here, with weight 3."""
    model, item, _ = replayed(places)
    off = torch.tensor([[0.1, 0.2, 0.2], [0.1, 0.2, 0.2]])
    record = replace(item.record, v_old=model.weights.detach() - off)
    turn = SimpleNamespace(replay="it", counts=True)
    turn.replay = SimpleNamespace(step=0)
    idle = SimpleNamespace(replay=turn.replay, counts=False)
    plan = SimpleNamespace(kl_replays=lambda rank: Rows([(1, 3.0)]), groups=[0, 0])
    lockstep = SimpleNamespace(plan=plan, kl_probes=lambda rank: [turn, idle])
    rollout = SimpleNamespace(record=lambda plan, turn: record)
    ticks: list[int] = []
    found = update.path_kl(lockstep, rollout, World(), torch.device("cpu"), lambda: ticks.append(1))  # type: ignore[arg-type]
    square = float(item.record.policy.transition(0).sensitivity) ** 2
    mean = 0.2**2 if places else (0.1**2 + 2 * 0.2**2) / 3
    assert found == pytest.approx(3 * 0.5 * square * mean / 2, rel=1e-5)
    assert len(ticks) == 2


class Rows(list):
    def __getitem__(self, replay: object) -> list[tuple[int, float]]:  # type: ignore[override]
        return list(self)


def test_advantages_are_of_the_total_or_of_what_judges_each_part() -> None:
    specs = [
        RewardSpec(name="trainer_toys:bright", label=label, judges=judges, weights={"bright": weight})
        for label, judges, weight in (("seen", "video", 1.0), ("heard", "audio", -2.0), ("both", "", 0.5))
    ]
    reward = CompositeReward(specs)
    names = ("seen/bright", "heard/bright", "both/bright")
    assert reward.counting(part="audio") == {"heard/bright": -2.0, "both/bright": 0.5}
    parts = dict(zip(names, torch.tensor([[1.0, 2.0, 1.0, 4.0], [3.0, 1.0, 1.0, 2.0], [8.0, 0.5, 5.0, 1.0]])))
    total = torch.tensor([1.0, 3.0, 2.0, 2.0])
    scored = Scores(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]), total, parts, {})
    config = AdvantageConfig(scale="none", clip=1.2)
    both = ["video", "audio"]
    # seen + both / 2: 5, 2.25, 3.5, 4.5; both / 2 - 2 heard: -2, -1.75, 0.5, -3.5
    expected = [[1.2, -0.125], [-1.2, 0.125], [-0.5, 1.2], [0.5, -1.2]]
    torch.testing.assert_close(advantages_of(config, reward, both, scored), torch.tensor(expected))
    alone = CompositeReward(specs[:2])  # nothing judges the rest
    assert not advantages_of(config, alone, ["video", "rest"], scored)[:, 1].any()
    reward.judges_parts = False
    assert advantages_of(config, reward, both, scored).tolist() == [-1.0, 1.0, 0.0, 0.0]
    config = AdvantageConfig(scale="global", clip=None)
    torch.testing.assert_close(
        advantages_of(config, reward, both, scored), torch.tensor([-1.0, 1.0, 0, 0]) * math.sqrt(2)
    )
    weights = {"seen/bright": 3.0, "heard/bright": 1.0}
    reward = SimpleNamespace(counting=lambda *given: weights, gated=dict, judges_parts=False)
    # Three of seen and one of heard, each normalized in its group or not: -3 + 1 and -3 - 1, or -1.5 + 1 and -4.5 - 0.5; then of size 1.
    for scale, clip, first, second in (("group", None, 2.0, 4.0), ("group", 1.0, 2.0, 4.0), ("none", None, 0.5, 5.0)):
        config = AdvantageConfig(decoupled=True, scale=scale, clip=clip)
        expected = torch.tensor([-first, first, -second, second]) / math.sqrt((first**2 + second**2) / 2)
        found = advantages_of(config, reward, both, scored)
        torch.testing.assert_close(found, expected if clip is None else expected.clamp(-clip, clip))


def test_controllers_see_the_kl_its_share_and_the_number_of_updates() -> None:
    seen: list[tuple[float, ...]] = []
    kl, anchor = SimpleNamespace(observe=lambda *given: seen.append(given)), SimpleNamespace(advance=lambda n: n == 6)
    state = SimpleNamespace(ema=None, updates=6, iteration=3, kl=kl, anchor=anchor)
    metrics = {"kl/total": 0.5, "loss/kl": 0.125, "gradient/kl_share": 0.25}
    Updater.advance(SimpleNamespace(state=state), metrics)
    assert (seen, metrics["anchor/renewed"]) == ([(0.5, 0.25)], 1.0)


@pytest.mark.parametrize("reads", [True, False])
def test_clips_that_nobody_looks_at_are_not_described(reads: bool) -> None:
    reward = SimpleNamespace(reads_clips=reads)
    studio = SimpleNamespace(
        reward=reward,
        model=SimpleNamespace(video=VideoSpec(frames=1, height=1, width=1, fps=8.0)),
        clock=lambda name: nullcontext(),
        listen=lambda rollout, whole: None,
        decode=lambda rollout, whole: torch.zeros((1, 2, 8, 8, 3), dtype=torch.uint8),
        score=lambda *given: "scores",
        latents=lambda rollout: None,
    )
    assert (RolloutEngine.judge(studio, None, None, whole=False).thumbnails is not None) == reads
    assert RolloutEngine.judge(studio, None, None).thumbnails is not None


def test_the_seed_of_a_run_reaches_its_noise_and_its_prompts(make_config, make_trainer) -> None:
    one, other = (make_trainer(make_config(seed=seed)) for seed in (3, 4))
    assert one.engine.sampler(plan_of(one, 2)).keys == NoiseKeys(3, 2)
    assert one.state.stream.peek(20) != other.state.stream.peek(20)


def test_the_share_of_the_old_policy_grows_to_its_end_over_the_ramp() -> None:
    spec = ObjectiveSpec(kind="nft", old_decay=0.8, old_ramp=4)
    assert [build(spec).decay(done) for done in range(1, 7)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8], rel=1e-12)


# Configuration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "size", "found"),
    [(1.0, 4, (4, 2, 4)), (0.01, 8, (2, 1, 1)), (1 / 3, 24, (8, 4, 8)), (1.0, 5, (5, 2, 5)), (0.75, 4, (3, 1, 3))],
)
def test_shares_of_a_group_are_clips_pairs_and_the_best(fraction: float, size: int, found: tuple) -> None:
    batch = BatchConfig(group_size=size, trained_fraction=fraction)
    assert (batch.trained, batch.pairs, batch.best) == found


def test_evaluations_stand_at_their_beat_early_and_at_both_ends() -> None:
    assert EvalConfig(every=3).points(7) == [0, 3, 6, 7]
    assert EvalConfig(every=0).points(7) == [0, 7]
    assert EvalConfig(every=3, early=[1, 3, 7, 8]).points(7) == [0, 1, 3, 6, 7]
    assert [EvalConfig(steps=steps).steps_for(ModelSpec(path="a/b")) for steps in (5, None)] == [5, 40]
    held = {"shapes": "shapes", "starter": "starter_eval", "rows.txt": None}
    assert {name: DataConfig(prompts=name).held_out for name in held} == held
    assert DataConfig(prompts="shapes", eval_prompts="rows.txt").held_out == "rows.txt"
