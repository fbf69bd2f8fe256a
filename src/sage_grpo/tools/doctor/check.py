"""The result of a check, the reason for each check and its remedy; as lines for people, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from sage_grpo.samplers.kernels import EXACT
from sage_grpo.utils.json_schema import finite

if TYPE_CHECKING:
    from rich.console import Console

Status = Literal["pass", "skip", "warn", "fail"]
ORDER: tuple[Status, ...] = ("pass", "skip", "warn", "fail")  # from good to bad
STYLE = {"pass": "green", "skip": "dim", "warn": "bold yellow", "fail": "bold red"}

WHY = {
    "versions": "the model families are written against these libraries' own modules: older ones compute something else, or crash",
    "device": "a GPU that is shared runs out of memory after an hour",
    "plan": "steps that cannot explore or are not trained are found here in a second, and in a run after the model is loaded",
    "files": "a weight that is missing gets random values, and a tokenizer without its files an empty vocabulary: both look plausible",
    "settings": "held-out scores mean nothing for prompts that are trained on, a distilled network burns its pictures with guidance on top, and "
    "bfloat16 is hundreds of times slower on a CPU",
    "stability": "a sampler that overshoots, or whose last step leaves its noise, makes clips that the reward can only call bad",
    "prompt": "a network that does not read its prompt cannot learn to follow it",
    "padding": "padding that is attended changes the velocity, by how much depends on the batch: rollout and replay then disagree",
    "pipeline": "what is trained must be what users of the checkpoint run: the same grid, guidance, text and network",
    "vae": "latents that are scaled twice, or not at all, decode to washed-out or burnt clips that no reward can rank",
    "guidance": "a replay at another scale is of another model: its gradient teaches guidance, not the reward",
    "reward valid": "a clip without a score is left out: too many of them leave nothing to compare",
    "reward spread": "advantages are differences within a group: without any, or with noise instead, there is nothing to learn",
    "reward batch": "a score that depends on its batch depends on ranks and micro-batches: advantages compare what cannot be compared",
    "reward prompt": "a reward that ignores the prompt, or sees another clip's, teaches the model to ignore it too",
    "reward statistics": "a reward that is brightness or motion in disguise is maxed out by a white or a frozen clip",
    "ratio": "before the first update both policies are one: a ratio other than 1 is an error of replay that the clip takes for learning",
    "gradients": "an adapter that binds to no module trains nothing, modules without a gradient are dead weight, and one below AdamW's epsilon moves nothing",
    "update": "a bfloat16 weight has three digits: steps of a learning rate are rounded away, and the run makes no progress",
    "step size": "a step as long as the velocity itself leaves nothing of the model that was trained: the run then learns from noise",
    "ranks": "a rank whose gradients were not added up trains another model, and the average of both is neither",
    "trust region": "a KL without a gradient holds nothing back, whatever its coefficient: the policy drifts until the reward is hacked",
    "save": "weights that change when they are saved make the run useless",
}
"""Check -> reason."""
REMEDY = {
    "versions": "pip install -U the libraries that are too old",
    "device": "stop other processes on the GPU (nvidia-smi), or take another with model.device",
    "plan": "set what is named; `sage-grpo inspect` shows the steps of a schedule",
    "files": "get what is named, or give the right path",
    "settings": "set what is named; keep data.eval_prompts apart from data.prompts, and every prompt once in its file",
    "stability": f"look at `sage-grpo inspect` with this kernel and schedule; leave rollout.deterministic_last out, or take kernel.name {EXACT}",
    "prompt": "compare what the pipeline makes of the two prompts; a user's family must hand the encoding to the network",
    "padding": "a family's encode must return valid tokens only, and batches must mask or avoid padding (docs/extending.md)",
    "pipeline": "compare model.shift, model.guidance_scale and model.negative_prompt with the checkpoint; else report it",
    "vae": "a family's codec applies the VAE's scaling exactly once; compare vae/config.json with the published one",
    "guidance": "sample and replay with the guidance of model.guidance_scale and model.guidance_in_training",
    "reward valid": "score one of the clips with `sage-grpo evaluate` and read the reason",
    "reward spread": "take a reward that tells clips of one prompt apart, or raise batch.group_size",
    "reward batch": "normalize nothing over the batch inside a reward, and mask its padding; the trainer normalizes within groups",
    "reward prompt": "check which prompt the reward gets for which clip; a reward without prompts needs one with them beside it",
    "reward statistics": "add a reward that guards against it (video_stats with a negative weight), or another judge",
    "ratio": "try model.compile false, model.attention native, rollout.storage float32; then report it",
    "gradients": "leave model.lora.targets empty for the family's own, or name modules of the transformer; or lower optimizer.eps",
    "update": "keep trained weights in float32 (the default), or raise optimizer.lr",
    "step size": "lower optimizer.lr, by as much as this is above 0.1, or set optimizer.target_kl and max_kl",
    "ranks": "restart all processes from one checkpoint; the same code, seed and libraries on every machine",
    "trust region": "the reference pass must use the anchor's weights, and the KL must depend on the velocity",
    "save": "look at the exported folder with diffusers; a disk that is full writes half of a file",
}
"""Check -> remedy when it warns or fails."""
STOPPED = ("what cannot be checked cannot be trained", "fix this first; the checks after it were left out")
"""Reason and remedy of a stage that an error ended."""


@dataclass(frozen=True)
class Check:
    """One line of a check-up."""

    name: str
    """Name of the check."""
    status: Status
    """pass, warn (look at it), fail (the run would not learn, or not what you think), or skip (not checked; `value` says why)."""
    value: str
    """Measured value."""
    number: float | None = None
    """The measured value as a number, where it is one."""
    why: str = ""
    """Reason, if not in WHY."""
    remedy: str = ""
    """Remedy, if not in REMEDY."""

    def __post_init__(self) -> None:
        remedy = self.remedy or REMEDY.get(self.name, STOPPED[1])
        object.__setattr__(self, "why", self.why or WHY.get(self.name, STOPPED[0]))
        object.__setattr__(self, "remedy", "" if self.status == "skip" else remedy)


def worst(found: Iterable[Check]) -> Status:
    return max((one.status for one in found), key=ORDER.index, default="pass")


def graded(value: float, *, warn: float, fail: float) -> Status:
    if not math.isfinite(value) or value > fail:
        return "fail"
    return "warn" if value > warn else "pass"


def relative(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted|; infinite where the shapes differ."""
    if found.shape != wanted.shape:
        return math.inf
    found, wanted = found.double().cpu(), wanted.double().cpu()
    size = float(wanted.norm())
    gap = float((found - wanted).norm())
    return gap / size if size > 0 else (0.0 if gap == 0 else math.inf)


def rounding(dtype: torch.dtype) -> float:
    """A relative error that order of operations explains in this precision, after a whole network."""
    return 2e-4 if dtype == torch.float32 else 5e-2


def show(found: Check, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    text = Text(found.value)
    if found.status in ("warn", "fail"):
        text.append(f"\n{found.why}", style="dim")
        text.append(f"\n-> {found.remedy}", style=STYLE[found.status])
    row = Table.grid(padding=(0, 1))
    row.add_column(width=4)
    row.add_column(width=17)
    row.add_column(overflow="fold")  # a path must not lose its end
    row.add_row(Text(found.status, style=STYLE[found.status]), Text(found.name, style="bold"), text)
    console.print(row)


def show_summary(found: Sequence[Check], console: Console) -> None:
    count = Counter(one.status for one in found)
    text = ", ".join(f"{count[status]} {status}" for status in ORDER if count[status])
    console.print(text, style=STYLE[worst(found)])
    console.print("What to change when a run goes wrong: docs/what-to-change-first.md")


def document(found: Sequence[Check]) -> dict[str, Any]:
    rows = [finite(dataclasses.asdict(one)) for one in found]  # `value` states an infinite number
    return {"status": worst(found), "findings": rows}
