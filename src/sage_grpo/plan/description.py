"""A run as it is known before its first pass: architecture, layout of ranks, noise grid and plans. `plan`, `doctor` and the first lines of `train`
read it from here; `inspect` takes a checkpoint's grid from the same architecture."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from sage_grpo.data.prompts import Prompt
from sage_grpo.distributed.spec import Layout, lay_out
from sage_grpo.models.base import abilities, network_of
from sage_grpo.models.distilled import Distilled, find_distilled
from sage_grpo.plan.architecture import Architecture, find_architecture
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.plan import Plan
from sage_grpo.training.planner import Planner

LOOKED_AT = 16
"""Iterations that are planned for the mean of a run: windows move, and the shared steps of groups with them."""
DRAWS = 256
"""Windows that suffice for a mean if every group draws its own: with many groups, few iterations are enough."""


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """A configuration with its model's architecture, on a number of ranks."""

    config: TrainConfig
    processes: int = 1
    known: Architecture | None = None  # the architecture, where it is not that of the configured checkpoint

    def __post_init__(self) -> None:
        self.plans  # noqa: B018 - raises where parts do not go together

    @cached_property
    def architecture(self) -> Architecture:
        return find_architecture(self.config.model) if self.known is None else self.known

    @cached_property
    def layout(self) -> Layout:
        layout, model = lay_out(self.config.parallel, self.processes), self.architecture.model
        if layout.sequence == 1:
            return layout
        if abilities(model).split_sequence is None:
            raise ValueError(f"{self.architecture.family} cannot split a clip over ranks: set parallel.sp to 1.")
        if model.heads[0] % layout.sequence:
            raise ValueError(
                f"parallel.sp is {layout.sequence}, but the network has {model.heads[0]} attention heads: use a divisor of that."
            )
        return layout

    @cached_property
    def planner(self) -> Planner:
        config, model, ranks = self.config, self.architecture.model, self.layout.data
        grid = self.architecture.grid(config.rollout.steps, config.rollout.shift)
        planner = Planner(config, grid, config.kernel.build(grid), model.trains, ranks, cache(network_of(model)))
        planner.check()
        return planner

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """Plans of the first iteration and of some later ones."""
        config, window, most = self.config, self.config.rollout.window, LOOKED_AT
        prompts = [Prompt(f"prompt {place}") for place in range(config.batch.prompts)]
        moves = window.kind in ("random", "sliding")
        if window.kind == "drawn":
            moves = len(self.planner.candidates()) > 1
            most = max(1, min(LOOKED_AT, DRAWS // config.batch.prompts))
        looked = range(0, config.iterations, max(1, config.iterations // most)) if moves else [0]
        return tuple(self.planner.foresee(self.planner.plan(iteration, prompts)) for iteration in looked)

    @property
    def plan(self) -> Plan:
        return self.plans[0]

    def unexplored(self) -> str | None:
        """A sentence on steps that stay deterministic because the state would hold too much noise after them."""
        return self.planner.unexplored()

    @property
    def distilled(self) -> Distilled | None:
        return find_distilled(self.config.model)

    def advice(self) -> str | None:
        """Advice on guidance or steps of a distilled checkpoint; None where they are its authors'."""
        config, distilled = self.config, self.distilled
        if distilled is None:
            return None
        evaluated = config.evaluate.steps_for(config.model)
        return distilled.advice(self.architecture.guidance_scale, config.rollout.steps, evaluated)

    def size_advice(self) -> str:
        """Advice on the size of Wan 2.2 5B's clips; empty for other models, and where it is large enough."""
        model, video = self.architecture.model, self.architecture.model.video
        if not getattr(model, "expand_timesteps", False) or video.height * video.width >= 480 * 832:
            return ""
        count = (video.height // 32) * (video.width // 32)
        return (
            f"Wan 2.2 5B compresses 16 x 16 pixels and joins 2 x 2 of these: {video.height} x {video.width} leaves {count} tokens for four "
            "frames, its own 704 x 1280 has 880. Below 480 x 832 (390) its clips lose their detail: for small clips train Wan 2.1 1.3B."
        )


def describe(config: TrainConfig, processes: int = 1, architecture: Architecture | None = None) -> RunDescription:
    """The description of a run; raises a ValueError where its parts do not go together."""
    return RunDescription(config=config, processes=processes, known=architecture)
