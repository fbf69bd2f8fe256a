"""Options of the objectives: fields of `objective` and of `surrogate` in a configuration."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal, get_args

from sage_grpo.config.ranges import Count, Decay, Natural, Positive, Range, checked
from sage_grpo.utils.suggest import did_you_mean

Kind = Literal["surrogate", "nft", "awm", "dpo", "sft", "gradient"]
KINDS = get_args(Kind)
Draw = Literal["schedule", "strata", "last"]
Credit = Literal["affine", "exact"]
Weighting = Literal["uniform", "adaptive", "ghuber"]


@checked
class ObjectiveSpec:
    """The loss: on the steps that explored, on clean clips that are noised again, or on steps of the ODE by the reward's gradient (both: kernel.name ode)."""

    kind: Kind | str = "surrogate"
    """surrogate: the policy gradient on steps with noise (fields of `surrogate`). nft: DiffusionNFT, positive and negative flow matching.
    awm: advantage-weighted matching, whose ratio and clip are those of `surrogate`. gradient: the reward is differentiated by the clip, and its
    gradient carried back to steps of the rollout (ReFL, DRaFT). dpo: the best clip of a group is preferred to the worst, relative to the
    trust region's anchor. sft: flow matching of a group's best clips. These two also learn from clips that you give (data.clips). All but
    the first sample with the ODE. Your own by its import path, module:Class (docs/extending.md)."""
    levels: Count = 4
    """nft, awm, dpo, sft: noise levels at which every clip is learned; they are dealt out to the updates of a rollout. gradient: steps of every rollout
    that are trained."""
    draw: Draw = "schedule"
    """nft, awm, dpo, sft: where a prompt's levels lie: at steps of the rollout's schedule, drawn from all (schedule) or one from each of
    equal parts, without the first step and the last tenth (strata). gradient: schedule, or last, the steps before the clip."""
    credit: Credit = "affine"
    """gradient: how it reaches a step. affine: as if later velocities did not depend on the state (one pass per trained step, which may be any).
    exact: through the network at every later step, which must all be trained (draw last)."""
    predict: Annotated[float, Range(0, 1, open_below=True)] | None = None
    """gradient: the clip is predicted in one step from a step drawn from this last share of the schedule, as ReFL does; None samples it to the end."""
    weight: Weighting = "uniform"
    """nft, awm, dpo, sft: weight of a level's squared error: 1, or what their authors run. adaptive (nft): sigma over the mean absolute error.
    ghuber (awm): sigma, on the error's fourth root, so that large errors count less."""
    beta: Positive = 1.0
    """nft: how far the positive and negative velocities lie from the old one. The loss holds the policy by beta times the squared way. dpo: how
    soon a preference is strong enough: log-odds per difference of mean squared errors, half of it."""
    saturation: Positive = 1.0
    """nft: the advantage at which a clip counts as wholly good (r = 1), and its negative as wholly bad. The loss is multiplied by it, so
    that the learning rate means the same for every value."""
    old_decay: Decay = 0.0
    """nft, awm: share of the old policy that stays after each rollout's updates; 0 makes the newest weights the old policy."""
    old_ramp: Natural = 0
    """nft, awm: iterations over which old_decay is reached, linearly; 0 is at once."""
    old_samples: bool = True
    """nft, awm: whether an old policy that lags samples the clips. false: the newest weights do, and the old policy is only what the
    step-wise KL (and nft's velocities) refer to."""

    options: dict[str, Any] = field(default_factory=dict)
    """Options of an objective of your own, by name."""

    def __post_init__(self) -> None:
        if ":" in self.kind:
            return  # its class may be missing where a configuration is only read
        if self.kind not in KINDS:
            raise ValueError(
                f"objective.kind must be one of {', '.join(KINDS)}, or the import path of your own (module:Class), got {self.kind!r}."
                f"{did_you_mean(self.kind, KINDS)}"
            )
        if self.options:
            raise ValueError(
                f"objective.options is for objectives of your own; {self.kind} has fields of its own: leave it out."
            )
        ours, matching = self.kind == "gradient", self.kind in ("nft", "awm", "dpo", "sft")
        reasons = {
            "objective.draw last is part of objective.kind gradient": matching and self.draw == "last",
            f"objective.draw {self.draw} is a level that no step of a rollout has: use last or schedule with objective.kind gradient": ours
            and self.draw == "strata",
            "objective.credit exact is part of objective.kind gradient": matching and self.credit == "exact",
            "objective.credit exact needs objective.draw last: a gradient cannot pass a step that is not trained": ours
            and self.credit == "exact"
            and self.draw != "last",
            "objective.predict is part of objective.kind gradient": matching and self.predict is not None,
            f"objective.weight {self.weight} weighs errors at noise levels, which objective.kind gradient has none of": ours
            and self.weight != "uniform",
            f"objective.weight adaptive is part of nft: use uniform with objective.kind {self.kind}": self.weight
            == "adaptive"
            and self.kind not in ("surrogate", "nft"),
            f"objective.weight ghuber is part of awm: use uniform with objective.kind {self.kind}": self.weight
            == "ghuber"
            and self.kind != "awm",
            f"objective.old_decay is about an old policy, which objective.kind {self.kind} has none of": self.old_decay
            > 0
            and self.kind in ("gradient", "dpo", "sft"),
            f"objective.old_ramp ({self.old_ramp}) needs objective.old_decay, which is 0": self.old_ramp > 0
            and not self.old_decay,
            "objective.old_samples false needs objective.old_decay, which is 0: there is no old policy": not self.old_samples
            and not self.old_decay,
        }
        for reason, found in reasons.items():
            if found:
                raise ValueError(f"{reason}.")


@checked
class SurrogateConfig:
    """The policy-gradient loss."""

    kind: Literal["clipped", "kl_mask"] = "clipped"
    """PPO's clip on the ratio, or Flow-DPPO's mask on the exact KL."""
    centred: bool | Literal["scaled"] = False
    """Remove the bias of the ratio: log r + KL, the KL as a constant. "scaled" is GRPO-Guard's released code: the KL with its gradient, and both
    times the step's std before the ratio is taken, so that one clip range is as tight at every step."""
    clip_scale: Positive = 0.076
    """Clip range as c / sqrt(latent dimensions); the paper's 1e-4 at 480p x 81 frames is c = 0.076."""
    clip_range: Positive | None = None
    """Absolute clip range; overrides clip_scale."""
    kl_mask_scale: Positive = 1.0
    """kl_mask drops aggressive moves where KL >= kl_mask_scale / latent dimensions."""
    equalize: bool = True
    """Temporal gradient equaliser: weight steps by median(sensitivity) / sensitivity."""
    equalize_by: Literal["sensitivity", "std"] = "sensitivity"
    """The quantity that is divided out: sensitivity is |b| / std, the size of a step's gradient; std is 1 / std, as the
    paper prints it."""
    equalize_cap: Positive | None = None
    """Largest equaliser weight; None is no cap."""

    def __post_init__(self) -> None:
        if self.kind == "kl_mask" and self.centred == "scaled":
            raise ValueError(
                "surrogate.centred scaled is about the clip, which surrogate.kind kl_mask has none of: use true."
            )
