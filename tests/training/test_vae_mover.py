"""The VAE stays on the accelerator when, and only when, a measured iteration leaves room for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sage_grpo.models.devices import Home
from sage_grpo.training.placing import VaeMover

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


def test_what_never_changes_is_not_copied_back() -> None:
    """On the meta device nothing is left of a tensor: what returns can only come from the copy that stayed."""
    module = torch.nn.BatchNorm1d(3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    home = Home()
    home.leave(module)  # as from a GPU
    for _ in range(2):
        home.move(module, torch.device("meta"))
        assert all(value.is_meta for value in module.state_dict().values())
        home.move(module, torch.device("cpu"))
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
