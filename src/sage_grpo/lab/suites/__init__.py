"""Experiments by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from sage_grpo.lab.design import Suite

Size = Literal["smoke", "full"]
SUITES: dict[str, Callable[[Size], Suite]] = {}
"""Name -> the suite of a size: smoke for two CPU cores, full for minutes of a GPU."""
