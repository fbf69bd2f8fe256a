"""Objectives without an SDE against policy gradients, at equal clips: what learning at fresh noise levels gives."""

from __future__ import annotations

from typing import Any

from sage_grpo.lab.design import Arm, Suite
from sage_grpo.lab.suites.common import COLUMNS, MEASURED, Size, judged, sized

PLAIN: dict[str, Any] = {
    "model.guidance_scale": None,
    "rollout.solver": "euler",
    "advantage.scale": "group",
    "objective.levels": 4,
    "objective.draw": "schedule",
    "objective.weight": "uniform",
    "objective.saturation": 1.0,
    "objective.old_decay": 0.0,
    "objective.old_ramp": 0,
    "objective.old_samples": True,
    "surrogate.clip_range": None,
    "trust_region.mode": "none",
    "trust_region.beta_position": 1.0,
    "trust_region.beta_velocity": 0.1,
    "kl.lambda_max": 1e-5,
    "update.updates_per_rollout": 2,
}
"""What was measured: both objectives alone, on settings that they share with the others. The presets are as their authors run them now."""


def objectives(size: Size) -> Suite:
    """branch and sage against DiffusionNFT and advantage-weighted matching, with their levels, leash and old policy."""
    arms = (
        Arm(name="branch", recipe="shapes/branch"),
        Arm(name="sage", recipe="shapes/sage_paper"),
        Arm(name="nft", recipe="shapes/nft", options=PLAIN),
        Arm(name="awm", recipe="shapes/awm", options=PLAIN),
        Arm(name="nft, 2 levels", recipe="shapes/nft", options={**PLAIN, "objective.levels": 2}),
        Arm(name="nft, beta 0.1", recipe="shapes/nft", options={**PLAIN, "objective.beta": 0.1}),
        Arm(name="nft, adaptive", recipe="shapes/nft", options={**PLAIN, "objective.weight": "adaptive"}),
        Arm(name="nft, old 0.5", recipe="shapes/nft", options={**PLAIN, "objective.old_decay": 0.5}),
        Arm(name="awm, uniform draw", recipe="shapes/awm", options={**PLAIN, "objective.draw": "uniform"}),
    )
    suite = Suite(
        name="objectives",
        title="With and without an SDE",
        question="DiffusionNFT and AWM sample with the ODE and learn at fresh noise levels; their papers claim up to 25 times less compute than FlowGRPO. At "
        "equal clips, do they learn in this world, and how do they compare with branch and sage?",
        arms=arms,
        baseline="branch",
        options={**MEASURED, "rewards": judged()},
        iterations=45,
        points=(0, 15, 45),
        columns=COLUMNS,
        figures=("bars", "curves"),
        notes="All arms sample 4 x 12 clips an iteration; passes through the network differ and are counted. Learning rates are those of the recipes.",
    )
    return sized(suite, size, brief=("branch", "sage", "nft", "awm"), smoke=("branch", "nft"))
