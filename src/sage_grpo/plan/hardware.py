"""GPUs by name: memory, and the rates of passes, measured if available."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from sage_grpo.config.parsing import ConfigError
from sage_grpo.plan.formulas import Rates
from sage_grpo.utils.suggest import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of device."""

    title: str
    gib: float  # memory of one device
    rates: Rates
    origin: str  # source of the numbers, as text

    @property
    def is_cpu(self) -> bool:
        return self.title.startswith("CPU")


@cache
def _table() -> dict[str, Any]:
    return json.loads((files("sage_grpo.plan") / "hardware.json").read_text())


def find(name: str, gpus: int = 1) -> Hardware:
    rows, name = _table()["gpus"], name.lower()
    if name == "cpu":
        return cpu()
    if name not in rows:
        names = ["cpu", *rows]
        raise ConfigError(f"gpu {name!r} is unknown: use one of {', '.join(names)}.{did_you_mean(name, names)}")
    return _gpu(rows[name], gpus)


def here(gpus: int = 1) -> Hardware:
    """The device of this machine: its own memory, and the rates of the GPU with its name, if the table has one."""
    if not torch.cuda.is_available():
        return cpu()
    properties = torch.cuda.get_device_properties(0)
    near = [row for row in _table()["gpus"].values() if row["title"].removeprefix("NVIDIA ") in properties.name]
    if near:
        known = _gpu(max(near, key=lambda one: len(one["title"])), gpus)
    else:
        origin = "not in the table: an H100's rates are used"
        known = replace(find("h100", gpus), title=properties.name, origin=origin)
    return replace(known, gib=properties.total_memory / 2**30)


def cpu() -> Hardware:
    """This machine's processor: PyTorch's number of cores, each as fast as the measured one."""
    gib, cores = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, torch.get_num_threads()
    core = Rates(**_table()["core"])
    all_cores = {name: cores * getattr(core, name) for name in ("attention", "products", "bandwidth")}
    rates = replace(core, **all_cores, launch=core.launch / cores)
    origin = (
        f"{cores} core(s) like the one that was measured (docs/speed.md); others differ by a factor of two or three"
    )
    return Hardware(title="CPU", gib=gib, rates=rates, origin=origin)


def _gpu(row: dict[str, Any], gpus: int) -> Hardware:
    table, reference = _table(), _table()["gpus"]["h200"]
    node = table["node"]
    link = row["link"] if gpus <= node["gpus"] else min(row["link"], node["link"])
    rates, origin = row.get("measured"), "measured (docs/speed.md)"
    if rates is None:  # the share of its peak that an H200 reaches of its own
        compute, memory = row["peak"] / reference["peak"], row["memory"] / reference["memory"]
        scales = {"attention": compute, "products": compute, "bandwidth": memory}
        rates = {name: reference["measured"][name] * scale for name, scale in scales.items()}
        origin = "estimated from its peak and what an H200 reaches of its own"
    rates = Rates(**rates, link=link, eager=table["eager"])
    return Hardware(title=row["title"], gib=row["gib"], rates=rates, origin=origin)
