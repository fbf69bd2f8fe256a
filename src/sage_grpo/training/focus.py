"""What is learned of which part of a clip: parts that explore, and rewards that judge one part alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sage_grpo.models import ModelError
from sage_grpo.models.base import VelocityModel
from sage_grpo.models.parts import HasParts
from sage_grpo.models.policy import Step
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.placing import to_device

if TYPE_CHECKING:
    from sage_grpo.training.update import Item


@dataclass(frozen=True)
class Part:
    """A part of a state that is learned for itself."""

    name: str
    place: slice
    column: int
    """Of log-probabilities, and of advantages where there is one for each part."""
    share: float
    """In the loss: the losses of parts are averaged."""

    @property
    def dims(self) -> int:
        """Numbers of it in a sample."""
        return int(self.place.stop - self.place.start)

    def of(self, item: Item, step: Step) -> tuple[Item, Step]:
        """An item and its step as if this part were all that there is."""
        record = item.record

        def own(rows: Tensor | None) -> Tensor | None:
            return None if rows is None else rows[:, self.place]

        seen = dataclasses.replace(
            record,
            x=record.x[:, self.place],
            x_next=record.x_next[:, self.place],
            v_old=own(record.v_old),
            log_prob_old=None if record.log_prob_old is None else record.log_prob_old[:, self.column],
        )
        advantage = item.advantage if item.advantage.ndim == 1 else item.advantage[:, self.column]
        item = dataclasses.replace(
            item, record=seen, advantage=advantage, weight=self.share * item.weight, v_anchor=own(item.v_anchor)
        )
        v = step.velocity[:, self.place]
        x = to_device(seen.x, v.device, torch.float32)
        return item, Step(gaussian=record.policy.transition(item.step)(x, v), velocity=v)


def parts_of(config: TrainConfig, model: VelocityModel) -> tuple[Part, ...]:
    """The parts that are learned each for itself, in the model's order; none where the state is learned as one."""
    explore, judged = config.rollout.explore, [spec.judges for spec in config.rewards if spec.judges]
    if not explore and not judged:
        return ()
    asked = f"rollout.explore {explore}" if explore else f"rewards.judges {judged[0]}"
    if not isinstance(model, HasParts):
        raise ModelError(
            f"{asked} is about parts of a clip, and {type(model).__name__} has one, the video. Leave it out."
        )
    model.parts.mask([*explore, *judged])  # refuses unknown names
    silent = [name for name in judged if explore and name not in explore]
    if silent:
        raise ModelError(
            f"rewards.judges {silent[0]}, but rollout.explore is {explore}: what does not explore learns nothing. Add it there."
        )
    reasons = {
        "objective.kind gradient differentiates by the whole clip": config.objective.by_gradient,
        f"objective.kind {config.objective.kind} learns whole clips, which are chosen": config.objective.by_choice,
        "batch.trained_fraction chooses clips by one advantage": bool(judged) and config.batch.trained_fraction < 1,
        f"objective.kind {config.objective.kind} samples with the ODE, so that no part explores": bool(explore)
        and config.objective.fresh,
    }
    for reason, found in reasons.items():
        if found:
            raise ModelError(f"{asked} cannot be had here: {reason}. Leave one of them out.")
    places = {name: place for name, place in model.parts.places().items() if name in explore or not explore}
    return tuple(Part(name, place, column, 1 / len(places)) for column, (name, place) in enumerate(places.items()))


def joined(gradients: Sequence[Tensor], parts: Sequence[Part], whole: Tensor) -> Tensor:
    """Gradients at the parts as one at the whole velocity, which has none elsewhere."""
    if not parts:
        (gradient,) = gradients
        return gradient
    total = torch.zeros_like(whole)
    for gradient, part in zip(gradients, parts):
        total[:, part.place] = gradient
    return total
