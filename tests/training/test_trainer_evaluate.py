"""Evaluation: the ODE, fixed seeds, all rewards, whatever the batches; and rewards that compare get whole groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import trainer_toys
from double import CLOSE
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.training.config import BatchConfig, EvalConfig
from trainer_helpers import plan_of, same, weights_of

REWARDS = [
    RewardSpec(name="trainer_toys:bright", weights={"bright": 2.0}),
    RewardSpec(name="video_stats", weights={"brightness": 1.0}, metric_only=True),
]


@pytest.mark.parametrize("kind", ["toy", pytest.param("wan_t2v", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("in_double")
def test_evaluation_repeats_and_does_not_depend_on_batches_or_history(kind: str, make_config, make_trainer) -> None:
    config = make_config(kind=kind, rewards=REWARDS, evaluate=EvalConfig(prompts=3, per_prompt=2, steps=3))
    results = []
    for micro_batch in (1, 4, 6):
        trainer = make_trainer(replace(config, batch=BatchConfig(prompts=2, group_size=2, micro_batch=micro_batch)))
        before = weights_of(trainer)
        first, second = trainer.evaluate(), trainer.evaluate()
        assert first.metrics == second.metrics
        assert torch.equal(first.clips, second.clips)
        assert same(before, weights_of(trainer))
        results.append(first)
    for other in results[1:]:
        assert other.captions == results[0].captions
        assert torch.equal(other.clips, results[0].clips)
        assert other.metrics == pytest.approx(results[0].metrics, rel=CLOSE)
    metrics = results[0].metrics
    assert metrics["eval/total"] == pytest.approx(2 * metrics["eval/bright"])
    assert "eval/brightness" in metrics
    assert metrics["eval/failed"] == 0
    assert len(results[0].clips) == 6


def test_evaluation_uses_no_exploration_and_its_own_seed(make_config, make_trainer) -> None:
    base = make_config(evaluate=EvalConfig(prompts=3, steps=3))
    plain = make_trainer(base).evaluate()
    loud = make_trainer(replace(base, seed=7, kernel=replace(base.kernel, eta=0.9))).evaluate()
    assert torch.equal(plain.clips, loud.clips)
    other = make_trainer(replace(base, evaluate=replace(base.evaluate, seed=99))).evaluate()
    assert not torch.equal(plain.clips, other.clips)


def test_rewards_receive_the_other_columns_of_a_prompt(make_config, make_trainer, tmp_path) -> None:
    file = tmp_path / "p.csv"
    file.write_text("prompt,worth\na cat,1\na red dog,10\n")
    config = make_config(
        rewards=[RewardSpec(name="trainer_toys:told")],
        evaluate=EvalConfig(prompts=2, per_prompt=2, steps=2),
        batch=BatchConfig(prompts=2, group_size=2, micro_batch=3),
    )
    trainer = make_trainer(replace(config, data=replace(config.data, prompts=str(file), eval_prompts=str(file))))
    ticks: list[tuple] = []
    trainer.clock.listen = lambda *given: ticks.append(given)
    assert trainer.evaluate().metrics["eval/told"] == 5.5
    assert [tick for tick in ticks if tick[1]] == [("evaluate", 1, 2), ("evaluate", 2, 2)]
    plan = plan_of(trainer)
    worth = torch.tensor([float(group.prompt.metadata["worth"]) for group in plan.groups])
    videos = trainer.studio.decode(trainer.roll_out(plan))
    assert torch.equal(trainer.studio.score(videos, plan).total, worth.repeat_interleave(2))


def failing(*bad: int, **fields) -> RewardSpec:
    options = {"bad": list(bad)}
    return RewardSpec(
        name="trainer_toys:bright_but", label="bright", batch_size=0, options=options, try_out=False, **fields
    )


def test_failed_clips_are_counted_and_left_out(make_config, make_trainer) -> None:
    config = make_config(evaluate=EvalConfig(prompts=3, steps=3), max_failed_fraction=0.4)
    clean = make_trainer(config).evaluate()
    result = make_trainer(replace(config, rewards=[failing(1)])).evaluate()
    assert result.metrics["eval/failed"] == result.metrics["eval/failed/bright"] == 1
    assert clean.metrics["eval/failed/bright"] == 0
    assert clean.report == ""
    assert "bright could not score 1 of 3 clips" in result.report
    assert f"bright on {result.captions[1]!r}: returned bright_but = nan" in result.report
    levels = clean.clips.float().mean(dim=(1, 2, 3, 4)) / 255
    assert result.metrics["eval/total"] == pytest.approx(float((levels[0] + levels[2]) / 2), rel=1e-5)


RANKED = RewardSpec(name="trainer_toys:ranked", options={"takes": "group"}, overlap=True)


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_every_call_has_a_whole_group_in_training_and_evaluation(micro_batch, make_config, make_trainer):
    batch = BatchConfig(prompts=2, group_size=4, micro_batch=micro_batch)
    evaluate = EvalConfig(prompts=2, per_prompt=3, steps=2)
    trainer = make_trainer(make_config(rewards=[RANKED], batch=batch, evaluate=evaluate))
    trainer_toys.SIZES.clear()  # the reward was tried out with two clips
    assert trainer.step()["reward/total"] == pytest.approx(1.5)  # the mean of 0, 1, 2, 3
    assert trainer_toys.SIZES == [4, 4]
    trainer.evaluate()
    assert trainer_toys.SIZES[2:] == [3, 3]


def test_an_evaluation_of_one_clip_a_prompt_is_refused_before_anything_is_sampled(make_config, make_trainer):
    with pytest.raises(RewardConfigError, match="per_prompt"):
        make_trainer(make_config(rewards=[RANKED]))
