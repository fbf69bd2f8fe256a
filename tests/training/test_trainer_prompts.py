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


def test_text_encoders_are_dropped_before_training_and_not_needed_again(make_config, make_trainer) -> None:
    trainer = make_trainer(make_config(kind="hunyuan15_t2v"))
    trainer.encode_prompts()
    pipe = trainer.model.pipe
    assert pipe.text_encoder is None
    assert pipe.text_encoder_2 is None
    for _ in range(trainer.config.iterations):
        trainer.step()
    trainer.evaluate()
    assert pipe.text_encoder is None, "a prompt was not encoded beforehand"


def test_encoding_beforehand_changes_nothing(make_config, make_trainer) -> None:
    config = make_config(kind="hunyuan15_t2v", iterations=1)
    first = make_trainer(config).step()
    eager = make_trainer(config)
    eager.encode_prompts()
    second = eager.step()
    assert {k: v for k, v in first.items() if not k.startswith("time/")} == {
        k: v for k, v in second.items() if not k.startswith("time/")
    }


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


@pytest.mark.slow
def test_a_long_run_encodes_as_it_goes_and_forgets_what_is_over(make_config, make_trainer, monkeypatch) -> None:
    """Six iterations of two prompts out of five, two prompts at a time: nothing else is encoded early or kept."""
    batch = BatchConfig(prompts=2, group_size=2, micro_batch=4)
    config = make_config(kind="hunyuan15_t2v", iterations=6, batch=batch, rollout={"steps": 3})
    config = replace(config, data=replace(config.data, eval_prompts=None))
    whole = make_trainer(config)
    expected = [whole.step() for _ in range(6)]
    assert whole.encoded_until == 6  # five prompts fit: encoded once
    trainer = make_trainer(replace(config, data=replace(config.data, encode_ahead=2)))
    trainer.model._conditions.clear()
    whole.encoded.clear()
    encode, held = trainer.model.encode, []

    def watch(prompts, images=None):
        held.append(len({id(value) for value in trainer.encoded.values()}))
        return encode(prompts, images)

    monkeypatch.setattr(trainer.model, "encode", watch)
    trainer.encode_prompts()
    assert len(held) == 2, "prompts of later iterations were encoded before the first"
    rows = []
    for number in range(6):
        rows.append(trainer.step())
        assert trainer.encoded_until > number
        assert trainer.model.pipe.text_encoder is None
        assert len(trainer.model._conditions) <= 2
    assert max(held) <= 2
    for row, wanted in zip(rows, expected):
        assert {k: v for k, v in row.items() if not k.startswith("time/")} == {
            k: v for k, v in wanted.items() if not k.startswith("time/")
        }
