"""Evaluation: the ODE, fixed seeds, all rewards, whatever the batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from trainer_helpers import plan_of, same, weights_of

from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.train.config import BatchConfig, EvalConfig

REWARDS = [
    RewardSpec(name="trainer_toys:bright", weights={"bright": 2.0}),
    RewardSpec(name="video_stats", weights={"brightness": 1.0}, metric_only=True),
]


@pytest.mark.parametrize("kind", ["toy", "wan_t2v"])
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
        assert (other.clips.int() - results[0].clips.int()).abs().max() <= 1
        for name, value in results[0].metrics.items():
            assert other.metrics[name] == pytest.approx(value, rel=1e-4)
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


def test_a_prompts_own_seed_fixes_its_noise_wherever_it_stands(make_config, make_trainer, tmp_path) -> None:
    from sage_grpo.flow.noise import keyed_noise

    clips = []
    for number, rows in enumerate(("a cat,7\na dog,\n", "a dog,\na bird,7\na cat,7\n")):
        file = tmp_path / f"{number}.csv"
        file.write_text("prompt,seed\n" + rows)
        settings = EvalConfig(prompts=3, per_prompt=2, steps=3, seed=number, show=6)
        config = make_config(evaluate=settings)
        trainer = make_trainer(replace(config, data=replace(config.data, eval_prompts=str(file))))
        starts, velocity = [], trainer.model.velocity

        def watched(x, sigma, conditions, *, velocity=velocity, starts=starts, **options):
            if float(sigma) == 1:
                starts.extend(x)
            return velocity(x, sigma, conditions, **options)

        trainer.model.velocity = watched
        result = trainer.evaluate()
        clips.append(
            {(text, copy): result.clips[2 * p + copy] for p, text in enumerate(result.captions[::2]) for copy in (0, 1)}
        )
        for copy in (0, 1):  # the noise of `generate --seed`
            noise = keyed_noise(trainer.model.latent_shape(), "generate", 7 + copy, "start")
            assert any(torch.equal(noise, start) for start in starts)
    first, second = clips
    assert [(first["a cat", copy].int() - second["a cat", copy].int()).abs().max() <= 1 for copy in (0, 1)] == [
        True
    ] * 2
    assert not torch.equal(first["a cat", 0], first["a cat", 1])
    assert not torch.equal(first["a dog", 0], second["a dog", 0])


def test_rewards_receive_the_other_columns_of_a_prompt(make_config, make_trainer, tmp_path) -> None:
    file = tmp_path / "p.csv"
    file.write_text("prompt,worth\na cat,1\na red dog,10\n")
    config = make_config(
        rewards=[RewardSpec(name="trainer_toys:told")],
        evaluate=EvalConfig(prompts=2, per_prompt=2, steps=2),
        batch=BatchConfig(prompts=2, group_size=2, micro_batch=3),
    )
    trainer = make_trainer(replace(config, data=replace(config.data, prompts=str(file), eval_prompts=str(file))))
    assert trainer.evaluate().metrics["eval/told"] == 5.5
    plan = plan_of(trainer)
    worth = torch.tensor([float(group.prompt.metadata["worth"]) for group in plan.groups])
    videos = trainer.decode(trainer.roll_out(plan))
    assert torch.equal(trainer.score(videos, plan).total, worth.repeat_interleave(2))


def test_evaluation_draws_other_noise_than_training(make_config, make_trainer) -> None:
    config = make_config(evaluate=EvalConfig(prompts=2, per_prompt=2, steps=3, seed=0), seed=0)
    trainer = make_trainer(config)
    clips = trainer.decode(trainer.roll_out(plan_of(trainer)))
    assert not any(torch.equal(a, b) for a in trainer.evaluate().clips for b in clips)


def test_failed_clips_are_counted_and_left_out(make_config, make_trainer) -> None:
    spec = RewardSpec(name="trainer_toys:bright_but", label="bright", batch_size=0, options={"bad": [1]})
    config = make_config(evaluate=EvalConfig(prompts=3, steps=3))
    clean = make_trainer(config).evaluate()
    result = make_trainer(replace(config, rewards=[spec])).evaluate()
    assert result.metrics["eval/failed"] == 1
    levels = clean.clips.float().mean(dim=(1, 2, 3, 4)) / 255
    assert result.metrics["eval/total"] == pytest.approx(float((levels[0] + levels[2]) / 2), rel=1e-5)


def test_runs_without_held_out_prompts_evaluate_nothing(make_config, make_trainer) -> None:
    config = make_config()
    trainer = make_trainer(replace(config, data=replace(config.data, eval_prompts=None)))
    assert trainer.held_out == []
