"""Learning from which clip was better, on the miniature: the held-out reward rises, from rollouts and from clips on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sage_grpo.commands import generate
from sage_grpo.models.spec import ModelSpec
from sage_grpo.recipes import recipe
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.training.config import EvalConfig, TrainConfig
from sage_grpo.training.inputs import build
from sage_grpo.training.trainer import Trainer

PROXY = RewardSpec(name="shapes_proxy", weights={"proxy": 1.0}, batch_size=0)
"""Colour and change: what a few updates move, where the judge would take many."""
ITERATIONS = 4
MODEL = ModelSpec(deterministic=True, vae_slicing=False, cache=None, options={"pad_text": 20})


def configured(method: str, folder: Path, clips: Path | None = None) -> TrainConfig:
    """A short, hot run."""
    config = recipe(f"shapes/{method}")
    return replace(
        config,
        out=str(folder / "run"),
        iterations=ITERATIONS,
        model=MODEL,
        rewards=[PROXY],
        data=replace(config.data, clips=None if clips is None else str(clips)),
        batch=replace(config.batch, prompts=4, group_size=6, micro_batch=24, trained_fraction=0.34),
        objective=replace(
            config.objective, beta=50.0
        ),  # at the preset's 500 a hot run has made up its mind after two updates
        optimizer=replace(config.optimizer, lr=5e-4),
        evaluate=EvalConfig(every=0, prompts=24, steps=6, solver="ab2"),
    )


def z_of_gain(config: TrainConfig) -> float:
    """The rise of the held-out reward in standard errors of its mean over clips of the same noise."""
    trainer = Trainer(config, build(config))

    def scores() -> torch.Tensor:
        return torch.tensor([row["scores"]["total"] for row in trainer.evaluate().rows])

    before = scores()
    for _ in range(config.iterations):
        trainer.step()
    gain = scores() - before
    return float(gain.mean() / gain.std() * len(gain) ** 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "rft"])
def test_it_learns_from_its_own_rollouts(method: str, tmp_path: Path) -> None:
    assert z_of_gain(configured(method, tmp_path)) > 3


@pytest.mark.slow
def test_dpo_learns_from_clips_that_were_scored_once(tmp_path: Path) -> None:
    options = generate.Options(
        model=replace(MODEL, train=False),
        prompts="shapes",
        first=8 * ITERATIONS,
        per_prompt=4,
        batch=24,
        steps=6,
        rewards=[PROXY],
        out=str(tmp_path / "clips"),
        progress=False,
    )
    assert generate.run(options) == 0
    config = configured("dpo", tmp_path, tmp_path / "clips")
    # Every pair once. At the rate of the others it unlearns after the first half: offline nobody looks at what the policy makes of it.
    optimizer = replace(config.optimizer, lr=2e-4)
    assert z_of_gain(replace(config, iterations=2 * ITERATIONS, optimizer=optimizer)) > 3
