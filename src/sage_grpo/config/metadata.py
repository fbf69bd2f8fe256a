"""What a field of a configuration affects, written once, in its type: `micro_batch: Speed[Count] = 1`. A group may say it for all of its
fields, with a class variable `affects`.

"Does this field matter?" is asked when a run is continued, when runs are compared and when a report puts them together: all of them ask
here. A field that says nothing affects what a run computes, so that a new one is never taken for harmless.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal, TypeVar, get_origin

from sage_grpo.config.ranges import inner_dataclass, type_hints

Effect = Literal["values", "training", "course", "content", "speed", "machine", "record", "start"]

MEANING: tuple[Effect, ...] = ("values", "training")
"""What a run is: a continued run must keep it."""
COMPARED: tuple[Effect, ...] = (*MEANING, "course", "content", "speed")
"""What tells runs of a comparison apart, which measures their time as well."""


@dataclass(frozen=True)
class Affects:
    """The mark in a type."""

    what: Effect


T = TypeVar("T")
Values = Annotated[T, Affects("values")]
"""What a run computes: the rule, said only where the group around it says something else."""
Training = Annotated[T, Affects("training")]
"""What training computes, and nothing of the model before it."""
Course = Annotated[T, Affects("course")]
"""How long a run goes on and what stops it: a continued run may change it, and with it what it computes."""
Content = Annotated[T, Affects("content")]
"""Where something lies that has a fingerprint of its own: the name may change, the content may not."""
Speed = Annotated[T, Affects("speed")]
"""Time and memory; values to rounding."""
Machine = Annotated[T, Affects("machine")]
"""How the work lies on the machine: values to rounding, and nothing that runs are compared by."""
Record = Annotated[T, Affects("record")]
"""What is written or shown of a run."""
Start = Annotated[T, Affects("start")]
"""This start of a run: where its folder is, whether it is continued, where it is logged. A change is not worth a word."""


@cache
def affects(options: type, key: str) -> Effect:
    """What a dotted key affects: what its field says, else its group, else the group around that; "values" where none does.

    Items of lists are `rewards[].name`, `rewards[0].name` or `rewards.name`; keys of a mapping are their field's."""
    found: Effect = "values"
    group: type | None = options
    for name in key.split("."):
        hints = {} if group is None else type_hints(group)
        hint = hints.get(name.partition("[")[0])
        if hint is None:
            break
        group = inner_dataclass(hint)
        found = getattr(group, "affects", found)
        marks = hint.__metadata__ if get_origin(hint) is Annotated else ()
        found = next((mark.what for mark in marks if isinstance(mark, Affects)), found)
    return found
