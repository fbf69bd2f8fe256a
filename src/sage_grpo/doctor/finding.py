"""What a check found: a name, a verdict, the measured value, why it matters and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Status = Literal["pass", "skip", "warn", "fail"]
ORDER: tuple[Status, ...] = ("pass", "skip", "warn", "fail")
"""From good to bad."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of a check-up."""

    name: str
    """What was checked."""
    status: Status
    """pass, warn (look at it), fail (the run would not learn, or not what you think), or skip (not checked; `value` says why)."""
    value: str
    """What was measured."""
    why: str
    """Why it matters."""
    remedy: str
    """What to do when it is not well."""
    number: float | None = None
    """The measured value as a number, where it is one."""


def skipped(name: str, reason: str, why: str) -> Finding:
    """A check that could not be made, or has no meaning here."""
    return Finding(name=name, status="skip", value=reason, why=why, remedy="")


def worst(findings: Iterable[Finding]) -> Status:
    """The worst verdict; "pass" for none."""
    return max((finding.status for finding in findings), key=ORDER.index, default="pass")


def graded(value: float, *, warn: float, fail: float) -> Status:
    """The verdict on an error: anything above a limit, or not a number, is worse."""
    if not math.isfinite(value) or value > fail:
        return "fail"
    return "warn" if value > warn else "pass"


def relative(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted|; infinite where the shapes differ."""
    if found.shape != wanted.shape:
        return math.inf
    found, wanted = found.double().cpu(), wanted.double().cpu()
    size = float(wanted.norm())
    gap = float((found - wanted).norm())
    return gap / size if size > 0 else (0.0 if gap == 0 else math.inf)


def rounding(dtype: torch.dtype) -> float:
    """A relative error that order of operations explains in this precision, after a whole network."""
    return 2e-4 if dtype == torch.float32 else 5e-2
