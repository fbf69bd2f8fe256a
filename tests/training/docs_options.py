"""The option tables of docs/config.md, written from the dataclasses so that they cannot go stale.

`python tests/training/docs_options.py` writes them; tests/training/test_config.py compares.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sage_grpo.config.help import field_docs
from sage_grpo.config.ranges import inner_dataclass, ranges

DOCUMENT = Path(__file__).parents[2] / "docs" / "config.md"
BEGIN, END = "<!-- options: written by tests/training/docs_options.py -->", "<!-- end of options -->"


def tables(kind: type, prefix: str = "", *, title: str = "Run") -> str:
    """A list of the plain fields of a dataclass, then one for each dataclass in it."""
    hints, docs, limits = get_type_hints(kind), field_docs(kind), ranges(kind)
    rows, later = [], []
    for field in dataclasses.fields(kind):
        inner = inner_dataclass(hints[field.name])
        if inner is None:
            text = docs[field.name]
            limit = _limit(field, hints[field.name], limits.get(field.name, ""), text)
            rows.append(f"- **`{prefix}{field.name}`** ({_default(field)}{limit and ', ' + limit}): {text}")
        else:
            many = "[]" if get_origin(hints[field.name]) is list else ""
            later.append(tables(inner, f"{prefix}{field.name}{many}.", title=f"{prefix}{field.name}"))
    summary = " ".join((inspect.getdoc(kind) or "").split())
    return "\n".join([f"### {title}", "", summary, "", *rows, "", *later])


def _limit(field: dataclasses.Field[Any], hint: Any, limit: str, text: str) -> str:
    """The range in words, or the choices where the text does not name all of them."""
    choices = [str(one) for one in get_args(hint)] if get_origin(hint) is Literal else []
    if all(choice in text for choice in choices):
        return re.sub(r"in \[0, 9\.2\d*e\+18\]", "at least 0", limit)
    return "or " + ", ".join(f"`{choice}`" for choice in choices if choice != field.default)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
        if value is None or value == "":
            return "`null`" if value is None else '`""`'
        return f"`{str(value).lower() if isinstance(value, bool) else value}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()}`"
    return "needed"


def section() -> str:
    from sage_grpo.training.config import TrainConfig

    return tables(TrainConfig).rstrip() + "\n"


def main() -> int:
    text = DOCUMENT.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{section()}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
