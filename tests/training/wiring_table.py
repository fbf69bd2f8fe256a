"""What must change when a field of TrainConfig changes: a row for every field whose effect the toy model shows, and a place for every other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sage_grpo.rewards.spec import Gate


@dataclass(frozen=True)
class Row:
    """One field, a value for it that is not the base's, and the phase that must change."""

    to: Any
    """The other value."""
    changes: str = ""
    """The first phase of training that changes: rollout, reward, advantage, gradient, weights, average (the exported weights), or
    nothing (to the bit)."""
    evaluation: bool = False
    """Whether the figures of an evaluation at the first weights change; where not, they must be the same."""
    base: dict[str, Any] = field(default_factory=dict)
    """Other fields that make this one matter, the same in both runs. The field itself may be here with its first value."""


GUIDED = {"model.family": "trainer_zoo.guided"}
WINDOW = {"rollout.window.kind": "fixed", "rollout.window.length": 2, "rollout.window.start": 1}
SLIDING = {**WINDOW, "rollout.window.kind": "sliding", "rollout.window.every": 1, "rollout.deterministic_last": False}
DRAWN = {"rollout.window.kind": "drawn", "rollout.window.length": 2, "rollout.deterministic_last": False}
NFT = {"kernel.name": "ode", "surrogate.equalize": False, "objective.kind": "nft"}
DPO = {"trust_region.mode": "fixed", **NFT, "objective.kind": "dpo"}
BY_GRADIENT = {
    "kernel.name": "ode",
    "surrogate.equalize": False,
    "trust_region.mode": "none",
    "update.updates_per_rollout": 1,
    "rewards[].name": "trainer_toys:bright",
    "rewards[].label": "mine",
    "rewards[].weights": {},
    "rewards[].options": {"differentiable": True},
    "objective.kind": "gradient",
    "objective.draw": "last",
    "objective.levels": 2,
}

GATED = {"rewards[].gate": Gate(part="texture", floor=9.0, below=-9.0)}

RUN = {
    "iterations": Row(6, "weights", base={"optimizer.decay": "linear"}),
    "seed": Row(1, "rollout"),
    "max_failed_fraction": Row(
        0.1, "reward", base={"rewards[].name": "trainer_toys:bright_but", "rewards[].weights": {}, "rewards[].options": {"bad": [5]}}
    ),
    "rewards[].name": Row("trainer_toys:other_parts", "reward", evaluation=True),
    "rewards[].weights": Row({"level": 1.0, "texture": -2.0}, "reward", evaluation=True),
    "rewards[].metric_only": Row(True, "reward", evaluation=True),
    "rewards[].options": Row({"offset": 1.0}, "reward", evaluation=True),
    "rewards[].schedule": Row([[0, 0.5], [4, 1.0]], "reward"),
    "rewards[].gate": Row(Gate(part="texture", floor=9.0, below=-9.0), "reward", evaluation=True),
    "rewards[].gate.part": Row("bright", "reward", evaluation=True, base=GATED),
    "rewards[].gate.floor": Row(-9.0, "reward", evaluation=True, base=GATED),
    "rewards[].gate.below": Row(-8.0, "reward", evaluation=True, base=GATED),
    "rewards[].gate.only": Row(["texture"], "reward", evaluation=True, base=GATED),
    "data.prompts": Row("OTHER_PROMPTS", "rollout"),
    "data.clips": Row("EXAMPLES", "rollout", base=DPO),
    "data.eval_prompts": Row("OTHER_PROMPTS", evaluation=True),
    "batch.prompts": Row(3, "rollout"),
    "batch.group_size": Row(3, "rollout"),
    "batch.trained_fraction": Row(0.5, "gradient"),
    "kernel.name": Row("flow", "rollout"),
    "kernel.eta": Row(0.6, "rollout"),
    "kernel.sigma_max": Row(0.9, "rollout"),
    "rollout.steps": Row(6, "rollout"),
    "rollout.shift": Row(2.0, "rollout"),
    "rollout.window.kind": Row("fixed", "rollout", base={"rollout.window.length": 2}),
    "rollout.window.start": Row(2, "rollout", base=WINDOW),
    "rollout.window.length": Row(3, "rollout", base=WINDOW),
    "rollout.window.stop": Row(3, "rollout", base=SLIDING),
    "rollout.window.every": Row(2, "rollout", base=SLIDING),
    "rollout.deterministic_last": Row(False, "rollout"),
    "rollout.same_noise": Row(True, "rollout"),
    "rollout.solver": Row("ab2", "rollout", base={**WINDOW, "rollout.window.start": 2}),
    "rollout.before_steps": Row(2, "rollout", base=WINDOW),
    "rollout.after_steps": Row(1, "rollout", base=WINDOW),
    "rollout.window.at": Row([1], "rollout", base=DRAWN),
    "rollout.window.weights": Row([1.0, 50.0, 1.0], "rollout", base={**DRAWN, "rollout.window.at": [0, 1, 2]}),
    "rollout.storage": Row("bfloat16", "rollout"),
    "rollout.staleness": Row(1, "gradient"),
    "advantage.scale": Row("none", "advantage"),
    "advantage.decoupled": Row(True, "advantage"),
    "advantage.clip": Row(0.5, "advantage"),
    "objective.kind": Row("awm", "gradient", base=NFT),
    "objective.levels": Row(3, "gradient", base=NFT),
    "objective.draw": Row("strata", "gradient", base={**NFT, "objective.levels": 2}),
    "objective.weight": Row("adaptive", "gradient", base=NFT),
    "objective.beta": Row(0.3, "gradient", base=NFT),
    "objective.saturation": Row(3.0, "gradient", base=NFT),
    "objective.credit": Row("exact", "gradient", base=BY_GRADIENT),
    "objective.predict": Row(0.6, "rollout", base={**BY_GRADIENT, "objective.levels": 1}),
    "objective.old_decay": Row(0.5, "gradient", base=NFT),
    "objective.old_ramp": Row(5, "gradient", base={**NFT, "objective.old_decay": 0.5}),
    "objective.old_samples": Row(False, "gradient", base={**NFT, "objective.old_decay": 0.5}),
    "surrogate.kind": Row("kl_mask", "gradient", base={"surrogate.kl_mask_scale": 1e-9}),
    "surrogate.centred": Row(True, "gradient"),
    "surrogate.clip_scale": Row(1e-6, "gradient"),
    "surrogate.clip_range": Row(1e-7, "gradient"),
    "surrogate.kl_mask_scale": Row(1e-9, "gradient", base={"surrogate.kind": "kl_mask", "surrogate.kl_mask_scale": 1e6}),
    "surrogate.equalize": Row(False, "gradient"),
    "surrogate.equalize_by": Row("std", "gradient"),
    "surrogate.equalize_cap": Row(0.5, "gradient"),
    "trust_region.mode": Row("moving", "gradient"),
    "trust_region.beta_position": Row(2.0, "gradient"),
    "trust_region.beta_velocity": Row(2.0, "gradient"),
    "kl.kind": Row("constant", "gradient"),
    "kl.lambda_min": Row(0.5, "gradient"),
    "kl.lambda_max": Row(2.0, "gradient"),
    "kl.warmup_updates": Row(2, "gradient"),
    "kl.target": Row(1e-9, "gradient", base={"kl.kind": "ppo", "kl.warmup_updates": 0, "kl.lambda_min": 1e-3, "kl.target": 1e3}),
    "kl.share": Row(0.5, "gradient", base={"kl.kind": "share"}),
    "kl.lambda_cap": Row(0.2, "gradient", base={"kl.kind": "share"}),
    "anchor.every": Row(1, "gradient"),
    "update.updates_per_rollout": Row(1, "gradient"),
    "update.step_fraction": Row(0.5, "gradient"),
    "update.deal": Row("clips", "gradient"),
    "update.repeat": Row(True, "gradient"),
    "update.permute_steps": Row(False, "gradient"),
    "optimizer.kind": Row("muon", "weights"),
    "optimizer.lr": Row(2e-3, "weights"),
    "optimizer.target_kl": Row(1e-6, "weights"),
    "optimizer.max_kl": Row(1e-6, "gradient"),  # acts after the optimizer: seen first in the next gradient
    "optimizer.betas": Row((0.5, 0.999), "weights"),
    "optimizer.eps": Row(1e-3, "weights"),
    "optimizer.weight_decay": Row(0.5, "weights"),
    "optimizer.max_grad_norm": Row(1e-6, "gradient"),
    "optimizer.warmup_updates": Row(4, "weights"),
    "optimizer.decay": Row("cosine", "weights"),
    "optimizer.ema": Row(0.9, "average"),
    "evaluate.prompts": Row(3, evaluation=True),
    "evaluate.per_prompt": Row(2, evaluation=True),
    "evaluate.steps": Row(5, evaluation=True),
    "evaluate.solver": Row("ab2", evaluation=True),
    "evaluate.seed": Row(7, evaluation=True),
}  # fmt: skip

MODEL = {
    "model.family": Row("trainer_zoo.guided", "rollout", evaluation=True),
    "model.guidance_scale": Row(3.0, "rollout", evaluation=True, base=GUIDED),
    "model.negative_prompt": Row("ugly", "rollout", evaluation=True, base=GUIDED),
    "model.guidance_in_training": Row(False, "rollout", base=GUIDED),
    "model.negative_gradient": Row(False, "gradient", base=GUIDED),
    "model.shift": Row(2.0, "rollout", evaluation=True),
}

ROWS: dict[str, Row] = {**RUN, **MODEL}

ELSEWHERE = {
    "run": "out resume allow_changes log.sinks data.encode_ahead evaluate.every evaluate.early keep.",
    "callbacks": "log. evaluate.show",
    "plan": "model.memory update.gradient_checkpointing",
    "workers": "rollout.on rollout.ray.",
    "training/test_iteration_formulas.py": "rollout.offload anchor.offload",
    "rewards": """rewards[].label rewards[].batch_size rewards[].device rewards[].overlap rewards[].try_out""",
    "training/test_focus.py": "rewards[].judges rollout.explore",
    "training/test_branching.py": "batch.micro_batch rollout.share",
    "training/test_placing.py": "model.deterministic",
    "objectives": "kl.window objective.options",
    "health": "sentinel.",
    "distributed": "parallel.",
    "models": """model.path model.revision model.dtype model.vae_dtype model.device model.train model.lora model.lora. model.guidance_scale_2
        model.frames model.height model.width model.fps model.sigmas model.adapters[]. model.attention model.compile
        model.expert model.vae_slicing model.vae_tiling model.options model.cache""",
}
"""Tests that see a field which the toy model cannot show; with a dot at its end, all fields of a part."""


def changed(part: Any, values: Mapping[str, Any]) -> Any:
    """A configuration with other values, all at once; `rewards[].name` changes the first reward's."""
    own, inner = {}, {}
    for key, value in values.items():
        name, _, rest = key.partition(".")
        if rest:
            inner.setdefault(name, {})[rest] = value
        else:
            own[name] = value
    for name, more in inner.items():
        if name.endswith("[]"):
            first, *others = getattr(part, name[:-2])
            own[name[:-2]] = [changed(first, more), *others]
        else:
            own[name] = changed(getattr(part, name), more)
    return replace(part, **own)
