"""Held-out scores of any weights: sampled with the ODE from fixed seeds, and scored with any rewards."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from sage_grpo.folder.settings import read_config
from sage_grpo.folder.weights import Choice
from sage_grpo.models.spec import ModelSpec
from sage_grpo.ranges import Count, Share, checked
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.training.config import EvalConfig
from sage_grpo.training.sources import first_frame, prompts_from

if TYPE_CHECKING:
    from sage_grpo.data.prompts import Prompt
    from sage_grpo.training.evaluate import Evaluation
    from sage_grpo.training.own import Own


def _shapes_reward() -> list[RewardSpec]:
    return [RewardSpec(name="shapes", weights={"TA": 1.0, "MQ": 0.5, "VQ": 0.5})]


@checked
class EvaluateSpec(Choice):
    """What to evaluate."""

    model: ModelSpec = ModelSpec(train=False)
    """The model; without a run or a path, the small checkpoint that the package carries."""
    prompts: str | None = "shapes"
    """Prompts: a .txt, .csv, .json or .jsonl file, "shapes" for the embedded world's held-out split, "starter_eval" (or "starter") for those of
    the package, or "train" for a run's training prompts."""
    rewards: list[RewardSpec] = field(default_factory=_shapes_reward)
    """Rewards with their weights."""
    max_failed_fraction: Share = 0.25
    """Share of clips whose reward may fail."""
    settings: EvalConfig = EvalConfig()
    """Number of prompts, steps, seed."""
    micro_batch: Count = 8
    """Clips that are sampled, or read from files, together."""

    @classmethod
    def of_run(cls, run: str, *, trust: bool = False, rewards: bool = True) -> Self:
        """What repeats a run's own evaluation of its final weights; `trust` and `rewards` as in `read_config`."""
        config = read_config(Path(run), trust=trust, rewards=rewards)
        return cls(
            run=run,
            model=config.model,
            prompts=config.data.held_out,
            rewards=config.rewards,
            max_failed_fraction=config.max_failed_fraction,
            settings=config.evaluate,
            micro_batch=config.batch.micro_batch,
        )


def measure(options: EvaluateSpec, own: Own | None = None) -> Evaluation:
    """Sample and score; what a program hands over takes the place of what the options name."""
    (result,) = _measure(options, [options], own)
    return result


def measure_pair(options: EvaluateSpec, own: Own | None = None) -> tuple[Evaluation, Evaluation]:
    """The base and the tuned model, each as `measure` finds it alone."""
    if not options.tunes:
        raise ValueError(
            "--pairs compares a tuned model with its base: give --run runs/NAME (without --weights base) or --lora FOLDER."
        )
    base, tuned = _measure(options, [options.base(), options], own)
    return base, tuned


def _measure(options: EvaluateSpec, choices: Sequence[Choice], own: Own | None = None) -> Iterator[Evaluation]:
    """An evaluation with each choice of weights, one model at a time."""
    from sage_grpo.models.devices import choose_device
    from sage_grpo.rewards.base import CompositeReward
    from sage_grpo.training.evaluate import evaluate
    from sage_grpo.training.own import Own
    from sage_grpo.training.scoring import try_rewards

    own = own or Own()
    if own.model is None:  # before rewards are loaded, which takes long as well
        options.model.check_named()
    prompts = _prompts(options) if own.prompts is None else list(own.prompts)
    found = [choice.find(options.model) for choice in choices]
    reward = CompositeReward(
        options.rewards,
        max_failed_fraction=options.max_failed_fraction,
        device=choose_device(options.model.device) if own.model is None else own.model.device,
        require_weights=False,
        objects=own.rewards,
    )
    try_rewards(reward, prompts[0], options.model)
    for one in found:
        model = one.load(own.model)  # last: it takes minutes, and a mistake above is found in seconds
        yield evaluate(model, reward, prompts, options.settings, micro_batch=options.micro_batch, images=first_frame)
        del model
        gc.collect()  # the next model needs its memory


def _prompts(options: EvaluateSpec) -> list[Prompt]:
    if options.prompts is None and options.run is None:
        raise ValueError(
            "There are no prompts to evaluate on: give --prompts FILE, or leave it out for the embedded world's."
        )
    if options.prompts is None:
        raise ValueError(
            f"{options.run} was trained without held-out prompts. Give --prompts FILE, or --prompts train for the prompts that "
            "it was trained on."
        )
    if options.prompts != "train":
        return prompts_from(options.prompts, split="heldout")
    if options.run is None:
        raise ValueError("--prompts train means the training prompts of a run: give --run runs/NAME as well.")
    return prompts_from(read_config(Path(options.run), trust=True).data.prompts, split="train")
