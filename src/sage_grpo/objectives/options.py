"""Options of the objectives: fields of `objective` and of `surrogate` in a configuration."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal, get_args

from sage_grpo.config.ranges import Count, Decay, Natural, Positive, Range, checked, refuse
from sage_grpo.utils.suggest import did_you_mean

Kind = Literal["surrogate", "nft", "awm", "dpo", "sft", "gradient"]
KINDS = get_args(Kind)
Draw = Literal["schedule", "strata", "last"]
Credit = Literal["affine", "exact"]
Weighting = Literal["uniform", "adaptive", "ghuber"]


@checked
class ObjectiveSpec:
    """The training objective (docs/method.md)."""

    kind: Kind | str = "surrogate"
    """surrogate (policy gradient), nft, awm, dpo, sft, gradient (of the reward), or your own as module:Class."""
    levels: Count = 4
    """Noise levels trained per clip (nft, awm, dpo, sft), or trained steps per rollout (gradient)."""
    draw: Draw = "schedule"
    """Choice of levels: from the schedule, stratified (strata), or its last steps (gradient only)."""
    credit: Credit = "affine"
    """gradient: affine treats later velocities as constants; exact backpropagates through them (needs draw last)."""
    predict: Annotated[float, Range(0, 1, open_below=True)] | None = None
    """gradient: predict the clip from a step in this last share of the schedule (ReFL); None samples it fully."""
    weight: Weighting = "uniform"
    """Weight of a level's error: uniform, or its authors' own (adaptive for nft, ghuber for awm)."""
    beta: Positive = 1.0
    """nft: distance of the two velocities from the old one. dpo: strength of the preference."""
    saturation: Positive = 1.0
    """nft: the advantage at which a clip counts as fully good or bad."""
    old_decay: Decay = 0.0
    """nft, awm: share of the old policy that remains after each rollout's updates."""
    old_ramp: Natural = 0
    """nft, awm: iterations over which old_decay is reached."""
    old_samples: bool = True
    """nft, awm: the old policy samples the clips; false samples with the newest weights."""

    options: dict[str, Any] = field(default_factory=dict)
    """Options of your own objective."""

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
        kind, draw, weight, lags = self.kind, self.draw, self.weight, self.old_decay > 0
        ours, matching, exact = kind == "gradient", kind in ("nft", "awm", "dpo", "sft"), self.credit == "exact"
        unlike = f"use uniform with objective.kind {kind}"
        reasons = {
            "objective.draw last is part of objective.kind gradient": matching and draw == "last",
            f"objective.draw {draw} is a level that no step of a rollout has: use last or schedule with objective.kind gradient": (
                ours and draw == "strata"
            ),
            "objective.credit exact is part of objective.kind gradient": matching and exact,
            "objective.credit exact needs objective.draw last: a gradient cannot pass a step that is not trained": (
                ours and exact and draw != "last"
            ),
            "objective.predict is part of objective.kind gradient": matching and self.predict is not None,
            f"objective.weight adaptive is part of nft: {unlike}": weight == "adaptive"
            and kind not in ("surrogate", "nft"),
            f"objective.weight ghuber is part of awm: {unlike}": weight == "ghuber" and kind != "awm",
            f"objective.old_decay is about an old policy, which objective.kind {kind} has none of": (
                lags and kind in ("gradient", "dpo", "sft")
            ),
            f"objective.old_ramp ({self.old_ramp}) needs objective.old_decay, which is 0": self.old_ramp > 0
            and not lags,
            "objective.old_samples false needs objective.old_decay, which is 0: there is no old policy": (
                not self.old_samples and not lags
            ),
        }
        refuse({f"{reason}.": holds for reason, holds in reasons.items()})


@checked
class SurrogateConfig:
    """The policy-gradient loss."""

    kind: Literal["clipped", "kl_mask"] = "clipped"
    """PPO's clipped ratio, or Flow-DPPO's KL mask."""
    centred: bool | Literal["scaled"] = False
    """Remove the ratio's bias by adding the KL; scaled is GRPO-Guard's version."""
    clip_scale: Positive = 0.076
    """Ratio clip range as c / sqrt(latent dimensions); 0.076 is the paper's 1e-4 at 480p x 81 frames."""
    clip_range: Positive | None = None
    """Absolute ratio clip range; overrides clip_scale."""
    kl_mask_scale: Positive = 1.0
    """kl_mask drops updates where KL >= this / latent dimensions."""
    equalize: bool = True
    """Temporal gradient equalizer: give all steps gradients of similar size."""
    equalize_by: Literal["sensitivity", "std"] = "sensitivity"
    """Quantity to divide out: sensitivity (|b| / std, the paper's Eqs. 38 and 39), or 1 / std alone."""
    equalize_cap: Positive | None = None
    """Largest equalizer weight; None is no limit."""

    def __post_init__(self) -> None:
        if self.kind == "kl_mask" and self.centred == "scaled":
            raise ValueError(
                "surrogate.centred scaled is about the clip, which surrogate.kind kl_mask has none of: use true."
            )
