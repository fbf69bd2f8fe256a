"""The pages of a comparison as a whole: every figure by hand, on rows with every kind of end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from lab_rows import row

from pen import drawing
from sage_grpo.tools.compare import report, store
from sage_grpo.tools.compare.design import Arm, Column, Suite
from sage_grpo.tools.compare.summary import summarize

HERE = Path(__file__).parent
COLUMNS = (Column(key="total", label="Overall", ceiling=3.0), Column(key="drift", higher=False))
ARMS = tuple(Arm(name=name, recipe="shapes/sage", options={"k": 1}) for name in "abcd")
SUITE = Suite(
    name="s", title="T", question="Q?", arms=ARMS, baseline="a", seeds=(1, 2, 3), columns=COLUMNS, passes=25, clips=40,
    notes="Note.", figures=("curves", "steps", "bars"),
)  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """a has three seeds and b two of them; of c one run ended, one diverged and one failed; d has none. Scores are eighths, which are exact."""
    a = [{0: 1.0, 2: 1.25, 4: 1.5}, {0: 1.5, 2: 1.75, 4: 2.0}, {0: 1.25, 2: 1.5, 4: 1.75}]
    b = [{0: 1.0, 2: 2.0, 4: 2.5}, {0: 1.5, 2: 3.0, 4: 3.5}]
    own = {"optimizer.lr": 2e-3, "kernel.eta": 0.5}
    busy = {"iteration": 1.5, "evaluate": 2.0, "total": 3600.0}
    found = [row("a", seed, curve) for seed, curve in enumerate(a, 1)][::-1]  # as runs end
    found += [row("b", seed, curve, cost=1234, settings=own, seconds=busy) for seed, curve in enumerate(b, 1)]
    for one in found:  # two prompts, an eighth of the seed's number above and below
        apart = one["seed"] / 8
        one["budgets"] = {"passes": 2, "clips": 4}
        one["versions"] = dict([("python", "3"), ("torch", "2")][:: 1 if one["arm"] == "a" else -1])
        scores = {point: found["total"] for point, found in one["evaluations"].items()}
        one["by_prompt"] = {point: {"total": [score - apart, score + apart]} for point, score in scores.items()}
    odd: dict[str, Any] = {"machine": {"device": "another"}, "commit": "", "settings": {}, "budgets": {"passes": 2}}
    odd["versions"] = {"python": "3", "torch": "2"}
    odd["steps"] = {"0": {"std": 0.5, "sensitivity": 4.0, "raw": 8.0}, "1": {"std": 0.25, "sensitivity": 8.0}}
    ended = row("c", 1, {0: 3.5, 2: 3.0, 4: 1.25}, cost=20, **odd)
    return [*found, ended, row("c", 2, {0: 4.0}, status="diverged", iterations=4), row("c", 3, {}, status="failed")]


def test_the_report_of_rows_with_every_kind_of_end() -> None:
    """Half of a's first interval: variances of seeds 1/16 / 3, of prompts 1/8 / 2 and of the rest 1/16 / 2 / 6, which is in both; their sum without it
    is 5/64, with one degree of freedom."""
    found = report.text(summarize(SUITE, rows()), rows(), [Path("x/curves.png")], "the command")
    assert found.replace(report.READING, "READING") + "\n" == (HERE / "report.txt").read_text()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The log of the drawing."""
    return drawing(monkeypatch, report)


def test_figures_show_the_numbers_of_the_tables(log: list[str], tmp_path: Path) -> None:
    files = report.draw(summarize(SUITE, rows()), tmp_path)
    assert files == [tmp_path / f"{name}.png" for name in SUITE.figures]
    assert "\n".join(log) + "\n" == (HERE / "figures.txt").read_text()


def test_without_matplotlib_there_is_all_but_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended = rows()
    store.save_suite(tmp_path, SUITE, [one["key"] for one in reversed(ended)], "the command")
    for one in [*ended, row("x", 1, {0: 1.0})]:  # of no run that was asked for
        store.append(tmp_path / store.ROWS, one)
    with pytest.warns(UserWarning, match="No figures: matplotlib cannot be imported.*pip install matplotlib"):
        found = report.render(tmp_path)
    names = {"report.md", "table.md", store.ROWS, store.SUITE}
    assert {file.name for file in tmp_path.iterdir()} == names
    assert report.tables(found) + "\n" == (tmp_path / "table.md").read_text()
    assert (tmp_path / "report.md").read_text() == report.text(found, ended[::-1], [], "the command") + "\n"


def test_arms_share_a_row_of_bases_only_where_it_is_true_for_all() -> None:
    """0.0500 and 0.0504 are printed with four digits: two rows, though they agree in three."""
    both = [row(arm, 1, {0: 0.5, 2: 1.5}) for arm in "ab"]
    both[1]["evaluations"]["0"]["drift"] = 0.0504
    lines = [line for line in report.tables(summarize(SUITE, both)).splitlines() if "| base" in line]
    assert ["0.0500" in lines[0], "0.0504" in lines[-1], len(lines)] == [True, True, 2]
