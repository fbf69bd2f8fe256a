"""Compare recipes and settings over several seeds: tables with intervals, figures and a report.

`sage-grpo compare shapes/branch shapes/sage --vary optimizer.lr=2e-5,5e-5 --seeds 8 --out FOLDER` runs a grid, `--suite FILE.yaml` an
experiment from a file, and `--table FOLDER` redraws tables and figures. The same command resumes an interrupted comparison.
"""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sage_grpo.config.parsing import ConfigError
from sage_grpo.config.ranges import Count, Folder, Natural, Seed, checked
from sage_grpo.tools.compare.design import FIRST_SEED, Arm, Size, Suite, load
from sage_grpo.utils.safe_io import check as check_links
from sage_grpo.utils.safe_io import printable
from sage_grpo.utils.suggest import did_you_mean

if TYPE_CHECKING:
    from sage_grpo.training.config import TrainConfig


@checked
class Options:
    """Recipes to compare, and their seeds."""

    recipes: list[str] = field(default_factory=list)
    """Recipes or recipe files (YAML) to compare; the words before all options."""
    vary: list[str] = field(default_factory=list)
    """Fields with several values, FIELD=VALUE,VALUE; each combination with each recipe is an arm."""
    set: list[str] = field(default_factory=list)
    """Fields with one value for all arms, FIELD=VALUE."""
    suite: Path | None = None
    """YAML file of an experiment, instead of recipes (docs/compare.md)."""
    arms: list[str] = field(default_factory=list)
    """Names of the arms to run; empty is all."""
    size: Size = "full"
    """Size of the suite: full, brief (the decisive arms), or smoke (a quick test)."""
    seeds: Count | None = None
    """Seeds per arm; None is the suite's number, or 8 for recipes."""
    first_seed: Seed = FIRST_SEED
    """First seed, if seeds is given; the others follow."""
    iterations: Count | None = None
    """Iterations of all runs; None is the recipe's or the suite's."""
    points: list[Natural] = field(default_factory=list)
    """Iterations to evaluate besides the first and the last; empty follows evaluate.every or the suite."""
    baseline: str | None = None
    """Arm to compare the others with; None is the first."""
    out: Folder | None = None
    """Folder of runs.jsonl and the tables; existing runs are not repeated. None is runs/compare, or the table's
    folder."""
    jobs: Count | Literal["auto"] = "auto"
    """Parallel runs; auto is one per core, 16 miniatures per GPU, or one real model per GPU."""
    weights: bool = False
    """Keep the final weights of every run."""
    table: Folder | None = None
    """Redraw the tables and figures of this folder, without training."""


def defaults(argv: list[str]) -> tuple[None, list[str]]:
    """The words with repeated lists (--vary A --vary B) as one."""
    lists: dict[str, list[str]] = {"--vary": [], "--set": [], "--arms": []}
    words, rest = [], list(argv)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name not in lists:
            words.append(f"{name}{equals}{value}")
            continue
        lists[name] += [value] if equals else []
        while rest and not rest[0].startswith("--"):
            lists[name].append(rest.pop(0))
    for name, values in lists.items():
        words += [name, *values] if values else []
    return None, words


def run(options: Options) -> int:
    if options.table is not None:
        return _draw_again(options)
    from sage_grpo.run.preflight import preflight
    from sage_grpo.tools.compare import run as comparison
    from sage_grpo.tools.compare.prepare import prepare
    from sage_grpo.tools.compare.report import REPORT
    from sage_grpo.tools.compare.store import KEPT, SUITE

    suite, out = suite_of(options), _folder(options)
    _check_arms(suite, options.arms)
    remarks: dict[str, None] = {}  # many arms have the same
    jobs = prepare(suite, start, lambda config: remarks.update(dict.fromkeys(preflight(config))))
    check_links(out, KEPT)
    for remark in remarks:
        print(f"sage-grpo: {remark}", file=sys.stderr)
    failed = None
    with suppress(KeyboardInterrupt):
        failed = comparison.run(
            out,
            suite,
            jobs,
            command=shlex.join(["sage-grpo", *sys.argv[1:]]),
            arms=options.arms or None,
            side_by_side=None if options.jobs == "auto" else int(options.jobs),
            weights=options.weights,
        )
    if (out / SUITE).is_file():  # else it was interrupted before the first run
        _draw(out, out)
    packed = shlex.join(["tar", "-czf", f"{out.name}.tar.gz", "-C", str(out.parent), out.name])
    print(f"Data: {out}. In one file: {packed}")
    if failed is None:
        print("Interrupted. The same command continues.", file=sys.stderr)
        return 130
    if failed:
        print(
            f"{failed} run(s) failed; {out / REPORT} has the reasons. The same command tries them again.",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _folder(options: Options) -> Path:
    return Path(options.out or "runs/compare")


def _draw_again(options: Options) -> int:
    """Tables, figures and report of a folder, which runs nothing; beside one's own rows another's would be taken for its own."""
    from sage_grpo.tools.compare.store import ROWS

    assert options.table is not None
    plain, names = Options(), [one.name for one in fields(Options) if one.name not in ("table", "out")]
    given = [name for name in names if getattr(options, name) != getattr(plain, name)]
    if given:
        raise ConfigError(f"--table draws finished runs and starts none: leave out {', '.join(given)}.")
    table = Path(options.table)
    out = table if options.out is None else Path(options.out)
    if (out / ROWS).is_file() and out.resolve() != table.resolve():
        raise ConfigError(f"{out} already has runs, whose tables would be overwritten: name another --out.")
    _draw(table, out)
    return 0


def _draw(folder: Path, out: Path) -> None:
    from sage_grpo.tools.compare.report import REPORT, render, tables

    print(printable(f"{tables(render(folder, out))}\n\nReport: {out / REPORT}"))


def suite_of(options: Options) -> Suite:
    if (options.suite is None) == (not options.recipes):
        raise ConfigError("Name recipes to compare (sage-grpo compare shapes/branch shapes/sage ...), or a --suite.")
    if options.suite is not None and options.vary:
        raise ConfigError("--vary makes arms of recipes; a suite has its own. --set changes a field of all of them.")
    suite = _grid(options) if options.suite is None else load(options.suite, options.size)
    suite = replace(suite, options={**suite.options, **dict(_pair(word) for word in _fields(options.set))})
    if options.seeds is not None:
        suite = replace(suite, seeds=tuple(range(options.first_seed, options.first_seed + options.seeds)))
    if options.iterations is not None:
        arms = tuple(replace(arm, iterations=None) for arm in suite.arms)
        suite = replace(suite, iterations=options.iterations, arms=arms)
    if options.points:
        suite = replace(suite, points=tuple(options.points))
    if options.baseline is not None:
        names = {arm.name: arm.name for arm in suite.arms}
        recipes = {arm.recipe: arm.name for arm in reversed(suite.arms)}
        suite = replace(suite, baseline=(recipes | names).get(options.baseline, options.baseline))
    return suite


def _check_arms(suite: Suite, names: Sequence[str]) -> None:
    known = [arm.name for arm in suite.arms]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--arms: there is no arm {name!r}. Arms: {', '.join(known)}." + did_you_mean(name, known)
            )


def start(name: str, steps: int | str | None = None, file: str | None = None) -> TrainConfig:
    """The configuration of a recipe, or of a recipe file; `steps` is the arm's `rollout.steps` (see `sage_grpo.recipes.recipe`). With `file`
    its settings follow the recipe's."""
    from sage_grpo.cli.starting import from_recipe
    from sage_grpo.config.parsing import parse
    from sage_grpo.recipes import recipe
    from sage_grpo.training.config import TrainConfig

    if file is not None:
        words = [f"--config={file}", f"--recipe={name}"]
    elif Path(name).is_file():
        words = [f"--config={name}"]
    else:
        return recipe(name, steps)
    words += [] if steps is None else [f"--rollout.steps={steps}"]
    defaults, words = from_recipe(TrainConfig, words)
    return parse(TrainConfig, words, prog="sage-grpo compare", defaults=defaults, recipes=True)


def _grid(options: Options) -> Suite:
    axes = []
    for words in _fields(options.vary):
        key, values = _pair(words)
        axes.append([(key, value) for value in _split(values)])
    tails = [axis[0][0].rpartition(".")[2] for axis in axes]
    names = [axis[0][0] if tails.count(tail) > 1 else tail for axis, tail in zip(axes, tails)]
    arms = []
    for origin in options.recipes:
        start(origin)  # a name that is misspelled is refused before the files of another are missed
        for pairs in itertools.product(*axes):
            labels = [f"{name}={value}" for name, (_, value) in zip(names, pairs)]
            arms.append(Arm(name=" ".join([origin, *labels]), recipe=origin, options=dict(pairs)))
    return Suite(
        name=_folder(options).name,
        title=f"{' and '.join(options.recipes)}" + (f" over {', '.join(axis[0][0] for axis in axes)}" if axes else ""),
        question="Which settings score best on held-out prompts?",
        arms=tuple(arms),
        baseline=arms[0].name,
    )


def _fields(words: Sequence[str]) -> list[str]:
    """FIELD=VALUE,VALUE again, where the parser has split it at its commas."""
    found: list[str] = []
    for word in words:
        if re.match(r"[A-Za-z_][\w.]*=", word) or not found:
            found.append(word)
        else:
            found[-1] += f",{word}"
    return found


def _pair(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not equals or not value:
        raise ConfigError(f"{word!r} is not a setting: write FIELD=VALUE, such as optimizer.lr=2e-5.")
    return key, value


def _split(values: str) -> list[str]:
    """Values between commas that are not inside brackets."""
    parts, depth = [""], 0
    for letter in values:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part]
