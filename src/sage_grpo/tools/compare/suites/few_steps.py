"""Learning on a model that needs few steps: does it stay sharp?"""

from __future__ import annotations

from dataclasses import replace

from sage_grpo.tools.compare.design import Arm, Suite
from sage_grpo.tools.compare.suites.common import COLUMNS, SHARPNESS, Size, judged, sized

SEEDS = tuple(range(9001, 9009))
"""No run had these before."""
STEPS = 4
FOLDER = "./shapes-distilled/pipeline"
"""What `sage-grpo shapes distill` writes, below the folder in which the suite is run."""


def few_steps(size: Size) -> Suite:
    """Samplers and objectives on the miniature, distilled to four steps."""
    few = {"rollout.steps": STEPS}
    arms = (
        Arm(name="branch", recipe="shapes/branch", options={**few, "rollout.window.at": [1]}),
        Arm(name="sage_exact", recipe="shapes/sage_exact", options=few),
        Arm(name="cps, eta 1", recipe="shapes/cps", options={**few, "kernel.eta": 1.0}),
        Arm(name="cps", recipe="shapes/cps", options=few),
        Arm(name="nft", recipe="shapes/nft", options={**few, "objective.levels": 3}),
    )
    suite = Suite(
        name="few_steps",
        title="Learning on a few-step model",
        question="A model that was distilled to four steps is sharp in four steps. Which way of exploring improves it without blurring it or making it drift?",
        arms=arms,
        baseline="branch",
        seeds=SEEDS,
        options={"model.path": FOLDER, "evaluate.prompts": 128, "evaluate.steps": STEPS, "rewards": judged()},
        iterations=90,
        points=(0, 15, 30, 60, 90),
        columns=(*COLUMNS, SHARPNESS),
        figures=("curves", "bars"),
        notes=f"The model is made first, by `sage-grpo shapes distill`, in the folder where the suite is run ({FOLDER}). Evaluated at its own {STEPS} steps: "
        "the base row is the distilled model. `cps` at eta 1 renews all noise at every step, as multi-step consistency sampling does.",
    )
    found = sized(suite, size, brief=("branch", "cps, eta 1"), smoke=("branch", "cps, eta 1"))
    # a smoke test needs no model of its own: the package's, at as many steps, runs the same code
    own = {key: value for key, value in found.options.items() if key != "model.path"}
    return replace(found, options=own) if size == "smoke" else found
