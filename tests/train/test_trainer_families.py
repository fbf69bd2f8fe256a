"""Every family trains one iteration of methods of every kind, and the first ratio is exactly 1."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from trainer_helpers import same, weights_of

from sage_grpo.recipes.methods import METHODS
from sage_grpo.train.config import BatchConfig

KINDS = ("sage", "branch", "mix_grpo", "nft", "awm")
"""An SDE at all steps, branches, a window between deterministic steps, two losses at fresh levels: what a family could tell apart."""
FAMILIES = ("wan_t2v", "ltx", "hunyuan", "sana_video", "flux", "sd3", "qwen_image")


@pytest.mark.parametrize("kind", FAMILIES)
def test_methods_of_every_kind_train_every_family(kind: str, make_config, make_trainer) -> None:
    small = {"height": 8, "width": 8} if kind in ("flux", "sd3") else {}
    batch = BatchConfig(prompts=1, group_size=2, micro_batch=2)
    config = make_config(kind=kind, model=small, rollout={"steps": 4}, batch=batch)
    # The others differ in what becomes of a velocity, not in how a model is asked for it: each is tried on a family or two.
    others = list(METHODS)[FAMILIES.index(kind) :: len(FAMILIES)]
    for method in dict.fromkeys((*KINDS, *others)):
        # One with guidance: two branches, or a scale that is an input.
        scale = 3.0 if method == "sage" else 1.0
        trainer = make_trainer(METHODS[method](replace(config, model=replace(config.model, guidance_scale=scale))))
        before = weights_of(trainer)
        metrics = trainer.step()
        assert all(math.isfinite(value) for value in metrics.values()), method
        assert metrics.get("ratio/first_update", 0.0 if method == "nft" else None) == 0.0, method  # nft has no ratio
        assert not same(before, weights_of(trainer)), method
