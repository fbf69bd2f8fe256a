"""Names of things that a Python program hands to a run as objects, in the places where a configuration names what to load.

A configuration with such a name says truly what was used, and cannot be loaded from alone: each loader refuses its part.
"""

from __future__ import annotations

PREFIX = "object:"
"""What the names begin with; `object:bright` is the reward `bright` of somebody's program."""


class ObjectNeeded(ValueError):
    """Only the program that had the object can do this; the message says how."""


def name_of(label: str) -> str:
    """The name of an object in a configuration."""
    return f"{PREFIX}{label}"


def is_object(name: str | None) -> bool:
    """Whether a name stands for an object."""
    return name is not None and name.startswith(PREFIX)


def refuse_object(name: str | None, what: str, instead: str) -> None:
    """Refuse to load by its name what was an object; `instead` is what else can be given."""
    if is_object(name):
        raise ObjectNeeded(
            f"This run got {what} as an object of a Python program ({name}), which no file holds. "
            f"{instead}, or hand it over in Python (docs/api.md)."
        )
