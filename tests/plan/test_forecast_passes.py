"""What `sage-grpo plan` says of the network's passes is what the network does, counted during real iterations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sage_grpo.cli.main import main
from sage_grpo.models.spec import ModelSpec
from sage_grpo.plan.architecture import Architecture
from sage_grpo.plan.costs import Forecast, forecast
from sage_grpo.plan.hardware import find
from sage_grpo.plan.passes import PHASES, Guiding, PassCount, count, kinds
from sage_grpo.plan.show import _idle, _most
from sage_grpo.recipes import recipe
from sage_grpo.recipes.methods import METHODS
from sage_grpo.recipes.targets import TARGETS
from sage_grpo.samplers.windows import Window
from sage_grpo.training.config import BatchConfig, TrainConfig
from sage_grpo.training.lockstep import Lockstep, ScheduledReplay
from sage_grpo.training.plan import Plan
from sage_grpo.worlds.world import WORLDS
from trainer_zoo.guided import GuidedToy

GUIDED = ModelSpec(family="trainer_zoo.guided", guidance_scale=4.0)


def foretold(config: TrainConfig, ranks: int, held_out: int | None = None) -> Forecast:
    """The forecast of a run; a toy's is of the toy itself."""
    toy = config.model.family is not None
    found = Architecture(family="toy", source="", model=GuidedToy(config.model)) if toy else None
    return forecast(config, find("cpu"), gpus=ranks, architecture=found, held_out=held_out)


def counted(trainer, *, evaluate: bool = False) -> dict[str, Counter]:
    result, phase = {}, ["other"]

    def note(module, arguments, named):
        x = named.get("hidden_states", arguments[0] if arguments else None)
        kind = phase[0] if not torch.is_grad_enabled() or phase[0] == "other" else "replay"
        result.setdefault(kind, Counter()).update({"forwards": 1, "clips": len(x)})

    def during(name, function):
        def call(*arguments, **named):
            phase[0] = name
            answer = function(*arguments, **named)
            phase[0] = "other"
            return answer

        return call

    networks = (trainer.model.network, *trainer.model.others)
    handles = [network.register_forward_pre_hook(note, with_kwargs=True) for network in networks]
    trainer.sample = during("rollout", trainer.sample)
    trainer.updater.run = during("reference", trainer.updater.run)
    trainer.evaluate = during("evaluation", trainer.evaluate)
    trainer.step()
    if evaluate:
        trainer.evaluate()
    for handle in handles:
        handle.remove()
    return result


def check(config, trainer, *, rank: int = 0, ranks: int = 1, evaluate: bool = False) -> None:
    said = foretold(config, ranks, len(trainer.held_out))
    row, seen = said.passes[rank], counted(trainer, evaluate=evaluate)
    sampled = row["shared"] + row["sampling"] + row["idle"]
    expected = {"rollout": sampled, "reference": row["reference"] + row["gauge"], "replay": row["replay"]}
    if evaluate:
        expected["evaluation"] = said.evaluation[rank]
    assert set(row) == set(PHASES)
    assert set(seen) <= set(expected)  # every pass happened in a phase that the plan knows
    for name, passes in expected.items():
        assert seen.get(name, Counter())["clips"] == passes.clips, name
        assert seen.get(name, Counter())["forwards"] == passes.forwards, name


QUICK = ("branch", "nft", "draft", "dpo")


@pytest.mark.parametrize(
    ("target", "method"),
    [
        *(("shapes", method) for method in QUICK),
        *(pytest.param("shapes", method, marks=pytest.mark.slow) for method in METHODS if method not in QUICK),
        *(pytest.param(target, "sage", marks=pytest.mark.slow) for target in list(TARGETS)[::3]),
    ],
)
def test_every_recipe(target, method, make_config, make_trainer) -> None:
    base, small = TARGETS[target](), make_config()
    base = replace(base, iterations=8, rollout=replace(base.rollout, steps=6), batch=replace(base.batch, prompts=2))
    config = replace(
        METHODS[method](base),
        model=replace(GUIDED, guidance_scale=1.0 if target in WORLDS else 4.0),
        rewards=[replace(reward, options={"differentiable": True}) for reward in small.rewards],
        data=small.data,
        evaluate=replace(base.evaluate, prompts=3, per_prompt=2, steps=2),
    )
    check(config, make_trainer(config), evaluate=True)


UNEVEN = BatchConfig(prompts=3, group_size=3, micro_batch=2)
CASES: dict[str, dict[str, Any]] = {
    "a fixed anchor, guided in rollouts alone": {"trust_region": {"mode": "fixed"}, "model": {"guidance_in_training": False}},
    "an anchor that moves": {"trust_region": {"mode": "moving"}},
    "two anchors": {"trust_region": {"mode": "fixed_dual"}},
    "the step is measured": {"optimizer": {"target_kl": 0.1}, "rollout": {"same_noise": True}},
    # With one clip a pass, which of them are best does not matter.
    "the best and the worst": {
        "batch": {"group_size": 5, "micro_batch": 1, "trained_fraction": 0.4},
        "optimizer": {"target_kl": 0.1},
        "update": {"deal": "clips"},
    },
    "an old policy": {"method": "nft", "objective": {"levels": 4, "old_decay": 0.0, "old_ramp": 0}, "trust_region": {"mode": "fixed"}},
    "an old policy that lags": {"method": "nft", "objective": {"levels": 4}, "trust_region": {"mode": "fixed"}},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_reason_for_a_pass(name, make_config, make_trainer) -> None:
    case = dict(CASES[name])
    config = replace(make_config(rollout={"steps": 5}), batch=UNEVEN, model=GUIDED)
    config = METHODS[case.pop("method")](config) if "method" in case else config
    parts = {part: replace(getattr(config, part), **changes) for part, changes in case.items()}
    check(replace(config, **parts), make_trainer(replace(config, **parts)))


def place_of(plan: Plan, turn: ScheduledReplay) -> float:
    return plan.groups[turn.replay.members[0].group].sigma(turn.replay.step)


def plainly(plan: Plan, rank: int, guiding: Guiding, reference: Sequence[int]) -> dict[str, PassCount]:
    result = dict.fromkeys(PHASES, PassCount())
    for one in plan.sampled(rank):
        result["shared" if one.shared else "sampling"] += guiding.one(one.rows, one.sigma)
    first = plan.group_of(plan.batches(rank)[0])
    for network, number in Lockstep(plan).idle_passes(rank).items():
        sigma = next((s for s in first.schedule.sigmas.tolist() if plan.network(s) == network), 1.0)
        result["idle"] += sum([guiding.one(1, sigma)] * number, PassCount())
    for update, referenced in enumerate(reference):
        turns = [(one.states.rows, place_of(plan, one)) for one in Lockstep(plan).replays(rank, update)]
        passes = sum((guiding.one(*one) for one in turns), PassCount())
        result["replay"] += passes
        result["reference"] += sum([passes] * referenced, PassCount())
    gauged = [(one.states.rows, place_of(plan, one)) for one in Lockstep(plan).kl_probes(rank)]
    result["gauge"] = sum((guiding.one(*one) for one in gauged), PassCount())
    return result


KINDS: dict[str, dict[str, Any]] = {
    "every clip for itself": {},
    "groups share their beginning": {"rollout": {"same_noise": True}},
    "side by side": {"rollout": {"same_noise": True}, "window": Window(kind="drawn", length=2), "micro_batch": 3},
    "as many steps before, elsewhere": {"rollout": {"same_noise": True, "before_steps": 1}, "window": Window(kind="drawn")},
    "drawn, all for themselves": {"window": Window(kind="drawn", length=2), "micro_batch": 2},
    "a window that moves": {"window": Window(kind="sliding", length=2, every=1), "micro_batch": 3},
    "the step is measured": {"optimizer": {"target_kl": 0.1}, "micro_batch": 2},
    "the step of groups is measured": {"optimizer": {"target_kl": 0.1}, "rollout": {"same_noise": True}, "micro_batch": 2},
    "fresh noise levels": {"method": "nft"},
    "the best and the worst": {"trained_fraction": 0.5, "optimizer": {"target_kl": 0.1}},
    "the best and the worst, some together": {"trained_fraction": 0.5, "micro_batch": 2, "deal": "clips"},
    "clips of groups are dealt out": {"rollout": {"same_noise": True}, "deal": "clips", "micro_batch": 3},
}  # fmt: skip


def sized(config: TrainConfig, case: dict[str, Any], micro_batch: int, **update: Any) -> TrainConfig:
    return replace(
        config,
        batch=BatchConfig(prompts=7, micro_batch=micro_batch, trained_fraction=case.get("trained_fraction", 1.0)),
        optimizer=replace(config.optimizer, **case.get("optimizer", {})),
        update=replace(config.update, step_fraction=1.0, **update),
    )


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_parts_count_as_all_parts_do(name: str, ranks: int, make_config) -> None:
    case = KINDS[name]
    window = case.get("window", Window())
    config = make_config(rollout={"steps": 6, "window": window, **case.get("rollout", {})}, iterations=2)
    config = METHODS[case["method"]](config) if "method" in case else config
    updates = {"updates_per_rollout": 1 if window.kind == "drawn" else 2, "deal": case.get("deal", "steps")}
    config = sized(replace(config, model=GUIDED), case, case.get("micro_batch", 1), **updates)
    said = foretold(config, ranks)
    wasted = said.counts[0].padding + sum(row["idle"].clips for row in said.passes)
    assert f" take {wasted} padding passes" in _idle(said) or not wasted
    # An expert takes over, and guidance ends, on the way: noise levels are not all alike.
    guiding = Guiding(lambda sigma: 2 if sigma > 0.8 else 1, together=1)
    for whole in said.plans:
        plan = replace(whole, network=lambda sigma: int(sigma <= 0.75))
        reference = [1, 2, 0][: plan.updates]
        found = count(plan, kinds(plan, guiding.branches), guiding, reference=reference)
        assert found.phases == [plainly(plan, rank, guiding, reference) for rank in range(ranks)]
        replays = [[len(plan.replays(rank, update)) for update in range(plan.updates)] for rank in range(ranks)]
        assert found.padding == ranks * sum(
            len(Lockstep(plan).replays(0, update)) for update in range(plan.updates)
        ) - sum(map(sum, replays))


@pytest.mark.parametrize(
    ("name", "ranks"), [("every clip for itself", 3), ("side by side", 1), ("the step is measured", 3)]
)
def test_states_that_are_kept_are_those_of_all_parts(name: str, ranks: int, checkpoint) -> None:
    """Bytes, part by part and at once; where a group is one micro-batch, one step's end is the next one's start."""
    case = KINDS[name]
    base = recipe("shapes/sage")
    rollout = replace(base.rollout, steps=6, window=case.get("window", Window()), **case.get("rollout", {}))
    base = replace(base, model=ModelSpec(path=str(checkpoint("hunyuan15_t2v"))), rollout=rollout)
    for micro in (case.get("micro_batch", 1), 4):
        config = sized(base, case, micro, updates_per_rollout=1)
        said = forecast(config, find("cpu"), gpus=ranks)
        for rank in range(ranks):
            states, rows = said._stored(said.plan, rank)
            replays = said.plan.replayable(rank, 0)
            kept = {(one.step, one.members): one.rows for one in replays}
            kept |= {(one.step + 1, one.members): len(one.members) for one in replays}
            assert states == 4 * (sum(kept.values()) + sum(one.rows for one in replays)), "states and old velocities"
            clips = sum(len(batch.members) for batch in said.plan.batches(rank))
            anchors = 4 * max(rows) * config.trust_region.uses_anchor
            element = math.prod(said.architecture.model.latent_shape())
            assert said._kept(rank) == element * (states + anchors + 4 * clips)


def test_given_clips_are_neither_sampled_nor_decoded() -> None:
    config = recipe("shapes/dpo")
    found = forecast(replace(config, data=replace(config.data, clips="pairs.jsonl")), find("cpu"))
    (phases,) = found.passes
    rows = config.batch.prompts * config.objective.levels
    assert (phases["sampling"].clips, phases["replay"].clips) == (0, 2 * rows)
    assert found._decoded() == 0


def test_a_plan_of_one_prompt_is_counted_and_the_busiest_rank_is_shown() -> None:
    for method in ("sage", "branch"):
        assert main(["plan", f"shapes/{method}", "--batch.prompts", "1"]) == 0
    rows = [SimpleNamespace(velocities=n, forwards=n, clips=n) for n in (3, 5, 4)]
    assert _most(rows) == ["5", "5", "5", "12"]  # type: ignore[arg-type]


def test_clips_are_decoded_where_any_reward_looks_at_them() -> None:
    layout, plan = SimpleNamespace(sequence=1, data=2), SimpleNamespace(examples=False)
    for reads_latents, clips in (((True, False), 4), ((True, True), 0), ((False,), 4)):
        config = SimpleNamespace(rewards=[SimpleNamespace(reads_latents=one) for one in reads_latents])
        made = SimpleNamespace(plan=plan, config=config, layout=layout, _clips=lambda rank, sequence: 3 + rank)
        assert Forecast._decoded(made) == clips  # type: ignore[arg-type]
