"""The documents say what the code does: every option, every metric, and commands that parse."""

from __future__ import annotations

import re
from pathlib import Path

import docs_options

from sage_grpo.configure import leaves
from sage_grpo.rl.trust_region import TrustRegion
from sage_grpo.training.config import OptimizerConfig, TrainConfig

DOCS = Path(__file__).parents[2] / "docs"


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


def test_every_option_that_the_documents_name_exists() -> None:
    keys = {key for key, _ in leaves(TrainConfig)}
    sections = {key.split(".")[0] for key in keys if "." in key}
    for document in ("from-official.md", "config.md"):
        text = (DOCS / document).read_text().split(docs_options.BEGIN)[0]
        names = re.findall(r"`(?:--)?([a-z_]+\.[a-z_.]+)[` ]", text)
        names = [n for n in names if n.split(".")[0] in sections and not n.endswith((".yaml", ".jsonl", ".md"))]
        assert len(names) > 10  # the pattern still finds them
        for name in names:
            assert name in keys, f"{document} names {name}"
