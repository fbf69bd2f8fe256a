"""A check-up as lines for people, and as JSON."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sage_grpo.doctor.finding import ORDER, Finding, worst
from sage_grpo.documents import finite

STYLE = {"pass": "green", "skip": "dim", "warn": "bold yellow", "fail": "bold red"}


def line(finding: Finding, console: Console) -> None:
    """The verdict with what was measured and why it matters; what to do where something is not well."""
    text = Text(finding.value)
    if finding.status != "skip":
        text.append(f"\n{finding.why}", style="dim")
    if finding.status in ("warn", "fail"):
        text.append(f"\n-> {finding.remedy}", style=STYLE[finding.status])
    row = Table.grid(padding=(0, 1))
    row.add_column(width=4)
    row.add_column(width=17)
    row.add_column(overflow="fold")  # a path must not lose its end
    row.add_row(Text(finding.status, style=STYLE[finding.status]), Text(finding.name, style="bold"), text)
    console.print(row)


def summary(findings: Sequence[Finding], console: Console) -> None:
    """How many of each verdict."""
    count = Counter(finding.status for finding in findings)
    text = ", ".join(f"{count[status]} {status}" for status in ORDER if count[status])
    console.print(Text(text, style=STYLE[worst(findings)]))


def document(findings: Sequence[Finding]) -> dict[str, Any]:
    """Plain values."""
    rows = [finite(dataclasses.asdict(finding)) for finding in findings]  # of an infinite number `value` tells
    return {"status": worst(findings), "findings": rows}
