"""The whole configuration of a run: frozen, keyword-only, each default in one place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from sage_grpo.config.metadata import Content, Course, Effect, Machine, Record, Speed, Start
from sage_grpo.config.ranges import Count, Decay, Folder, Natural, NotNegative, Positive, Range, Seed, Share, checked
from sage_grpo.distributed.spec import ParallelSpec, RaySpec
from sage_grpo.health.config import SentinelConfig
from sage_grpo.models.distilled import steps_of
from sage_grpo.models.spec import ModelSpec
from sage_grpo.objectives.base import Objective
from sage_grpo.objectives.build import build
from sage_grpo.objectives.kl_control import KlCoefficient
from sage_grpo.objectives.options import ObjectiveSpec
from sage_grpo.objectives.options import SurrogateConfig as SurrogateConfig
from sage_grpo.objectives.trust_region import TrustRegion
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.samplers.kernels import KernelSpec
from sage_grpo.samplers.solvers import Rule, SolverName
from sage_grpo.samplers.windows import Window
from sage_grpo.worlds.world import WORLDS


@checked
class BatchConfig:
    """Rollouts of an iteration: prompts x group size; all other numbers are derived."""

    prompts: Count = 16
    """Prompts per iteration."""
    group_size: Annotated[int, Range(2)] = 4
    """Rollouts per prompt; advantages are relative to this group."""
    micro_batch: Speed[Count] = 1
    """Rollouts that go through the network together, in rollout and in updates alike (a matter of memory only)."""
    trained_fraction: Annotated[float, Range(0, 1, open_below=True)] = 1.0
    """Share of a group's clips that updates train: the best of them and the worst, half each, at least one of both (DanceGRPO's 8 of 24 is
    1/3). Advantages are relative to the whole group. A micro-batch without any is not replayed: with micro_batch 1 updates cost this share.
    objective.kind dpo: pairs of best and worst. sft: the best alone, at least one."""

    @property
    def trained(self) -> int:
        return min(self.group_size, max(2, round(self.trained_fraction * self.group_size)))

    @property
    def pairs(self) -> int:
        return max(1, self.trained // 2)

    @property
    def best(self) -> int:
        return max(1, round(self.trained_fraction * self.group_size))


@checked
class RolloutConfig:
    """Sampling of rollouts."""

    steps: Count = 20
    """Denoising steps."""
    shift: Positive | None = None
    """Shift of the noise schedule; None is the model's."""
    window: Window = Window()
    """Window of the exploring steps."""
    deterministic_last: bool | None = None
    """Make the last step an ODE step. None asks the kernel: where it would leave its noise in the video the last step is one, and so are steps
    before it after which the state would hold more than 3.5 times the noise variance that the network is told (grids that end near 0, as
    SD3's). true: the last step alone. false: none (the paper's way)."""
    same_noise: bool = False
    """Start all members of a group from the same noise, so that they differ by exploration only."""
    share: bool = True
    """With same_noise: run what the members of a group have in common once, and replay a state that they share once."""
    explore: list[str] = field(default_factory=list)
    """Parts of a clip that explore (LTX-2: video, audio), each with a ratio of its own; others follow the ODE. Empty: all, in one ratio, unless a reward
    judges one part."""
    solver: Rule = "euler"
    """Solver of the deterministic steps: euler, or ab2 (second order, at the same cost)."""
    before_steps: Count | None = None
    """Deterministic steps before those that explore, if any; None keeps the full schedule."""
    after_steps: Count | None = None
    """Deterministic steps after those that explore, if any; None keeps the full schedule."""
    after_fraction: Annotated[float, Range(0, 1, open_below=True)] = 1.0
    """Share of the deterministic steps after those that explore that is kept, at least one of them: what `after_steps` is for windows that move
    (MixGRPO-Flash)."""
    storage: Literal["float32", "bfloat16"] = "float32"
    """Precision in which trajectories are kept; the rollout itself runs through the stored values, so ratios stay exact."""
    offload: Speed[bool] = False
    """Keep trajectories in CPU memory between rollout and update."""
    staleness: Natural = 0
    """Iterations by which the weights that sample are older than those that learn: workers then sample while the trainer updates. Ratios are to the
    policy that sampled."""
    on: Machine[Literal["here", "ray"]] = "here"
    """Process that samples: this one, or workers on Ray (the extra sage-grpo[ray])."""
    ray: RaySpec = RaySpec()
    """Workers on Ray."""

    def __post_init__(self) -> None:
        if self.on == "here" and self.ray != RaySpec():
            raise ValueError("rollout.ray is about workers on Ray: set rollout.on ray, or leave it out.")
        for name, unused in (("before_steps", None), ("after_steps", None), ("after_fraction", 1.0)):
            if getattr(self, name) != unused and self.window.kind == "all":
                raise ValueError(f"rollout.{name} needs a window: with window.kind all every step explores.")
        if self.after_steps is not None and self.after_fraction < 1:
            raise ValueError(
                f"rollout.after_fraction {self.after_fraction:g} and rollout.after_steps {self.after_steps} say the same thing twice: leave "
                "one of them out."
            )


@checked
class AdvantageConfig:
    """Conversion of rewards into advantages."""

    scale: Literal["group", "global", "none"] = "group"
    """Divide by the group's std, by the std of the rewards of all groups together (as FlowGRPO's, DiffusionNFT's and AWM's code does), or not
    at all. The mean is the group's in any case."""
    decoupled: bool = False
    """Normalise every reward in its group before adding them up (GDPO)."""
    clip: Positive | None = 5.0
    """Largest absolute advantage; None is no limit."""


@checked
class UpdateConfig:
    """Use of a rollout by the updates."""

    updates_per_rollout: Count = 2
    """Optimizer updates per rollout; its trained steps are dealt out to them. With 1 the ratio is always 1, the clip never
    binds and the step-wise KL has no gradient."""
    step_fraction: Annotated[float, Range(0, 1, open_below=True)] = 1.0
    """Share of the stochastic steps that is trained, drawn anew every iteration."""
    repeat: bool = False
    """Every update replays all trained steps, as PPO's epochs do, instead of its share of them."""
    deal: Literal["steps", "clips"] = "steps"
    """The unit that is dealt out to a rollout's updates: trained steps, so that every update sees every clip; or clips,
    each with all of its trained steps, as most authors' code does (a window of one step then has several updates,
    too)."""
    permute_steps: bool = True
    """Deal steps out in random order; false goes from noise to data."""
    gradient_checkpointing: Speed[bool | Literal["attention", "auto"]] = "auto"
    """Compute what the backward pass needs again instead of keeping it. true: all but the input of each block; "attention": all but
    that and what attention gave, the slowest to compute and small; "auto": nothing where memory allows, else as little as it
    takes."""


@checked
class AnchorConfig:
    """The reference policy of the position term and of dpo."""

    every: Count = 10
    """Optimizer updates between renewals (modes moving and dual; fixed and fixed_dual never renew)."""
    offload: Speed[bool] = False
    """Keep the anchor, or the old policy of a loss at fresh noise levels, in CPU memory."""


@checked
class OptimizerConfig:
    """Optimizer and learning rate."""

    kind: Literal["adamw", "muon"] = "adamw"
    """AdamW, or Muon for matrices with AdamW for the rest."""
    lr: Positive = 1e-5
    """Peak learning rate."""
    target_kl: Positive | None = None
    """The learning rate follows so that the policies before and after a rollout's updates are this far apart: nats of the whole path of
    a rollout (the exact KL, summed over its trained steps and all latent dimensions). In bfloat16 rounding alone has a KL (0.05 of branch, 3 of
    sage with a Wan of 12 million parameters), which a target must be above. It never exceeds lr, nor falls below a thousandth of it. None leaves it alone."""
    max_kl: Positive | None = None
    """A rollout's updates that move the policy by more nats than this are scaled back to it, measured to within 2%, so that none can wreck the
    policy. Costs a copy of the trainable weights, and where it acts two to four passes per prompt (at most 12). In bfloat16 it must be above
    the KL of rounding (`target_kl`): below that less is kept, with a warning."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Momentum and second-moment decay of AdamW."""
    eps: Positive = 1e-8
    """AdamW's epsilon. The loss is scaled by sqrt(latent dimensions), so it means the same at any resolution; the metric
    gradient/rms_over_eps says how far gradients are above it."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm. Typical norms: 0.3 to 3 for the miniature, 0.1 for HunyuanVideo-1.5 with a LoRA."""
    warmup_updates: Natural = 0
    """Updates of linear warm-up."""
    decay: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after warm-up; it would reach 0 one update after the last."""
    ema: Decay | None = None
    """Decay of an exponential moving average of the weights, per update; None keeps none."""

    def __post_init__(self) -> None:
        if self.target_kl is not None and self.max_kl is not None and self.max_kl < self.target_kl:
            raise ValueError(
                f"optimizer.max_kl ({self.max_kl}) is below optimizer.target_kl ({self.target_kl}), which no rollout could then "
                "reach: 4 to 10 times the target leaves room for its scatter."
            )

    @property
    def measures_kl(self) -> bool:
        """True if the KL of a rollout's updates is measured, which takes a network pass per prompt."""
        return self.target_kl is not None or self.max_kl is not None


@checked
class DataConfig:
    """Sources of prompts."""

    prompts: Content[str] = "shapes"
    """"shapes" (the training split of the embedded world), "starter" (160 video prompts that come with the package), or a .txt, .csv, .json or
    .jsonl file. A prompt has at most 20,000 characters."""
    clips: Content[str | None] = None
    """Clips to learn from in place of rollouts (objective.kind dpo, sft): a .jsonl or .csv with prompt, win and lose, or prompt and clip, or its
    folder. Its prompts stand in place of data.prompts. docs/preferences.md."""
    eval_prompts: Content[str | None] = None
    """Held-out prompts: a file, "shapes" or "starter_eval". None is the held-out part of "shapes" or of "starter", or for files
    no evaluation."""
    encode_ahead: Speed[Count] = 1024
    """Training prompts that are encoded at a time and kept in memory, per rank. A run with more loads its text encoders again
    whenever these are used up."""

    def __post_init__(self) -> None:
        if self.prompts == "starter_eval":
            raise ValueError('data.prompts: "starter_eval" is held out and never trained on. Use "starter".')
        if self.prompts == self.eval_prompts == "starter":
            raise ValueError('data.eval_prompts: "starter" is what is trained on. Leave it out, or use "starter_eval".')

    @property
    def held_out(self) -> str | None:
        """Source of the held-out prompts; None is no evaluation."""
        if self.eval_prompts is not None:
            return self.eval_prompts
        return {**{name: name for name in WORLDS}, "starter": "starter_eval"}.get(self.prompts)


@checked
class EvalConfig:
    """Evaluation on held-out prompts with the ODE and fixed seeds."""

    every: Record[Natural] = 20
    """Iterations between evaluations; 0 evaluates only before and after training. Before and after always count."""
    early: Record[list[Count]] = field(default_factory=list)
    """Further iterations that are evaluated, such as [2, 4, 6, 8]: a reward that can be hacked is often hacked within ten iterations,
    and the sentinel sees only what is evaluated."""
    prompts: Count = 64
    """Number of held-out prompts."""
    per_prompt: Count = 1
    """Clips per prompt."""
    steps: Count | None = None
    """ODE steps. None: those of model.sigmas, or of a checkpoint (or adapter) whose name says that it was distilled to few; else 40."""
    solver: SolverName = "euler"
    """"euler" is the Euler step on the model's grid, "ab2" its second-order version at the same cost; "checkpoint" is the checkpoint's own scheduler (Wan's multistep UniPC)."""
    seed: Seed = 1234
    """Seed of the initial noises: the same in every evaluation."""
    show: Record[Natural] = 8
    """Clips that are saved as videos."""

    def steps_for(self, model: ModelSpec) -> int:
        return steps_of(model) if self.steps is None else self.steps

    def points(self, iterations: int) -> list[int]:
        """Iterations after which a run of this length is evaluated."""
        regular = range(0, iterations, self.every) if self.every else ()
        return sorted({0, *regular, *(number for number in self.early if number < iterations), iterations})


@checked
class KeepConfig:
    """Files that a run keeps on disk."""

    affects: ClassVar[Effect] = "record"
    checkpoint_every: Count = 10
    """Iterations between checkpoints; the last iteration always saves."""
    checkpoints: Count = 2
    """Number of checkpoints that are kept, besides the best weights."""
    videos_every: Natural = 10
    """Iterations between saved rollout videos; 0 saves none."""
    videos: Natural = 4
    """Rollout videos per saved iteration."""
    video_megabytes: NotNegative = 200.0
    """Disk budget of all saved videos; the oldest go first."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Destinations of metrics, besides the terminal and metrics.jsonl."""

    affects: ClassVar[Effect] = "start"
    tensorboard: bool = True
    """Scalars for TensorBoard."""
    wandb: str | None = None
    """Weights & Biases project; needs the extra sage-grpo[wandb]."""
    name: str | None = None
    """Name of the run at W&B; null takes the folder's. Two runs of one name stay two."""
    group: str | None = None
    """Group of the run at W&B."""
    entity: str | None = None
    """W&B user or team that the project belongs to; null takes your default."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run at W&B."""
    sinks: list[str] = field(default_factory=list)
    """Places of your own by their import paths, module:Class (docs/extending.md)."""
    progress: bool = True
    """Progress bars."""


@checked
class TrainConfig:
    """A run of `sage-grpo train`. The defaults are the paper's SAGE-GRPO."""

    out: Start[Folder] = "runs/sage"
    """Folder of the run: config, metrics, checkpoints, videos."""
    iterations: Course[Count] = 100
    """Rollout-and-update iterations."""
    seed: Seed = 0
    """Seed of prompts, noise, windows and step choices."""
    resume: Start[Literal["auto", "never", "must"]] = "auto"
    """Continue from the newest good checkpoint in `out` if there is one; start anew into an empty folder; or insist on one."""
    allow_changes: Start[list[str]] = field(default_factory=list)
    """Fields that a continued run may change although they change its results: fields (optimizer.lr, seed) or prompts,
    eval_prompts, weights, code, plugins (their content). Any other such change is refused."""
    model: ModelSpec = ModelSpec()
    """The video model."""
    rewards: list[RewardSpec] = field(
        default_factory=lambda: [RewardSpec(name="shapes", weights={"TA": 1.0, "MQ": 0.5, "VQ": 0.5})]
    )
    """Rewards with their weights."""
    max_failed_fraction: Course[Share] = 0.25
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
    objective: ObjectiveSpec = ObjectiveSpec()
    """Training objective."""
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
    sentinel: SentinelConfig = SentinelConfig()
    """Watches the run."""

    def __post_init__(self) -> None:
        late = [number for number in self.evaluate.early if number > self.iterations]
        if late:
            raise ValueError(
                f"evaluate.early {late[0]} is never reached: the run has {self.iterations} iterations. Leave it out, or raise iterations."
            )
        if not self.model.train:
            raise ValueError("model.train must be true in a run, which would train nothing: leave it out.")
        if not any(reward.counts for reward in self.rewards) and (self.rewards or self.data.clips is None):
            raise ValueError(
                "rewards: none of them counts (each is metric_only or has only weights of 0), so there is nothing to learn "
                "from. Give one a weight."
            )
        self._check_sigmas()
        self._check_clips()
        if ":" not in self.objective.kind:  # one of your own is checked where it is built
            self.check_objective()
        self._check_workers()

    def build_objective(self) -> Objective:
        return build(self.objective, self.surrogate)

    @property
    def explores(self) -> bool:
        return self.build_objective().samples == "sde"

    def check_objective(self) -> None:
        objective, kind = self.build_objective(), self.objective.kind
        if self.data.clips is not None and not objective.given_clips:
            raise ValueError(
                f"data.clips gives clips in place of rollouts, from which objective.kind {kind} cannot learn: use dpo (pairs) or sft, "
                "for example with the methods dpo and rft, or leave data.clips out."
            )
        objective.check(self)
        mode, once = self.trust_region.mode, self.update.updates_per_rollout == 1
        live = once and not objective.lags  # the rollout's policy is still the live one
        inert = mode == "stepwise" and live
        if self.kl.kind == "share" and (mode == "none" or inert):
            why = "which has no gradient with update.updates_per_rollout 1" if inert else "so that there is no KL"
            raise ValueError(
                f"kl.kind is share, but trust_region.mode is {mode}, {why}: set trust_region.mode to fixed, moving or dual."
            )

    @property
    def group_size(self) -> int:
        """Clips per group: of a rollout, or of a row of data.clips (a pair, or one clip)."""
        return self.batch.group_size if self.data.clips is None else self.build_objective().given_clips

    @property
    def held_out(self) -> str | None:
        """Source of the held-out prompts; None without one, or without a reward that would score their clips."""
        return self.data.held_out if self.rewards else None

    def _check_workers(self) -> None:
        rollout, ray, stale = self.rollout, self.rollout.on == "ray", self.rollout.staleness > 0
        reasons = {
            "data.clips: clips are given, so that there is nothing to sample": ray and self.data.clips is not None,
            "model.lora null: all weights would travel to every worker in every iteration; train a LoRA": ray
            and self.model.lora is None,
            "optimizer.target_kl or max_kl: they measure how far one rollout's updates went from the policy that sampled it, which is older "
            "than that; leave them out": stale and self.optimizer.measures_kl,
        }
        wrong = [reason for reason, holds in reasons.items() if holds]
        if wrong:
            raise ValueError(
                f"rollout.on {rollout.on} with rollout.staleness {rollout.staleness} does not go with "
                + "; nor with ".join(wrong)
                + "."
            )

    def _check_sigmas(self) -> None:
        levels, rollout, evaluate = self.model.sigmas, self.rollout, self.evaluate
        wrong = {
            f"rollout.steps {rollout.steps}": rollout.steps != len(levels),
            f"evaluate.steps {evaluate.steps}": evaluate.steps not in (None, len(levels)),
            f"rollout.shift {rollout.shift}": rollout.shift is not None,
            "evaluate.solver checkpoint": evaluate.solver == "checkpoint",
        }
        found = [name for name, is_wrong in wrong.items() if is_wrong and levels]
        if found:
            raise ValueError(
                f"model.sigmas has {len(levels)} noise levels, which does not go with {', '.join(found)}: set rollout.steps and "
                f"evaluate.steps to {len(levels)}, and leave rollout.shift and evaluate.solver out."
            )

    def _check_clips(self) -> None:
        """Refuse fewer trained clips than updates where clips are dealt out."""
        update, clips = self.update, self.batch.prompts * self.batch.trained
        if update.deal == "clips" and update.repeat:
            raise ValueError(
                "update.deal clips does not go with update.repeat true, where every update trains every clip: leave one of them out."
            )
        if update.deal == "clips" and clips < update.updates_per_rollout:
            raise ValueError(
                f"update.deal clips: {clips} trained clips are too few for update.updates_per_rollout {update.updates_per_rollout}. "
                "Use fewer updates, or more prompts or clips."
            )
