"""The documents say what the code does: every option, every metric, and commands that parse."""

from __future__ import annotations

import re

import docs_options

from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.training.config import OptimizerConfig


def test_the_option_tables_are_those_of_the_code() -> None:
    assert docs_options.section() in docs_options.DOCUMENT.read_text(), "run: python tests/training/docs_options.py"


def test_every_metric_is_in_the_glossary(make_config, make_trainer) -> None:
    text = docs_options.DOCUMENT.read_text()
    known = set(re.findall(r"`([a-z]+/[\w/<>]+)`", text))
    # Parts and rewards stand for those of this run: "anything" would make every new metric pass for one.
    stands_for = {"NNN": r"\d{3}", "<part>": "bright", "<reward>": "bright", "<phase>": r"\w+"}
    patterns = []
    for name in map(re.escape, known):
        for placeholder, meaning in stands_for.items():
            name = name.replace(placeholder, meaning)
        patterns.append(re.compile(name))
    trainer = make_trainer(
        make_config(optimizer=OptimizerConfig(ema=0.9, target_kl=0.1), trust_region=TrustRegion(mode="dual"))
    )
    for name in {**trainer.evaluate().metrics, **trainer.step()}:
        assert any(pattern.fullmatch(name) for pattern in patterns), f"docs/config.md does not explain {name}"
