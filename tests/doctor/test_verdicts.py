"""Figures and limits of checks, on made-up measurements: what is told, and where a verdict turns."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sage_grpo.tools.doctor import checkpoint, learning, reward
from sage_grpo.tools.doctor.check import graded, relative, rounding

GROUPS = torch.tensor([0, 0, 1, 1])


def test_an_error_is_relative_to_what_is_right_and_graded_by_limits() -> None:
    three, four = torch.tensor([3.0]), torch.tensor([4.0])
    assert (relative(three, four), relative(four, three)) == (0.25, pytest.approx(1 / 3))
    assert relative(three, torch.zeros(1)) == relative(three, torch.zeros(2)) == math.inf
    assert relative(torch.zeros(1), torch.zeros(1)) == 0.0
    found = [graded(value, warn=1.0, fail=2.0) for value in (1.0, 1.5, 2.0, 2.5, math.nan, math.inf)]
    assert found == ["pass", "warn", "warn", "fail", "fail", "fail"]
    assert (rounding(torch.float32), rounding(torch.bfloat16)) == (2e-4, 5e-2)


@pytest.mark.parametrize(("off", "status"), [(0, "pass"), (1, "pass"), (2, "warn"), (5, "fail")])
def test_decoding_is_measured_in_levels_of_255(off: int, status: str, monkeypatch) -> None:
    wanted = torch.full((1, 2, 4, 4, 3), 100, dtype=torch.uint8)
    monkeypatch.setattr(checkpoint, "stock_decode", lambda model, latents: wanted)
    found = checkpoint.vae(SimpleNamespace(decode=lambda latents: wanted + off), torch.zeros(1))
    assert (found.status, found.number) == (status, pytest.approx(off))
    assert f"by {off:.2g} of 255" in found.value
    assert checkpoint.vae(SimpleNamespace(decode=lambda latents: wanted[:, :1]), torch.zeros(1)).status == "fail"


@pytest.mark.parametrize(
    ("second", "number", "status"), [(3.0, 0.5, "pass"), (2.0, 0.0, "fail"), (math.inf, math.inf, "fail")]
)
def test_another_prompt_is_measured_by_the_first(second: float, number: float, status: str) -> None:
    model = SimpleNamespace(
        velocity=lambda x, sigma, given: given[0] * torch.ones_like(x), latent_shape=lambda: (3, 2), device="cpu"
    )
    x = checkpoint.start(model)
    assert x.shape == (1, 3, 2)
    assert 0 < float(checkpoint.MIDDLE) < 1
    found = checkpoint.prompt(model, x, [2.0, second])
    assert (found.number, found.status) == (pytest.approx(number), status)


def trainer_of(**gradients: list[float] | None) -> SimpleNamespace:
    params = {}
    for name, gradient in gradients.items():
        params[f"{name}.weight"] = p = nn.Parameter(torch.zeros(2))
        p.grad = None if gradient is None else torch.tensor(gradient)
    config = SimpleNamespace(optimizer=SimpleNamespace(eps=1e-8, warmup_updates=5, lr=0.1, max_kl=None))
    return SimpleNamespace(
        state=SimpleNamespace(params=params, updates=0),
        config=config,
        world=SimpleNamespace(size=1),
        model=SimpleNamespace(network=nn.Module(), others=[]),
    )


@pytest.mark.parametrize(
    ("gradients", "status", "number"),
    [
        ({"a": [0.0, 3.0], "b": [4.0, 0.0]}, "pass", 2.5),  # a part of a weight may be silent
        ({"a": [0.0, 3.0], "b": [0.0, 0.0]}, "warn", 1.5),
        ({"a": [0.0, 3.0], "b": None, "c": None}, "fail", math.sqrt(9 / 6)),
        ({"a": [1e-9, 0.0]}, "warn", 1e-9 / math.sqrt(2)),
        ({"a": [math.nan, 1.0]}, "fail", math.nan),
        ({"a": None}, "fail", 0.0),
        ({}, "fail", None),
    ],
)
def test_gradients_by_module_and_size(gradients, status: str, number: float) -> None:
    found = learning.gradients(trainer_of(**gradients))
    assert (found.status, found.number) == (status, pytest.approx(number, nan_ok=True))


@pytest.mark.parametrize(
    ("moves", "status", "share"),
    [([1, 1], "pass", 1.0), ([1, 0], "warn", 0.5), ([0, 0], "fail", 0.0), ([1, math.nan], "fail", 1.0)],
)
def test_how_much_an_update_changes(moves: list[float], status: str, share: float) -> None:
    """After the warm-up; of weights whose gradient is not next to nothing."""
    trainer = trainer_of(a=[1.0, 1.0], b=[1e-9, 1.0], c=None)
    trainer.state.params["b.weight"].grad[1] = 0.0

    def apply(metrics: dict[str, float]) -> dict[str, float]:
        assert trainer.state.updates == 5
        with torch.no_grad():
            trainer.state.params["a.weight"].add_(torch.tensor(moves))
        return {"optimizer/lr": 0.1}

    trainer.updater = SimpleNamespace(apply=apply)
    trainer.state.params["b.weight"].grad = None
    found = learning.update_moves(trainer)
    assert (found.status, found.number) == (status, share)


@pytest.mark.parametrize(
    ("updates", "lags", "every", "inert"),
    [(1, False, 1, True), (1, False, None, True), (1, False, 2, False), (2, False, 1, False), (1, True, 1, False)],
)
def test_a_kl_to_the_policy_itself_is_told(updates: int, lags: bool, every: int | None, inert) -> None:
    sums = {"kl/total": 0.1, "gradient/policy": 9.0, "gradient/kl": 1.0}
    seen: list[object] = []
    trainer = trainer_of(a=[1.0, 1.0])
    trainer.config.trust_region = SimpleNamespace(mode="moving")
    trainer.config.update = SimpleNamespace(updates_per_rollout=updates)
    trainer.config.build_objective = lambda: SimpleNamespace(lags=lags)
    trainer.state.anchor = None if every is None else SimpleNamespace(every=every)
    trainer.state.kl = SimpleNamespace(value=0.5)
    trainer.state.optimizer = SimpleNamespace(zero_grad=lambda: None)
    trainer.old = "lags" if lags else None
    trainer.updater = SimpleNamespace(
        accumulate=lambda items, kl_lambda: SimpleNamespace(sums=sums),
        with_reference=lambda items: items,
        with_old=lambda items: seen.append(items) or items,
    )
    found = learning.trust_region(SimpleNamespace(trainer=trainer), [])
    assert seen == ([[]] if lags else []), "the reference is the old policy's"
    assert (found.status, found.number) == (("warn", 0.0) if inert else ("pass", 0.25))
    assert ("next to nothing" in found.value) is False
    sums["gradient/kl"] = 0.0
    assert learning.trust_region(SimpleNamespace(trainer=trainer), []).status == ("warn" if inert else "fail")


@pytest.mark.parametrize(
    ("size", "spread", "flat"), [(1e6, 0.3, True), (1e6, 30.0, False), (1e-3, 3e-7, True), (1e-3, 1e-5, False)]
)
def test_scores_are_flat_by_their_size_but_not_by_less_than_one(size: float, spread: float, flat: bool) -> None:
    first = size + spread * torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    scoring = reward.Scoring(
        groups=GROUPS, swapped=first[None], **dict.fromkeys(("first", "again", "reversed", "single", "path"), first)
    )
    assert reward.is_flat(scoring) == flat


@pytest.mark.parametrize(
    ("scores", "allowed", "status"),
    [([1, 2], 0.0, "pass"), ([1, math.nan], 0.5, "warn"), ([1, math.nan], 0.4, "fail"), ([math.inf] * 2, 1.0, "fail")],
)
def test_clips_without_a_score(scores: list[float], allowed: float, status: str) -> None:
    assert reward.valid(torch.tensor(scores), allowed).status == status
