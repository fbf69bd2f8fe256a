"""Sentences and splits of the scenes world."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from sage_grpo.utils.suggest import did_you_mean

Phrase = tuple[str, ...]
"""Words in a row."""
Meaning = tuple[str, str]
"""An attribute and its value."""


def is_heldout(names: Iterable[str]) -> bool:
    """True for about one combination in ten; by a hash of the names, so a split never moves."""
    return hashlib.sha256("/".join(names).encode()).digest()[0] % 10 == 0


class AnyScene:
    """Common base of scenes: a value for every attribute that a prompt can name."""

    attributes: ClassVar[Mapping[str, Sequence[str]]]
    """Every attribute and its values."""

    def __post_init__(self) -> None:
        for (name, values), value in zip(self.attributes.items(), self.names):
            if value not in values:
                raise ValueError(
                    f"Scene.{name} is {value!r}; use one of {', '.join(values)}.{did_you_mean(str(value), values)}"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The values, in the order of the attributes."""
        return tuple(getattr(self, name) for name in self.attributes)

    @property
    def indices(self) -> tuple[int, ...]:
        """The index of each value, in the order of the attributes."""
        return tuple(values.index(value) for values, value in zip(self.attributes.values(), self.names))

    @property
    def heldout(self) -> bool:
        """True when this combination is kept out of all training."""
        return is_heldout(self.names)


def vocabulary_of(phrases: Iterable[str], templates: Iterable[str]) -> tuple[str, ...]:
    """Every word of the phrases, and of the templates without their {fields}, sorted."""
    plain = [re.sub(r"\{\w+\}", " ", template) for template in templates]
    return tuple(sorted({word for text in (*phrases, *plain) for word in text.split()}))


def named_in(text: str, meanings: Mapping[Phrase, Meaning], vocabulary: Sequence[str]) -> Iterator[Meaning]:
    """Meanings of a sentence, in its order; at every place the longest phrase counts. A ValueError explains unknown words."""
    found = re.findall(r"[^\s.,;:!?\"()]+", text.lower())
    longest = max(map(len, meanings))
    place = 0
    while place < len(found):
        lengths = range(min(longest, len(found) - place), 0, -1)
        length = next((n for n in lengths if tuple(found[place : place + n]) in meanings), 0)
        if length:
            yield meanings[tuple(found[place : place + length])]
        elif (word := found[place]) not in vocabulary:
            raise ValueError(
                f"Unknown word {word!r} in {text!r}.{did_you_mean(word, vocabulary)} words() lists what is known."
            )
        place += max(length, 1)
