"""Optional actions of a run: a failure is a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any


def attempt(what: str, action: Callable[[], Any]) -> bool:
    """Run an optional action; if it fails, the run goes on with a warning. Returns True if it worked."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - neither a full disk nor a logger's fault ends a run of days
        warnings.warn(f"{what} failed ({type(error).__name__}: {error}). The run goes on.", stacklevel=3)
        return False
    return True
