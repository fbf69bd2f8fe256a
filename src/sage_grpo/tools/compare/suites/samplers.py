"""Samplers before anything is learned, and the equaliser of their gradients: the paper's figures 1, 3, 4 and 9."""

from __future__ import annotations

from sage_grpo.tools.compare.design import Arm, Suite
from sage_grpo.tools.compare.suites.common import COLUMNS, DRIFT, FLICKER, FRESH, MEASURED, OVERALL, Size, judged, sized

KERNELS = ("dance", "flow", "cps", "sage", "sage_exact")
RECIPE = "shapes/sage_paper"


def _kernel(name: str) -> dict[str, object]:
    """A kernel in the place of sage, with its own clamp."""
    return {"kernel.name": name, "kernel.sigma_max": None}


def noise(size: Size) -> Suite:
    """What exploration costs before training: quality and drift of noisy rollouts by kernel, eta and steps."""
    arms = [Arm(name="sage_exact 0.01, 6 steps", recipe=RECIPE, options={**_kernel("sage_exact"), "kernel.eta": 0.01})]
    for steps, etas in ((6, (0.2, 0.5, 1.0)), (10, (0.5,)), (20, (0.5,))):
        arms += [
            Arm(
                name=f"{name} {eta}, {steps} steps",
                recipe=RECIPE,
                options={**_kernel(name), "kernel.eta": eta, "rollout.steps": steps},
            )
            for eta in etas
            for name in KERNELS
        ]
    suite = Suite(
        name="noise",
        title="Rollouts with exploration, before training (figures 1 and 9)",
        question="The paper claims that integrating the variance over a step removes excess noise, so that rollouts of sage are better and stay closer to "
        "the manifold than those of flow and dance. Is that so at equal eta, and by how much?",
        arms=tuple(arms),
        baseline="sage 0.5, 6 steps",
        options={**MEASURED, "rewards": judged()},
        iterations=4,
        columns=COLUMNS,
        kind="rollout",
        figures=("bars",),
        notes="Nothing is learned. Each arm samples 4 batches of 48 clips a seed from the same prompts and start noises. The first arm nearly is the ODE.",
    )
    brief = [arm.name for arm in arms if " 0.5, 6 " in arm.name or ", 20 " in arm.name or " 1.0, 6 " in arm.name]
    brief.append("sage_exact 0.01, 6 steps")
    return sized(suite, size, brief=brief, smoke=("sage 0.5, 6 steps", "dance 0.5, 6 steps"))


def equaliser(size: Size) -> Suite:
    """The temporal gradient equaliser on and off for every kernel, with gradient norms by step."""
    arms = tuple(
        Arm(
            name=f"{name}, {'equalised' if on else 'plain'}",
            recipe=RECIPE,
            options={
                **_kernel(name),
                "surrogate.equalize": on,
                "trust_region.mode": "none",
                "update.step_fraction": 1.0,
            },
        )
        for name in KERNELS
        for on in (True, False)
    )
    suite = Suite(
        name="equaliser",
        title="The temporal gradient equaliser (figures 3 and 4)",
        question="The paper claims that gradients vanish at high noise and explode at low noise as 1/std, and that dividing by it makes every sampler learn "
        "more, and more steadily. Is that the imbalance that is measured, and does dividing it out help?",
        arms=arms,
        baseline="sage, equalised",
        options={**MEASURED, "rewards": judged()},
        iterations=45,
        points=(0, 15, 30, 45),
        columns=(OVERALL, DRIFT, FLICKER),
        figures=("steps", "curves"),
        notes="All five exploring steps are trained and there is no KL, so that the equaliser is all that differs. Sensitivity is |b|/std, not 1/std.",
    )
    brief = ("sage, equalised", "sage, plain", "flow, equalised", "flow, plain")
    return sized(suite, size, brief=brief, smoke=("sage, equalised", "sage, plain"))


def regime(size: Size) -> Suite:
    """The equaliser where the paper trains: 20 steps, shift 5, one update of all steps; as printed, and as its derivation has it."""
    ways: dict[str, dict[str, object]] = {
        "plain": {"surrogate.equalize": False},
        "1/std": {"surrogate.equalize_by": "std"},
        "|b|/std": {"surrogate.equalize_by": "sensitivity"},
    }
    arms = tuple(
        Arm(name=f"{name}, {way}", recipe=RECIPE, options={**_kernel(name), **options})
        for name in ("sage", "flow")
        for way, options in ways.items()
    )
    suite = Suite(
        name="regime",
        title="The equaliser in the paper's regime",
        question="With 20 steps and shift 5 sensitivities span two orders of magnitude. Does dividing gradients by 1/std, as the paper prints it, help "
        "there, and does |b|/std, which is what its derivation gives?",
        arms=arms,
        baseline="sage, |b|/std",
        seeds=FRESH,
        options={
            **MEASURED,
            "rewards": judged(),
            "model.shift": 5.0,
            "rollout.steps": 20,
            "trust_region.mode": "none",
            "update.step_fraction": 1.0,
            "update.updates_per_rollout": 1,
        },
        iterations=45,
        points=(0, 15, 45),
        columns=(OVERALL, DRIFT, FLICKER),
        figures=("steps", "curves"),
    )
    return sized(
        suite,
        size,
        brief=[arm.name for arm in arms if arm.name.startswith("sage")],
        smoke=("sage, |b|/std", "sage, plain"),
    )
