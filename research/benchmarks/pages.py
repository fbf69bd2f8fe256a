"""Figures in README.md and docs come from committed data: this fills them in, and says where one does not.

    PYTHONPATH=src python research/benchmarks/pages.py                 # refresh every marked place
    PYTHONPATH=src python research/benchmarks/pages.py --check         # change nothing; exit 1 where a place is stale or a number has no source
    PYTHONPATH=src python research/benchmarks/pages.py keep FOLDER     # take the rows of a comparison (`sage-grpo compare --out FOLDER`) into research/results
    PYTHONPATH=src python research/benchmarks/pages.py suite NAME      # the comparison in research/results/NAME as a file for `sage-grpo compare --suite`

A marked place is `<!-- data: VIEW FILE key=value ... -->text<!-- end -->`, a block of lines or a word in a sentence; FILE is a path from the
repository's root, VIEW a function of `views.py`. The words around are a person's, and sentences with figures of research/results are in answers.yaml there. Outside
of marked places, figures of answers.yaml, code spans and code blocks, the pages that `strict` lists and answers.yaml hold no decimal number and no percentage that is
not a name (Wan 2.1) or a convention (95%): write a setting, or a constant of a formula, as code, a measurement as a marked place.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))
import pictures
from claims import claims
from views import FIGURE, TESTED, corrected, loaded
from views import VIEWS as TABLES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "research" / "results"
PLACE = re.compile(r"<!-- data: (?P<query>.*?) -->(?P<text>.*?)<!-- end -->", re.DOTALL)
TABLE = re.compile(r"<!-- table \S+ -->.*?<!-- end of table -->", re.DOTALL)
"""A table of side_by_side/table.py, which research/tests/test_benchmarks.py compares with its file."""
NUMBER = re.compile(r"(?<![\w.])[+-]?\d*\.\d+(?:e-?\d+)?%?|\b\d+ ?%")
CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", re.DOTALL)
NAMES = re.compile(
    r"HunyuanVideo-1\.5|Wan 2\.[12](?: / 2\.2)?(?: (?:1\.3|5|14) ?B)?|Python 3\.\d+|arXiv \d{4}\.\d{5}|Apache-2\.0|95% interval"
)
"""Numbers that are names or conventions."""
KEPT_CURVES = ("iteration", "reward/total", "reward/group_std", "gradient/kl_share", "kl/total", "optimizer/lr")
"""Training metrics that stay in committed rows."""
KEPT_SCORES = (
    "total",
    "Overall",
    "VQ",
    "MQ",
    "TA",
    "TA/shape",
    "TA/size",
    "drift",
    "flicker",
    "sharpness",
    "proxy",
    "clips",
)
"""Scores that do, on the prompts of the evaluation and on those that it never saw (unseen/NAME)."""


def pages() -> list[Path]:
    """Every document that may have marked places."""
    return [
        ROOT / "README.md",
        *(file for folder in ("docs", "research") for file in sorted((ROOT / folder).rglob("*.md"))),
    ]


def strict() -> list[Path]:
    """Documents without a number that has no source."""
    measured = ("benchmark", "demo", "probe", "rewards", "scale", "speed", "trust")
    return [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in measured), *sorted(RESULTS.rglob("*.md"))]


def view(query: str) -> str:
    """The text of a marked place."""
    name, file, *words = shlex.split(query)
    if name not in VIEWS:
        raise ValueError(f"There is no view {name!r}: {', '.join(VIEWS)}.")
    if not (ROOT / file).exists():
        raise ValueError(f"{query}: there is no {file}.")
    return VIEWS[name](ROOT / file, **dict(word.split("=", 1) for word in words))


def notes_on(page: Path) -> str:
    """Notes on a page: its differences by Holm's correction over all of them, and comparisons with rows of code that no commit has."""
    TESTED.clear()
    folders: set[str] = set()
    for place in PLACE.finditer(page.read_text(encoding="utf-8")):
        name, file, *words = shlex.split(place["query"])
        if name == notes_on.__name__:
            continue
        view(place["query"])
        if name == "answers":
            part = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))[words[0].removeprefix("part=")]
            folders |= {figure[2] for figure in FIGURE.finditer(str(part))}
        folders |= {Path(file).name, *(word.removeprefix("suite=") for word in words)}
    count, apart, lost = corrected()
    text = f"Holm's correction: {apart} of {count} differences on this page have an interval without zero, {apart - len(lost)} after it"
    text += f" (not {', '.join(text.replace(' ', '') for text in lost)})." if lost else "."
    rows = [RESULTS / name for name in sorted(folders) if (RESULTS / name / "runs.jsonl").is_file()]
    changed = ", ".join(f"`{folder.name}`" for folder in rows if uncommitted(folder))
    return text + (f" `+changes`: {changed}." if changed else "")


def uncommitted(folder: Path) -> bool:
    """True where a row's commit ends in +changes."""
    return any(str(row.get("commit")).endswith("+changes") for row in loaded(folder)[1])


VIEWS = {**TABLES, "claims": claims, "notes_on": notes_on}


def refreshed(text: str) -> str:
    """A document with all of its marked places filled in."""

    def fill(place: re.Match[str]) -> str:
        found = view(place["query"])
        found = f"\n{found}\n" if "\n" in place["text"] or "\n" in found else found
        return f"<!-- data: {place['query']} -->{found}<!-- end -->"

    return PLACE.sub(fill, text)


def loose_numbers(text: str) -> Iterator[tuple[int, str]]:
    """Line and number of everything that looks measured and is in no marked place."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found[0])

    for pattern in (PLACE, FIGURE, TABLE, CODE, NAMES):
        text = pattern.sub(blank, text)
    for number, line in enumerate(text.splitlines(), start=1):
        for found in NUMBER.finditer(line):
            yield number, found[0]


def problems() -> list[str]:
    """Stale places, and numbers without a source."""
    found = []
    if not alike(json.loads((RESULTS / "leaderboard.json").read_text(encoding="utf-8")), leaderboard()):
        found.append(
            "research/results/leaderboard.json is not what the rows in research/results give; run research/benchmarks/pages.py keep FOLDER"
        )
    found += [f"{file.relative_to(ROOT)}: other rows; run research/benchmarks/pages.py" for file in pictures.stale()]
    answers = (RESULTS / "answers.yaml").read_text(encoding="utf-8")
    without = {folder.name for folder in pictures.suites()} ^ yaml.safe_load(answers)["suites"].keys()
    found += [f"research/results/answers.yaml: {name} has no rows, or rows and no line" for name in sorted(without)]
    found += [
        f"research/results/answers.yaml:{line}: {number} comes from no data file"
        for line, number in loose_numbers(answers)
    ]
    for file in pages():
        text, name = file.read_text(encoding="utf-8"), file.relative_to(ROOT)
        if refreshed(text) != text:
            found.append(f"{name}: a marked place is stale; run research/benchmarks/pages.py")
        if file in strict():
            found += [f"{name}:{line}: {number} comes from no data file" for line, number in loose_numbers(text)]
    return found


def alike(one: Any, other: Any) -> bool:
    """Equal but for the last digits of floats, which are another machine's own (its logarithms are behind the intervals)."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and one == other


def keep(folder: Path) -> Path:
    """Take a comparison into research/results/NAME: its rows without what no table shows."""
    from sage_grpo.tools.compare import store
    from sage_grpo.utils.safe_io import replace_text

    suite, keys, command = store.load_suite(folder)
    target = RESULTS / suite.name
    target.mkdir(parents=True, exist_ok=True)
    rows = sorted(
        store.latest(store.read_rows(folder / store.ROWS), keys).values(),
        key=lambda row: (row["arm"], row["seed"]),
    )
    first = {row["arm"]: row["seed"] for row in reversed(rows)}
    short = [compact(row, settings=first[row["arm"]] == row["seed"]) for row in rows]
    told = set[str]()
    for row in short:  # what all have in common is told once
        for name in ("versions", "code"):
            words = json.dumps([name, row.get(name)])
            if words in told:
                row.pop(name, None)
            told.add(words)
    content = "".join(json.dumps(row) + "\n" for row in short)
    replace_text(target / store.ROWS, content)
    # Where a folder lay is nobody's business, and would be wrong elsewhere.
    store.save_suite(
        target, suite, [row["key"] for row in rows], re.sub(r"(--out[= ])\S+", rf"\1runs/{suite.name}", command)
    )
    (RESULTS / "leaderboard.json").write_text(json.dumps(leaderboard(), indent=1) + "\n", encoding="utf-8")
    print(
        f"kept {len(rows)} rows in {target.relative_to(ROOT)} ({len(content) // 1000} kB); write its line in research/results/answers.yaml"
    )
    return target


def compact(row: dict[str, Any], *, settings: bool) -> dict[str, Any]:
    """A row without what no table shows; an arm's settings stand in its first row only."""
    training, evaluations = row.get("training") or {}, row["evaluations"]
    return row | {
        "settings": row["settings"] if settings else {},
        "training": {
            name: [None if value is None else float(f"{value:.4g}") for value in thinned(values)]
            for name, values in training.items()
            if name in KEPT_CURVES
        },
        "evaluations": {
            point: {name: value for name, value in scores.items() if name.removeprefix("unseen/") in KEPT_SCORES}
            for point, scores in evaluations.items()
        },
    }


def thinned(values: list[Any], most: int = 10) -> list[Any]:
    """Every n-th value, the last one among them."""
    step = -(-len(values) // most) or 1
    return values[::-1][::step][::-1]


def leaderboard() -> dict[str, Any]:
    """Entries of all comparisons in research/results."""
    from leaderboard import board

    from sage_grpo.tools.compare import store

    comparisons, seen = [], set[str]()
    for file in sorted(RESULTS.glob(f"*/{store.SUITE}")):
        suite, rows, _ = loaded(file.parent)
        comparisons.append((suite, [row for row in rows if row["key"] not in seen]))  # suites may share runs
        seen |= {row["key"] for row in rows}
    return board(comparisons) | {"left_out": {}}


def suite_file(name: str) -> str:
    """A comparison in research/results as a suite file."""
    suite = asdict(loaded(RESULTS / name)[0])
    del suite["name"]
    plain = json.loads(json.dumps(suite))  # lists for tuples
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=160))


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="nothing, keep FOLDER, or suite NAME")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.words[:1] == ["keep"] and len(options.words) == 2:
        keep(Path(options.words[1]))
    elif options.words[:1] == ["suite"] and len(options.words) == 2:
        print(suite_file(options.words[1]), end="")
        return 0
    elif options.words:
        parser.error("the only words are: keep FOLDER, suite NAME")
    if not options.check:
        pictures.redraw()
        for file in pages():
            text = file.read_text(encoding="utf-8")
            if (new := refreshed(text)) != text:
                file.write_text(new, encoding="utf-8")
                print(f"refreshed {file.relative_to(ROOT)}")
    found = problems()
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
