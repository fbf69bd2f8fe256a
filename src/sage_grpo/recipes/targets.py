"""Targets: a model and the format that it is trained in. Each target is a whole configuration with SAGE's settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from sage_grpo.models.spec import LoraSpec, ModelSpec
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.samplers.kernels import KernelSpec
from sage_grpo.training.config import (
    AnchorConfig,
    BatchConfig,
    DataConfig,
    EvalConfig,
    KeepConfig,
    OptimizerConfig,
    RolloutConfig,
    SurrogateConfig,
    TrainConfig,
    UpdateConfig,
)
from sage_grpo.training.kl_coefficient import KlCoefficient

T = TypeVar("T")


def using(config: T, options: dict[str, Any]) -> T:
    """The configuration with other values of some options, by their dotted names."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in options.items():
        name, _, rest = key.partition(".")
        groups.setdefault(name, {})[rest] = value
    values = {name: inner[""] if "" in inner else using(getattr(config, name), inner) for name, inner in groups.items()}
    return replace(config, **values)  # type: ignore[type-var]


def shapes() -> TrainConfig:
    """The included miniature model; a CPU is enough, in minutes."""
    return TrainConfig(
        iterations=45,
        model=ModelSpec(deterministic=True),
        rewards=[RewardSpec(name="shapes", weights={"TA": 1.0, "MQ": 0.5, "VQ": 0.5}, batch_size=0)],
        batch=BatchConfig(prompts=4, group_size=12, micro_batch=12),
        kernel=KernelSpec(name="sage", eta=0.5),
        rollout=RolloutConfig(steps=6),
        update=UpdateConfig(updates_per_rollout=2, step_fraction=0.6),
        surrogate=SurrogateConfig(clip_scale=0.3),
        kl=KlCoefficient(kind="two_stage"),
        # Gradient norms here are 0.3 to 3: the clip is for outliers.
        optimizer=OptimizerConfig(lr=5e-5, weight_decay=0.0, betas=(0.9, 0.99), max_grad_norm=10.0),
        evaluate=EvalConfig(every=25, prompts=64, steps=20),
        keep=KeepConfig(checkpoint_every=10, videos_every=25),
    )


def hunyuan15() -> TrainConfig:
    """SAGE-GRPO on the paper's model: HunyuanVideo-1.5 480p text-to-video, VideoAlign; full fine-tuning on many GPUs.

    Guidance 6, shift 5, 81 frames and 24 fps are the checkpoint's own. The size is not: the released code's "480p" is
    352 x 624 for training, while the checkpoint is made for 480 x 848.
    """
    return TrainConfig(
        iterations=200,
        model=ModelSpec(
            path="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v", dtype="bfloat16", height=352, width=624
        ),
        rewards=[videoalign()],
        data=DataConfig(prompts="prompts.txt"),
        batch=BatchConfig(prompts=16, group_size=4, micro_batch=1),
        rollout=RolloutConfig(steps=20, storage="bfloat16"),
        update=UpdateConfig(updates_per_rollout=2),
        optimizer=OptimizerConfig(lr=1e-5, weight_decay=0.01, max_grad_norm=1.0),
        evaluate=EvalConfig(every=20, prompts=32),
    )


def hunyuan15_official() -> TrainConfig:
    """The settings of the released scripts, with their errors fixed; docs/from-official.md lists every departure."""
    config = hunyuan15()
    return replace(
        config,
        iterations=10000,
        seed=42,
        surrogate=SurrogateConfig(clip_range=1e-4),
        kl=KlCoefficient(kind="paper", target=1e-5),  # it compares the KL with its own largest coefficient
        anchor=AnchorConfig(every=10, offload=True),
        update=replace(config.update, updates_per_rollout=1),
        optimizer=OptimizerConfig(kind="muon", lr=1e-5, weight_decay=0.01, max_grad_norm=1.0),
        evaluate=EvalConfig(every=100, prompts=32, steps=40, seed=930),
        keep=KeepConfig(checkpoint_every=100),
    )


def hunyuan15_lora() -> TrainConfig:
    """HunyuanVideo-1.5 on one GPU: a LoRA, fewer rollouts, half of the steps trained."""
    small = {"batch.prompts": 4, "update.step_fraction": 0.5, "optimizer.lr": 1e-4, "model.lora": LoraSpec(rank=32)}
    # An iteration takes half an hour on one GPU; an adapter's checkpoint is 2 GB.
    return using(hunyuan15(), {**small, "keep.checkpoint_every": 1})


def wan() -> TrainConfig:
    """Wan 2.1 1.3B text-to-video at 480 x 832, 81 frames (guidance 5, shift 3, 16 fps): a LoRA on one GPU."""
    model = {"model.path": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "model.height": None, "model.width": None}
    return using(hunyuan15_lora(), model)


def wan22() -> TrainConfig:
    """Wan 2.2 A14B text-to-video at 480 x 832, 81 frames, both experts: a LoRA of each, on eight GPUs.

    Guidance 4 at high and 3 at low noise is what its authors sample with; the checkpoint itself says neither.
    """
    model = {"model.path": "Wan-AI/Wan2.2-T2V-A14B-Diffusers", "model.expert": "both"}
    guidance = {"model.guidance_scale": 4.0, "model.guidance_scale_2": 3.0}
    return using(wan(), {**model, **guidance, "batch.prompts": 8})


def ltx2() -> TrainConfig:
    """LTX-2 (19B) with sound at 512 x 768, 121 frames: a LoRA on one GPU of 80 GB.

    VideoAlign looks and CLAP listens. Training runs without guidance, which would be up to four passes a step; evaluation has it.
    """
    rewards = [videoalign(), RewardSpec(name="clap", options={"model": "laion/clap-htsat-unfused"})]
    return using(wan(), {"model.path": "Lightricks/LTX-2", "model.guidance_in_training": False, "rewards": rewards})


def videoalign() -> RewardSpec:
    """VideoAlign with the paper's alignment-focused weights (setting B), which are the released code's as well."""
    files = {"checkpoint": "ckpts/VideoReward", "template": "ckpts/prompt_template.py"}
    options = {**files, "base": "Qwen/Qwen2-VL-2B-Instruct"}
    return RewardSpec(name="videoalign", weights={"VQ": 0.5, "MQ": 0.5, "TA": 1.0}, options=options)


TARGETS: dict[str, Callable[[], TrainConfig]] = {
    target.__name__: target for target in (shapes, hunyuan15, hunyuan15_lora, wan, wan22, ltx2)
}
WHOLE: dict[str, Callable[[], TrainConfig]] = {"hunyuan15/official": hunyuan15_official}
"""Recipes that are not a target with a method."""
