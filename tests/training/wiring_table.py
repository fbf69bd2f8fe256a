"""What must change when a field of TrainConfig changes: one row for every field. A field without a row fails the tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sage_grpo.models.spec import AdapterSpec, LoraSpec


@dataclass(frozen=True)
class Row:
    """One field, and a value for it that is not the base's. What must change follows from what the field says it affects: a record changes
    what the run leaves on disk and nothing else; anything else that is no matter of speed or machine, the phase that stands here."""

    to: Any
    """The other value."""
    changes: str = ""
    """The first phase of training that changes: rollout, reward, advantage, gradient, weights, average (the exported weights), or
    nothing (to the bit)."""
    evaluation: bool = False
    """Whether the figures of an evaluation at the first weights change; where not, they must be the same."""
    base: dict[str, Any] = field(default_factory=dict)
    """Other fields that make this one matter, the same in both runs. The field itself may be here with its first value."""


@dataclass(frozen=True)
class Seen(Row):
    """A field whose effect the toy model cannot show: what it changes is seen where it is used, and said in `why`."""

    look: str = ""
    """Which look of test_wiring.py sees it."""
    kind: str = ""
    """Tiny checkpoint that it is seen on."""
    why: str = ""
    """Needed where the field affects values; else what it affects is the reason."""


ON_RAY = {"model.lora": LoraSpec(rank=1), "rollout.on": "ray"}
GUIDED = {"model.family": "trainer_zoo.guided"}
SOUNDING = {"model.height": 32, "model.width": 32}
WINDOW = {"rollout.window.kind": "fixed", "rollout.window.length": 2, "rollout.window.start": 1}
SLIDING = {**WINDOW, "rollout.window.kind": "sliding", "rollout.window.every": 1, "rollout.deterministic_last": False}
DRAWN = {"rollout.window.kind": "drawn", "rollout.window.length": 2, "rollout.deterministic_last": False}
GIVEN = {**WINDOW, "rollout.steps": 10}
FIRST_BLOCK = GIVEN | {"rollout.cheap.cache": "first_block", "rollout.cheap.cache_threshold": 10.0}
FEEDBACK = {"kl.kind": "ppo", "kl.warmup_updates": 0, "kl.lambda_min": 1e-3}
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
FAULT = "matters when something is wrong; tests/sentinel/test_sentinel.py and test_sentinel_run.py"

RUN = {
    "out": Seen("elsewhere", look="folder"),
    "iterations": Row(6, "weights", base={"optimizer.decay": "linear"}),
    "seed": Row(1, "rollout"),
    "resume": Seen("never", look="second_start", why="matters when the folder holds a run"),
    "allow_changes": Seen(["optimizer.lr"], look="changed_start", why="matters when the folder holds a run"),
    "max_failed_fraction": Row(
        0.1, "reward", base={"rewards[].name": "trainer_toys:bright_but", "rewards[].weights": {}, "rewards[].options": {"bad": [5]}}
    ),
    "rewards[].name": Row("wiring_rewards:other_parts", "reward", evaluation=True),
    "rewards[].label": Seen("mine", look="reward_names", why="a name in the log"),
    "rewards[].weights": Row({"level": 1.0, "texture": -2.0}, "reward", evaluation=True),
    "rewards[].judges": Seen(
        "audio", look="learned_parts", kind="ltx2", base=SOUNDING, why="the toy model has one part; see test_focus.py"
    ),
    "rewards[].metric_only": Row(True, "reward", evaluation=True),
    "rewards[].standardize": Row({"level": [0.5, 0.1]}, "reward", evaluation=True),
    "rewards[].options": Row({"offset": 1.0}, "reward", evaluation=True),
    "rewards[].batch_size": Seen(2, look="reward_calls"),
    "rewards[].device": Seen("meta", look="reward_device", why="there is one device here"),
    "rewards[].overlap": Seen(True, look="reward_thread"),
    "rewards[].isolate_failures": Seen(False, look="calls_after_a_failure", why="how often a reward that fails is called"),
    "rewards[].try_out": Seen(False, look="tried_out", why="a call before the run"),
    "rewards[].actors": Seen(2, look="judges", base=ON_RAY),
    "rewards[].actor_gpus": Seen(0.5, look="judges", base=ON_RAY | {"rewards[].actors": 1}),
    "rewards[].actor_cpus": Seen(2.0, look="judges", base=ON_RAY | {"rewards[].actors": 1}),
    "data.prompts": Row("OTHER_PROMPTS", "rollout"),
    "data.clips": Row("EXAMPLES", "rollout", base=DPO),
    "data.formats": Seen(
        ["2x4x8"],
        look="learned_formats",
        base=DPO | {"data.clips": "pairs.jsonl"},
        why="the toy model has one format; see test_given_formats.py",
    ),
    "data.eval_prompts": Row("OTHER_PROMPTS", evaluation=True),
    "data.encode_ahead": Seen(1, look="encoded"),
    "batch.prompts": Row(3, "rollout"),
    "batch.group_size": Row(3, "rollout"),
    "batch.trained_fraction": Row(0.5, "gradient"),
    "batch.micro_batch": Seen(2, look="passes", why="memory only; values to rounding are in tests/training/test_trainer_ratio.py"),
    "kernel.name": Row("flow", "rollout"),
    "kernel.eta": Row(0.6, "rollout"),
    "kernel.sigma_max": Row(0.9, "rollout"),
    "rollout.steps": Row(6, "rollout"),
    "rollout.shift": Row(2.0, "rollout"),
    "rollout.window.kind": Row("fixed", "rollout", base={"rollout.window.length": 2}),
    "rollout.window.start": Row(2, "rollout", base=WINDOW),
    "rollout.window.length": Row(3, "rollout", base=WINDOW),
    "rollout.window.stop": Row(3, "rollout", base=SLIDING),
    "rollout.window.stride": Row(2, "rollout", base=SLIDING),
    "rollout.window.every": Row(2, "rollout", base=SLIDING),
    "rollout.deterministic_last": Row(False, "rollout"),
    "rollout.same_noise": Row(True, "rollout"),
    "rollout.share": Seen(False, look="passes", base={"rollout.same_noise": True}, why="time only"),
    "rollout.explore": Seen(
        ["audio"], look="learned_parts", kind="ltx2", base=SOUNDING, why="the toy model has one part; see test_focus.py"
    ),
    "rollout.solver": Row("ab2", "rollout", base={**WINDOW, "rollout.window.start": 2}),
    "rollout.before_steps": Row(2, "rollout", base=WINDOW),
    "rollout.after_steps": Row(1, "rollout", base=WINDOW),
    "rollout.after_fraction": Row(0.5, "rollout", base=WINDOW),
    "rollout.cheap.guidance": Row((0.3, 0.7), "rollout", base=GIVEN | GUIDED),
    "rollout.cheap.negative_every": Row(2, "rollout", base=GIVEN | GUIDED),
    "rollout.cheap.cache": Seen("taylorseer", look="given_steps", kind="wan_t2v", base=GIVEN, why="the toy has no caches"),
    "rollout.cheap.cache_threshold": Seen(1e-9, look="given_steps", kind="wan_t2v", base=FIRST_BLOCK, why="the toy has no caches"),
    "rollout.cheap.cache_every": Seen(
        4, look="given_steps", kind="wan_t2v", base=GIVEN | {"rollout.cheap.cache": "taylorseer"}, why="the toy has no caches"
    ),
    "rollout.cheap.attention": Seen("_native_math", look="given_steps", kind="wan_t2v", base=GIVEN, why="the toy has no attention"),
    "rollout.window.at": Row([1], "rollout", base=DRAWN),
    "rollout.window.weights": Row([1.0, 50.0, 1.0], "rollout", base={**DRAWN, "rollout.window.at": [0, 1, 2]}),
    "rollout.window.branches": Row(2, "rollout", base=DRAWN),
    "rollout.storage": Row("bfloat16", "rollout"),
    "rollout.offload": Seen(True, look="storage"),
    "rollout.staleness": Row(1, "gradient"),
    "rollout.on": Seen("ray", look="crew", base={"model.lora": LoraSpec(rank=1)}),
    "rollout.ray.address": Seen("127.0.0.1:6379", look="crew", base=ON_RAY),
    "rollout.ray.workers": Seen(3, look="crew", base=ON_RAY),
    "rollout.ray.gpus": Seen(0.5, look="crew", base=ON_RAY),
    "rollout.ray.cpus": Seen(2.0, look="crew", base=ON_RAY),
    "rollout.ray.scores": Seen("trainer", look="crew", base=ON_RAY),
    "rollout.ray.limit": Seen(1.0, look="crew", base=ON_RAY),
    "rollout.ray.patience": Seen(1.0, look="crew", base=ON_RAY),
    "advantage.scale": Row("none", "advantage"),
    "advantage.decoupled": Row(True, "advantage"),
    "advantage.clip": Row(0.5, "advantage"),
    "objective.kind": Row("awm", "gradient", base=NFT),
    "objective.levels": Row(3, "gradient", base=NFT),
    "objective.draw": Row("uniform", "gradient", base=NFT),
    "objective.weight": Row("sigma", "gradient", base=NFT),
    "objective.beta": Row(0.3, "gradient", base=NFT),
    "objective.saturation": Row(3.0, "gradient", base=NFT),
    "objective.credit": Row("exact", "gradient", base=BY_GRADIENT),
    "objective.predict": Row(0.6, "rollout", base={**BY_GRADIENT, "objective.levels": 1}),
    "objective.frames": Row(1, "gradient", base=BY_GRADIENT),
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
    "trust_region.estimator": Row("log_ratio", "gradient"),
    "kl.kind": Row("constant", "gradient"),
    "kl.lambda_min": Row(0.5, "gradient"),
    "kl.lambda_max": Row(2.0, "gradient"),
    "kl.warmup_updates": Row(2, "gradient"),
    "kl.target": Row(1e-9, "gradient", base={**FEEDBACK, "kl.target": 1e3}),
    "kl.window": Seen(1, look="feedback", why="the toy's KL hardly moves within a few updates"),
    "kl.share": Row(0.5, "gradient", base={"kl.kind": "share"}),
    "kl.lambda_cap": Row(0.2, "gradient", base={"kl.kind": "share"}),
    "anchor.every": Row(1, "gradient"),
    "anchor.skip_below": Row(0.99, "gradient", base={"trust_region.mode": "fixed", "anchor.every": 1}),
    "anchor.offload": Seen(True, look="anchor"),
    "update.updates_per_rollout": Row(1, "gradient"),
    "update.step_fraction": Row(0.5, "gradient"),
    "update.deal": Row("clips", "gradient"),
    "update.repeat": Row(True, "gradient"),
    "update.permute_steps": Row(False, "gradient"),
    "update.gradient_checkpointing": Seen(True, look="checkpointing", why="memory only; tests/models compares the gradients"),
    "optimizer.kind": Row("muon", "weights"),
    "optimizer.lr": Row(2e-3, "weights"),
    "optimizer.target_kl": Row(1e-6, "weights"),
    "optimizer.max_lr_factor": Row(9.0, "weights", base={"optimizer.target_kl": 1e3}),
    "optimizer.max_kl": Row(1e-6, "gradient"),  # acts after the optimizer: seen first in the next gradient
    "optimizer.betas": Row((0.5, 0.999), "weights"),
    "optimizer.eps": Row(1e-3, "weights"),
    "optimizer.weight_decay": Row(0.5, "weights"),
    "optimizer.max_grad_norm": Row(1e-6, "gradient"),
    "optimizer.warmup_updates": Row(4, "weights"),
    "optimizer.decay": Row("cosine", "weights"),
    "optimizer.ema": Row(0.9, "average"),
    "evaluate.every": Row(1),
    "evaluate.early": Row([1]),
    "evaluate.prompts": Row(3, evaluation=True),
    "evaluate.per_prompt": Row(2, evaluation=True),
    "evaluate.steps": Row(5, evaluation=True),
    "evaluate.solver": Row("ab2", evaluation=True),
    "evaluate.seed": Row(7, evaluation=True),
    "evaluate.show": Row(2),
    "keep.checkpoint_every": Row(3, base={"keep.checkpoints": 4}),
    "keep.checkpoints": Row(1),
    "keep.videos_every": Row(1),
    "keep.videos": Row(3, base={"keep.videos_every": 2}),
    "keep.video_megabytes": Row(0.003, base={"keep.videos_every": 1}),
    "profile": Row(1),
    "sentinel.action": Seen("stop", look="interventions", why=FAULT),
    "sentinel.patience": Seen(1, look="interventions", why=FAULT),
    "sentinel.window": Seen(5, look="interventions", why=FAULT),
    "sentinel.deviations": Seen(2.0, look="interventions", why=FAULT),
    "sentinel.lost": Seen(0.9, look="interventions", why=FAULT),
    "sentinel.stderrs": Seen(90.0, look="interventions", why=FAULT),
    "sentinel.lr_factor": Seen(0.1, look="interventions", base={"sentinel.action": "lower_lr"}, why=FAULT),
    "sentinel.rollbacks": Seen(1, look="interventions", base={"sentinel.action": "rollback"}, why=FAULT),
    "log.tensorboard": Row(True),
    "log.wandb": Seen("project", look="sinks"),
    "log.trackio": Seen("project", look="sinks"),
    "log.sinks": Seen(["trainer_toys:Kept"], look="own_sinks"),
    "log.progress": Seen(True, look="terminal"),
    "parallel.dp_replicate": Seen(2, look="layout"),
    "parallel.dp_shard": Seen(4, look="layout", base={"parallel.dp_replicate": 1, "parallel.dp_shard": 8}),
    "parallel.sp": Seen(2, look="layout"),
    "parallel.reshard": Seen(False, look="sharding"),
    "parallel.cpu_offload": Seen(True, look="sharding"),
    "parallel.sync_every_pass": Seen(True, look="sharding"),
    "parallel.async_checkpoint": Seen(True, look="writer"),
    "parallel.timeout": Seen(60.0, look="started"),
}  # fmt: skip

LORA = {"model.lora": LoraSpec(rank=2)}
FROZEN = {"model.adapters": [AdapterSpec(path="LORA")]}
MODEL = {
    "model.path": Seen("OTHER_CHECKPOINT", look="model", kind="wan_t2v", why="another network"),
    "model.revision": Seen("v2", look="download", why="a hub is asked for it"),
    "model.family": Row("trainer_zoo.guided", "rollout", evaluation=True),
    "model.dtype": Seen("bfloat16", look="model", kind="wan_t2v", why="the toy has one dtype"),
    "model.vae_dtype": Seen("bfloat16", look="model", kind="wan_t2v", why="the toy has no VAE"),
    "model.device": Seen("cuda", look="device", kind="wan_t2v", why="there is one device here"),
    "model.train": Seen(False, look="refusal", why="a run that trains nothing is refused"),
    "model.lora": Seen(LoraSpec(rank=2), look="model", kind="wan_t2v", why="the toy has none"),
    "model.lora.rank": Seen(4, look="model", kind="wan_t2v", base=LORA, why="the toy has none"),
    "model.lora.alpha": Seen(8.0, look="model", kind="wan_t2v", base=LORA, why="the toy has none"),
    "model.lora.targets": Seen(["attn1.to_q"], look="model", kind="wan_t2v", base=LORA, why="the toy has none"),
    "model.lora.seed": Seen(3, look="model", kind="wan_t2v", base=LORA, why="the toy has none"),
    "model.lora.path": Seen("SAVED_LORA", look="model", kind="wan_t2v", base=LORA, why="the toy has none"),
    "model.guidance_scale": Row(3.0, "rollout", evaluation=True, base=GUIDED),
    "model.guidance_scale_2": Seen(3.0, look="model", kind="wan22_t2v", why="needs two experts"),
    "model.negative_prompt": Row("ugly", "rollout", evaluation=True, base=GUIDED),
    "model.guidance_in_training": Row(False, "rollout", base=GUIDED),
    "model.negative_gradient": Row(False, "gradient", base=GUIDED),
    "model.frames": Seen(9, look="model", kind="wan_t2v", why="the toy has one format"),
    "model.height": Seen(48, look="model", kind="wan_t2v", why="the toy has one format"),
    "model.width": Seen(48, look="model", kind="wan_t2v", why="the toy has one format"),
    "model.fps": Seen(12.0, look="model", kind="wan_t2v", why="the toy has one format"),
    "model.shift": Row(2.0, "rollout", evaluation=True),
    "model.sigmas": Seen(
        [1.0, 0.9, 0.8, 0.5, 0.2],
        look="model",
        kind="wan_t2v",
        base={"evaluate.steps": 5},
        why="the toy's grid is its own",
    ),
    "model.adapters[].path": Seen("ANOTHER_LORA", look="model", kind="wan_t2v", base=FROZEN, why="the toy has none"),
    "model.adapters[].file": Seen("a.safetensors", look="model", kind="wan_t2v", base=FROZEN, why="the toy has none"),
    "model.adapters[].scale": Seen(0.5, look="model", kind="wan_t2v", base=FROZEN, why="the toy has none"),
    "model.adapters[].expert": Seen(
        "low",
        look="model",
        kind="wan22_t2v",
        base={"model.adapters": [AdapterSpec(path="LORA", expert="high")]},
        why="needs two experts",
    ),
    "model.attention": Seen(
        "_native_math", look="model", kind="wan_t2v", why="the toy has none; the values are the same"
    ),
    "model.deterministic": Seen(True, look="fixed_order", why="a CPU has one order anyway"),
    "model.memory": Seen(24.0, look="budget"),
    "model.packed": Seen(False, look="stock_passes", kind="hunyuan15_t2v", why="one family; the values are the same"),
    "model.compile": Seen(True, look="compiled", kind="wan_t2v"),
    "model.expert": Seen("low", look="model", kind="wan22_t2v", why="needs two experts"),
    "model.vae_slicing": Seen(False, look="model", kind="wan_t2v"),
    "model.vae_tiling": Seen(True, look="model", kind="wan_t2v", why="the toy has no VAE"),
    "model.decoder": Row("trainer_toys:darker", "reward"),
    "model.options": Seen({"guidance_rescale": 0.5}, look="model", kind="ltx", why="each family has its own"),
    "model.cache": Seen("OWN_CACHE", look="model", kind="wan_t2v"),
}

ROWS: dict[str, Row] = {**RUN, **MODEL}
