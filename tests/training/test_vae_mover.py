"""Memory and transfers: the VAE stays where a measured iteration leaves room, and loops do not wait for the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sage_grpo.training import update as update_module
from sage_grpo.training.placing import VaeMover, to_device, to_storage

GIB = 2**30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A model whose VAE takes 2 GiB of a GPU of 100 GiB, of which another process has 20."""
    seen = SimpleNamespace(moves=[], vae_here=True, device=torch.device("cuda", 0))

    def place(part: str, device: object) -> None:
        assert part == "vae"
        seen.vae_here = torch.device(device).type == "cuda"
        seen.moves.append(torch.device(device).type)

    seen.place = place
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: (30 + 2 * seen.vae_here) * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GIB, 100 * GIB))
    return seen


def decode(place: VaeMover, gpu: SimpleNamespace) -> list[str]:
    gpu.moves.clear()
    with place.decoding():
        assert gpu.vae_here
    return list(gpu.moves)


@pytest.mark.parametrize(("peak", "stays"), [(69.9, True), (70.1, False)])
def test_it_stays_where_every_phase_leaves_room(gpu: SimpleNamespace, peak: float, stays: bool) -> None:
    place = VaeMover(gpu)
    assert decode(place, gpu) == ["cuda", "cpu"]  # nothing is known of an update yet
    place.observe({"time/total": 1e3, "time/peak_gib_decode": 40.0, "time/peak_gib_update": peak})  # 72 - 2 fit
    assert decode(place, gpu) == (["cuda"] if stays else ["cuda", "cpu"])


def test_it_leaves_again_when_a_phase_needs_more(gpu: SimpleNamespace) -> None:
    place = VaeMover(gpu)
    decode(place, gpu)
    for peak, moves in ((60.0, ["cuda"]), (71.9, ["cuda"]), (73.0, ["cuda", "cpu"])):  # peaks with the VAE in them
        place.observe({"time/peak_gib_reward": peak})
        assert decode(place, gpu) == moves


def test_a_run_on_the_cpu_moves_nothing_away() -> None:
    moves: list[str] = []
    model = SimpleNamespace(device=torch.device("cpu"), place=lambda part, device: moves.append(str(device)))
    place = VaeMover(model)
    with place.decoding():
        pass
    place.observe({"time/total": 1.0})
    assert moves == ["cpu"]


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
