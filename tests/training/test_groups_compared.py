"""A run whose reward compares the clips of a group: it gets them whole, whatever the micro-batches."""

from __future__ import annotations

import pytest

import trainer_toys
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.training.config import BatchConfig, EvalConfig

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
