"""Tables from rows: every number by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lab_rows import row

from sage_grpo.cli.main import main
from sage_grpo.config.parsing import ConfigError
from sage_grpo.tools.compare import store
from sage_grpo.tools.compare.design import Arm, Column, Suite
from sage_grpo.tools.compare.report import render
from sage_grpo.tools.compare.summary import Cell, at_passes, difference, interval, summarize
from sage_grpo.utils.safe_io import CONTROL, LeadsOut
from sage_grpo.utils.statistics import crossed_interval, mean_interval, paired_interval


def suite(**fields: Any) -> Suite:
    """Arms a (the baseline), b and c, seeds 1 and 2."""
    arms = tuple(Arm(name=name, recipe="shapes/sage") for name in "abc")
    columns = (Column(key="total", label="Overall", ceiling=2.0), Column(key="drift", higher=False))
    start = {"name": "s", "title": "T", "question": "Q?", "baseline": "a", "seeds": (1, 2), "columns": columns}
    return Suite(**{"arms": arms, **start, **fields})


ROWS = [
    row("a", 1, {0: 1.0, 2: 1.2, 4: 1.4}),
    row("a", 2, {0: 1.0, 2: 1.3, 4: 1.6}),
    row("b", 1, {0: 1.0, 4: 1.5}, cost=5),
    row("b", 2, {0: 1.0, 4: 1.9}, cost=5),
    row("c", 1, {0: 1.0, 4: 9.0}),
    row("c", 2, {0: 1.0}, status="diverged", iterations=4),
]


def test_scores_at_equal_passes_lie_on_the_curve() -> None:
    summary = summarize(suite(), ROWS)
    a, b, c = summary.arms.values()
    assert summary.budget == 20
    assert a.equal["total"].mean == pytest.approx((1.2 + 1.3) / 2)
    assert b.equal["total"].mean == pytest.approx((1.5 + 1.9) / 2)
    assert c.equal["total"].mean == pytest.approx(5.0)  # half of the way from 1 to 9
    assert b.equal_difference["total"].mean == pytest.approx((0.3 + 0.6) / 2)
    assert b.equal_difference["drift"].mean == pytest.approx((0.03 + 0.06) / 2)
    assert a.equal_difference == {}
    assert at_passes(ROWS[0], "total", 10) == pytest.approx(1.1)
    assert at_passes(ROWS[0], "total", 41) is None
    assert at_passes(ROWS[0], "total", 40 * (1 + 1e-12)) == 1.4  # means of costs are rounded
    assert at_passes(row("a", 1, {0: 1.0, 2: 3.0, 4: 9.0}, cost=0), "total", 0) == 1.0
    assert summarize(suite(), []).arms["a"].iterations == 0


def test_points_are_numbers_and_not_words() -> None:
    """As words 10 comes before 2, and a budget of 15 would lie between the start and the end."""
    long = row("a", 1, {10: 2.0, 0: 1.0, 2: 1.5})
    assert at_passes(long, "total", 15) == pytest.approx(1.375)
    assert at_passes(long, "total", 60) == pytest.approx(1.75)
    assert at_passes(long, "total", 100) == pytest.approx(2.0)
    steps = {str(step): {"raw": 1.0} for step in (10, 9, 2)}
    summary = summarize(suite(), [{**long, "steps": steps}, row("a", 2, {0: 1.0, 10: 2.0})])
    assert list(summary.arms["a"].curves["total"]) == list(summary.arms["a"].passes_at) == [0, 2, 10]
    assert list(summary.arms["a"].steps) == [0, 2, 9, 10]


def test_prompts_are_paired_only_where_no_clip_of_one_failed() -> None:
    """Two seeds that lost a prompt each have as many, but not the same."""
    whole = {1: Cell(2.0, (1.0, 3.0)), 2: Cell(3.0, (2.0, 4.0)), 5: Cell(9.0, (9.0, 9.0))}
    lost = {1: Cell(3.0, (None, 3.0)), 2: Cell(1.0, (1.0, None)), 7: Cell(0.0, (0.0, 0.0))}
    assert difference(lost, whole) == paired_interval({1: 3.0, 2: 1.0}, {1: 2.0, 2: 3.0})
    del lost[7]
    assert interval(lost) == mean_interval([3.0, 1.0])
    other = {1: Cell(5.0, (4.0, 6.0)), 2: Cell(3.5, (2.0, 5.0))}
    assert difference(other, whole) == crossed_interval([[3.0, 3.0], [0.0, 1.0]])
    assert interval(other) == crossed_interval([[4.0, 6.0], [2.0, 5.0]])
    fewer = {seed: Cell(cell.mean, cell.by_prompt[:1]) for seed, cell in other.items()}  # of other prompts
    assert difference(fewer, whole) == paired_interval({1: 5.0, 2: 3.5}, {1: 2.0, 2: 3.0})


def _write(folder: Path, rows: list[dict[str, Any]], figures: tuple[str, ...] = ()) -> None:
    store.save_suite(folder, suite(figures=figures), [r["key"] for r in ROWS], "the command")
    for one in rows:
        store.append(folder / store.ROWS, one)


def test_half_a_last_line_is_cut_off_and_other_damage_is_named(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    for one in ROWS[:2]:
        store.append(file, one)
    whole = file.read_bytes()
    assert not store.repair(file)
    file.write_bytes(whole + b'{"format": 1, "arm"')
    assert len(store.read_rows(file)) == 2
    assert store.repair(file)
    assert file.read_bytes() == whole
    file.write_bytes(whole[:-1])  # only its newline is missing: the next row would be glued to it
    assert store.repair(file)
    assert file.read_bytes() == whole
    file.write_bytes(b"nonsense\n" + whole)
    with pytest.raises(ConfigError, match="line 1: it is not JSON"):
        store.read_rows(file)


def test_the_finished_row_counts_and_not_a_fault_before_or_after() -> None:
    bad, good = {**ROWS[0], "status": "failed"}, ROWS[0]
    for rows in ([bad, good], [good, bad]):
        assert store.latest(rows, [good["key"]])[good["key"]]["status"] == "done"
    assert not store.latest(rows, ["another"])


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A folder that may come from somebody else: a link in it names what they like."""
    folder = tmp_path / "given"
    (tmp_path / "private").mkdir()
    folder.mkdir()
    return folder


@pytest.mark.parametrize("name", ["suite.json", "runs.jsonl"])
def test_the_rows_of_a_comparison_are_its_own(given: Path, name: str) -> None:
    _write(given, ROWS)
    (given / name).rename(given.parent / name)
    (given / name).symlink_to(given.parent / name)
    with pytest.raises(LeadsOut, match=name):
        render(given)


def test_tables_and_figures_are_not_written_through_links(given: Path) -> None:
    _write(given, ROWS, ("bars",))
    mine = given.parent / "private" / "file"
    mine.write_text("mine")
    for name in ("table.md", "report.md", "bars.png"):
        (given / name).symlink_to(mine)
        (given / f".{name}.tmp").symlink_to(mine)
    render(given)
    assert mine.read_text() == "mine"
    assert (given / "table.md").read_text().startswith("| arm |")
    assert not [file for file in given.iterdir() if file.is_symlink()]


def test_a_linked_folder_of_unfinished_runs_is_not_emptied(given: Path) -> None:
    kept = given.parent / "private" / "k" / "000002"
    kept.mkdir(parents=True)
    (given / "unfinished").symlink_to(given.parent / "private")
    for key in ("k", "../../private/k"):
        with pytest.raises(LeadsOut):
            store.forget(given, key)
        assert kept.is_dir()


def test_names_of_a_comparison_do_not_steer_the_terminal(tmp_path: Path, capsys) -> None:
    odd = "a\x1b]0;owned\x07"
    arms = (Arm(name=odd, recipe="shapes/sage"), Arm(name="b", recipe="shapes/sage"))
    asked = suite(arms=arms, baseline=odd, title=odd, question=odd, figures=())
    store.save_suite(tmp_path, asked, [row["key"] for row in ROWS], odd)
    for one in ROWS[:4]:
        store.append(tmp_path / store.ROWS, {**one, "arm": odd if one["arm"] == "a" else "b", "error": odd})
    assert main(["compare", "--table", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    for text in (told, (tmp_path / "report.md").read_text(), (tmp_path / "table.md").read_text()):
        assert "a\\x1b]0;owned" in text
        assert not CONTROL.search(text)
