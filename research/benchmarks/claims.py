"""README's claims as sentences, with every figure from the rows of research/results."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from views import TESTED, between, corrected, value


def claims(folder: Path) -> str:
    """Three claims with their figures and limits; `folder` is research/results."""
    TESTED.clear()
    methods, regime, heat, table = (folder / name for name in ("headline", "regime", "heat", "table2"))
    second, equalized, taken = (folder / name for name in ("scenes_headline", "scenes_equaliser", "taken"))
    first_budget, second_budget = folder / "budget", folder / "scenes_budget"
    plain = between(equalized, arm="sage, 20 steps, plain", other="sage, 20 steps, equalised")
    texts = (
        f"""**No method learns more per network evaluation than `branch`, which explores one step per prompt.** With as many
        evaluations, and rates chosen for that budget, SAGE scores {than(minus(first_budget, "sage"))} and MixGRPO
        {than(minus(first_budget, "mix"))}. In the second world MixGRPO scores {than(minus(second_budget, "mix"))}, and DiffusionNFT
        {than(minus(second_budget, "nft"))}. With the same clips AWM scores {than(minus(methods, "awm", "clips"))}, and in the second world
        DiffusionNFT {than(minus(second, "nft", "clips"))}. Limit: two small worlds; two seeds chose each rate.""",
        f"""**The gradient equalizer helps, with the factor |b|/std of the paper's Eqs. 38 and 39.** Without it SAGE scores
        {than(minus(regime, "sage, plain"))} over 45 iterations of 20 steps at shift 5, and {than(plain)} in the second world.
        FlowGRPO's sampler with the same equalizer differs by {minus(regime, "flow, |b|/std")}, SAGE without the dual trust region by
        {minus(table, "sage")}. Limit: in our normalization the printed KL coefficients hardly act; at the paper's strength they are untested.""",
        f"""**At four times the good learning rate, `optimizer.target_kl` limits a run to a step size that was read off a good
        one.** After 300 iterations `branch` ends at {value(heat, "none 2e-04")} without it, at {value(heat, "target_kl 2e-04")} with it,
        and at the good rate at {value(heat, "none 5e-05")}. Limit: the good run must be of the same method. A target measured on SAGE
        gives `branch` almost no gain: {value(taken, "branch 0.0002, sage at 5e-5")}, without a target
        {value(taken, "branch 0.0002, no target")}.""",
    )
    lost = "|".join(re.escape(text[1:]) for text in corrected()[2]) or "$^"
    return "\n".join(
        textwrap.fill(
            re.sub(rf"({lost}) (lower|higher)", r"\1 \2 (not distinguishable)", " ".join(text.split())),
            119,
            initial_indent=f"{number}. ",
            subsequent_indent="   ",
        )
        for number, text in enumerate(texts, start=1)
    )


def minus(folder: Path, arm: str, at: str = "") -> str:
    """Difference from the comparison's baseline: at its end, at equal clips, or at equal network evaluations."""
    return value(folder, arm, kind=f"{at}_difference" if at else "difference")


def than(difference: str) -> str:
    """`-0.1 ± 0.2` as `0.1 ± 0.2 lower (not distinguishable)`."""
    mean, half = (float(part) for part in difference.split("±"))
    words = "lower" if mean < 0 else "higher"
    return f"{difference[1:]} {words}" + (" (not distinguishable)" if abs(mean) <= half else "")
