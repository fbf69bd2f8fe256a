"""Network passes of a rollout: exact at exploring steps, approximated as `rollout.cheap` sets elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from torch import Tensor

from sage_grpo.models.base import RunsCheaply, VelocityModel
from sage_grpo.models.cheap import CheapSpec, Guide
from sage_grpo.models.policy import Policy
from sage_grpo.types import Conditioning


class RolloutPasses:
    """Computes the velocities of a rollout. The approximation is on only between two consecutive given steps: no exact pass runs inside."""

    def __init__(self, model: VelocityModel, spec: CheapSpec) -> None:
        self.model, self.spec = model, spec
        self._stack = ExitStack()
        self._forget: Callable[[], None] | None = None
        """Set while the approximation is on."""
        self._path: object = None
        """The path whose steps the caches hold."""

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
        """The velocity of a step, and the contribution of guidance where later steps of the path may reuse it; `added` is that of the step before."""
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
        """Switch the approximation off."""
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
