"""Settings that do not go together are refused by name, and their neighbours that do are taken."""

from __future__ import annotations

import pytest

from sage_grpo.configure import parse
from sage_grpo.training.config import TrainConfig

SIGMAS = "--model.sigmas [1.0,0.9,0.8,0.5,0.2] --evaluate.steps 5"
DRAWN = "--rollout.window.kind drawn"
CASES = [
    ("--profile 2", ""),
    ("--profile 3", "use at most 2"),
    ("--evaluate.early [3]", ""),
    ("--evaluate.early [4]", "early 4 is never reached"),
    (SIGMAS, ""),
    (f"{SIGMAS} --rollout.steps 4", "does not go with rollout.steps 4"),
    (f"{SIGMAS} --evaluate.steps 4", "does not go with evaluate.steps 4"),
    (f"{SIGMAS} --rollout.shift 2", "does not go with rollout.shift 2"),
    (f"{SIGMAS} --evaluate.solver checkpoint", "does not go with evaluate.solver checkpoint"),
    ("--kl.kind share --trust_region.mode none", "so that there is no KL"),
    ("--kl.kind share --trust_region.mode stepwise", ""),
    ("--kl.kind share --trust_region.mode stepwise --update.updates_per_rollout 1", "no gradient with"),
    ("--kl.kind share --trust_region.mode fixed --update.updates_per_rollout 1", ""),
    (
        "--kl.kind share --trust_region.mode stepwise --trust_region.estimator log_ratio --update.updates_per_rollout 1",
        "",
    ),
    ("--update.deal clips --update.updates_per_rollout 8", ""),
    ("--update.deal clips --update.updates_per_rollout 9", "8 trained clips are too few"),
    ("--update.deal clips --update.repeat true", "does not go with update.repeat true"),
    ("--surrogate.kind kl_mask --surrogate.centred scaled", "kl_mask has none of"),
    ("--surrogate.kind kl_mask --surrogate.centred true", ""),
    ("--rollout.after_fraction 0.4", "rollout.after_fraction needs a window"),
    (f"{DRAWN} --rollout.after_fraction 0.4", ""),
    (f"{DRAWN} --rollout.after_fraction 0.4 --rollout.after_steps 3", "the same thing twice"),
    ("--rollout.before_steps 2", "rollout.before_steps needs a window"),
    ("--rollout.cheap.negative_every 2", "rollout.cheap needs a window"),
    (f"{DRAWN} --rollout.cheap.negative_every 2", ""),
    ("--rollout.ray.workers 3", "set rollout.on ray"),
    ("--rollout.on ray", "model.lora null"),
    ('--rewards [{"name":"trainer_toys:bright","actors":1}]', "processes on a Ray cluster"),
    ('--rollout.on ray --model.lora.rank 2 --rewards [{"name":"trainer_toys:bright","actors":1}]', ""),
    ("--rollout.on ray --model.lora.rank 2 --rollout.staleness 1", ""),
    ("--rollout.on ray --model.lora.rank 2 --rollout.staleness 1 --optimizer.max_kl 1", "older than that"),
    ("--optimizer.max_lr_factor 2", "needs optimizer.target_kl"),
    ("--optimizer.max_lr_factor 2 --optimizer.target_kl 0.1 --optimizer.max_kl 0.1", ""),
    ("--optimizer.target_kl 0.1 --optimizer.max_kl 0.09", "is below optimizer.target_kl"),
    ("--data.prompts starter_eval", "is held out"),
    ("--data.prompts starter --data.eval_prompts starter", "is what is trained on"),
    ("--data.prompts starter --data.eval_prompts starter_eval", ""),
    ("--model.train false", "model.train must be true"),
]


@pytest.mark.parametrize(("words", "said"), CASES)
def test_settings_go_together_or_are_refused(words: str, said: str, make_config) -> None:
    if not said:
        assert parse(TrainConfig, words.split(), prog="train", defaults=make_config()) != make_config()
        return
    with pytest.raises(ValueError) as refused:
        parse(TrainConfig, words.split(), prog="train", defaults=make_config())
    assert said in str(refused.value)
