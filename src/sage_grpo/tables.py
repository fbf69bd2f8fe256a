"""Tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
