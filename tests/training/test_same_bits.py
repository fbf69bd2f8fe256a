"""model.deterministic: backward passes, and nothing else, run in torch's deterministic mode; what has none is refused by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils import deterministic

from sage_grpo.configure import ConfigError
from sage_grpo.recipes import recipe
from sage_grpo.training import inputs
from sage_grpo.training import placing as module
from sage_grpo.training.inputs import build, compiles
from sage_grpo.training.placing import get_ready, same_bits

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
    with (
        pytest.raises(ConfigError, match=r"(?s)model\.deterministic cannot be kept.*put_"),
        same_bits(CPU, wanted=True),
    ):
        output.backward()


@pytest.mark.parametrize("wanted", [True, False])
def test_a_run_does_its_backward_passes_in_there_and_its_forward_passes_outside(
    make_config, make_trainer, as_on_a_gpu: None, *, wanted: bool
) -> None:
    """Replays must have the bits of the rollout, which knows nothing of the mode."""
    config = make_config(model={"deterministic": wanted})
    trainer = make_trainer(config)
    backward: set[bool] = set()
    forward: set[bool] = set()
    for parameter in trainer.model.trainable().values():
        parameter.register_hook(lambda gradient: backward.add(torch.are_deterministic_algorithms_enabled()))
    velocity = trainer.model.velocity

    def watched(*args: Any, **options: Any) -> Any:
        forward.add(torch.are_deterministic_algorithms_enabled())
        return velocity(*args, **options)

    trainer.model.velocity = watched
    trainer.encode_prompts()
    trainer.step()
    assert backward == {wanted}
    assert forward == {False}


def test_backward_passes_that_must_have_an_order_are_not_compiled() -> None:
    """PyTorch refuses a compiled backward pass in the mode that it was not compiled in, and a graph of its own would round otherwise."""
    config = recipe("wan/branch")
    fixed = replace(config, model=replace(config.model, deterministic=True))
    assert compiles(config, GPU)[0]
    assert compiles(fixed, GPU) == (False, "no: model.deterministic has backward passes that are not compiled")
    asked = replace(fixed, model=replace(fixed.model, compile=True))
    with pytest.raises(ConfigError, match=r"model\.compile true does not go with model\.deterministic true"):
        compiles(asked, GPU)
    assert compiles(asked, CPU)[0]  # nothing is to be fixed there


def test_what_does_not_go_together_is_refused_before_prompts_and_rewards_are_read(monkeypatch) -> None:
    monkeypatch.setattr(inputs, "choose_device", lambda wanted: GPU)
    config = recipe("wan/branch")
    model, data = replace(config.model, deterministic=True, compile=True), replace(config.data, prompts="nowhere.txt")
    with pytest.raises(ConfigError, match=r"model\.compile true does not go with model\.deterministic true"):
        build(replace(config, model=model, data=data))


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


@pytest.fixture
def a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if no run had been in it yet."""
    monkeypatch.setattr(module, "_turned_off", [])
    monkeypatch.delenv(module.WORKSPACE, raising=False)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.usefixtures("a_fresh_process")
def test_pytorch_may_not_choose_cudnns_attention_until_a_run_without_the_setting() -> None:
    """It excludes that kernel by itself only where the mode is on in forward passes, too."""
    get_ready(wanted=True)
    get_ready(wanted=True)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    get_ready(wanted=False)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)  # a program's own wish
    get_ready(wanted=True)
    get_ready(wanted=False)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.usefixtures("a_fresh_process")
def test_cublas_is_told_before_its_first_product_and_a_users_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    get_ready(wanted=False)
    assert module.WORKSPACE not in os.environ
    get_ready(wanted=True)
    assert os.environ[module.WORKSPACE] == ":4096:8"
    monkeypatch.setenv(module.WORKSPACE, ":16:8")
    get_ready(wanted=True)
    assert os.environ[module.WORKSPACE] == ":16:8"
