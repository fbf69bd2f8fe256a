"""Loops that do not wait for the device: noise, stored states and metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sage_grpo.training import rollout as rollout_module
from sage_grpo.training import update as update_module
from sage_grpo.training.placing import to_device, to_storage

META = torch.device("meta")


class Calls(TorchDispatchMode):
    """Operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.copies: list[tuple[bool, bool]] = []
        """For every copy whether it changes the type and whether it changes the place."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen.append(func.name())
        if func.name() == "aten::_to_copy":
            self.copies.append((result.dtype != args[0].dtype, result.device != args[0].device))
        return result


def test_types_change_before_states_leave_and_after_they_come_back() -> None:
    """A CPU that changed the type on the way would read a copy that has not arrived."""
    x = torch.randn(3)
    with Calls() as leaving:
        kept = to_storage(x, META, torch.bfloat16)
    assert leaving.copies == [(True, False), (False, True)]
    with Calls() as coming:
        back = to_device(x.bfloat16(), META, torch.float32)
    assert coming.copies[-2:] == [(False, True), (True, False)]
    assert (kept.dtype, back.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(
        to_device(to_storage(x, x.device, torch.bfloat16), x.device, torch.float32), x.bfloat16().float()
    )


def test_metrics_are_counted_without_reading_the_device(
    make_config, make_trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float(), bool(), item() and masks all fetch a value, and with it wait for everything before it."""
    count, calls, items = update_module._count, Calls(), []

    def watched(*arguments: Any) -> None:
        items.append(1)
        with calls:
            count(*arguments)

    monkeypatch.setattr(update_module, "_count", watched)
    make_trainer(make_config()).step()
    assert len(items) > 2
    waits = (
        "aten::_local_scalar_dense",
        "aten::nonzero",
        "aten::is_nonzero",
        "aten::index.Tensor",
        "aten::masked_select",
    )
    assert not [name for name in calls.seen if name in waits]


def test_the_first_noise_of_a_clip_is_drawn_after_the_clips_before_it(
    make_config, make_trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all of it before the first pass, while the device has nothing to do."""
    trainer = make_trainer(make_config())
    events: list[str] = []
    draw, velocity = rollout_module.keyed_noise, trainer.model.velocity
    monkeypatch.setattr(rollout_module, "keyed_noise", lambda shape, *key: events.append(key[0]) or draw(shape, *key))
    trainer.model.velocity = lambda *args, **kwargs: events.append("pass") or velocity(*args, **kwargs)
    plan = trainer.planner.plan(0, trainer.state.stream.take(trainer.config.batch.prompts))
    assert len(plan.batches(0)) > 1
    trainer.roll_out(plan)
    size = len(plan.batches(0)[0].members)
    first = events.index("pass")
    assert events[:first] == ["start"] * size
    assert events.count("start") == sum(len(batch.members) for batch in plan.batches(0))
    assert events.index("step") > first
