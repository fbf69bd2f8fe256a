"""Text of figures, tables and progress. Figures are rounded once, from all of their digits, and alike on every page.

A figure that is stored, compared, ranked or subtracted keeps its digits; it is rounded here, for display only. Halves are rounded away from zero, as
by `toFixed` in the scripts of the pages: Python's own format takes them to the even digit, so that 6.25% would be 6.2% in a terminal and 6.3% in a
browser.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NONE = "–"
"""Stands for a missing figure."""
_EXACT = Context(prec=800)
"""Digits enough for the exact value of every float."""


def fixed(value: float, digits: int, *, signed: bool = False, grouped: bool = False) -> str:
    """So many digits after the point. signed: with a plus. grouped: 12,345."""
    if not math.isfinite(value):
        return f"{value:+}" if signed else f"{value}"
    rounded = Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP, _EXACT)
    return f"{rounded:{'+' if signed else ''}{',' if grouped else ''}f}"


def minutes(seconds: float | None) -> str:
    if seconds is None:
        return "? min"
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


def spreadsheet_cell(text: str) -> str:
    """A foreign text for a spreadsheet, which would take it for a formula without the ' before it, and a carriage return for the end of a row."""
    return ("'" * text.startswith(("=", "+", "-", "@", "\t", "\r")) + text).replace("\r", " ")


EVERY = 30.0
"""Seconds between two lines of progress."""


def lines_on_the_way(name: str, say: Callable[[str], None]) -> Callable[[int, int], None]:
    """A listener of (done, all) that prints both and the remaining time, at most every EVERY seconds from now on."""
    began = last = time.monotonic()

    def listen(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if 0 < done < total and now - last >= EVERY:
            last = now
            say(f"{name}: {done}/{total} micro-batches, {minutes((now - began) / done * (total - done))} left")

    return listen


def percent(share: float, digits: int = 0) -> str:
    return f"{fixed(100 * share, digits)}%"


def number(value: float | None) -> str:
    """Three digits after the point, four below 0.1; a dash where there is none."""
    return NONE if value is None or math.isnan(value) else fixed(value, _digits(value))


def plus_minus(mean: float, half: float, *, signed: bool = False) -> str:
    """A mean ± half of its interval, with the digits of `number`; no half where it is NaN. A signed one has three digits always."""
    digits = 3 if signed else _digits(mean)
    text = fixed(mean, digits, signed=signed)
    return text if math.isnan(half) else f"{text} ± {fixed(half, digits)}"


def _digits(value: float) -> int:
    return 3 if abs(value) >= 0.1 else 4


def narrow_table(title: str, *heads: str, left: Sequence[str] = ()) -> Table:
    """A table with columns of these names, right-aligned but for those on the `left`, and narrow padding: eight columns fit a terminal of 80."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right")
    return table


BAR = r"\|"
"""An escaped bar for Markdown."""


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [f"| {' | '.join(str(cell).replace('|', BAR) for cell in row)} |" for row in (heads, *rows)]
    return [lines[0], "|---" * len(heads) + "|", *lines[1:]]


@contextmanager
def progress_bar(name: str, total: int, *, shown: bool, console: Console | None = None) -> Iterator[Callable[[], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not shown) as progress:
        task = progress.add_task(name, total=total)
        yield lambda: progress.advance(task)
