"""Learning from the reward's own gradient, beside learning from scores alone: how much faster, and does the truth follow?"""

from __future__ import annotations

from typing import Any

from sage_grpo.tools.compare.design import Arm, Column, Suite
from sage_grpo.tools.compare.suites.common import COLUMNS, MEASURED, SHARPNESS, Size, judged, proxied, sized

SEEDS = tuple(range(9101, 9109))
"""No run had these before."""
RATES = (1.5e-5, 5e-5, 1.5e-4)
"""The recipe's in the middle: nobody has tuned it for these methods."""
WAYS: dict[str, dict[str, Any]] = {
    # The last quarter of six steps is one step, from which a predicted clip is the sampled one: that would be draft again.
    "refl": {"objective.predict": 0.5},
    "draft": {},
    "adjoint": {},
}


def gradients(size: Size) -> Suite:
    """ReFL, DRaFT and the adjoint at three rates, each on the judge, and on a proxy that can be hacked."""
    proxy = {"rewards": proxied()}
    arms = (
        Arm(name="branch", recipe="shapes/branch"),
        *(
            Arm(name=f"{name} {rate:g}", recipe=f"shapes/{name}", options={**options, "optimizer.lr": rate})
            for name, options in WAYS.items()
            for rate in RATES
        ),
        Arm(name="draft, last 3 steps", recipe="shapes/draft", options={"objective.levels": 3}),
        # A target KL needs a path with noise, which none of these has. What holds them is a KL of velocities with a share of the gradient.
        Arm(
            name="adjoint, KL share",
            recipe="shapes/adjoint",
            options={"trust_region.mode": "fixed", "kl.kind": "share"},
        ),
        Arm(name="branch on the proxy", recipe="shapes/branch", options=proxy),
        Arm(name="draft on the proxy", recipe="shapes/draft", options=proxy),
        Arm(name="adjoint on the proxy", recipe="shapes/adjoint", options=proxy),
    )
    suite = Suite(
        name="gradients",
        title="The reward's gradient against a policy gradient",
        question="A reward that can be differentiated says in which direction to go, where scores only say which clip was better. How much faster is that at "
        "equal iterations, and with a reward that can be hacked, how much sooner is the truth lost?",
        arms=arms,
        baseline="branch",
        seeds=SEEDS,
        options={**MEASURED, "rewards": judged()},
        iterations=45,
        points=(0, 15, 45),
        columns=(*COLUMNS, SHARPNESS, Column(key="total", label="trained reward")),
        figures=("bars", "curves"),
        notes="Overall is the judge's in every arm: on the proxy it is the truth that no gradient has seen, and `trained reward` is the proxy. Passes are those "
        "of the denoiser; the decoder's and the judge's backward pass, which a gradient needs on top, are not among them: compare seconds.",
    )
    brief = ("branch", *(f"{name} {RATES[1]:g}" for name in WAYS), "branch on the proxy", "draft on the proxy")
    return sized(suite, size, brief=brief, smoke=("branch", f"draft {RATES[1]:g}"))
