"""Suggestions for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(given: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """ " Did you mean 'x'?" with the nearest name, whatever the case of its letters; empty where none is near."""
    near = nearest(given, known, cutoff)
    return f" Did you mean {near!r}?" if near else ""


def nearest(given: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    folded = {name.lower(): name for name in known}
    near = difflib.get_close_matches(given.lower(), folded, n=1, cutoff=cutoff)
    return folded[near[0]] if near else ""
