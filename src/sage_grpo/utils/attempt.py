"""Actions that a run can do without: a failure is a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any


def attempt(what: str, action: Callable[[], Any]) -> bool:
    """Do something that a run can do without: if it fails, a warning says so and the run goes on. Returns whether it worked."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - neither a full disk nor a logger's fault ends a run of days
        warnings.warn(f"{what} failed ({type(error).__name__}: {error}). The run goes on.", stacklevel=3)
        return False
    return True
