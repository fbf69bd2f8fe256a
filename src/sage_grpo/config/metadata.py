"""The effect of a configuration field, written once, in its type: `micro_batch: Speed[Count] = 1`. A group may declare it for all of its fields, with
a class variable `affects`.

Continuing a run, comparing runs and reports read these effects to decide if a field matters. A field without one affects the values that a run
computes, so that a new field is never taken for harmless.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal, TypeVar, get_origin

from sage_grpo.config.ranges import inner_dataclass, type_hints

Effect = Literal["values", "training", "course", "content", "speed", "machine", "record", "start"]

MEANING: tuple[Effect, ...] = ("values", "training")
"""Effects that define a run: a continued run must keep them."""
COMPARED: tuple[Effect, ...] = (*MEANING, "course", "content", "speed")
"""Effects that distinguish the runs of a comparison, which measures their time as well."""


@dataclass(frozen=True)
class Affects:
    """The marker in a type."""

    what: Effect


T = TypeVar("T")
# The values that a run computes: the default, written only where the group declares another effect.
Values = Annotated[T, Affects("values")]
# The values that training computes, but not the model before it.
Training = Annotated[T, Affects("training")]
# The length of a run and its stopping rules: a continued run may change them, and so its results.
Course = Annotated[T, Affects("course")]
# The place of content that has a fingerprint: the name may change, the content may not.
Content = Annotated[T, Affects("content")]
Speed = Annotated[T, Affects("speed")]  # time and memory; values to rounding
Machine = Annotated[T, Affects("machine")]  # the layout of the work: values to rounding, ignored in comparisons
Record = Annotated[T, Affects("record")]  # the files and output of a run
Start = Annotated[T, Affects("start")]  # launch-only: the folder, resuming, trackers; not reported on resume


@cache
def affects(options: type, key: str) -> Effect:
    """The effect of a dotted key: its field's, else its group's, else that of the group around; "values" without any.

    Items of lists are `rewards[].name`, `rewards[0].name` or `rewards.name`; keys of a mapping are their field's.
    """
    effect: Effect = "values"
    group: type | None = options
    for name in key.split("."):
        hints = {} if group is None else type_hints(group)
        hint = hints.get(name.partition("[")[0])
        if hint is None:
            break
        group = inner_dataclass(hint)
        effect = getattr(group, "affects", effect)
        marks = hint.__metadata__ if get_origin(hint) is Annotated else ()
        effect = next((mark.what for mark in marks if isinstance(mark, Affects)), effect)
    return effect
