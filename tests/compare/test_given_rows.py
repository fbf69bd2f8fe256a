"""Rows and suites of a comparison from somebody else: what tables would stumble over is refused where it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lab_rows import row

from sage_grpo.config.parsing import ConfigError
from sage_grpo.tools.compare import store
from sage_grpo.tools.compare.design import Arm, Suite

SUITE = Suite(name="s", title="T", question="Q?", arms=(Arm(name="a", recipe="shapes/sage"),), baseline="a", seeds=(1,))
DEEP = "[" * 20_000 + "]" * 20_000


def changed(document: Any, path: str, value: Any) -> Any:
    """The document with another value at a place a/b/c; ... takes it away."""
    document = json.loads(json.dumps(document))
    *way, last = [int(part) if part.isdigit() and "[]" in path else part for part in path.replace("[]/", "").split("/")]
    at = document
    for part in way:
        at = at[part]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return document


def read(tmp_path: Path, content: Any, more: bytes = b"") -> list[dict[str, Any]]:
    file = tmp_path / store.ROWS
    file.write_bytes(json.dumps(content).encode() + b"\n" + more)
    return store.read_rows(file)


def test_rows_as_they_are_written_are_read_and_one_that_is_nested_without_end_is_refused(tmp_path) -> None:
    whole, failed = row("a", 1, {0: 1.0, 2: 2.0}), row("a", 1, {}, status="failed")
    failed = {name: failed[name] for name in ("format", *store.HEAD)}
    for one in (whole, row("a", 1, {0: 1.0}, status="diverged", iterations=2), failed):
        assert read(tmp_path, one) == [one]
    with pytest.raises(ConfigError, match="line 2"):
        read(tmp_path, whole, DEEP.encode() + b"\n{}\n")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *((name, ...) for name in (*store.HEAD, "evaluations", "passes", "updates", "seconds", "seconds/total", "passes/2")),
        ("arm", []), ("seed", "1"), ("seed", True), ("key", {}), ("status", None), ("error", 3), ("iterations", 1.5), ("settings", []),
        ("settings/rewards", "x"), ("settings/rewards", [1]), ("settings/rewards", [{"name": 1}]), ("evaluations", -1),
        ("evaluations/x", {}), ("evaluations/0", 1), ("evaluations/0/total", "x"), ("evaluations/0/total", 10**400), ("passes/0", None),
        ("updates", "x"), ("seconds", 0), ("seconds/total", []), ("steps/0", "x"), ("steps/0/sent", []), ("training", []), ("commit", []),
        ("recipe", 0),
    ],
)  # fmt: skip
def test_rows_that_no_run_writes_are_refused_by_line(path: str, value: Any, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"line 1.*[Rr]emove") as refused:
        read(tmp_path, changed(row("a", 1, {0: 1.0, 2: 2.0}), path, value))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("keys", "x"), ("keys", [1]), ("keys", [[]]), ("command", None), ("suite", []), ("suite/arms", None), ("suite/arms", [1]),
        ("suite/baseline", 1.5), ("suite/seeds", ["x"]), ("suite/figures", ["pie"]), ("suite/columns", [{"key": 1}]), ("suite/kind", "x"),
        ("suite/points", 3), ("suite/title", {}), ("suite/more", 1), ("suite/name", ...), ("suite", ...), ("keys", ...),
    ],
)  # fmt: skip
def test_suites_that_no_comparison_writes_are_refused(path: str, value: Any, tmp_path) -> None:
    store.save_suite(tmp_path, SUITE, ["k"], "command")
    file = tmp_path / store.SUITE
    assert store.load_suite(tmp_path) == (SUITE, ["k"], "command")
    file.write_text(json.dumps(changed(json.loads(file.read_text()), path, value)))
    with pytest.raises(ConfigError, match="damaged"):
        store.load_suite(tmp_path)


def test_suites_that_are_no_json_are_refused(tmp_path) -> None:
    for text in ("", "{", "[]", "null", DEEP, '{"suite": ' + DEEP + "}"):
        (tmp_path / store.SUITE).write_text(text)
        with pytest.raises(ConfigError, match="damaged"):
            store.load_suite(tmp_path)
