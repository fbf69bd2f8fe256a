"""Memory, transfers and order: backward passes alone run in torch's deterministic mode where model.deterministic asks for it, the VAE stays
where a measured iteration leaves room, and loops do not wait for the device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import deterministic
from torch.utils._python_dispatch import TorchDispatchMode

from sage_grpo.config.parsing import ConfigError
from sage_grpo.models.spec import ModelSpec
from sage_grpo.recipes import recipe
from sage_grpo.run.preflight import preflight
from sage_grpo.training import offload as module
from sage_grpo.training.inputs import compiles
from sage_grpo.training.loss import UpdateSums
from sage_grpo.training.offload import VaeMover, get_ready, same_bits, to_device, to_storage

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(module.WORKSPACE, "")  # so that it is as it was afterwards, whoever sets it
    monkeypatch.delenv(module.WORKSPACE)
    monkeypatch.setenv(module.ALLOCATOR[0], "backend:native")
    before = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    yield
    assert (torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory) == before


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEVICES", ("cpu", "cuda"))


def test_on_a_gpu_torch_adds_in_a_fixed_order_and_does_not_only_warn() -> None:
    with same_bits(GPU, wanted=True):
        assert torch.are_deterministic_algorithms_enabled()
        # With a warning attention goes on in any order.
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not deterministic.fill_uninitialized_memory
    with same_bits(CPU, wanted=True):
        assert not torch.are_deterministic_algorithms_enabled()


def test_what_a_program_had_asked_torch_for_comes_back() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.raises(ZeroDivisionError), same_bits(GPU, wanted=True):
            _ = 1 / 0
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


class _NoOrder(torch.autograd.Function):
    """Its backward pass has an operation for which torch knows no fixed order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clone().put_(torch.tensor([0]), gradient[:1])


def test_a_part_without_a_fixed_order_is_refused_by_name(as_on_a_gpu: None) -> None:
    output = _NoOrder.apply(torch.ones(3, requires_grad=True)).sum()
    refused = pytest.raises(ConfigError, match=r"(?s)model\.deterministic cannot be kept.*put_")
    with refused, same_bits(CPU, wanted=True):
        output.backward()


@pytest.mark.parametrize("wanted", [True, False])
def test_a_run_does_its_backward_passes_in_there_and_its_forward_passes_outside(
    make_config, make_trainer, as_on_a_gpu: None, *, wanted: bool
) -> None:
    """Replays must have the bits of the rollout, which knows nothing of the mode."""
    trainer = make_trainer(make_config(model={"deterministic": wanted}))
    backward, forward, velocity = set(), set(), trainer.model.velocity

    def note(where: set[bool]) -> None:
        where.add(torch.are_deterministic_algorithms_enabled())

    for parameter in trainer.model.trainable().values():
        parameter.register_hook(lambda gradient: note(backward))
    trainer.model.velocity = lambda *args, **options: note(forward) or velocity(*args, **options)
    trainer.encode_prompts()
    trainer.step()
    assert (backward, forward) == ({wanted}, {False})


def test_backward_passes_that_must_have_an_order_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch refuses a compiled backward pass in the mode that it was not compiled in, and a graph of its own would round otherwise."""
    config = recipe("wan/branch")
    fixed = replace(config, model=replace(config.model, deterministic=True))
    assert compiles(config, GPU)[0]
    assert compiles(fixed, GPU) == (False, "no: model.deterministic has backward passes that are not compiled")
    asked = replace(fixed, model=replace(fixed.model, compile=True), data=replace(config.data, prompts="nowhere.txt"))
    assert compiles(asked, CPU)[0]  # nothing is to be fixed there
    monkeypatch.setattr("sage_grpo.run.preflight.choose_device", lambda wanted: GPU)
    for refuses in (lambda: compiles(asked, GPU), lambda: preflight(asked)):  # before prompts and rewards are read
        with pytest.raises(ConfigError, match=r"model\.compile true does not go with model\.deterministic true"):
            refuses()


@pytest.mark.parametrize("name", module.ALLOCATOR)
def test_segments_of_memory_grow_unless_a_user_has_said_otherwise(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in module.ALLOCATOR:
        monkeypatch.setenv(each, "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    get_ready(wanted=False)
    assert not os.environ[module.ALLOCATOR[0]]  # a CPU has none
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    get_ready(wanted=False)
    assert [os.environ[each] for each in module.ALLOCATOR] == ["expandable_segments:True", ""]
    for each in module.ALLOCATOR:
        monkeypatch.setenv(each, "backend:native" if each == name else "")
    get_ready(wanted=False)
    assert sorted(os.environ[each] for each in module.ALLOCATOR) == ["", "backend:native"]


def test_cudnns_attention_and_cublas_are_set_until_a_run_without_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch excludes cuDNN's kernel by itself only where the mode is on in forward passes, too. A user's word counts."""
    monkeypatch.setattr(module, "_turned_off", [])
    before, enabled = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        get_ready(wanted=False)
        assert module.WORKSPACE not in os.environ
        get_ready(wanted=True)
        get_ready(wanted=True)
        assert (enabled(), os.environ[module.WORKSPACE]) == (False, ":4096:8")
        get_ready(wanted=False)
        assert enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        monkeypatch.setenv(module.WORKSPACE, ":16:8")
        get_ready(wanted=True)
        get_ready(wanted=False)
        assert (enabled(), os.environ[module.WORKSPACE]) == (False, ":16:8")
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


GIB = 2**30


def test_the_vae_stays_while_every_phase_leaves_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 2 GiB of a GPU of 100 GiB, of which another process has 20; nothing is known of an update at first."""
    gpu = SimpleNamespace(moves=[], vae_here=True, device=torch.device("cuda", 0))

    def place(part: str, device: object) -> None:
        assert part == "vae"
        gpu.vae_here = torch.device(device).type == "cuda"
        gpu.moves.append(torch.device(device).type)

    gpu.place = place
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: (30 + 2 * gpu.vae_here) * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GIB, 100 * GIB))

    def decode(mover: VaeMover) -> list[str]:
        gpu.moves.clear()
        with mover.decoding():
            assert gpu.vae_here
        return list(gpu.moves)

    # Peaks of an update: 72 - 2 fit without the VAE; later peaks have it in them.
    for peaks in ([(70.1, False)], [(69.9, True), (60.0, True), (71.9, True), (73.0, False)]):
        mover = VaeMover(gpu)
        assert decode(mover) == ["cuda", "cpu"]
        for peak, stays in peaks:
            mover.observe({"time/total": 1e3, "time/peak_gib_decode": 40.0, "time/peak_gib_update": peak})
            assert decode(mover) == (["cuda"] if stays else ["cuda", "cpu"])
    assert VaeMover(gpu, ModelSpec(memory=40.0))._available() == 40 * GIB
    mover = VaeMover(SimpleNamespace(device=CPU, place=lambda part, device: gpu.moves.append(str(device))))
    gpu.moves.clear()
    with mover.decoding():
        pass
    mover.observe({"time/total": 1.0})
    assert gpu.moves == ["cpu"]  # a run on the CPU moves nothing away


META = torch.device("meta")


class Calls(TorchDispatchMode):
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
    rounded = to_device(to_storage(x, x.device, torch.bfloat16), x.device, torch.float32)
    assert torch.equal(rounded, x.bfloat16().float())


def test_metrics_are_counted_without_reading_the_device(
    make_config, make_trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float(), bool(), item() and masks all fetch a value, and with it wait for everything before it."""
    count, calls, items = UpdateSums.add, Calls(), []

    def watched(*arguments: Any) -> None:
        items.append(1)
        with calls:
            count(*arguments)

    monkeypatch.setattr(UpdateSums, "add", watched)
    make_trainer(make_config()).step()
    assert len(items) > 2
    waits = {"_local_scalar_dense", "nonzero", "is_nonzero", "index.Tensor", "masked_select"}
    assert not waits & {name.removeprefix("aten::") for name in calls.seen}
