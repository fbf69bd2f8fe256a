"""GPUs by name: memory, and the rates of passes, measured if available."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from sage_grpo.config.parsing import ConfigError
from sage_grpo.plan.formulas import Rates
from sage_grpo.utils.suggest import did_you_mean

Origin = str
"""Source of the numbers, as text for a table."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of device."""

    title: str
    gib: float
    """Memory of one device."""
    rates: Rates
    origin: Origin

    @property
    def is_cpu(self) -> bool:
        """True if there is no accelerator."""
        return self.title.startswith("CPU")


@cache
def _table() -> dict[str, Any]:
    return json.loads((files("sage_grpo.plan") / "hardware.json").read_text())


def names() -> list[str]:
    """Every name that `find` accepts."""
    return ["cpu", *_table()["gpus"]]


def find(name: str, gpus: int = 1) -> Hardware:
    """A device by its short name; `gpus` of them, possibly on several nodes."""
    if name.lower() == "cpu":
        return cpu()
    rows = _table()["gpus"]
    if name.lower() not in rows:
        raise ConfigError(
            f"gpu {name!r} is unknown: use one of {', '.join(names())}, or --measure on the machine itself."
            + did_you_mean(name, names())
        )
    return _gpu(rows[name.lower()], gpus)


def here(gpus: int = 1) -> Hardware:
    """The device of this machine: its own memory, and the rates of the GPU with its name, if the table has one."""
    import torch

    if not torch.cuda.is_available():
        return cpu()
    properties = torch.cuda.get_device_properties(0)
    rows = _table()["gpus"].values()
    near = [row for row in rows if row["title"].removeprefix("NVIDIA ") in properties.name]
    row = max(near, key=lambda one: len(one["title"]), default=None)
    if row is None:
        return dataclasses.replace(
            find("h100", gpus),
            title=properties.name,
            gib=properties.total_memory / 2**30,
            origin="not in the table: an H100's rates stand in; --measure takes its own",
        )
    return dataclasses.replace(_gpu(row, gpus), gib=properties.total_memory / 2**30)


def cpu() -> Hardware:
    """This machine's processor: PyTorch's number of cores, each as fast as the measured one."""
    import torch

    gib, cores = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, torch.get_num_threads()
    core = Rates(**_table()["core"])
    rates = dataclasses.replace(
        core,
        **{name: cores * getattr(core, name) for name in ("attention", "products", "bandwidth")},
        launch=core.launch / cores,
    )
    origin = f"{cores} core(s) like the one that was measured (docs/plan.md); others differ by a factor of two or three: --measure takes yours"
    return Hardware(title="CPU", gib=gib, rates=rates, origin=origin)


def _gpu(row: dict[str, Any], gpus: int) -> Hardware:
    table, ruler = _table(), _table()["gpus"]["h200"]
    node = table["node"]
    link = row["link"] if gpus <= node["gpus"] else min(row["link"], node["link"])
    measured = row.get("measured")
    if measured is None:
        best = ruler["measured"]
        compute, memory = row["peak"] / ruler["peak"], row["memory"] / ruler["memory"]
        measured = {
            "attention": best["attention"] * compute,
            "products": best["products"] * compute,
            "bandwidth": best["bandwidth"] * memory,
        }
        origin = "estimated from its peak and what an H200 reaches of its own"
    else:
        origin = "measured (docs/plan.md)"
    return Hardware(
        title=row["title"], gib=row["gib"], rates=Rates(**measured, link=link, eager=table["eager"]), origin=origin
    )
