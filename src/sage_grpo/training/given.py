"""Passes of a rollout: exact where a step explores, and as cheap as `rollout.cheap` says elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from torch import Tensor

from sage_grpo.data.prompts import Prompt
from sage_grpo.models import ModelError
from sage_grpo.models.base import RunsCheaply, VelocityModel
from sage_grpo.models.cheap import CheapSpec, Guide, check_negative
from sage_grpo.models.policy import Policy
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.plan import Plan
from sage_grpo.training.planner import Planner
from sage_grpo.types import Conditioning


class Passes:
    """Asks the network for velocities. Its cheap way is only ever on between two given steps that follow one another: nothing exact runs inside."""

    def __init__(self, model: VelocityModel, spec: CheapSpec) -> None:
        self.model, self.spec = model, spec
        self._stack = ExitStack()
        self._forget: Callable[[], None] | None = None
        """Set while the cheap way is on."""
        self._path: object = None
        """Whose steps its caches hold."""

    def velocity(
        self,
        policy: Policy,
        index: int,
        x: Tensor,
        conditions: Sequence[Conditioning],
        *,
        guide: Guide,
        path: object,
        added: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The velocity of a step, and what guidance added to it where later steps of the path may reuse it; `added` is that of the step before."""
        if guide == "exact":
            self.exact()
            return policy.step(index, x, conditions).velocity, None
        model, (sigma, _) = self.model, policy.schedule.pair(index)
        assert isinstance(model, RunsCheaply)
        self._cheap(model, path)
        if guide == "whole":
            v, alone = model.both(x, sigma, conditions, guidance=policy.guidance)
            return v, v - alone if self.spec.negative_every > 1 else None
        v = self.model.velocity(x, sigma, conditions, guidance=1.0)
        if guide == "none":
            return v, None
        assert added is not None
        return v + added, added

    def exact(self) -> None:
        """From now on as always."""
        self._stack.close()
        self._forget = None

    def _cheap(self, model: RunsCheaply, path: object) -> None:
        if not self.spec.changes_passes:
            return
        if self._forget is None:
            self._forget = self._stack.enter_context(model.cheaply(self.spec))
        elif path is not self._path:
            self._forget()
        self._path = path


def check_cheap(config: TrainConfig, model: VelocityModel, planner: Planner, *, split: bool = False) -> None:
    """Refuse what a model or a layout cannot do; `split`: ranks share the tokens of a clip."""
    spec, guidance = config.rollout.cheap, config.model.training_guidance
    if not spec.on:
        return
    if not isinstance(model, RunsCheaply):
        raise ModelError(
            f"rollout.cheap needs a model with the methods branches, both, check_cheap and cheaply (docs/extending.md), and "
            f"{type(model).__name__} does not have them. Leave it out."
        )
    check_negative(spec, lambda sigma: model.branches(sigma, guidance))
    model.check_cheap(spec)
    if split and spec.cache == "first_block":
        raise ModelError(
            'rollout.cheap.cache "first_block" decides by the tokens it sees, of which every rank of parallel.sp has others: they would wait '
            "for one another for ever. Use taylorseer, or parallel.sp 1."
        )
    if spec.guides_less and planner.ranks > 1 and not _in_step(planner):
        raise ModelError(
            "rollout.cheap.guidance and negative_every need ranks that make the same passes, because all of them gather the weights of each: "
            "here they branch at different steps, or some have fewer passes. Use one place in rollout.window.at, and as many prompts as ranks or "
            "a multiple of it."
        )


def _in_step(planner: Planner) -> bool:
    """Whether all ranks run the network equally often in every iteration."""
    window = planner.config.rollout.window
    if not planner.config.objective.fresh and window.kind != "fixed" and len(window.at or ()) != 1:
        return False
    plan = planner.plan(0, [Prompt("")] * planner.config.batch.prompts)
    first, *others = (_often(plan, rank) for rank in range(planner.ranks))
    return all(other == first for other in others)


def _often(plan: Plan, rank: int) -> Counter[tuple[bool, Guide]]:
    return Counter((plan.trains(one.sigma), one.guide) for one in plan.sampled(rank))
