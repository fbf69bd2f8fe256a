"""Detection of checkpoints that were distilled to few steps or to no guidance, and advice where they are used as if they were not.

No file of such a checkpoint forbids guidance: its network has the same shape as the one it was made from, and loads with that one's
guidance and steps. It is recognized by its name, on the hub or as a folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sage_grpo.models.spec import ModelSpec

SIGNS: Mapping[str, tuple[int, int] | None] = {
    r"schnell": (1, 4),
    r"3\.?5.*large.*turbo": (4, 4),
    r"ltx.*distill": (4, 10),
    r"hunyuanvideo-?1\.?5.*step_?-?distill": (8, 12),
    r"hunyuanvideo-?1\.?5.*distill": None,
    r"wan.*(?:lightning|nfe4)": (4, 4),
    r"wan.*step_?-?distill": (4, 4),
    r"fastwan": (3, 3),
    r"qwen.*lightning": (4, 8),
    r"(?<![a-z])(?:turbo|lightning|distill|lightx2v|causvid)": None,
    r"(?<![a-z])(?:cfg_?-?distill|step_?-?distill|self-?_?forcing|sfwan)": None,
}
"""Names that distilled checkpoints have, as regular expressions for small letters, and the fewest and most steps with which their authors
sample them: None where these are those of the original model, or are not known. The first match counts."""
USUAL = 40  # steps of an evaluation of a model that needs many
UNDONE = re.compile(r"(?:de|un|non|not)[-_ ]?distill")
"""Names of models that were not distilled, or whose distillation was undone."""
COUNTED = re.compile(r"(?<![a-z0-9])([1-9]\d?)[-_ ]?steps?(?![a-z])")  # A number of steps in a name


@dataclass(frozen=True, kw_only=True)
class Distilled:
    """A checkpoint that is sampled without guidance."""

    evidence: str  # the evidence, in words
    steps: tuple[int, int] | None = None  # steps with which its authors sample it; None where that is not known here

    def advice(self, scale: float, steps: int | None = None, evaluated: int | None = None) -> str | None:
        """Advice on a wrong guidance scale (1 is none) or wrong numbers of steps of rollouts and evaluations; None where all are right."""
        low, high = self.steps or (0, 0)
        asked = {"rollout.steps": steps, "evaluate.steps": evaluated}
        guided, many = scale != 1, {name: count for name, count in asked.items() if high and (count or 0) > high}
        if not guided and not many:
            return None
        count = f"in {low} steps" if low == high else f"in {low} to {high} steps"
        used = "without guidance" if self.steps is None else f"without guidance and {count}"
        here = [f"model.guidance_scale is {scale:g}"] if guided else []
        here += [f"{name} is {count}" for name, count in many.items()]
        mend = ["model.guidance_scale 1"] if guided else []
        mend += [f"{name} {high}" for name in many or (asked if steps is None and high else ())]
        return (
            f"This is a distilled checkpoint ({self.evidence}), which its authors sample {used}, but {' and '.join(here)}. Set "
            f"{' and '.join(mend)}; leave it only where further training undid the distillation."
        )


def find_distilled(spec: ModelSpec) -> Distilled | None:
    """The distillation that the names of a checkpoint and its adapters show."""
    names = [("the file of an adapter", f"{Path(one.path).name}/{one.file}") for one in spec.adapters]
    if spec.path not in (None, "shapes"):
        names.append(("its name", Path(spec.path).name))  # without the hub's owners and the folders above
    if any(UNDONE.search(name.casefold()) for _, name in names):
        return None
    for where, name in names:
        sign = next((sign for sign in SIGNS if re.search(sign, name.casefold())), None)
        if sign is not None:
            # A number of steps beside the sign replaces the table's. Alone it may be the number of any run.
            counted = COUNTED.search(name.casefold())
            steps = SIGNS[sign] if counted is None else (int(counted[1]), int(counted[1]))
            return Distilled(evidence=f'{where} is "{name}"', steps=steps)
    return None


def steps_of(spec: ModelSpec) -> int:
    """Default number of steps of an evaluation: that of the stated grid, or the most that the authors of a distilled model take, else 40."""
    if spec.sigmas:
        return len(spec.sigmas)
    distilled = find_distilled(spec)
    return USUAL if distilled is None or distilled.steps is None else distilled.steps[1]
