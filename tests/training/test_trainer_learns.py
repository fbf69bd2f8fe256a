"""The point of it all: the held-out reward rises, for all weights, for a LoRA and for every method."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sage_grpo.models.spec import LoraSpec
from sage_grpo.recipes.methods import METHODS
from sage_grpo.training.config import BatchConfig, EvalConfig, OptimizerConfig
from slowly import slow_but
from trainer_helpers import of_method

EVAL = EvalConfig(prompts=5, per_prompt=4, steps=6)


def gain(trainer, iterations: int) -> tuple[float, float]:
    """Rise of the held-out reward, and the standard error of a single evaluation."""
    before = trainer.evaluate().metrics
    for _ in range(iterations):
        trainer.step()
    after = trainer.evaluate().metrics
    return after["eval/total"] - before["eval/total"], before["eval/total_stderr"]


QUICK = ("sage", "branch")
"""All steps, and one shared step."""


@pytest.mark.parametrize("method", slow_but(METHODS, *QUICK))
def test_every_method_learns(method: str, make_config, make_trainer) -> None:
    config = make_config(
        evaluate=EVAL,
        batch=BatchConfig(prompts=4, group_size=6, micro_batch=24),
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0),
        rollout={"steps": 6},
        iterations=24,
    )
    # Flash-GRPO explores little, at one step of the first half: it takes more rollouts.
    rise, error = gain(make_trainer(of_method(method, config)), 72 if method == "flash_grpo" else 24)
    assert rise > 4 * error


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)], ids=["full", "lora"])
def test_full_fine_tuning_and_lora_learn_on_a_real_architecture(lora, make_config, make_trainer) -> None:
    config = make_config(
        kind="wan_unipc_t2v",
        model={"lora": lora},
        evaluate=replace(EVAL, prompts=4, per_prompt=3, steps=4),
        batch=BatchConfig(prompts=3, group_size=6, micro_batch=18),
        optimizer=OptimizerConfig(lr=3e-3 if lora is None else 1e-2, weight_decay=0.0),
        rollout={"steps": 4},
    )
    rise, error = gain(make_trainer(config), 10)
    assert rise > 3 * error


def test_a_reversed_reward_unlearns(make_config, make_trainer) -> None:
    """The same run with the opposite reward goes the opposite way: it is the reward that moves the policy."""
    from sage_grpo.rewards.spec import RewardSpec

    config = make_config(
        evaluate=EVAL,
        rewards=[RewardSpec(name="trainer_toys:bright", weights={"bright": -1.0})],
        batch=BatchConfig(prompts=4, group_size=6, micro_batch=24),
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0),
    )
    trainer = make_trainer(config)
    before = trainer.evaluate().metrics["eval/bright"]
    for _ in range(10):
        trainer.step()
    assert trainer.evaluate().metrics["eval/bright"] < before


@pytest.mark.slow
@pytest.mark.parametrize("explore", [[], ["audio"]], ids=["both", "sound"])
def test_a_reward_for_the_sound_raises_it(explore: list[str], make_config, make_trainer) -> None:
    """On a tiny LTX-2, for the sound alone: its interval over the base excludes zero."""
    from sage_grpo.rewards.spec import RewardSpec

    config = make_config(
        kind="ltx2",
        model={"height": 32, "width": 32, "frames": 5},
        evaluate=replace(EVAL, prompts=4, per_prompt=4, steps=4),
        rewards=[RewardSpec(name="sound_stats", options={"parts": ["loudness"]}, judges="audio")],
        batch=BatchConfig(prompts=3, group_size=6, micro_batch=18),
        optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.0),
        rollout={"steps": 4, "explore": explore},
    )
    rise, error = gain(make_trainer(config), 10)
    assert rise > 4 * error
