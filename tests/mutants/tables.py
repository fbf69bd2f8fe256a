"""All planted errors: those of every table in `errors/`.

An entry of such a file:

    - what: the error in one line
      in: sentinel/sentinel.py::Sentinel._before      # file under src/sage_grpo, and symbol
      from: Python that stands in that symbol once # an expression or statements; see pattern.py
      to: what stands there instead                # `pass` takes statements away
      tests: sentinel/test_sentinel.py::test_name     # under tests/; or a list, the most specific first
      which: 2 of 3                                # only where it stands there several times
      hangs: true                                  # only where running into the time limit counts as noticed

Every value is text (`to: 1` needs no quotes); what YAML reads otherwise (`[`, `{`, `: `) goes into a block after `|-`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from mutants.error import PlantedError

FOLDER = Path(__file__).parent
NEEDED = {"what", "in", "from", "to", "tests"}
OPTIONAL = {"which", "hangs"}


def read(path: Path) -> Iterator[PlantedError]:
    """The errors of one table."""
    entries = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # BaseLoader: every value is text
    if not isinstance(entries, list):
        raise ValueError(f"{path.name} must be a list of errors, not {type(entries).__name__}.")
    for number, entry in enumerate(entries, 1):
        yield _error(entry, f"{path.name}, entry {number}", path.name)


def _error(entry: object, where: str, table: str) -> PlantedError:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} must have the fields {', '.join(sorted(NEEDED))}; it is {entry!r}.")
    missing, unknown = NEEDED - set(entry), set(entry) - NEEDED - OPTIONAL
    if missing or unknown:
        raise ValueError(f"{where} ({entry.get('what')}) lacks {sorted(missing)} and has unknown {sorted(unknown)}.")
    tests = entry["tests"] if isinstance(entry["tests"], list) else [entry["tests"]]
    others = [value for name, value in entry.items() if name != "tests"]
    if not all(isinstance(value, str) for value in [*tests, *others]):
        raise ValueError(
            f"{where} ({entry['what']}): a value is not text. Code with [, {{ or ': ' goes into a block after |-"
        )
    file, _, symbol = entry["in"].partition("::")
    if entry.get("hangs", "true") != "true":
        raise ValueError(f"{where} ({entry['what']}): hangs is true or left out, not {entry['hangs']!r}.")
    return PlantedError(
        what=entry["what"],
        file=file,
        symbol=symbol,
        old=entry["from"],
        new=entry["to"],
        tests=tuple(tests),
        hangs="hangs" in entry,
        which=entry.get("which", ""),
        table=table,
    )


MUTANTS: tuple[PlantedError, ...] = tuple(
    error for path in sorted((FOLDER / "errors").glob("*.yaml")) for error in read(path)
)
