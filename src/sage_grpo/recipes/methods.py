"""Methods of the field as settings of the same axes: kernel, step weighting, trust region, window, surrogate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from sage_grpo.objectives.advantage import Scale
from sage_grpo.objectives.options import ObjectiveSpec
from sage_grpo.objectives.trust_region import TrustRegion
from sage_grpo.recipes.targets import using
from sage_grpo.samplers.kernels import KernelSpec
from sage_grpo.samplers.windows import Window
from sage_grpo.training.config import AdvantageConfig, SurrogateConfig, TrainConfig
from sage_grpo.training.kl_coefficient import KlCoefficient

BETA = 500.0
"""Coefficient of dpo: as Flow-DPO's, on mean squared errors of velocities."""
# Latent dimensions of the authors' models.
SD3_512 = 16 * 64 * 64  # Stable Diffusion 3.5 at 512 x 512 (FlowGRPO, GRPO-Guard, Flow-DPPO)
FLUX_720 = 16 * 90 * 90  # FLUX.1 at 720 x 720 (MixGRPO)
HUNYUAN_480 = 16 * 14 * 60 * 60  # HunyuanVideo at 480 x 480, 53 frames (DanceGRPO)
WAN_240P = 16 * 9 * 30 * 52  # Wan 2.1 at 240 x 416, 33 frames (FlowGRPO)
WAN_480P = 16 * 21 * 60 * 104  # Wan 2.1 at 480 x 832, 81 frames (Flash-GRPO)
ONE_UPDATE = {"update.updates_per_rollout": 1, "update.step_fraction": 1.0}
"""One update of all trained steps, for methods that explore one step or train whole clips; the clip range and the KL need more to act."""


def sage(config: TrainConfig) -> TrainConfig:
    """SAGE-GRPO (arXiv 2603.21872): integrated variance, gradient equalizer, dual KL with a two-stage coefficient."""
    # Every part of the method acts, so a rollout is used twice. Measured (research/results: strategy_updates, table2), long runs score higher
    # with one update, and the KL changes nothing: `branch` has neither; `--update.updates_per_rollout 1 --trust_region.mode none` removes both here.
    return config


def sage_paper(config: TrainConfig) -> TrainConfig:
    """SAGE-GRPO with the paper's own values, each stated, so that other defaults do not change them."""
    rollout = {"window": Window(kind="all"), "before_steps": None, "after_steps": None}
    surrogate = {"kind": "clipped", "centred": False, "clip_range": None, "kl_mask_scale": 1.0}
    return replace(
        config,
        kernel=KernelSpec(name="sage", eta=0.5, sigma_max=1.0 - 3e-3),
        rollout=using(config.rollout, {**rollout, "same_noise": False, "share": True, "solver": "euler"}),
        batch=replace(config.batch, trained_fraction=1.0),
        advantage=AdvantageConfig(scale="group", decoupled=False, clip=5.0),
        objective=ObjectiveSpec(),
        surrogate=using(config.surrogate, {**surrogate, "equalize": True, "equalize_cap": None}),
        trust_region=TrustRegion(mode="dual", beta_position=1.0, beta_velocity=0.1),
        kl=KlCoefficient(kind="two_stage", lambda_min=1e-7, lambda_max=1e-5, warmup_updates=100),
        anchor=replace(config.anchor, every=10),
        # The paper gives no number of updates per rollout. With one, as released, the clip and half of the KL have no effect.
        update=replace(config.update, updates_per_rollout=2, repeat=False, deal="steps", permute_steps=True),
        sentinel=replace(config.sentinel, action="warn"),
    )


def sage_exact(config: TrainConfig) -> TrainConfig:
    """SAGE with its SDE integrated exactly ("Precise", arXiv 2605.23522): no clamp, no noise left in the clip."""
    return using(config, {"kernel.name": "sage_exact"})


def flow_grpo(config: TrainConfig) -> TrainConfig:
    """FlowGRPO as released: all steps explore and are trained, KL to the initial policy; on Wan the noise of its Wan script."""
    if "wan" in (config.model.path or "").lower():
        config = _released(config, KernelSpec(name="linear", eta=1.0), clip=1e-3, at=WAN_240P)
        return _kept(config, 0.004)
    config = _released(config, KernelSpec(name="flow", eta=0.7), clip=1e-4, at=SD3_512, scale="global")
    # FlowGRPO's KL leaves the step's length out of the variance, and is so ours times that length: 1 / steps in the mean (docs/method.md).
    return _kept(config, 0.04 / config.rollout.steps)


def dance_grpo(config: TrainConfig) -> TrainConfig:
    """DanceGRPO as released: constant diffusion, 0.6 of the steps of each group's best and worst clips, one initial noise, no KL."""
    config = _released(config, KernelSpec(name="dance", eta=0.25), clip=1e-4, at=HUNYUAN_480)
    # All steps explore, so members share no more than the start: running it once would save nothing.
    one_noise = {"rollout.same_noise": True, "rollout.share": False}
    return using(config, {"batch.trained_fraction": round(8 / 24, 4), "update.step_fraction": 0.6, **one_noise})


def cps(config: TrainConfig) -> TrainConfig:
    """Coefficient-preserving sampling with this package's loss."""
    constant = {"surrogate.equalize": False, "trust_region.mode": "fixed", "kl.kind": "constant"}
    return using(config, {"kernel.name": "cps", **constant})


def mix_grpo(config: TrainConfig) -> TrainConfig:
    """MixGRPO as released: explore and train in a window that slides from noise to data, one initial noise, no KL."""
    config = _released(config, KernelSpec(name="flow", eta=0.7), clip=1e-4, at=FLUX_720)
    steps = config.rollout.steps
    window = Window(kind="sliding", length=_part(4 / 25, steps), every=25, stop=max(1, steps - 1))
    return using(config, {"rollout.window": window, "rollout.same_noise": True, "update.updates_per_rollout": 4})


def flow_dppo(config: TrainConfig) -> TrainConfig:
    """Flow-DPPO as released (arXiv 2606.11025): steps of the first half, and a mask on the exact KL instead of the clip."""
    config = _released(config, KernelSpec(name="flow", eta=0.7), clip=1e-4, at=SD3_512, scale="global")
    length = _part(3 / 10, config.rollout.steps)
    window = Window(kind="random", length=length, stop=max(length, config.rollout.steps // 2))
    mask = {"surrogate.kind": "kl_mask", "surrogate.kl_mask_scale": 1e-5 * SD3_512}
    return using(config, {"rollout.window": window, **mask})


def grpo_guard(config: TrainConfig) -> TrainConfig:
    """GRPO-Guard as released (arXiv 2510.22319): FlowGRPO with centered ratios, and gradients of equal size at every step."""
    # Its ratio is scaled by the step's std, so its width is the step's length, and the clip range follows that: 2e-6 at ten steps.
    clip = 2e-6 * 10 / config.rollout.steps
    config = _released(config, KernelSpec(name="flow", eta=0.7), clip=clip, at=SD3_512)
    return using(config, {"surrogate.equalize": True, "surrogate.centred": "scaled"})


def flash_grpo(config: TrainConfig) -> TrainConfig:
    """Flash-GRPO as released (arXiv 2605.15980): one exploring step per prompt, drawn from the first half."""
    config = _released(config, KernelSpec(name="linear", eta=1.0), clip=1e-3, at=WAN_480P, scale="global")
    window = Window(kind="drawn", at=list(range(max(1, config.rollout.steps // 2))))
    return using(config, {"rollout.window": window, "surrogate.equalize": True})


def branch(config: TrainConfig) -> TrainConfig:
    """One exploring step per prompt from a state that the group shares: the fewest network evaluations (docs/method.md)."""
    window = Window(kind="drawn", at=[config.rollout.steps // 3])
    kernel = {"kernel.name": "sage_exact", "kernel.eta": math.sqrt(2), "trust_region.mode": "none"}
    return using(config, {**kernel, "rollout.window": window, "rollout.same_noise": True, **ONE_UPDATE})


def branch_long(config: TrainConfig) -> TrainConfig:
    """branch for long runs: 236 iterations of 24 prompts, some at later steps, a learning rate that falls to zero."""
    third = max(1, config.rollout.steps // 3)
    options = {
        "iterations": 236,
        "batch.prompts": 24,
        # Where one step explores, the later ones get worse (research/results/samplers.md), so some prompts explore those. Two second-order steps after the
        # branch train as well as three Euler steps, with fewer network evaluations; one before it instead of two costs a little (research/results/samplers.md).
        "rollout.window": _later(config.rollout.steps),
        **{"rollout.solver": "ab2", "rollout.before_steps": third, "rollout.after_steps": third},
        # The noise of its steps limits a long run: more prompts and a falling rate both lower it, and a start at twice the rate makes up
        # for the fall. Where one step explores, that start loses visual quality in some seeds, also with 32 prompts (research/results/long_runs.md).
        **{"optimizer.lr": 2 * config.optimizer.lr, "optimizer.decay": "linear"},
        # Some seeds lose a part of the reward in between. Rolling back saved one of eight with 16 prompts (research/results/long_runs.md);
        # its effect with these settings is not measured.
        "sentinel.action": "rollback",
    }
    return using(branch(config), options)


def nft(config: TrainConfig) -> TrainConfig:
    """DiffusionNFT (arXiv 2509.16117): no SDE; matches good clips and moves away from bad ones."""
    levels = max(1, int(0.99 * config.rollout.steps))  # as released: 9 of 10 steps, 24 of 25
    objective = ObjectiveSpec(kind="nft", levels=levels, weight="adaptive", saturation=5.0, old_decay=0.5, old_ramp=500)
    return _kept(_without_sde(config, objective), 1e-4)


def awm(config: TrainConfig) -> TrainConfig:
    """Advantage-weighted matching (arXiv 2509.25050): no SDE; flow matching of clips, weighted by advantage."""
    levels = _part(6 / 14, config.rollout.steps)
    objective = ObjectiveSpec(kind="awm", levels=levels, draw="strata", weight="ghuber", old_decay=0.3, old_ramp=300)
    config = _without_sde(config, replace(objective, old_samples=False))
    # To the start and to the average, in the released code's own weights; it divides advantages by 5, so that this is 5 times its loss.
    region = TrustRegion(mode="fixed_dual", beta_position=1e-4, beta_velocity=1.0)
    kl = {"kl.kind": "constant", "kl.lambda_max": 5.0}
    return using(config, {"surrogate.clip_range": 1.0, "trust_region": region, **kl})


def dpo(config: TrainConfig) -> TrainConfig:
    """DPO: a group's best clip against its worst, or pairs of data.clips."""
    # Diffusion-DPO (arXiv 2311.12908) on velocities, as Flow-DPO (arXiv 2501.13918).
    fraction = round(2 / config.batch.group_size, 4)
    # The loss itself compares with the reference, so the KL beside it has weight 0.
    kl = KlCoefficient(kind="constant", lambda_min=0.0, lambda_max=0.0)
    config = using(config, {"batch.trained_fraction": fraction, "trust_region": TrustRegion(mode="fixed"), "kl": kl})
    levels = _part(1 / 3, config.rollout.steps)
    return _without_sde(config, ObjectiveSpec(kind="dpo", levels=levels, draw="strata", beta=BETA))


def rft(config: TrainConfig) -> TrainConfig:
    """Fine-tuning on each group's best clips, or on data.clips."""
    options = {"batch.trained_fraction": 0.25, "trust_region": TrustRegion(mode="none"), "kl.kind": "constant"}
    objective = ObjectiveSpec(kind="sft", levels=_part(1 / 3, config.rollout.steps), draw="strata")
    return _without_sde(using(config, options), objective)


def refl(config: TrainConfig) -> TrainConfig:
    """ReFL (arXiv 2304.05977): the reward's gradient at a clip predicted in one late step. Needs a differentiable reward."""
    return _by_gradient(config, ObjectiveSpec(kind="gradient", levels=1, draw="last", predict=0.25))


def draft(config: TrainConfig) -> TrainConfig:
    """DRaFT-K (arXiv 2309.17400): the reward's exact gradient through the last K steps (objective.levels)."""
    return _by_gradient(config, ObjectiveSpec(kind="gradient", levels=1, draw="last", credit="exact"))


def adjoint(config: TrainConfig) -> TrainConfig:
    """The reward's gradient at any steps, with later velocities as constants: one pass per trained step."""
    return _by_gradient(config, ObjectiveSpec(kind="gradient", levels=_part(1 / 3, config.rollout.steps)))


def _by_gradient(config: TrainConfig, objective: ObjectiveSpec) -> TrainConfig:
    """Sample with the ODE, and learn in one update from the gradient of the reward."""
    config = using(config, {"rollout.solver": "euler", "trust_region": TrustRegion(mode="none")})
    return _one_update(config, objective)


def _without_sde(config: TrainConfig, objective: ObjectiveSpec) -> TrainConfig:
    """Sample with the ODE, without guidance, and learn in one update at noise levels of the same schedule.

    Clips are targets of the network's own velocity: guided ones would be of another policy than the one that is trained.
    """
    unguided = {"model.guidance_scale": 1.0, "model.guidance_scale_2": None}
    # Both use second-order solvers, one evaluation a step.
    options = {"rollout.solver": "ab2", "advantage.scale": "global", "advantage.clip": 5.0}
    return using(_one_update(config, objective), unguided | options)


def _one_update(config: TrainConfig, objective: ObjectiveSpec) -> TrainConfig:
    """Sample with the ODE, and learn from whole clips in one update."""
    surrogate = {"surrogate.kind": "clipped", "surrogate.centred": False, "surrogate.equalize": False}
    return using(config, {"kernel": KernelSpec(name="ode"), "objective": objective, **surrogate, **ONE_UPDATE})


def _later(steps: int) -> Window:
    """Prompts branch at a third, half or two thirds of the steps, three, one and one of five; where these coincide, the step is drawn as often as both."""
    drawn = Counter[int]()
    for place, weight in ((steps // 3, 3), (steps // 2, 1), (2 * steps // 3, 1)):
        drawn[min(place, max(0, steps - 2))] += weight  # the last step has no noise to learn from
    return Window(kind="drawn", at=list(drawn), weights=[float(weight) for weight in drawn.values()])


def _released(config: TrainConfig, kernel: KernelSpec, *, clip: float, at: int, scale: Scale = "group") -> TrainConfig:
    """Settings common to released code: the clips of a rollout are dealt out to its updates, no step weights, no KL.

    `clip` is the authors' range `at` their number of latent dimensions: a log-ratio is a mean over these, whose noise falls as 1 / sqrt(D).
    """
    return replace(
        config,
        kernel=kernel,
        advantage=AdvantageConfig(scale=scale, clip=5.0),
        surrogate=SurrogateConfig(clip_scale=clip * math.sqrt(at), equalize=False),
        trust_region=TrustRegion(mode="none"),
        kl=replace(config.kl, kind="constant"),
        update=replace(config.update, updates_per_rollout=2, step_fraction=1.0, repeat=False, deal="clips"),
    )


def _kept(config: TrainConfig, coefficient: float) -> TrainConfig:
    """Add a KL to the initial policy, with a constant coefficient."""
    kl = {"kl.kind": "constant", "kl.lambda_max": coefficient}
    return using(config, {"trust_region": TrustRegion(mode="fixed"), **kl})


def _part(share: float, steps: int) -> int:
    """A share of the steps, at least one: authors' numbers are of their own number of steps."""
    return max(1, round(share * steps))


METHODS: dict[str, Callable[[TrainConfig], TrainConfig]] = {
    method.__name__: method
    for method in (
        sage, sage_paper, branch, branch_long, sage_exact, flow_grpo, dance_grpo, cps, mix_grpo, flash_grpo, grpo_guard,
        flow_dppo, nft, awm, dpo, rft, refl, draft, adjoint,
    )
}  # fmt: skip
