"""From votes to pairs to learn from: majorities of several raters, without ties, checks and raters who do not look."""

from __future__ import annotations

import json

import pytest

import studies
from sage_grpo.cli.main import main
from sage_grpo.data.examples import load_examples
from sage_grpo.tools.study.making import CLIPS, StudyPlan, make, open_study
from sage_grpo.tools.study.pairs import Shown, Task
from sage_grpo.tools.study.results import preferences, results
from sage_grpo.tools.study.store import StudyError

PAIR = Task(0, Shown(0), Shown(1))


def voted(store, task: Task, answers: dict) -> None:
    rater, _ = store.add_rater([task])
    (asked,) = store.ask(rater)
    store.vote(rater, asked.name, asked.name, answers)


@pytest.fixture
def store(tmp_path):
    made = studies.study(dimensions={"quality": "Which?", "motion": "Which?"}, methods=2)
    return studies.created(tmp_path / "s.sqlite", made)


@pytest.mark.parametrize(
    ("votes", "win"),
    [
        ([("left", "left")], 0),
        ([("right", "right")], 1),
        ([("left", "tie")], 0),
        ([("tie", "tie")], None),
        ([("left", "left"), ("right", "right")], None),
        ([("left", "left"), ("right", "right"), ("right", "tie")], 1),
    ],
)
def test_the_majority_of_all_answers_decides(votes, win, store) -> None:
    for quality, motion in votes:
        voted(store, PAIR, {"quality": quality, "motion": motion})
    found = preferences(store)
    assert (found.votes, found.undecided) == (len(votes), int(win is None))
    files = [f"0-{method}-False.mp4" for method in (0, 1)]
    assert [(row["win"], row["lose"]) for row in found.rows] == ([] if win is None else [(files[win], files[1 - win])])


def test_sides_do_not_matter_and_one_question_may_decide(store) -> None:
    voted(store, PAIR, {"quality": "left", "motion": "right"})
    voted(store, Task(0, Shown(1), Shown(0)), {"quality": "right", "motion": "right"})
    (row,) = preferences(store).rows
    assert (row["win"], row["votes_for"], row["votes_against"]) == ("0-0-False.mp4", 3, 1)
    assert preferences(store, dimension="motion").undecided == 1
    assert preferences(store, dimension="quality").rows[0]["votes_for"] == 2
    with pytest.raises(StudyError, match="has no question 'speed'"):
        preferences(store, dimension="speed")


def test_checks_and_flagged_raters_do_not_teach(store) -> None:
    voted(store, Task(0, Shown(0), Shown(0)), {"quality": "left", "motion": "left"})
    assert preferences(store).votes == results(store)["votes"] == 0
    rater, _ = store.add_rater([Task(1, Shown(0), Shown(0)), Task(1, Shown(0), Shown(1))])
    for _ in range(2):
        asked = store.ask(rater)[0]
        store.vote(rater, asked.name, asked.name, {"quality": "left", "motion": "left"})
    assert len(preferences(store).rows) == 1
    assert preferences(store, exclude_flagged=True).rows == []
    assert [results(store, exclude_flagged=one)["votes"] for one in (False, True)] == [1, 0]


def test_the_command_writes_a_list_that_a_run_reads(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    methods = studies.folders(tmp_path / "made", 2, {"sage": 200, "base": 40})
    prompts = [studies.Prompt("a cat"), studies.Prompt("a dog")]
    asked = {"quality": "Which?"}
    make(
        tmp_path / "study", StudyPlan(title="t", methods=methods, prompts=prompts, dimensions=asked, checks=0.0, seed=1)
    )
    assert main(["study", "export", "--for_training"]) == 2
    store = open_study(tmp_path / "study")
    voted(store, Task(0, Shown(0), Shown(1)), {"quality": "left"})
    voted(store, Task(1, Shown(0), Shown(1)), {"quality": "tie"})
    store.close()
    assert main(["study", "export", "--for_training", "--out", "lists/pairs.jsonl"]) == 0
    assert "1 pairs of 2 votes in lists/pairs.jsonl; 1 pairs are left out" in capsys.readouterr().out
    (example,) = load_examples(tmp_path / "lists", pairs=True)
    row = json.loads((tmp_path / "lists/pairs.jsonl").read_text())
    assert example.text == "a cat"
    assert [file.resolve().parent for file in example.clips] == [tmp_path / "study" / CLIPS] * 2
    assert (row["votes_for"], row["votes_against"]) == (1, 0)
    assert main(["study", "export", "--dimension", "quality"]) == 2
