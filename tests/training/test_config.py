"""Settings that do not go together are refused by name and their neighbors that do are taken; docs/config.md has every option and metric."""

from __future__ import annotations

import re

import docs_options
import pytest
import yaml
from wiring_table import changed

from sage_grpo.models.spec import LoraSpec
from sage_grpo.objectives.trust_region import TrustRegion
from sage_grpo.training.config import OptimizerConfig

SIGMAS = "--model.sigmas [1.0,0.9,0.8,0.5,0.2] --evaluate.steps 5"
RAY = "--rollout.on ray --model.lora LORA"
DRAWN = "--rollout.window.kind drawn"
CASES = [
    ("--evaluate.early [4]", "early 4 is never reached"),
    (f"{SIGMAS} --evaluate.early [3] --surrogate.kind kl_mask --surrogate.centred true", ""),
    (f"{DRAWN} --rollout.after_steps 4 --data.eval_prompts starter_eval", ""),
    (f"{SIGMAS} --rollout.steps 4", "does not go with rollout.steps 4"),
    (f"{SIGMAS} --evaluate.steps 4", "does not go with evaluate.steps 4"),
    (f"{SIGMAS} --rollout.shift 2", "does not go with rollout.shift 2"),
    (f"{SIGMAS} --evaluate.solver checkpoint", "does not go with evaluate.solver checkpoint"),
    ("--kl.kind share --trust_region.mode none", "so that there is no KL"),
    ("--kl.kind share --trust_region.mode stepwise", ""),
    ("--kl.kind share --trust_region.mode stepwise --update.updates_per_rollout 1", "no gradient with"),
    ("--update.deal clips --update.updates_per_rollout 8", ""),
    ("--update.deal clips --update.updates_per_rollout 9", "8 trained clips are too few"),
    ("--update.deal clips --update.repeat true", "does not go with update.repeat true"),
    ("--surrogate.kind kl_mask --surrogate.centred scaled", "kl_mask has none of"),
    ("--rollout.after_steps 4", "rollout.after_steps needs a window"),
    ("--rollout.before_steps 2", "rollout.before_steps needs a window"),
    ("--rollout.ray.workers 3", "set rollout.on ray"),
    ("--rollout.on ray", "model.lora null"),
    (f"{RAY} --rollout.staleness 1 --optimizer.max_kl 1", "older than that"),
    ("--optimizer.target_kl 0.1 --optimizer.max_kl 0.1", ""),
    ("--optimizer.target_kl 0.1 --optimizer.max_kl 0.09", "is below optimizer.target_kl"),
    (
        "--objective.kind awm --objective.old_decay 0.3 --objective.old_samples false --update.updates_per_rollout 2",
        "need the rollout's weights",
    ),
    ("--data.prompts starter_eval", "is held out"),
    ("--data.prompts starter --data.eval_prompts starter", "is what is trained on"),
    ("--model.train false", "model.train must be true"),
]
OBJECTS = {"LORA": LoraSpec(rank=2)}


@pytest.mark.parametrize(("words", "said"), CASES)
def test_settings_go_together_or_are_refused(words: str, said: str, make_config) -> None:
    keys, values = words.replace("--", "").split()[::2], words.split()[1::2]
    asked = {key: OBJECTS.get(value, yaml.safe_load(value)) for key, value in zip(keys, values, strict=True)}
    if said:
        with pytest.raises(ValueError, match=re.escape(said)):
            changed(make_config(), asked)
    else:
        changed(make_config(), asked)


def test_the_option_tables_are_those_of_the_code() -> None:
    assert docs_options.section() in docs_options.DOCUMENT.read_text(), "run: python tests/training/docs_options.py"


def test_every_metric_is_in_the_glossary(make_config, make_trainer) -> None:
    text = docs_options.DOCUMENT.read_text()
    known = set(re.findall(r"`([a-z]+/[\w/<>]+)`", text)) | set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
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
