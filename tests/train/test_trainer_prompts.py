"""Prompts are encoded once, before training; the text encoders are gone while it runs."""

from __future__ import annotations


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
