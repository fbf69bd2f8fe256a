"""Methods of the field as a few lines on the same axes: kernel, step weighting, trust region, window, surrogate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from sage_grpo.flow.windows import Window
from sage_grpo.train.config import TrainConfig


def sage(config: TrainConfig) -> TrainConfig:
    """SAGE-GRPO (arXiv 2603.21872): integrated variance, equaliser, dual trust region, two-stage coefficient."""
    return config


def sage_exact(config: TrainConfig) -> TrainConfig:
    """SAGE with its SDE integrated exactly ("Precise", arXiv 2605.23522): no clamp, no noise left in the video."""
    return replace(config, kernel=replace(config.kernel, name="sage_exact"))


def flow_grpo(config: TrainConfig) -> TrainConfig:
    """FlowGRPO: Euler-style variance, no step weighting, KL to the initial policy."""
    return _baseline(config, "flow", region="fixed")


def dance_grpo(config: TrainConfig) -> TrainConfig:
    """DanceGRPO: constant diffusion, no step weighting, no KL, one initial noise for a group."""
    config = _baseline(config, "dance", region="none")
    # All steps explore, so that members share no more than the start: nothing to win from running it once.
    return replace(config, rollout=replace(config.rollout, same_noise=True, share=False))


def cps(config: TrainConfig) -> TrainConfig:
    """Coefficient-preserving sampling with FlowGRPO's loss."""
    return _baseline(config, "cps", region="fixed")


def mix_grpo(config: TrainConfig) -> TrainConfig:
    """MixGRPO: explore and train inside a window that slides from noise to data, no KL."""
    config = _baseline(config, "flow", region="none")
    length = max(2, config.rollout.steps // 4)
    window = Window(kind="sliding", length=length, stride=1, every=max(1, config.iterations // config.rollout.steps))
    return replace(config, rollout=replace(config.rollout, window=replace(window, stop=config.rollout.steps - 1)))


def flow_dppo(config: TrainConfig) -> TrainConfig:
    """Flow-DPPO (arXiv 2606.11025): FlowGRPO with a mask on the exact KL instead of the ratio clip."""
    config = _baseline(config, "flow", region="none")
    return replace(config, surrogate=replace(config.surrogate, kind="kl_mask"))


def branch(config: TrainConfig) -> TrainConfig:
    """One exploring step per prompt from a state that the group shares, replayed once (ours; docs/method.md)."""
    rollout = replace(config.rollout, same_noise=True, window=Window(kind="drawn", at=[config.rollout.steps // 3]))
    return replace(
        config,
        kernel=replace(config.kernel, name="sage_exact", eta=math.sqrt(2)),
        rollout=rollout,
        update=replace(config.update, updates_per_rollout=1, step_fraction=1.0),
        trust_region=replace(config.trust_region, mode="none"),
    )


def _baseline(config: TrainConfig, kernel: str, *, region: str) -> TrainConfig:
    return replace(
        config,
        kernel=replace(config.kernel, name=kernel),
        surrogate=replace(config.surrogate, equalize=False),
        trust_region=replace(config.trust_region, mode=region),
        kl=replace(config.kl, kind="constant"),
    )


METHODS: dict[str, Callable[[TrainConfig], TrainConfig]] = {
    method.__name__: method for method in (sage, sage_exact, flow_grpo, dance_grpo, cps, mix_grpo, flow_dppo, branch)
}
