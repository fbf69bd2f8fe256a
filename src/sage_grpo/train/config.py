"""The whole configuration of a run: frozen, keyword-only, one default in one place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sage_grpo.flow.kernels import KernelSpec
from sage_grpo.flow.solvers import Rule, SolverName
from sage_grpo.flow.windows import Window
from sage_grpo.models.spec import ModelSpec
from sage_grpo.parallel.spec import ParallelSpec
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.rl.kl_control import KlCoefficient
from sage_grpo.rl.trust_region import TrustRegion


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}.")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How many rollouts an iteration makes. Prompts x group size is all that you state; the rest is derived."""

    prompts: int = 16
    """Prompts per iteration."""
    group_size: int = 4
    """Rollouts per prompt; advantages are relative to this group."""
    micro_batch: int = 1
    """Rollouts that go through the network together, in rollout and in updates alike (a matter of memory only)."""

    def __post_init__(self) -> None:
        _at_least(1, prompts=self.prompts, micro_batch=self.micro_batch)
        _at_least(2, group_size=self.group_size)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How rollouts are sampled."""

    steps: int = 20
    """Denoising steps."""
    shift: float | None = None
    """Shift of the noise schedule; None is the model's."""
    window: Window = Window()
    """Which steps explore."""
    deterministic_last: bool | None = None
    """Make the last step an ODE step. None: on for kernels that would leave their noise in the video; false matches the paper."""
    same_noise: bool = False
    """Start all members of a group from the same noise, so that they differ by exploration only."""
    share: bool = True
    """With same_noise: run what the members of a group have in common once, and replay a state that they share once."""
    solver: Rule = "euler"
    """Solver of the deterministic steps: euler, or ab2 (second order, at the same cost)."""
    before_steps: int | None = None
    """Deterministic steps before those that explore, where there are any; None is as `steps` has them."""
    after_steps: int | None = None
    """Deterministic steps after those that explore, where there are any; None is as `steps` has them."""
    storage: Literal["float32", "bfloat16"] = "float32"
    """Precision in which trajectories are kept; the rollout itself runs through the stored values, so ratios stay exact."""
    offload: bool = False
    """Keep trajectories in CPU memory between rollout and update."""

    def __post_init__(self) -> None:
        _at_least(1, steps=self.steps)
        for name in ("before_steps", "after_steps"):
            value = getattr(self, name)
            if value is not None:
                _at_least(1, **{f"rollout.{name}": value})
                if self.window.kind == "all":
                    raise ValueError(f"rollout.{name} needs a window: with window.kind all every step explores.")


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """How rewards become advantages."""

    scale: Literal["group", "global", "none"] = "group"
    """Divide by the group's std, by the std over all groups, or not at all."""
    decoupled: bool = False
    """Normalise every reward in its group before adding them up (GDPO)."""
    clip: float | None = 5.0
    """Largest absolute advantage."""


@dataclass(frozen=True, kw_only=True)
class SurrogateConfig:
    """The policy-gradient loss."""

    kind: Literal["clipped", "kl_mask"] = "clipped"
    """PPO's clip on the ratio, or Flow-DPPO's mask on the exact KL."""
    centred: bool = False
    """Remove the bias of the ratio: log r + KL."""
    clip_scale: float = 0.076
    """Clip range as c / sqrt(latent dimensions); the paper's 1e-4 at 480p x 81 frames is c = 0.076."""
    clip_range: float | None = None
    """Absolute clip range; overrides clip_scale."""
    kl_mask_scale: float = 1.0
    """kl_mask drops aggressive moves where KL >= kl_mask_scale / latent dimensions."""
    equalize: bool = True
    """Temporal gradient equaliser: weight steps by median(sensitivity) / sensitivity."""
    equalize_cap: float | None = None
    """Largest equaliser weight; None is no cap."""


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """How a rollout is used."""

    updates_per_rollout: int = 2
    """Optimizer updates per rollout; its trained steps are dealt out to them. With 1 the ratio is always 1, the clip never
    binds and the step-wise KL has no gradient."""
    step_fraction: float = 1.0
    """Share of the stochastic steps that is trained, drawn anew every iteration."""
    repeat: bool = False
    """Every update replays all trained steps, as PPO's epochs do, instead of its share of them."""
    permute_steps: bool = True
    """Deal steps out in random order; false goes from noise to data."""
    gradient_checkpointing: bool = False
    """Trade compute for memory in the backward pass."""

    def __post_init__(self) -> None:
        _at_least(1, updates_per_rollout=self.updates_per_rollout)
        if not 0 < self.step_fraction <= 1:
            raise ValueError(f"step_fraction must lie in (0, 1], got {self.step_fraction}.")


@dataclass(frozen=True, kw_only=True)
class AnchorConfig:
    """The reference policy of the position term."""

    every: int = 10
    """Optimizer updates between renewals (modes moving and dual; fixed never renews)."""
    offload: bool = False
    """Keep the anchor in CPU memory."""

    def __post_init__(self) -> None:
        _at_least(1, every=self.every)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning rate."""

    kind: Literal["adamw", "muon"] = "adamw"
    """AdamW, or Muon for matrices with AdamW for the rest."""
    lr: float = 1e-5
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Momentum and second-moment decay of AdamW."""
    eps: float = 1e-8
    """AdamW's epsilon. The loss is scaled by sqrt(latent dimensions), so it means the same at any resolution; the metric
    gradient/rms_over_eps says how far gradients are above it."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm. Typical norms: 0.3 to 3 for the miniature, 0.1 for HunyuanVideo-1.5 with a LoRA."""
    warmup_updates: int = 0
    """Updates of linear warm-up."""
    decay: Literal["constant", "cosine", "linear"] = "constant"
    """What the learning rate does after warm-up; it would reach 0 one update after the last."""
    ema: float | None = None
    """Decay of an exponential moving average of the weights, per update; None keeps none."""

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.max_grad_norm <= 0:
            raise ValueError(f"lr and max_grad_norm must be positive, got {self.lr} and {self.max_grad_norm}.")
        if self.ema is not None and not 0 <= self.ema < 1:
            raise ValueError(f"ema must lie in [0, 1), got {self.ema}.")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where prompts come from."""

    prompts: str = "shapes"
    """"shapes" (the embedded world's training split), or a .txt, .csv or .jsonl file."""
    eval_prompts: str | None = None
    """Held-out prompts: a file, or "shapes". None is the shapes world's held-out split, or for files no evaluation."""
    encode_ahead: int = 1024
    """Training prompts that are encoded at a time and kept in memory, per rank. A run with more loads its text encoders again
    whenever these are used up."""

    def __post_init__(self) -> None:
        _at_least(1, encode_ahead=self.encode_ahead)

    @property
    def held_out(self) -> str | None:
        """Where held-out prompts come from; None is nowhere."""
        return self.eval_prompts or ("shapes" if self.prompts == "shapes" else None)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out prompts with the ODE and fixed seeds."""

    every: int = 20
    """Iterations between evaluations; 0 evaluates only before and after training. Before and after always count."""
    prompts: int = 64
    """How many held-out prompts."""
    per_prompt: int = 1
    """Clips per prompt."""
    steps: int = 40
    """ODE steps."""
    solver: SolverName = "euler"
    """"euler" is the Euler step on the model's grid, "ab2" its second-order sister at the same cost; "checkpoint" is the checkpoint's own scheduler (Wan's multistep UniPC)."""
    seed: int = 1234
    """Seed of the initial noises: the same in every evaluation."""
    show: int = 8
    """Clips that are saved as videos."""

    def __post_init__(self) -> None:
        _at_least(1, prompts=self.prompts, per_prompt=self.per_prompt, steps=self.steps)
        _at_least(0, every=self.every, show=self.show)


@dataclass(frozen=True, kw_only=True)
class KeepConfig:
    """What is written to disk."""

    checkpoint_every: int = 10
    """Iterations between checkpoints; the last iteration always saves."""
    checkpoints: int = 2
    """How many checkpoints are kept, besides the best weights."""
    videos_every: int = 10
    """Iterations between saved rollout videos; 0 saves none."""
    videos: int = 4
    """Rollout videos per saved iteration."""
    video_megabytes: float = 200.0
    """Disk budget of all saved videos; the oldest go first."""

    def __post_init__(self) -> None:
        _at_least(1, checkpoint_every=self.checkpoint_every, checkpoints=self.checkpoints)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Where metrics go, besides the terminal and metrics.jsonl."""

    tensorboard: bool = True
    """Scalars and videos for TensorBoard."""
    wandb: str | None = None
    """Weights & Biases project; needs the extra sage-grpo[wandb]."""
    trackio: str | None = None
    """Trackio project; needs the extra sage-grpo[trackio]."""
    progress: bool = True
    """Progress bars."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run of `sage-grpo train`. The defaults are the paper's SAGE-GRPO."""

    out: str = "runs/sage"
    """Folder of the run: config, metrics, checkpoints, videos."""
    iterations: int = 100
    """Rollout-and-update iterations."""
    seed: int = 0
    """Seed of prompts, noise, windows and step choices."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Continue from the newest good checkpoint in `out` if there is one; start anew into an empty folder; or insist on one."""
    model: ModelSpec = ModelSpec()
    """The video model."""
    rewards: list[RewardSpec] = field(
        default_factory=lambda: [RewardSpec(name="shapes", weights={"TA": 1.0, "MQ": 0.5, "VQ": 0.5})]
    )
    """Rewards with their weights."""
    max_failed_fraction: float = 0.25
    """Share of rollouts whose reward may fail before the run stops."""
    data: DataConfig = DataConfig()
    """Prompts."""
    batch: BatchConfig = BatchConfig()
    """Batch arithmetic."""
    kernel: KernelSpec = KernelSpec()
    """The sampler that explores."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Advantages."""
    surrogate: SurrogateConfig = SurrogateConfig()
    """Policy loss."""
    trust_region: TrustRegion = TrustRegion()
    """KL terms."""
    kl: KlCoefficient = KlCoefficient()
    """KL coefficient."""
    anchor: AnchorConfig = AnchorConfig()
    """Reference policy."""
    update: UpdateConfig = UpdateConfig()
    """Updates."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer."""
    evaluate: EvalConfig = EvalConfig()
    """Evaluation."""
    keep: KeepConfig = KeepConfig()
    """Disk."""
    parallel: ParallelSpec = ParallelSpec()
    """Several processes."""
    log: LogConfig = LogConfig()
    """Logging."""

    def __post_init__(self) -> None:
        _at_least(1, iterations=self.iterations)
        if not 0 <= self.max_failed_fraction <= 1:
            raise ValueError(f"max_failed_fraction must lie in [0, 1], got {self.max_failed_fraction}.")
