"""Prompts are encoded once, before training; the text encoders are gone while it runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sage_grpo.parallel.spec import Layout
from sage_grpo.parallel.world import World
from sage_grpo.training.config import BatchConfig
from sage_grpo.training.inputs import build
from sage_grpo.training.trainer import Trainer
from trainer_helpers import plan_of


def test_a_rank_encodes_only_the_prompts_that_it_samples(make_config, monkeypatch) -> None:
    """Of two prompts with four clips each, two ranks have one each. (Held-out prompts are batched by length, and needed by all.)"""
    config = make_config(iterations=2)
    config = replace(config, data=replace(config.data, eval_prompts=None))
    seen: list[set[str]] = []
    for rank in range(2):
        world = World(rank=rank, size=2, layout=Layout(1, 2, 1))
        trainer = Trainer(config, build(config, world), world)
        texts: set[str] = set()
        encode = trainer.model.encode

        def watch(prompts, images=None, encode=encode, texts=texts):
            texts.update(prompts)
            return encode(prompts, images)

        monkeypatch.setattr(trainer.model, "encode", watch)
        trainer.encode_prompts()
        beforehand = set(texts)
        trainer.roll_out(plan_of(trainer))
        assert texts == beforehand
        seen.append(beforehand)
        monkeypatch.undo()
    assert [len(texts) for texts in seen] == [2, 2]
    assert len(seen[0] | seen[1]) == 4


@pytest.mark.parametrize(("ahead", "until"), [(2, [1, 1, 2, 3]), (4, [2, 2, 2, 4]), (100, [6, 6, 6, 6])])
def test_prompts_are_encoded_as_far_ahead_as_asked(ahead: int, until: list[int], make_config, make_trainer) -> None:
    """Six iterations of two prompts out of five: beforehand, and then whenever what was encoded is used up."""
    batch = BatchConfig(prompts=2, group_size=2, micro_batch=4)
    config = make_config(iterations=6, batch=batch, rollout={"steps": 3})
    trainer = make_trainer(replace(config, data=replace(config.data, eval_prompts=None, encode_ahead=ahead)))
    trainer.encode_prompts()
    found = [trainer.encoded_until]
    for _ in range(3):
        trainer.step()
        found.append(trainer.encoded_until)
        assert len(trainer.encoded) <= ahead
    assert found == until
    fresh = make_trainer(trainer.config)
    fresh.step()
    assert fresh.encoded, "the first iteration's prompts were not encoded before it"
