"""What a configuration asks for is what rollouts, updates, evaluations and files get: the numbers, not only that something changed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from double import CLOSE
from sage_grpo.flow.windows import Window
from sage_grpo.models.spec import ModelSpec
from sage_grpo.parallel.spec import Layout
from sage_grpo.parallel.world import World
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.rl.kl_control import KlCoefficient
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.session import run as train
from sage_grpo.training.config import (
    AdvantageConfig,
    BatchConfig,
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    UpdateConfig,
)
from sage_grpo.training.evaluate import Evaluation
from sage_grpo.training.inputs import build
from sage_grpo.training.scoring import Scored, describe
from sage_grpo.training.trainer import Trainer
from sage_grpo.training.update import Tally, summarize
from sage_grpo.types import Conditioning
from trainer_helpers import plan_of, resume, same, weights_of
from trainer_zoo import toy

DIMS = math.prod(toy.SHAPE)


def frame_rate(videos: Tensor, prompts: Sequence[str], fps: float) -> list[float]:
    """A reward that says what it was told."""
    return [fps] * len(prompts)


def level_of(text: str) -> float:
    return 0.2 * len(text) - 1.0


def fits(videos: Tensor, prompts: Sequence[str], fps: float) -> list[float]:
    """Whether clips are what `Lettered` makes of their prompts."""
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


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch):
    """class -> the specification of a model of that class."""

    def use(kind: type) -> ModelSpec:
        module = sys.modules[__name__]
        monkeypatch.setitem(sys.modules, "arrives.family", module)
        monkeypatch.setattr(module, "load", lambda spec, device=None: kind(spec), raising=False)
        return ModelSpec(family="arrives.family")

    return use


def run_up_to_scores(trainer: Trainer):
    """Plan, rollout and scores of the next iteration."""
    plan = plan_of(trainer)
    rollout = trainer.roll_out(plan)
    with trainer.reward.early(trainer.model.video.fps) as early:
        videos = trainer.studio.decode(rollout, early, plan.prompts)
        return plan, rollout, trainer.studio.score(videos, plan, early)


@pytest.mark.parametrize("overlap", [False, True])
def test_clips_of_a_rollout_are_scored_with_their_own_prompts(
    overlap: bool, make_config, make_trainer, family, tmp_path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join("x" * (3 + 2 * index) for index in range(4)) + "\n", encoding="utf-8")
    config = make_config(
        data=DataConfig(prompts=str(file)),
        rewards=[RewardSpec(name=f"{__name__}:fits", try_out=False, overlap=overlap)],
        batch=BatchConfig(prompts=4, group_size=2, micro_batch=3),
    )
    _, _, scored = run_up_to_scores(make_trainer(replace(config, model=family(Lettered))))
    assert scored.total.tolist() == [1.0] * 8


# Updates ------------------------------------------------------------------------------------------------------------


def test_masked_members_are_in_no_statistic_of_the_ratio(make_config, make_trainer) -> None:
    bad = RewardSpec(name="trainer_toys:bright_but", options={"bad": [5]}, batch_size=0, try_out=False)
    trainer = make_trainer(make_config(rewards=[bad], batch=BatchConfig(prompts=2, group_size=4, micro_batch=8)))
    roll_out = trainer.roll_out

    def spoilt(plan):
        rollout = roll_out(plan)
        for record in rollout.records.values():
            record.log_prob_old[5] += 1.0
        return rollout

    trainer.roll_out = spoilt
    trainer.step()
    first = trainer.log[0]
    assert first["ratio/largest_log"] == first["ratio/std"] == first["ratio/clip_fraction"] == 0.0
    assert first["ratio/mean"] == 1.0


def test_updates_of_unequal_size_are_means_over_their_own_steps(make_config, make_trainer) -> None:
    trainer = make_trainer(make_config(rollout={"steps": 4}))  # three trained steps for two updates
    plan, rollout, scored = run_up_to_scores(trainer)
    counts = [len(part) for part in plan.groups[0].trained]
    assert counts == [1, 2]
    for update in range(2):
        items = trainer.items(plan, rollout, scored, trainer.advantages(scored), update)
        assert float(sum(item.weight.sum() for item in items)) == pytest.approx(1.0)


def test_passes_that_only_keep_ranks_in_step_have_no_weight(make_config) -> None:
    """Three rollouts on two ranks: both sample and replay as often as the one with two, the other partly for nothing."""
    config = make_config(batch=BatchConfig(prompts=1, group_size=3, micro_batch=1))
    total, counts, passes, weight = torch.tensor([1.0, 2.0, 4.0]), [], [], 0.0
    for rank in range(2):
        world = World(rank=rank, size=2, layout=Layout(1, 2, 1))
        trainer = Trainer(config, build(config, world), world)
        plan, velocity, calls = plan_of(trainer), trainer.model.velocity, []
        trainer.model.velocity = lambda *a, v=velocity, c=calls, **named: c.append(1) or v(*a, **named)
        rollout = trainer.roll_out(plan)
        passes.append(len(calls))
        scored = Scored(torch.zeros(3, dtype=torch.long), torch.arange(3), total, {"bright": total}, {}, "")
        items = trainer.items(plan, rollout, scored, trainer.advantages(scored), 0)
        counts.append(len(items))
        weight += float(sum(item.weight.sum() for item in items))
    assert passes == [2 * 5] * 2  # sharded networks take all ranks to run one
    assert counts == [2 * len(plan.groups[0].trained[0])] * 2
    assert weight == pytest.approx(1.0)


def test_advantages_are_clipped_and_scaled_as_asked(make_config, make_trainer) -> None:
    total = torch.tensor([0.0, 1.0, 2.0, 9.0, 0.0, 0.0, 2.0, 2.0])
    centred = total - torch.tensor([3.0, 1.0]).repeat_interleave(4)
    both = float(centred.square().mean().sqrt())
    stds = torch.tensor([float(centred[:4].square().mean().sqrt()), 1.0]).repeat_interleave(4)
    one_reward = centred / stds  # normalised in the group, and over the batch it has std 1 already
    for config, expected in (
        (AdvantageConfig(scale="none", clip=None), centred),
        (AdvantageConfig(scale="none", clip=1.5), centred.clamp(-1.5, 1.5)),
        (AdvantageConfig(scale="global", clip=None), centred / float(total.std(correction=0))),
        (AdvantageConfig(clip=0.8), one_reward.clamp(-0.8, 0.8)),
        (AdvantageConfig(decoupled=True, clip=None), one_reward),
        (AdvantageConfig(decoupled=True, clip=0.8), one_reward.clamp(-0.8, 0.8)),
        (AdvantageConfig(decoupled=True, scale="none", clip=None), centred / both),
    ):
        trainer = make_trainer(make_config(advantage=config))
        _, _, scored = run_up_to_scores(trainer)
        scored = replace(scored, total=total, parts={"bright": total})
        torch.testing.assert_close(trainer.advantages(scored), expected, rtol=1e-4, atol=1e-5)


def test_the_controller_sees_the_kl_without_lambda(make_config, make_trainer) -> None:
    kl = KlCoefficient(kind="constant", lambda_min=0.0, lambda_max=0.25)
    trainer = make_trainer(make_config(kl=kl, trust_region=TrustRegion(mode="fixed")))
    trainer.step()
    assert trainer.state.kl.history == [log["kl/total"] for log in trainer.log]
    assert trainer.log[1]["loss/kl"] == pytest.approx(0.25 * trainer.log[1]["kl/total"])
    assert trainer.log[1]["kl/total"] > 0


def test_the_learning_rate_decays_over_all_updates_of_the_run(make_config, make_trainer) -> None:
    trainer = make_trainer(make_config(optimizer=OptimizerConfig(lr=0.6, decay="linear"), iterations=3))
    trainer.step()
    trainer.step()
    assert [log["optimizer/lr"] for log in trainer.log] == pytest.approx([0.6, 0.5, 0.4, 0.3])


# What is logged -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_double")
def test_the_logged_loss_is_the_equalised_one(make_config, make_trainer) -> None:
    """On policy every ratio is 1, so a step's loss is minus its weight times the mean advantage (not 0, as advantages are clipped)."""
    trainer = make_trainer(
        make_config(update=UpdateConfig(updates_per_rollout=1), advantage=AdvantageConfig(clip=0.3), seed=3)
    )
    plan, _, scored = run_up_to_scores(trainer)
    mean = float(trainer.advantages(scored).mean())
    (steps,) = plan.groups[0].trained
    weight = sum(plan.equalizer[step] for step in steps) / len(steps)
    assert abs(mean) > 0.01
    assert abs(weight - 1) > 0.05
    assert trainer.step()["loss/policy"] == pytest.approx(-mean * weight, rel=CLOSE)


def test_spread_and_shares_are_made_of_their_sums() -> None:
    tally = Tally()
    sums = {"ratio/mean": 0.03, "ratio/square": 0.0025, "gradient/policy": 9.0, "gradient/kl": 16.0}
    tally.sums |= {name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}
    metrics = summarize(tally, World(), [])
    assert metrics["ratio/mean"] == pytest.approx(1.03)
    assert metrics["ratio/std"] == pytest.approx(0.04)
    assert metrics["gradient/kl_share"] == pytest.approx(4 / 7)


def test_the_spread_of_rewards_is_that_of_the_valid_ones() -> None:
    total = torch.tensor([0.0, 2.0, math.nan, 4.0, 1.0, 1.0, 1.0, 5.0])
    groups = torch.tensor([0] * 4 + [1] * 4)
    scored = Scored(groups, torch.arange(8) % 4, total, {"bright": total}, {"bright": 1}, "")
    metrics = describe(scored, torch.tensor([1.0, -3.0] * 4), {})
    assert metrics["reward/total"] == metrics["reward/bright"] == 2.0
    assert metrics["reward/std"] == pytest.approx(math.sqrt((4 + 0 + 4 + 1 + 1 + 1 + 9) / 7))
    assert metrics["reward/group_std"] == pytest.approx((math.sqrt(8 / 3) + math.sqrt(3)) / 2)
    assert (metrics["advantage/std"], metrics["advantage/largest"]) == (2.0, 3.0)


# Rollouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guides", [True, False])
def test_rollout_and_updates_run_without_guidance_when_asked_to(guides, family, make_config, make_trainer) -> None:
    model = replace(family(Guided), guidance_in_training=guides)
    trainer = make_trainer(replace(make_config(), model=model))
    assert trainer.step()["ratio/first_log"] == 0.0
    assert set(trainer.model.seen) == {3.0 if guides else 1.0}
    trainer.model.seen.clear()
    trainer.evaluate()
    assert set(trainer.model.seen) == {3.0}  # whatever training does


@pytest.mark.usefixtures("in_double")
def test_a_second_order_rollout_starts_anew_after_every_exploring_step(make_config, make_trainer) -> None:
    """What came before the noise says nothing about the path after it: there the first step is Euler's."""
    window = Window(kind="fixed", start=1, length=2)
    trainer = make_trainer(make_config(rollout={"steps": 6, "solver": "ab2", "window": window}))
    plan = plan_of(trainer)
    rollout = trainer.roll_out(plan)
    sigmas = trainer.planner.grid.sigmas.tolist()
    for batch, latents in rollout.latents:
        (record,) = (r for replay, r in rollout.records.items() if (replay.step, replay.members) == (2, batch.members))
        x, before = record.x_next, None
        for step in range(3, 6):
            v, h = (
                trainer.model.velocity(x, torch.tensor(sigmas[step]), record.conditions),
                sigmas[step + 1] - sigmas[step],
            )
            x = x + h * v if before is None else x + h * v + 0.5 * h * h / before[1] * (v - before[0])
            before = v, h
        torch.testing.assert_close(latents, x, rtol=CLOSE, atol=CLOSE)


# Evaluation and rewards ---------------------------------------------------------------------------------------------


def test_first_frames_reach_rollouts_and_evaluations(make_config, make_trainer, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (4, 3), (9, 8, 7)).save(tmp_path / "first.png")
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a cat", "image": "first.png"}\n{"prompt": "a dog"}\n')
    config = make_config(data=DataConfig(prompts=str(file), eval_prompts=str(file)))
    trainer = make_trainer(config)
    given, encode = {}, trainer.model.encode

    def watched(prompts, images=None):
        given.update(zip(prompts, images or [None] * len(prompts)))
        return encode(prompts, images)

    trainer.model.encode = watched
    for act in (lambda: trainer.roll_out(plan_of(trainer)), trainer.evaluate):
        given.clear()
        act()
        assert given["a dog"] is None
        assert given["a cat"].tolist() == [[[9, 8, 7]] * 4] * 3


def test_evaluation_scores_every_clip_against_its_own_prompt(family, make_config, make_trainer) -> None:
    """Prompts are batched by their length; scores and captions come back in the order of the file."""
    config = make_config(
        rewards=[RewardSpec(name=f"{__name__}:fits", try_out=False)],
        evaluate=EvalConfig(prompts=5, per_prompt=2, steps=2, show=10),
        batch=BatchConfig(prompts=2, group_size=2, micro_batch=3),
    )
    trainer = make_trainer(replace(config, model=family(Lettered)))
    result = trainer.evaluate()
    assert result.metrics["eval/fits"] == 1.0
    assert result.captions == [prompt.text for prompt in trainer.held_out for _ in range(2)]
    assert fits(result.clips, result.captions, 8.0) == [1.0] * 10
    assert fits(result.clips, result.captions[::-1], 8.0) != [1.0] * 10


def test_rewards_are_told_the_frame_rate_of_the_model(make_config, make_trainer) -> None:
    trainer = make_trainer(make_config(rewards=[RewardSpec(name=f"{__name__}:frame_rate")]))
    assert trainer.evaluate().metrics["eval/frame_rate"] == trainer.model.video.fps == 8.0
    _, _, scored = run_up_to_scores(trainer)
    assert scored.total.tolist() == [8.0] * 8


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
    first.writer.finish()
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
