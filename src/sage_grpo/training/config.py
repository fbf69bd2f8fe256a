"""The whole configuration of a run: frozen, keyword-only, each default in one place."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from sage_grpo.config.metadata import Content, Course, Effect, Machine, Speed, Start
from sage_grpo.config.ranges import Count, Folder, Natural, NotNegative, Positive, Range, Seed, Share, checked, refuse
from sage_grpo.data.groups import BatchConfig as BatchConfig
from sage_grpo.data.sources import PromptSource, split_file
from sage_grpo.distributed.spec import ParallelSpec, RaySpec
from sage_grpo.health.config import SentinelConfig
from sage_grpo.models.spec import ModelSpec
from sage_grpo.objectives.advantage import AdvantageConfig as AdvantageConfig
from sage_grpo.objectives.base import Objective
from sage_grpo.objectives.build import build
from sage_grpo.objectives.options import ObjectiveSpec
from sage_grpo.objectives.options import SurrogateConfig as SurrogateConfig
from sage_grpo.objectives.trust_region import TrustRegion
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.samplers.kernels import KernelSpec
from sage_grpo.samplers.solvers import Rule
from sage_grpo.samplers.windows import Window
from sage_grpo.training.evaluate import EvalConfig as EvalConfig
from sage_grpo.training.kl_coefficient import KlCoefficient
from sage_grpo.training.optim import OptimizerConfig as OptimizerConfig
from sage_grpo.training.reference import AnchorConfig as AnchorConfig
from sage_grpo.worlds.world import WORLDS


@checked
class RolloutConfig:
    """Sampling of clips in training."""

    steps: Count = 20
    """Denoising steps."""
    shift: Positive | None = None
    """Shift of the noise schedule; None is the model's."""
    window: Window = Window()
    """Steps that add noise."""
    deterministic_last: bool | None = None
    """End with an ODE step; None does so if the sampler would leave noise, false is the paper's."""
    same_noise: bool = False
    """Start a group's clips from the same noise, so that they differ by exploration only."""
    share: bool = True
    """With same_noise, compute the steps that a group has in common once."""
    explore: list[str] = field(default_factory=list)
    """LTX-2: modalities that explore (video, audio), each with its own ratio. Empty explores all with one ratio."""
    solver: Rule = "euler"
    """Solver of the deterministic steps: euler, or ab2 (second order at the same cost)."""
    before_steps: Count | None = None
    """Number of deterministic steps before the exploring ones; None keeps the schedule's."""
    after_steps: Count | None = None
    """Number of deterministic steps after the exploring ones; None keeps the schedule's."""
    storage: Literal["float32", "bfloat16"] = "float32"
    """Precision of stored trajectories; ratios stay exact in both."""
    offload: Speed[bool] = False
    """Keep trajectories in CPU memory between rollout and update."""
    staleness: Natural = 0
    """Iterations by which the sampling weights may lag, so that workers sample during updates."""
    on: Machine[Literal["here", "ray"]] = "here"
    """Process that samples: the trainer (here), or Ray workers (needs sage-grpo[ray])."""
    ray: RaySpec = RaySpec()
    """Ray workers."""

    def __post_init__(self) -> None:
        if self.on == "here" and self.ray != RaySpec():
            raise ValueError("rollout.ray is about workers on Ray: set rollout.on ray, or leave it out.")
        for name in ("before_steps", "after_steps"):
            if getattr(self, name) is not None and self.window.kind == "all":
                raise ValueError(f"rollout.{name} needs a window: with window.kind all every step explores.")


@checked
class UpdateConfig:
    """Optimizer updates per rollout."""

    updates_per_rollout: Count = 2
    """Optimizer updates per rollout. With 1, neither the ratio clip nor the step-wise KL has an effect."""
    step_fraction: Annotated[float, Range(0, 1, open_below=True)] = 1.0
    """Share of the exploring steps that is trained, drawn anew every iteration."""
    repeat: bool = False
    """Train all steps in every update (PPO epochs) instead of dividing them among the updates."""
    deal: Literal["steps", "clips"] = "steps"
    """Divide a rollout among its updates by steps or by clips."""
    permute_steps: bool = True
    """Train steps in random order; false goes from noise to data."""
    gradient_checkpointing: Speed[bool | Literal["attention", "auto"]] = "auto"
    """Recompute activations in the backward pass: true all, attention all but attention's outputs, auto as few as fit."""

    @property
    def deals_steps(self) -> bool:
        """True if every update has its own steps; otherwise each trains all steps, of all clips or of its own."""
        return not self.repeat and self.deal == "steps"


@checked
class DataConfig:
    """Prompts."""

    prompts: Content[str | list[PromptSource | str]] = "shapes"
    """Training prompts: shapes (the miniature world), starter (160 included prompts), a file or folder, hf:owner/name@COMMIT, or a
    list of these, or of {path, weight}."""
    clips: Content[str | None] = None
    """Clips to learn from instead of rollouts (dpo, sft): a .jsonl or .csv file, or its folder (docs/preferences.md)."""
    eval_prompts: Content[str | None] = None
    """Held-out prompts: a file, shapes or starter_eval. None is those of shapes, starter or the folder of data.prompts,
    else no evaluation."""
    encode_ahead: Speed[Count] = 1024
    """Prompts encoded at a time, per rank; with more, text encoders are loaded again."""

    def __post_init__(self) -> None:
        paths = [source.path for source in self.sources]
        if unread := [path for path in paths if path.startswith("[")]:
            raise ValueError(f"data.prompts: a source is a FILE or {{path: FILE, weight: NUMBER}}, got {unread[0]}.")
        if len(set(paths)) < len(paths) or not paths:
            raise ValueError(f"data.prompts must name one or more different sources, got {', '.join(paths) or 'none'}.")
        if "starter_eval" in paths:
            raise ValueError('data.prompts: "starter_eval" is held out and never trained on. Use "starter".')
        if "starter" in paths and self.eval_prompts == "starter":
            raise ValueError('data.eval_prompts: "starter" is what is trained on. Leave it out, or use "starter_eval".')

    @property
    def sources(self) -> list[PromptSource]:
        listed = [self.prompts] if isinstance(self.prompts, str) else self.prompts
        return [PromptSource(path=one) if isinstance(one, str) else one for one in listed]

    @property
    def held_out(self) -> str | None:
        """Source of the held-out prompts; None is no evaluation."""
        if self.eval_prompts is not None or not isinstance(self.prompts, str):
            return self.eval_prompts
        if self.prompts in (*WORLDS, "starter"):
            return "starter_eval" if self.prompts == "starter" else self.prompts
        return self.prompts if split_file(Path(self.prompts), "heldout") is not None else None


@checked
class KeepConfig:
    """Files kept on disk."""

    affects: ClassVar[Effect] = "record"
    checkpoint_every: Count = 10
    """Iterations between checkpoints; the last iteration always saves one."""
    checkpoints: Count = 2
    """Checkpoints to keep, besides the best weights."""
    videos_every: Natural = 10
    """Iterations between saved rollout videos; 0 saves none."""
    videos: Natural = 4
    """Rollout videos per saved iteration."""
    video_megabytes: NotNegative = 200.0
    """Disk budget of all videos, in MB; the oldest are deleted first."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Trackers, besides the terminal and metrics.jsonl."""

    affects: ClassVar[Effect] = "start"
    tensorboard: bool = True
    """Write TensorBoard scalars."""
    wandb: str | None = None
    """Weights & Biases project (needs sage-grpo[wandb])."""
    name: str | None = None
    """Name of the W&B run; null is the folder's name."""
    group: str | None = None
    """Group of the W&B run."""
    entity: str | None = None
    """W&B user or team; null is your default."""
    tags: list[str] = field(default_factory=list)
    """Tags of the W&B run."""
    sinks: list[str] = field(default_factory=list)
    """Your own trackers, as module:Class (docs/extending.md)."""
    progress: bool = True
    """Show progress bars."""


@checked
class TrainConfig:
    """A training run. The defaults are the paper's SAGE-GRPO."""

    out: Start[Folder] = "runs/sage"
    """Folder of the run."""
    iterations: Course[Count] = 100
    """Iterations; each samples one rollout and trains on it."""
    seed: Seed = 0
    """Seed of prompts, noise, windows and step choices."""
    resume: Start[Literal["auto", "never", "must"]] = "auto"
    """auto continues from the newest good checkpoint, if any; never needs an empty folder; must needs a checkpoint."""
    allow_changes: Start[list[str]] = field(default_factory=list)
    """Settings that a resumed run may change: field names, or prompts, eval_prompts, weights, code, plugins."""
    model: ModelSpec = ModelSpec()
    """The video model."""
    rewards: list[RewardSpec] = field(
        default_factory=lambda: [RewardSpec(name="shapes", weights={"TA": 1.0, "MQ": 0.5, "VQ": 0.5})]
    )
    """Rewards with their weights."""
    max_failed_fraction: Course[Share] = 0.25
    """Share of clips whose reward may fail before the run stops."""
    data: DataConfig = DataConfig()
    """Prompts."""
    batch: BatchConfig = BatchConfig()
    """Rollouts per iteration."""
    kernel: KernelSpec = KernelSpec()
    """The sampler that explores."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling of clips in training."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Advantages from rewards."""
    objective: ObjectiveSpec = ObjectiveSpec()
    """Training objective."""
    surrogate: SurrogateConfig = SurrogateConfig()
    """The policy-gradient loss."""
    trust_region: TrustRegion = TrustRegion()
    """KL terms of the loss."""
    kl: KlCoefficient = KlCoefficient()
    """KL coefficient."""
    anchor: AnchorConfig = AnchorConfig()
    """Reference policy of the KL and of dpo."""
    update: UpdateConfig = UpdateConfig()
    """Optimizer updates per rollout."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning rate."""
    evaluate: EvalConfig = EvalConfig()
    """Evaluation on held-out prompts."""
    keep: KeepConfig = KeepConfig()
    """Files kept on disk."""
    parallel: ParallelSpec = ParallelSpec()
    """Several processes."""
    log: LogConfig = LogConfig()
    """Trackers."""
    sentinel: SentinelConfig = SentinelConfig()
    """Health checks of the run."""

    def __post_init__(self) -> None:
        late = [number for number in self.evaluate.early if number > self.iterations]
        update, clips = self.update, self.batch.prompts * self.batch.trained
        nothing = not any(reward.counts for reward in self.rewards) and (self.rewards or self.data.clips is None)
        reasons = {
            f"evaluate.early {min(late, default=0)} is never reached: the run has {self.iterations} iterations. Leave it out, or raise "
            "iterations.": bool(late),
            "model.train must be true in a run, which would train nothing: leave it out.": not self.model.train,
            "rewards: none of them counts (each is metric_only or has only weights of 0), so there is nothing to learn from. Give one a "
            "weight.": bool(nothing),
            "update.deal clips does not go with update.repeat true, where every update trains every clip: leave one of them out.": (
                update.deal == "clips" and update.repeat
            ),
            f"update.deal clips: {clips} trained clips are too few for update.updates_per_rollout {update.updates_per_rollout}. "
            "Use fewer updates, or more prompts or clips.": update.deal == "clips"
            and clips < update.updates_per_rollout,
        }
        refuse(reasons)
        self._check_schedules()
        self._check_sigmas()
        if ":" not in self.objective.kind:  # one of your own is checked where it is built
            self.check_objective()
        self._check_workers()

    def build_objective(self) -> Objective:
        return build(self.objective, self.surrogate)

    @property
    def explores(self) -> bool:
        return self.build_objective().samples == "sde"

    def check_objective(self) -> None:
        objective, kind, mode = self.build_objective(), self.objective.kind, self.trust_region.mode
        gated = [reward.title for reward in self.rewards if reward.gate is not None and objective.differentiates]
        reasons = {
            f"data.clips gives clips in place of rollouts, from which objective.kind {kind} cannot learn: use dpo (pairs) or sft, "
            "for example with the methods dpo and rft, or leave data.clips out.": (
                self.data.clips is not None and not objective.given_clips
            ),
            f"rewards {', '.join(gated)}: a gate has no gradient, which objective.kind {kind} needs. Leave it out.": bool(
                gated
            ),
        }
        refuse(reasons)
        objective.check(self)
        # With one update, the rollout's policy is still the live one, unless an old policy lags.
        inert = mode == "stepwise" and self.update.updates_per_rollout == 1 and not objective.lags
        why = "which has no gradient with update.updates_per_rollout 1" if inert else "so that there is no KL"
        share = (
            f"kl.kind is share, but trust_region.mode is {mode}, {why}: set trust_region.mode to fixed, moving or dual."
        )
        refuse({share: self.kl.kind == "share" and (mode == "none" or inert)})

    @property
    def group_size(self) -> int:
        """Clips per group: of a rollout, or of a row of data.clips (a pair, or one clip)."""
        return self.batch.group_size if self.data.clips is None else self.build_objective().given_clips

    @property
    def held_out(self) -> str | None:
        """Source of the held-out prompts; None without one, or without a reward that would score their clips."""
        return self.data.held_out if self.rewards else None

    def _check_workers(self) -> None:
        rollout, ray = self.rollout, self.rollout.on == "ray"
        reasons = {
            "data.clips: clips are given, so that there is nothing to sample": ray and self.data.clips is not None,
            "model.lora null: all weights would travel to every worker in every iteration; train a LoRA": (
                ray and self.model.lora is None
            ),
            "optimizer.target_kl or max_kl: they measure how far one rollout's updates went from the policy that sampled it, which is older "
            "than that; leave them out": rollout.staleness > 0 and self.optimizer.measures_kl,
        }
        refuse(reasons, f"rollout.on {rollout.on} with rollout.staleness {rollout.staleness}")

    def _check_schedules(self) -> None:
        """Refuse iterations at which no reward counts."""
        counting = [reward for reward in self.rewards if reward.counts]
        numbers = range(self.iterations) if any(reward.schedule for reward in counting) else ()
        for number in (*numbers, None):
            if counting and not any(reward.factor(number) for reward in counting):
                when = "after the last point, where evaluations take it" if number is None else f"at iteration {number}"
                raise ValueError(
                    f"rewards: the schedules leave no reward {when}, so that there is nothing to learn from. Give one a factor above 0."
                )

    @property
    def rewards_over_time(self) -> list[str]:
        """Sentences on the rewards' schedules and gates."""
        return [reward.over_time for reward in self.rewards if reward.over_time]

    def _check_sigmas(self) -> None:
        count, rollout, evaluate = len(self.model.sigmas), self.rollout, self.evaluate
        reasons = {
            f"rollout.steps {rollout.steps}: set {count}": rollout.steps != count,
            f"evaluate.steps {evaluate.steps}: set {count}": evaluate.steps not in (None, count),
            f"rollout.shift {rollout.shift}: leave it out": rollout.shift is not None,
            "evaluate.solver checkpoint: leave it out": evaluate.solver == "checkpoint",
        }
        refuse(reasons if count else {}, f"model.sigmas, which has {count} noise levels,")
