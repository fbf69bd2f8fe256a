"""The options of `sage-grpo probe`."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from sage_grpo.config.ranges import Count, Folder, Natural, Positive, Range, Share, checked
from sage_grpo.models.cheap import CheapSpec
from sage_grpo.samplers.solvers import Rule
from sage_grpo.tools.probe.estimate import QUADRUPLE


@checked
class WaysSpec:
    """Cheap ways to run the steps that do not explore, each compared with the full way: as many steps as the evaluation makes, all of them exact."""

    measure: bool = False
    """Measure which of these ways rank clips as the full way does, in place of where to explore."""
    after: list[Count] = field(default_factory=list)
    """Numbers of steps after the branch; empty is as many as the schedule has there, and a half, a third and a fourth of them."""
    before: list[Count] = field(default_factory=list)
    """Numbers of steps before the branch; empty is the configuration's."""
    solvers: list[Rule] = field(default_factory=lambda: ["euler", "ab2"])
    """Solvers of these steps."""
    cheap: list[CheapSpec] = field(default_factory=list)
    """Settings to try besides the configuration's own rollout.cheap: [{guidance: [0.2, 0.9]}, {negative_every: 2}]."""
    least: Share = 0.8
    """The rank correlation with the full way that a recommended way must have, with the whole of its interval."""

    def __post_init__(self) -> None:
        if not self.solvers:
            raise ValueError("probe.ways.solvers is empty: name euler, ab2 or both.")


@checked
class ProbeSpec:
    """Size of the probe."""

    prompts: Annotated[int, Range(2)] = 8
    """The first so many training prompts; intervals are over prompts."""
    starts: Annotated[int, Range(2)] = 2
    """Start noises per prompt."""
    members: Annotated[int, Range(8)] = 8
    """Clips per branch: 8, 12, 16, ..."""
    steps: list[Natural] | None = None
    """Steps to branch at; None is every step that can be trained."""
    etas: list[Positive] | None = None
    """Values of kernel.eta to compare at the best step, besides the configuration's; None is half of it, and one and a half of it up to 1.5."""
    ways: WaysSpec = WaysSpec()
    """Another question: how cheaply the steps that do not explore can be run."""
    out: Folder = "probe"
    """Folder for probe.json, probe.png and snippet.yaml."""
    json: bool = False
    """Print JSON only."""

    def __post_init__(self) -> None:
        if self.members % QUADRUPLE:
            raise ValueError(
                f"probe.members must be 8, 12, 16, ..., got {self.members}: clips of a branch come in quadruples of noises, and a "
                "variance needs two of them."
            )
        for name in ("steps", "etas"):
            values = getattr(self, name)
            if values is not None and (len(set(values)) < len(values) or (name == "steps" and not values)):
                raise ValueError(f"probe.{name} must name different values, got {values}.")
