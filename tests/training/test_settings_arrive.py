"""What a configuration asks for is what rollouts, updates, evaluations and files get: the numbers, not only that something changed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

import trainer_toys
from double import CLOSE
from sage_grpo.distributed.spec import Layout
from sage_grpo.distributed.world import World
from sage_grpo.models.spec import ModelSpec
from sage_grpo.objectives.trust_region import TrustRegion
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.member import RewardFailure
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.session import assemble
from sage_grpo.run.session import run as train
from sage_grpo.samplers.noise import keyed_noise
from sage_grpo.samplers.windows import Window
from sage_grpo.training.config import BatchConfig, DataConfig, EvalConfig, OptimizerConfig, UpdateConfig
from sage_grpo.training.evaluate import Evaluation
from sage_grpo.training.inputs import build
from sage_grpo.training.lockstep import Lockstep
from sage_grpo.training.loss import Diverged, UpdateSums, summarize
from sage_grpo.training.scoring import Scores, summary
from sage_grpo.training.trainer import Trainer
from sage_grpo.types import Conditioning
from trainer_helpers import plan_of, resume, same, weights_of
from trainer_zoo import toy


def frame_rate(videos: Tensor, prompts: Sequence[str], fps: float) -> list[float]:
    return [fps] * len(prompts)


def level_of(text: str) -> float:
    return 0.2 * len(text) - 1.0


def fits(videos: Tensor, prompts: Sequence[str], fps: float) -> list[float]:
    expected = 255 * torch.sigmoid(torch.tensor([level_of(text) for text in prompts]))
    return ((videos.float().mean(dim=(1, 2, 3, 4)) - expected).abs() < 2).float().tolist()


class Guided(toy.ToyModel):
    """The toy with a guidance scale that it notes; its velocity depends on it."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.guidance_scale, self.seen = 3.0, []

    def velocity(self, x, sigma, conditions, *, guidance=None):
        scale = self.guidance_scale if guidance is None else guidance
        self.seen.append(scale)
        return scale * super().velocity(x, sigma, conditions)


class Lettered(toy.ToyModel):
    """Its clips have a brightness that depends on the length of the prompt, and prompts are batched by length."""

    def encode(self, prompts, images=None):
        return [Conditioning({"letters": torch.zeros(len(text)), "words": torch.zeros(toy.WORDS)}) for text in prompts]

    def velocity(self, x, sigma, conditions, *, guidance=None):
        levels = torch.tensor([level_of(" " * len(c.tensors["letters"])) for c in conditions])
        return (x - levels.view(-1, 1, 1, 1, 1)) / sigma


class Bent(toy.ToyModel):
    """Its grid is no shifted even one; it also notes where it was asked for a velocity."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.visited: list[float] = []

    def sigmas(self, num_steps, shift=None):
        return torch.linspace(1, 0, num_steps + 1) ** (self.shift if shift is None else shift)

    def velocity(self, x, sigma, conditions, *, guidance=None):
        self.visited.append(float(sigma))
        return super().velocity(x, sigma, conditions, guidance=guidance)


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch):
    def use(kind: type) -> ModelSpec:
        module = sys.modules[__name__]
        monkeypatch.setitem(sys.modules, "arrives.family", module)
        monkeypatch.setattr(module, "load", lambda spec, device=None: kind(spec), raising=False)
        return ModelSpec(family="arrives.family")

    return use


def run_up_to_scores(trainer: Trainer):
    plan = plan_of(trainer)
    rollout = trainer.sample(plan)
    videos = trainer.engine.decode(rollout)
    return plan, rollout, trainer.engine.gather(trainer.engine.score(videos, plan))


# Rollouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_clips_are_scored_with_their_own_prompts_and_the_models_frame_rate(
    overlap: bool, make_config, make_trainer, family, tmp_path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join("x" * length for length in (7, 3, 9, 5)) + "\n", encoding="utf-8")
    names = (f"{__name__}:fits", f"{__name__}:frame_rate")
    config = make_config(
        data=DataConfig(prompts=str(file), eval_prompts=str(file)),
        rewards=[RewardSpec(name=name, try_out=False, overlap=overlap) for name in names],
        evaluate=EvalConfig(prompts=4, per_prompt=2, steps=2, show=10),
        batch=BatchConfig(prompts=4, group_size=2, micro_batch=3),
    )
    trainer = make_trainer(replace(config, model=family(Lettered)))
    _, _, scored = run_up_to_scores(trainer)
    assert scored.total.tolist() == [1.0 + 8.0] * 8
    result = trainer.evaluate()
    assert (result.metrics["eval/fits"], result.metrics["eval/frame_rate"]) == (1.0, 8.0)
    assert result.captions == [prompt.text for prompt in trainer.held_out for _ in range(2)]
    assert fits(result.clips, result.captions, 8.0) == [1.0] * 8
    assert fits(result.clips, result.captions[::-1], 8.0) != [1.0] * 8


@pytest.mark.parametrize("guides", [True, False])
def test_rollout_and_updates_run_without_guidance_when_asked_to(guides, family, make_config, make_trainer) -> None:
    model = replace(family(Guided), guidance_in_training=guides)
    trainer = make_trainer(replace(make_config(), model=model))
    assert trainer.step()["ratio/first_log"] == 0.0
    assert set(trainer.model.seen) == {3.0 if guides else 1.0}
    trainer.model.seen.clear()
    trainer.evaluate()
    assert set(trainer.model.seen) == {3.0}  # whatever training does


def test_rollouts_and_evaluations_visit_the_sigmas_of_the_models_grid(family, make_config, make_trainer) -> None:
    def grid(num_steps: int, power: float) -> list[float]:
        return (torch.linspace(1, 0, num_steps + 1) ** power)[:-1].tolist()

    config = make_config(rollout={"steps": 5}, evaluate=EvalConfig(prompts=2, steps=4))
    config = replace(config, model=replace(family(Bent), shift=3.0))
    for shift, power in ((None, 3.0), (2.0, 2.0)):
        trainer = make_trainer(replace(config, rollout=replace(config.rollout, shift=shift)))
        trainer.step()
        assert sorted(set(trainer.model.visited), reverse=True) == pytest.approx(grid(5, power))
        trainer.model.visited.clear()
        trainer.evaluate()
        assert trainer.model.visited == pytest.approx(grid(4, 3.0))


@pytest.mark.usefixtures("in_double")
def test_a_second_order_rollout_starts_anew_after_every_exploring_step(make_config, make_trainer) -> None:
    """What came before the noise says nothing about the path after it: there the first step is Euler's."""
    window = Window(kind="fixed", start=1, length=2)
    trainer = make_trainer(make_config(rollout={"steps": 6, "solver": "ab2", "window": window}))
    rollout = trainer.sample(plan_of(trainer))
    sigmas = trainer.planner.grid.sigmas.tolist()
    for batch, latents in rollout.latents:
        (record,) = (r for replay, r in rollout.records.items() if (replay.step, replay.members) == (2, batch.members))
        x, before = record.x_next, None
        for now, following in pairwise(sigmas[3:]):
            v, h = trainer.model.velocity(x, torch.tensor(now), record.conditions), following - now
            x = x + h * v if before is None else x + h * v + 0.5 * h * h / before[1] * (v - before[0])
            before = v, h
        torch.testing.assert_close(latents, x, rtol=CLOSE, atol=CLOSE)


def test_first_frames_reach_rollouts_and_evaluations(make_config, make_trainer, tmp_path: Path) -> None:
    Image.new("RGB", (4, 3), (9, 8, 7)).save(tmp_path / "first.png")
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a cat", "image": "first.png"}\n{"prompt": "a dog"}\n')
    trainer = make_trainer(make_config(data=DataConfig(prompts=str(file), eval_prompts=str(file))))
    given, encode = {}, trainer.model.encode

    def watched(prompts, images=None):
        given.update(zip(prompts, images or [None] * len(prompts)))
        return encode(prompts, images)

    trainer.model.encode = watched
    for act in (lambda: trainer.sample(plan_of(trainer)), trainer.evaluate):
        given.clear()
        act()
        assert given["a dog"] is None
        assert given["a cat"].tolist() == [[[9, 8, 7]] * 4] * 3


def test_rewards_receive_the_other_columns_of_a_prompt(make_config, make_trainer, tmp_path) -> None:
    file = tmp_path / "p.csv"
    file.write_text("prompt,worth\na cat,1\na red dog,10\n")
    config = make_config(
        rewards=[RewardSpec(name="trainer_toys:told")],
        evaluate=EvalConfig(prompts=2, per_prompt=2, steps=2),
        batch=BatchConfig(prompts=2, group_size=2, micro_batch=3),
        data=DataConfig(prompts=str(file), eval_prompts=str(file)),
    )
    trainer, ticks = make_trainer(config), []
    trainer.clock.listen = lambda *given: ticks.append(given)
    assert trainer.evaluate().metrics["eval/told"] == 5.5
    assert [tick for tick in ticks if tick[1]] == [("evaluate", 1, 2), ("evaluate", 2, 2)]
    plan, _, scored = run_up_to_scores(trainer)
    worth = torch.tensor([float(group.prompt.metadata["worth"]) for group in plan.groups])
    assert torch.equal(scored.total, worth.repeat_interleave(2))


# Updates ------------------------------------------------------------------------------------------------------------


def bad(*places: int) -> list[RewardSpec]:
    return [RewardSpec(name="trainer_toys:bright_but", options={"bad": list(places)}, batch_size=0, try_out=False)]


def test_updates_of_unequal_size_are_means_over_their_own_steps(make_config, make_trainer) -> None:
    trainer = make_trainer(make_config(rollout={"steps": 4}))  # three trained steps for two updates
    plan, rollout, scored = run_up_to_scores(trainer)
    assert [len(part) for part in plan.groups[0].trained] == [1, 2]
    for update in range(2):
        items = trainer.updater.items(Lockstep(plan), rollout, scored, trainer.advantages(scored, plan), update)
        assert float(sum(item.weight.sum() for item in items)) == pytest.approx(1.0)


def test_passes_that_only_keep_ranks_in_step_have_no_weight(make_config) -> None:
    """Three rollouts on two ranks: both sample and replay as often as the one with two, the other partly for nothing."""
    config = make_config(batch=BatchConfig(prompts=1, group_size=3, micro_batch=1))
    total, counts, passes, weight = torch.tensor([1.0, 2.0, 4.0]), [], [], 0.0
    for rank in range(2):
        world = World(rank=rank, size=2, layout=Layout(1, 2, 1))
        trainer = assemble(config, build(config, world), world)
        plan, velocity, calls = plan_of(trainer), trainer.model.velocity, []
        trainer.model.velocity = lambda *a, v=velocity, c=calls, **named: c.append(1) or v(*a, **named)
        rollout = trainer.sample(plan)
        passes.append(len(calls))
        scored = Scores(torch.zeros(3, dtype=torch.long), torch.arange(3), total, {"bright": total}, {})
        items = trainer.updater.items(Lockstep(plan), rollout, scored, trainer.advantages(scored, plan), 0)
        counts.append(len(items))
        weight += float(sum(item.weight.sum() for item in items))
    assert passes == [2 * 5] * 2  # sharded networks take all ranks to run one
    assert counts == [2 * len(plan.groups[0].trained[0])] * 2
    assert weight == pytest.approx(1.0)


def test_the_learning_rate_decays_over_all_updates_of_the_run(make_config, make_trainer) -> None:
    trainer = make_trainer(make_config(optimizer=OptimizerConfig(lr=0.6, decay="linear"), iterations=3))
    trainer.step()
    trainer.step()
    assert [log["optimizer/lr"] for log in trainer.log] == pytest.approx([0.6, 0.5, 0.4, 0.3])


def test_more_failures_than_allowed_stop_the_run_before_an_update(make_config, make_trainer) -> None:
    config = make_config(rewards=bad(1, 5), max_failed_fraction=0.25)
    assert make_trainer(config).step()["reward/failed"] == 2
    trainer = make_trainer(replace(config, rewards=bad(1, 2, 5)))
    before = weights_of(trainer)
    with pytest.raises(RewardFailure, match=r"3 of 8 clips.*0\.25"):
        trainer.step()
    assert same(before, weights_of(trainer))
    assert trainer.state.updates == trainer.state.iteration == 0


@pytest.mark.usefixtures("in_double")
def test_updates_see_the_mean_over_valid_rollouts_only(make_config, make_trainer) -> None:
    """Weights of the valid rollouts add up to 1 whatever failed.

    KL to an anchor that was moved by hand does not depend on rewards, so with member k of four left out its mean is (S - KL_k) / 3, and
    these means, averaged over all k, are S / 4: the mean of a rollout in which nobody failed.
    """

    def mean_kl(*places: int) -> float:
        config = make_config(
            rewards=bad(*places),
            batch=BatchConfig(prompts=1, group_size=4, micro_batch=4),
            update=UpdateConfig(updates_per_rollout=1),
            trust_region=TrustRegion(mode="fixed"),
        )
        trainer = make_trainer(config)
        for name, copy in trainer.state.anchor.copies.items():
            copy += 0.1 * keyed_noise(tuple(copy.shape), "moved", name)
        trainer.state.anchor.renewed_at = -1  # it is not the live policy any more
        trainer.step()
        return trainer.log[0]["kl/position"]

    left_out = [mean_kl(member) for member in range(4)]
    assert max(left_out) > 1.001 * min(left_out) > 0
    assert sum(left_out) / 4 == pytest.approx(mean_kl(), rel=CLOSE)


def test_a_loss_that_is_not_finite_names_its_denoising_step(make_config, make_trainer) -> None:
    """The velocity at step 2 is spoilt in replays; the rollout was fine."""
    trainer = make_trainer(make_config(update=UpdateConfig(updates_per_rollout=1, permute_steps=False)))
    velocity, (sigma, _) = trainer.model.velocity, trainer.planner.grid.pair(2)

    def spoilt(x, at, conditions, *, guidance=None):
        v = velocity(x, at, conditions, guidance=guidance)
        return v * math.inf if torch.is_grad_enabled() and float(at) == float(sigma) else v

    trainer.model.velocity = spoilt
    before = weights_of(trainer)
    with pytest.raises(Diverged, match=r"denoising step\(s\) \[2\].*not changed"):
        trainer.step()
    assert same(before, weights_of(trainer))
    assert trainer.state.updates == 0
    assert not trainer.state.optimizer.tensors()


def test_a_gradient_that_breaks_inside_the_network_names_its_update(make_config, make_trainer) -> None:
    trainer = make_trainer(make_config(update=UpdateConfig(updates_per_rollout=2)))
    trainer.step()

    def state() -> list[dict[str, Tensor]]:
        kept = trainer.state.optimizer.tensors(), trainer.state.anchor.copies
        return [weights_of(trainer), *({name: tensor.clone() for name, tensor in one.items()} for one in kept)]

    before = state()
    parameter = next(iter(trainer.state.params.values()))
    parameter.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(Diverged, match="optimizer update 2 is nan"):
        trainer.step()
    assert all(map(same, before, state()))
    assert trainer.state.updates == 2
    assert all(p.grad is None for p in trainer.state.params.values())


# What is logged -----------------------------------------------------------------------------------------------------


def test_spread_and_shares_are_made_of_their_sums() -> None:
    tally = UpdateSums()
    sums = {
        "ratio/mean": 0.03,
        "ratio/square": 0.0025,
        "gradient/policy": 9.0,
        "gradient/kl": 16.0,
        "loss/policy": 0.0,
        "loss/kl": 0.0,
    }
    tally.sums |= {name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}
    metrics = summarize(tally, World(), [])
    found = [metrics[name] for name in ("ratio/mean", "ratio/std", "gradient/kl_share")]
    assert found == pytest.approx([1.03, 0.04, 4 / 7])


def test_the_spread_of_rewards_is_that_of_the_valid_ones() -> None:
    total = torch.tensor([0.0, 2.0, math.nan, 4.0, 1.0, 1.0, 1.0, 5.0])
    groups = torch.tensor([0] * 4 + [1] * 4)
    scored = Scores(groups, torch.arange(8) % 4, total, {"bright": total}, {"bright": 1})
    metrics = summary(scored, torch.tensor([1.0, -3.0] * 4), {})
    assert metrics["reward/total"] == metrics["reward/bright"] == 2.0
    assert metrics["reward/std"] == pytest.approx(math.sqrt((4 + 0 + 4 + 1 + 1 + 1 + 9) / 7))
    assert metrics["reward/group_std"] == pytest.approx((math.sqrt(8 / 3) + math.sqrt(3)) / 2)
    assert (metrics["advantage/std"], metrics["advantage/largest"]) == (2.0, 3.0)
    assert metrics["zero_std_ratio"] == 0.0
    total[:4] = torch.tensor([0.9, 0.9, math.nan, 0.9])  # their std in float32 is not 0
    assert summary(scored, total, {})["zero_std_ratio"] == 0.5


# Evaluation ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_double")
def test_evaluation_repeats_and_does_not_depend_on_batches_or_history(make_config, make_trainer) -> None:
    rewards = [
        RewardSpec(name="trainer_toys:bright", weights={"bright": 2.0}),
        RewardSpec(name="video_stats", weights={"brightness": 1.0}, metric_only=True),
    ]
    config = make_config(rewards=rewards, evaluate=EvalConfig(prompts=3, per_prompt=2, steps=3))
    trainers = [make_trainer(replace(config, batch=replace(config.batch, micro_batch=size))) for size in (1, 4)]
    before = weights_of(trainers[0])
    one, again, other = (trainer.evaluate() for trainer in (trainers[0], *trainers))
    assert same(before, weights_of(trainers[0]))
    assert one.metrics == again.metrics == pytest.approx(other.metrics, rel=CLOSE)
    assert torch.equal(one.clips, again.clips)
    assert torch.equal(one.clips, other.clips)
    assert one.captions == other.captions
    assert one.metrics["eval/total"] == pytest.approx(2 * one.metrics["eval/bright"])
    assert "eval/brightness" in one.metrics
    assert (one.metrics["eval/failed"], len(one.clips)) == (0, 6)


def test_every_call_of_a_reward_that_compares_has_a_whole_group(make_config, make_trainer) -> None:
    ranked = [RewardSpec(name="trainer_toys:ranked", options={"takes": "group"}, overlap=True)]
    config = make_config(
        rewards=ranked,
        batch=BatchConfig(prompts=2, group_size=4, micro_batch=3),
        evaluate=EvalConfig(prompts=2, per_prompt=3, steps=2),
    )
    trainer = make_trainer(config)
    trainer_toys.SIZES.clear()  # the reward was tried out with two clips
    assert trainer.step()["reward/total"] == pytest.approx(1.5)  # the mean of 0, 1, 2, 3
    trainer.evaluate()
    assert trainer_toys.SIZES == [4, 4, 3, 3]
    with pytest.raises(RewardConfigError, match="per_prompt"):
        make_trainer(make_config(rewards=ranked))


# Files --------------------------------------------------------------------------------------------------------------


def test_exports_hold_the_average_where_there_is_one(make_config, make_trainer, tmp_path: Path) -> None:
    for ema in (None, 0.5):
        trainer = make_trainer(make_config(optimizer=OptimizerConfig(lr=1e-2, ema=ema)))
        trainer.step()
        trainer.export(tmp_path / str(ema))
        saved = load_file(tmp_path / str(ema) / "toy.safetensors")
        assert same(saved, weights_of(trainer)) == (ema is None)
        assert ema is None or same(saved, trainer.state.ema.copies)


def test_a_resumed_run_remembers_its_best_and_what_it_has_evaluated(make_config, make_trainer, tmp_path: Path) -> None:
    first, second = make_trainer(make_config()), make_trainer(make_config())
    first.step()
    first.state.best, first.state.evaluated = {"iteration": 1, "score": 0.9}, 1
    first.save(tmp_path)
    resume(second, tmp_path)
    assert second.state.best == {"iteration": 1, "score": 0.9}
    assert second.state.evaluated == 1  # else the continued run would begin with an evaluation that was done


@pytest.mark.parametrize(("scores", "best"), [([0.1, 0.9, math.nan, 0.5], 1), ([0.9, 0.1, 0.3, 0.5], 0)])
def test_the_best_weights_are_those_of_the_highest_score(
    scores: list[float], best: int, make_config, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = []

    def evaluate(self: Trainer, *arguments) -> Evaluation:
        history.append(weights_of(self))
        metrics = {"eval/total": scores[self.state.iteration], "eval/failed": 0.0}
        return Evaluation(metrics, torch.zeros((0, 2, 8, 8, 3), dtype=torch.uint8), [])

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    config = make_config(evaluate=EvalConfig(every=1))
    train(config)
    assert len(history) == 4
    state = json.loads((Path(config.out) / "checkpoints" / "000003" / "state.json").read_text())
    assert state["best"] == {"iteration": best, "score": 0.9}
    if best:
        assert same(load_file(Path(config.out) / "best" / "toy.safetensors"), history[best])
    else:  # the weights that the run started from
        assert not (Path(config.out) / "best").exists()


def test_text_encoders_leave_before_an_evaluation_samples(make_config, make_trainer, monkeypatch) -> None:
    events: list[str] = []
    trainer = make_trainer(make_config())
    monkeypatch.setattr(type(trainer.model), "unload_text", lambda model: events.append("unloaded"))
    encode, decode = trainer.model.encode, trainer.model.decode
    monkeypatch.setattr(trainer.model, "encode", lambda *given: events.append("encoded") or encode(*given))
    monkeypatch.setattr(trainer.model, "decode", lambda *given: events.append("decoded") or decode(*given))
    trainer.evaluate()
    assert list(dict.fromkeys(events)) == ["encoded", "unloaded", "decoded"]
