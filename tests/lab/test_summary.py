"""Tables from rows: every number by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from lab_rows import row

from sage_grpo.cli import main
from sage_grpo.configure import ConfigError
from sage_grpo.inside import CONTROL, LeadsOut
from sage_grpo.lab import store
from sage_grpo.lab.design import Arm, Column, Suite
from sage_grpo.lab.report import render, tables
from sage_grpo.lab.summary import at_passes, summarize

T1 = 12.7062047
"""97.5% quantile of t with one degree of freedom."""


def suite(**fields: Any) -> Suite:
    """Arms a (the baseline), b and c, seeds 1 and 2."""
    arms = tuple(Arm(name=name, recipe="shapes/sage") for name in "abc")
    columns = (Column(key="total", label="Overall", ceiling=2.0), Column(key="drift", higher=False))
    start = {
        "name": "s",
        "title": "T",
        "question": "Q?",
        "arms": arms,
        "baseline": "a",
        "seeds": (1, 2),
        "columns": columns,
    }
    return Suite(**{**start, **fields})


ROWS = [
    row("a", 1, {0: 1.0, 2: 1.2, 4: 1.4}),
    row("a", 2, {0: 1.0, 2: 1.3, 4: 1.6}),
    row("b", 1, {0: 1.0, 4: 1.5}, cost=5),
    row("b", 2, {0: 1.0, 4: 1.9}, cost=5),
    row("c", 1, {0: 1.0, 4: 9.0}),
    row("c", 2, {0: 1.0}, status="diverged", iterations=4),
]


def test_means_intervals_ways_and_differences() -> None:
    summary = summarize(suite(), ROWS)
    a, b, c = summary.arms.values()
    assert a.final["total"].mean == pytest.approx(1.5)
    assert a.final["total"].half == pytest.approx(T1 * 0.1)  # deviation 0.2 / sqrt 2, over sqrt 2
    assert b.difference["total"].mean == pytest.approx((0.1 + 0.3) / 2)
    assert b.difference["total"].half == pytest.approx(T1 * 0.1)
    assert b.difference["drift"].mean == pytest.approx(0.02)
    assert not a.difference
    assert a.way is not None
    assert a.way.mean == pytest.approx(0.5)  # 0.4 and 0.6 of the way from 1 to 2
    assert a.base == {"total": 1.0, "drift": 0.1}
    assert (a.passes, b.passes, a.updates) == (40, 20, 8)
    assert c.counts == {"done": 1, "diverged": 1, "failed": 0, "missing": 0}
    assert c.final["total"].mean == 9.0  # the one that ended
    assert c.difference["total"].count == 1
    # t = 0.2 / 0.1 with one degree of freedom; c has one pair and is no test, so that Holm has one.
    assert summary.adjusted["b"] == pytest.approx(1 - 2 * math.atan(2.0) / math.pi)
    assert math.isnan(summary.adjusted["c"])


def test_scores_at_equal_passes_lie_on_the_curve() -> None:
    """The cheapest arm makes 20 passes; a has made as many after 2 of its 4 iterations."""
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


def test_pairs_are_seeds_whatever_the_order_of_rows() -> None:
    """Seed 1 gains 0.1 and seed 2 0.3; crosswise it would be 0.5 and -0.1, of the same mean."""
    b = summarize(suite(), [ROWS[1], ROWS[0], *ROWS[2:]]).arms["b"]
    assert b.difference["total"].half == pytest.approx(T1 * 0.1)
    assert b.equal_difference["total"].half == pytest.approx(T1 * 0.15)


def base_rows(lines: list[str]) -> list[list[str]]:
    """The first cells of the rows of what is there before training: of whom, total, drift."""
    cells = [[cell.strip() for cell in line.split("|")[1:6]] for line in lines if line.startswith("| base")]
    return [[name, total, drift] for name, _, _, total, drift in cells]


def test_a_base_that_scatters_from_process_to_process_is_one_row_with_its_range() -> None:
    """a and b have bases in common; c, of another model, has none with them, although it scatters, too."""
    starts = {"a": (1.0, 1.02), "b": (1.01, 1.03), "c": (1.04, 1.05)}
    runs = [row(arm, seed, {0: start, 4: 1.5}) for arm, both in starts.items() for seed, start in enumerate(both, 1)]
    summary = summarize(suite(), runs)
    assert base_rows(tables(summary).splitlines()) == [
        ["base of a, b", "1.000 to 1.030", "0.100 to 0.103"],
        ["base of c", "1.040 to 1.050", "0.104 to 0.105"],
    ]
    assert summary.arms["a"].base["total"] == pytest.approx(1.01)


def test_names_with_commas_are_told_apart_in_a_row_of_bases() -> None:
    arms = tuple(Arm(name=f"{name}, hot", recipe="shapes/sage") for name in "abc")
    named = suite(arms=arms, baseline="a, hot")
    other = [row("c, hot", seed, {0: 0.4, 4: 1.2}) for seed in (1, 2)]
    found = summarize(named, [*({**one, "arm": f"{one['arm']}, hot"} for one in ROWS[:4]), *other])
    assert [name for name, _, _ in base_rows(tables(found).splitlines())] == [
        "base of a, hot; b, hot",
        "base of c, hot",
    ]


def test_every_model_has_a_base_of_its_own() -> None:
    """Arms of two models: two rows before training, and each run's way begins at its own base."""
    other = [row("b", seed, {0: 0.4, 4: 1.2}) for seed in (1, 2)]
    summary = summarize(suite(), [*ROWS[:2], *other, *ROWS[4:]])
    assert [arm.base["total"] for arm in summary.arms.values()] == pytest.approx([1.0, 0.4, 1.0])
    found = tables(summary).splitlines()
    assert [line[: line.index("|", 2)].strip("| ") for line in found if line.startswith("| base")] == [
        "base of a, c",
        "base of b",
    ]
    assert "| base of b |  | 0 | 0.400 | 0.0400 |" in found[3]
    way = summary.arms["b"].way
    assert way is not None
    assert way.mean == pytest.approx(0.5)


def test_seeds_without_a_run_are_counted() -> None:
    summary = summarize(suite(), [*ROWS[:3], row("b", 2, {}, status="failed", iterations=4)])
    assert summary.arms["b"].counts == {"done": 1, "diverged": 0, "failed": 1, "missing": 0}
    assert summary.arms["c"].counts["missing"] == 2
    assert summary.arms["b"].difference["total"].count == 1


def test_the_suite_refuses_what_cannot_be_compared() -> None:
    with pytest.raises(ConfigError, match=r"baseline 'sagee'.*Did you mean 'sage'"):
        suite(arms=(Arm(name="sage", recipe="x"),), baseline="sagee")
    with pytest.raises(ConfigError, match="two arms are called 'a'"):
        suite(arms=(Arm(name="a", recipe="x"), Arm(name="a", recipe="y")))
    with pytest.raises(ConfigError, match="seed is there twice"):
        suite(seeds=(1, 1))


FIGURES = ("curves", "steps", "bars")


def _write(folder: Path, rows: list[dict[str, Any]], figures: tuple[str, ...] = FIGURES) -> None:
    store.save_suite(folder, suite(figures=figures), [r["key"] for r in ROWS], "the command")
    for one in rows:
        store.append(folder / store.ROWS, one)


def test_the_report_has_tables_figures_settings_faults_and_machine(tmp_path: Path) -> None:
    _write(tmp_path, ROWS)
    render(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| a | 2 | 4 | 1.500 ± 1.271 | 0.150 ± 0.127 | 50% ± 127% | 1.250 ± 0.635 | 40 | 8 |" in text
    assert "| base |  | 0 | 1.000 | 0.100 | 0% |  | 0 | 0 |" in text
    assert "| b | 2 | +0.200 ± 1.271 | +0.020 ± 0.127 | 0.295 | +0.450 ± 1.906 | +0.045 ± 0.191 |" in text
    assert "| c | 1 (1 diverged) |" in text
    assert "- c, seed 2: diverged. why" in text
    for part in ("the command", "Q?", "`optimizer.lr` 0.001", "device a machine", "torch 2", "commit: abc"):
        assert part in text
    for name in ("curves", "steps", "bars"):
        assert f"]({name}.png)" in text
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    numbers = json.loads((tmp_path / "table.json").read_text())
    assert numbers["arms"]["a"]["final"]["total"]["mean"] == 1.5
    assert numbers["arms"]["c"]["difference"]["total"]["low"] is None


@pytest.mark.slow
def test_tables_do_not_depend_on_times_or_on_the_order_in_which_runs_ended(tmp_path: Path) -> None:
    for place, rows in (
        ("one", ROWS),
        ("two", [{**r, "seconds": {"iteration": 9, "evaluate": 9, "total": 99}} for r in ROWS[::-1]]),
    ):
        (tmp_path / place).mkdir()
        _write(tmp_path / place, rows)
        render(tmp_path / place)
    for name in ("table.md", "table.json", "curves.png"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_runs_of_several_machines_are_marked(tmp_path: Path) -> None:
    _write(tmp_path, [*ROWS[:1], {**ROWS[1], "machine": {"device": "another"}}], ())
    render(tmp_path)
    assert "runs differ in this" in (tmp_path / "report.md").read_text()


def test_a_folder_before_its_first_run_has_a_table(tmp_path: Path) -> None:
    _write(tmp_path, [])
    assert render(tmp_path).arms["a"].counts["missing"] == 2


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
    with pytest.raises(ConfigError, match="line 1 is no JSON"):
        store.read_rows(file)


def test_the_finished_row_counts_and_not_a_fault_before_or_after() -> None:
    bad, good = {**ROWS[0], "status": "failed"}, ROWS[0]
    for rows in ([bad, good], [good, bad]):
        assert store.latest(rows, [good["key"]])[good["key"]]["status"] == "done"
    assert not store.latest(rows, ["another"])


def test_a_suite_survives_its_file(tmp_path: Path) -> None:
    asked = suite(points=(1, 2), options={"kernel.eta": 0.5})
    store.save_suite(tmp_path, asked, ["k"], "words")
    assert store.load_suite(tmp_path) == (asked, ["k"], "words")
    (tmp_path / store.SUITE).write_text("{}")
    with pytest.raises(ConfigError, match="damaged"):
        store.load_suite(tmp_path)
    with pytest.raises(FileNotFoundError, match="not the folder of a comparison"):
        store.load_suite(tmp_path / "elsewhere")


@pytest.mark.parametrize("name", ["suite.json", "runs.jsonl"])
def test_the_rows_of_a_comparison_are_its_own(tmp_path: Path, name: str) -> None:
    """A folder may come from somebody else: a link in it names what they like."""
    (tmp_path / "given").mkdir()
    _write(tmp_path / "given", ROWS, ())
    (tmp_path / "given" / name).rename(tmp_path / name)
    (tmp_path / "given" / name).symlink_to(tmp_path / name)
    with pytest.raises(LeadsOut, match=name):
        render(tmp_path / "given")


def test_tables_and_figures_are_not_written_through_links(tmp_path: Path) -> None:
    given, private = tmp_path / "given", tmp_path / "private"
    given.mkdir()
    _write(given, ROWS, ("bars",))
    private.write_text("mine")
    for name in ("table.md", "table.json", "report.md", "leaderboard.json", "bars.png"):
        (given / name).symlink_to(private)
        (given / f".{name}.tmp").symlink_to(private)
    render(given)
    assert private.read_text() == "mine"
    assert (given / "table.md").read_text().startswith("| arm |")
    assert not [file for file in given.iterdir() if file.is_symlink()]


def test_a_linked_folder_of_unfinished_runs_is_not_emptied(tmp_path: Path) -> None:
    given, private = tmp_path / "given", tmp_path / "private"
    given.mkdir()
    (private / "k" / "000002").mkdir(parents=True)
    (given / "unfinished").symlink_to(private)
    for call in (lambda: store.forget(given, "k"), lambda: store.forget(given, "../../private/k")):
        with pytest.raises(LeadsOut):
            call()
        assert (private / "k" / "000002").is_dir()


def test_a_suite_in_a_linked_folder_is_not_drawn_into(tmp_path: Path, capsys) -> None:
    given, private = tmp_path / "given", tmp_path / "private"
    given.mkdir()
    private.mkdir()
    _write(private, ROWS, ())
    before = sorted(file.name for file in private.iterdir())
    (given / "inner").symlink_to(private)
    assert main(["compare", "--table", str(given)]) == 2
    assert "inner leads out" in capsys.readouterr().err
    assert sorted(file.name for file in private.iterdir()) == before
    (tmp_path / "named").symlink_to(private)  # a link that the user names
    assert main(["compare", "--table", str(tmp_path / "named")]) == 0


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


def test_at_a_budget_scores_are_those_measured_there_with_intervals_over_seeds_and_prompts() -> None:
    """The line from the base would say 1.05 at 10 passes; what was measured after the last iteration within the budget was 1.3 and 1.5."""
    rows = []
    for arm, seed, at_budget, by_prompt in (
        ("a", 1, 1.3, [1.0, 1.6]),
        ("a", 2, 1.5, [1.2, 1.8]),
        ("b", 1, 1.9, [1.7, 2.1]),
    ):
        one = row(arm, seed, {0: 1.0, 1: at_budget, 4: 1.2})
        one |= {"budgets": {"passes": 1, "clips": 4}, "by_prompt": {"1": {"total": by_prompt}}}
        rows.append(one)
    summary = summarize(suite(passes=12, clips=8), rows)
    a, b, c = summary.arms.values()
    assert summary.budget == 12
    assert a.equal["total"].mean == pytest.approx(1.4)
    # Seeds differ by 0.2 and prompts by 0.6, each exactly: variances 0.02 / 2 and 0.18 / 2, no rest.
    assert a.equal["total"].half == pytest.approx(T1 * math.sqrt(0.02 / 2 + 0.18 / 2))
    assert b.equal_difference["total"].mean == pytest.approx(0.6)  # seed 1 alone, prompt by prompt
    assert b.equal_difference["drift"].mean == pytest.approx(0.06)  # no scores by prompt: seed by seed
    assert a.clips["total"].mean == pytest.approx(1.2)
    assert c.equal["total"].count == 0
    heads = tables(summary).splitlines()[0]
    assert "Overall at 12 passes" in heads
    assert "Overall at 8 clips" in heads
