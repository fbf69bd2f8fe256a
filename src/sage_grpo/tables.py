"""Tables, for a terminal and as Markdown, and progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def narrow_table(title: str) -> Table:
    """A table without columns yet, whose padding is narrow: eight of them fit a terminal of 80."""
    from rich import box
    from rich.table import Table

    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (heads, *rows)]
    return [lines[0], "|---" * len(heads) + "|", *lines[1:]]


@contextmanager
def progress_bar(name: str, total: int, *, shown: bool, console: Console | None = None) -> Iterator[Callable[[], None]]:
    """A bar, where it is `shown`; what it gives is called after each of so many things."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not shown) as progress:
        task = progress.add_task(name, total=total)
        yield lambda: progress.advance(task)
