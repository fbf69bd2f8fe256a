"""Small rules of a plan at hand-made figures: rates of devices, what a measurement counts, when a change is worth a line."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sage_grpo.models.spec import LoraSpec
from sage_grpo.plan import changes, hardware, show
from sage_grpo.plan.passes import Guiding, PassCount, evaluation
from sage_grpo.recipes import recipe


def test_a_card_without_rates_has_the_share_of_its_peak() -> None:
    found = hardware.find("A100-80")
    assert (found.gib, found.rates.link, found.rates.eager, found.is_cpu) == (79.2, 230e9, 4e-3, False)
    assert found.rates.attention == pytest.approx(617e12 * 312 / 989)
    assert found.rates.products == pytest.approx(778e12 * 312 / 989)
    assert found.rates.bandwidth == pytest.approx(4.0e12 * 2.04 / 4.8)
    assert found.origin.startswith("estimated")
    links = [hardware.find(name, gpus).rates.link for name, gpus in (("h200", 8), ("h200", 9), ("rtx4090", 9))]
    assert links == [350e9, 40e9, 10e9], "between nodes, but never more than a card's own"
    known = hardware.find("h200")
    assert (known.rates.attention, known.origin) == (617e12, "measured (docs/speed.md)")


def test_the_device_of_this_machine(monkeypatch) -> None:
    named = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=50 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: named if place == 0 else None)
    found = hardware.here(9)
    assert (found.title, found.gib, found.rates.link) == ("NVIDIA H100 80GB HBM3", 50.0, 40e9)
    named.name = "somebody's own"
    found = hardware.here(9)
    assert (found.title, found.gib, found.rates) == ("somebody's own", 50.0, hardware.find("h100", 9).rates)
    assert found.origin.startswith("not in the table")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(hardware.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 20}.get)
    found = hardware.here()
    assert (found.is_cpu, found.gib) == (True, 4.0)
    rates = found.rates
    assert (rates.attention, rates.products, rates.bandwidth, rates.launch) == (2e11, 2.6e11, 4e11, 5e-5)


def test_passes_add_up_and_small_clips_are_guided_together() -> None:
    assert PassCount(1, 2, 3) + PassCount(4, 5, 6) * 2 == PassCount(9, 12, 15)
    guiding = Guiding(lambda sigma: 2 if sigma > 0.5 else 1, together=3)
    assert [guiding.one(rows, 0.9) for rows in (3, 4)] == [PassCount(1, 1, 6), PassCount(1, 2, 8)]
    assert guiding.one(4, 0.5) == PassCount(1, 1, 4)
    config = recipe("shapes/sage")
    spec = replace(config.evaluate, prompts=4, per_prompt=2)
    config = replace(config, evaluate=spec, batch=replace(config.batch, micro_batch=2))
    plain = Guiding(lambda sigma: 2 if sigma > 0.5 else 1)
    assert evaluation(config, 3, 2, [1.0, 0.5], plain) == [PassCount(4, 6, 9)] * 2
    assert sum(one.clips for one in evaluation(config, 9, 2, [1.0, 0.5], plain)) == 3 * 8, "not more than are asked for"


def test_times_are_told_in_a_fitting_unit() -> None:
    told = {0.04: "0.0 s", 119.9: "119.9 s", 120: "2.0 min", 7199: "120.0 min", 7200: "2.0 h"}
    assert {seconds: show._time(seconds) for seconds in told} == told


def forecast_of(peak: float, seconds: float, fits: bool = True, hours: float = 1.0) -> Any:
    return SimpleNamespace(peak=peak, iteration_seconds=seconds, fits=fits, gpu_hours=hours)


def test_a_change_is_worth_a_line_that_moves_a_hundredth() -> None:
    now = forecast_of(100.0, 100.0)
    moved = [(100.0, 100.0), (101.5, 100.0), (98.5, 100.0), (100.5, 99.5), (100.0, 101.5), (100.0, 98.5)]
    assert [changes._matters(now, forecast_of(*one)) for one in moved] == [False, True, True, False, True, True]
    ways = [
        changes.Change(name, run, forecast_of(peak, 1.0, fits, hours))
        for name, run, peak, fits, hours in (
            ("d", "another", 1.0, False, 1.0), ("b", "more GPUs", 9.0, True, 1.0), ("a", "same", 5.0, True, 9.0),
            ("c", "same", 2.0, False, 1.0), ("e", "another", 2.0, False, 0.0), ("a0", "same", 9.0, True, 8.0),
        )
    ]  # fmt: skip
    assert [one.option for one in sorted(ways, key=changes._rank)] == ["a0", "a", "b", "c", "d", "e"]
    options = (("a", True), ("b", 0.5), ("c", 3), ("model.lora", LoraSpec(rank=5)))
    assert " ".join(changes._typed(*one) for one in options) == "--a true --b 0.5 --c 3 --model.lora.rank 5"
    kinds = [["rollout.offload"], ["model.vae_tiling"], ["model.frames"], ["model.vae_tiling", "model.frames"]]
    assert [changes._stays(edit) for edit in kinds] == ["same", "nearly", "another", "another"]
