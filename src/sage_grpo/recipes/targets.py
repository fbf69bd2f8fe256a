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
WAN_NEGATIVE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，"
    "畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)
"""The negative prompt of Wan's own sampling script."""


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


def wan22_5b() -> TrainConfig:
    """Wan 2.2 5B, from text or a first frame, at its own 704 x 1280, 121 frames, 24 fps: a LoRA on one GPU of 48 GB.

    The negative prompt is its authors'. `wan` and `wan22` have none, so that runs of earlier versions go on.
    """
    return using(wan(), {"model.path": "Wan-AI/Wan2.2-TI2V-5B-Diffusers", "model.negative_prompt": WAN_NEGATIVE})


def sd35() -> TrainConfig:
    """Stable Diffusion 3.5 Medium, pictures of 512 x 512 (guidance 4.5, its card's), PickScore: a LoRA on one GPU of 24 GB."""
    return _pictures("stabilityai/stable-diffusion-3.5-medium", {"model.guidance_scale": 4.5})


def flux() -> TrainConfig:
    """FLUX.1-dev, pictures of 512 x 512, PickScore: a LoRA on one GPU of 48 GB."""
    return _pictures("black-forest-labs/FLUX.1-dev", {})


def qwen_image() -> TrainConfig:
    """Qwen-Image, pictures of 512 x 512, PickScore: a LoRA on one GPU of 48 GB."""
    return _pictures("Qwen/Qwen-Image", {"batch.micro_batch": 2})


def _pictures(path: str, options: dict[str, Any]) -> TrainConfig:
    """A LoRA of an image model: clips of one frame, more of them, and a reward of single frames."""
    reward = RewardSpec(name="pickscore", options={"model": "yuvalkirstain/PickScore_v1"})
    size = {"model.frames": 1, "model.height": 512, "model.width": 512}
    batch = {"batch.prompts": 8, "batch.group_size": 8, "batch.micro_batch": 4}
    return using(hunyuan15_lora(), {"model.path": path, **size, **batch, "rewards": [reward], **options})


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
    target.__name__: target
    for target in (shapes, hunyuan15, hunyuan15_lora, wan, wan22, wan22_5b, ltx2, sd35, flux, qwen_image)
}
WHOLE: dict[str, Callable[[], TrainConfig]] = {"hunyuan15/official": hunyuan15_official}
"""Recipes that are not a target with a method."""
