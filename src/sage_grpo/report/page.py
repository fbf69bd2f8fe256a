"""The report as one HTML page: data and assets put together. No network, no code from data."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from sage_grpo.documents import finite
from sage_grpo.report import gallery as clips
from sage_grpo.report.run_data import RunData, noise_picture, series, stepwise
from sage_grpo.report.summary import differences, table
from sage_grpo.version import __version__

SCRIPTS = ("base.js", "charts.js", "tables.js", "player.js", "gallery.js", "detail.js", "main.js")
"""In the order in which they are needed."""


def describe(runs: Sequence[RunData]) -> tuple[dict[str, Any], list[tuple[int, Any]]]:
    """All data of a page but its clips, and the files of those."""
    shown, files = clips.gallery(runs)
    names = _distinct(runs)
    return {
        "title": ", ".join(names),
        "version": __version__,
        "made": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "watch": None,
        "clips": {"kind": "none", "list": []},
        "runs": [_run(run, name) for run, name in zip(runs, names)],
        "summary": table(runs),
        "differs": differences(runs) if len(runs) > 1 else [],
        "gallery": shown,
    }, files


def render(data: Mapping[str, Any]) -> str:
    """The page. Its policy allows its own scripts, by their hash, and nothing else, whatever the data say."""
    script = "\n".join(f"// {name}\n{_asset(name)}" for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "media-src 'self' file: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    values = {
        "POLICY": policy,
        "TITLE": html.escape(str(data["title"])),
        "STYLE": _asset("style.css"),
        "DATA": as_script(data),
        "SCRIPT": script,
    }
    # In one pass over the template: what a value contains is never taken for a place.
    pieces = _asset("page.html").split("%%")
    return "".join(values[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def as_script(data: Any) -> str:
    """JSON that stays data inside a script element, whatever is in its strings."""
    text = json.dumps(finite(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text.encode("utf-8", "replace").decode("utf-8")


def _asset(name: str) -> str:
    return resources.files("sage_grpo.report").joinpath("assets", name).read_text(encoding="utf-8")


def _run(run: RunData, name: str) -> dict[str, Any]:
    total = run.settings.get("iterations")
    return {
        "name": name,
        "iteration": run.rows[-1]["iteration"] if run.rows else 0,
        "iterations": total if isinstance(total, int) else None,
        "finished": run.finished,
        "hours": sum(row.get("time/total") or 0 for row in (*run.rows, *run.evaluations)) / 3600,
        "steps": series(run.rows),
        "evaluations": series(run.evaluations),
        "stepwise": stepwise(run.rows),
        "noise": noise_picture(run),
        "settings": run.settings,
        "events": sorted(run.events, key=lambda event: (event["iteration"], event["time"] or 0)),
    }


def _distinct(runs: Sequence[RunData]) -> list[str]:
    """Names of folders; with their parents' where two are alike."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.folder.resolve().parent.name}/{run.name}" for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({place + 1})" for place, name in enumerate(names)]
