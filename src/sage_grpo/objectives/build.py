"""The objective that a configuration names."""

from __future__ import annotations

from dataclasses import fields

from sage_grpo.config.ranges import faults
from sage_grpo.objectives.base import Objective
from sage_grpo.objectives.matching import Awm, Nft
from sage_grpo.objectives.options import ObjectiveSpec, SurrogateConfig
from sage_grpo.objectives.policy_gradient import PolicyGradient
from sage_grpo.objectives.preference import Preference
from sage_grpo.objectives.reward_gradient import RewardGradient
from sage_grpo.objectives.supervised import Supervised
from sage_grpo.utils.imports import import_object
from sage_grpo.utils.suggest import did_you_mean

OBJECTIVES: dict[str, type[Objective]] = {
    "surrogate": PolicyGradient,
    "nft": Nft,
    "awm": Awm,
    "dpo": Preference,
    "sft": Supervised,
    "gradient": RewardGradient,
}


def find_objective(kind: str) -> type[Objective]:
    if ":" not in kind:
        return OBJECTIVES[kind]
    found = import_object(kind, "objective.kind")
    if not (isinstance(found, type) and issubclass(found, Objective)):
        raise ValueError(
            f"objective.kind {kind!r} is not an objective: it must be a subclass of sage_grpo.objectives.base.Objective; see docs/extending.md."
        )
    if found.loss is Objective.loss:
        raise ValueError(f"objective.kind {kind!r} has no loss(self, step); see docs/extending.md.")
    if found.samples == "sde" and found.log_prob is not Objective.log_prob:
        raise ValueError(
            f"objective.kind {kind!r} has a log_prob of its own, but rollouts record the sampler's: the first ratio would not be 1. Leave log_prob "
            "out, or learn from noised clips (a subclass of NoisedClips)."
        )
    return found


def build(spec: ObjectiveSpec, surrogate: SurrogateConfig | None = None) -> Objective:
    kind = find_objective(spec.kind)
    known = [one.name for one in fields(kind) if one.name not in ("spec", "surrogate")]
    for name in spec.options:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ValueError(
                f"objective.options: {spec.kind} has no option {name!r}; {takes}.{did_you_mean(name, known)}"
            )
    wrong = list(faults(kind, spec.options, "objective.options."))
    if wrong:
        raise ValueError(wrong[0])
    return kind(spec=spec, surrogate=surrogate or SurrogateConfig(), **spec.options)
