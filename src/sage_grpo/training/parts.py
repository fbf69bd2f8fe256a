"""Parts of a state with a ratio of their own (the picture and the sound of LTX-2): views of a replayed step that a loss is applied to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sage_grpo.models import ModelError
from sage_grpo.models.base import VelocityModel, abilities
from sage_grpo.models.policy import Step
from sage_grpo.objectives.base import Objective
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.loss import TrainItem
from sage_grpo.training.offload import to_device


@dataclass(frozen=True)
class StatePart:
    """A part of a clip's state with a ratio and a loss of its own: it explores, or a reward judges it alone."""

    name: str
    place: slice
    column: int
    """Column in log-probabilities, and in advantages with one column per part."""
    share: float
    """Share in the loss: the losses of parts are averaged."""

    @property
    def dims(self) -> int:
        return int(self.place.stop - self.place.start)

    def view(self, item: TrainItem, step: Step) -> tuple[TrainItem, Step]:
        """Restrict an item and its step to this part."""
        record = item.record

        def rows(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[:, self.place]

        part = replace(
            record,
            x=record.x[:, self.place],
            x_next=record.x_next[:, self.place],
            v_old=rows(record.v_old),
            log_prob_old=None if record.log_prob_old is None else record.log_prob_old[:, self.column],
        )
        advantage = item.advantage if item.advantage.ndim == 1 else item.advantage[:, self.column]
        item = replace(
            item, record=part, advantage=advantage, weight=self.share * item.weight, v_reference=rows(item.v_reference)
        )
        v = step.velocity[:, self.place]
        x = to_device(part.x, v.device, torch.float32)
        return item, Step(gaussian=record.policy.transition(item.step)(x, v), velocity=v)


def joined(gradients: Sequence[Tensor], parts: Sequence[StatePart], whole: Tensor) -> Tensor:
    total = torch.zeros_like(whole)
    for gradient, part in zip(gradients, parts):
        total[:, part.place] = gradient
    return total


def log_probs(objective: Objective, item: TrainItem, step: Step, parts: Sequence[StatePart]) -> Tensor:
    columns = []
    for view, law in [part.view(item, step) for part in parts] or [(item, step)]:
        x_next = to_device(view.record.x_next, law.velocity.device, torch.float32)
        sigma = view.record.policy.sigma(view.step)
        columns.append(objective.log_prob(law.gaussian, law.velocity, x_next, sigma))
    return torch.stack(columns, dim=1) if parts else columns[0]


def parts_of(config: TrainConfig, model: VelocityModel) -> tuple[StatePart, ...]:
    """The parts of a clip with a ratio of their own, in the model's order; empty if the state is learned as one."""
    explore, judged = config.rollout.explore, [spec.judges for spec in config.rewards if spec.judges]
    if not explore and not judged:
        return ()
    asked = f"rollout.explore {explore}" if explore else f"rewards.judges {judged[0]}"
    layout = abilities(model).parts
    if layout is None:
        raise ModelError(
            f"{asked} is about parts of a clip, and {type(model).__name__} has one, the video. Leave it out."
        )
    layout.check([*explore, *judged])
    silent = [name for name in judged if explore and name not in explore]
    if silent:
        raise ModelError(
            f"rewards.judges {silent[0]}, but rollout.explore is {explore}: what does not explore learns nothing. Add it there."
        )
    objective = config.build_objective()
    reasons = {
        f"objective.kind {config.objective.kind} differentiates by the whole clip": objective.differentiates,
        f"objective.kind {config.objective.kind} learns whole clips, which are chosen": objective.chooses,
        "batch.trained_fraction chooses clips by one advantage": bool(judged) and config.batch.trained_fraction < 1,
        f"objective.kind {config.objective.kind} samples with the ODE, so that no part explores": bool(explore)
        and objective.samples == "ode",
    }
    for reason, found in reasons.items():
        if found:
            raise ModelError(f"{asked} cannot be had here: {reason}. Leave one of them out.")
    places = {name: place for name, place in layout.places().items() if name in explore or not explore}
    return tuple(StatePart(name, place, column, 1 / len(places)) for column, (name, place) in enumerate(places.items()))
