"""Compare recipes and settings over seeds: many runs side by side, one file of rows, tables with intervals, figures, a report.

`sage-grpo compare shapes/branch shapes/sage --vary optimizer.lr=2e-5,5e-5 --seeds 8 --out FOLDER` runs a grid, `--suite FILE.yaml` an experiment
that a file states, and `--table FOLDER` draws tables and figures again. The same command continues what was interrupted (docs/compare.md).
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
from sage_grpo.config.ranges import Count, Folder, Natural, Positive, Seed, checked
from sage_grpo.tools.compare.design import FIRST_SEED, Arm, Suite
from sage_grpo.tools.compare.suite_file import Size, load
from sage_grpo.utils.safe_io import check as check_links
from sage_grpo.utils.safe_io import inside, printable
from sage_grpo.utils.suggest import did_you_mean

if TYPE_CHECKING:
    from sage_grpo.training.config import TrainConfig


@checked
class Options:
    """Options of a comparison."""

    recipes: list[str] = field(default_factory=list)
    """Recipes or recipe files (YAML) to compare; the words before all options."""
    vary: list[str] = field(default_factory=list)
    """Fields with several values, FIELD=VALUE,VALUE: every combination of them with every recipe is an arm."""
    set: list[str] = field(default_factory=list)
    """Fields with one value for all arms, FIELD=VALUE."""
    suite: list[str] = field(default_factory=list)
    """YAML files of experiments, in place of recipes (docs/compare.md). Several share the workers and the budget, and each has a folder of its
    file's name in `out`."""
    arms: list[str] = field(default_factory=list)
    """Make only the runs of these arms, by name; the others stay missing. Empty is all."""
    size: Size = "full"
    """Size of the suites: full (all arms), brief (the arms that decide), or smoke, which only shows that it works."""
    seeds: Count | None = None
    """Seeds of every arm; None is the suite's number, and 8 for recipes."""
    first_seed: Seed = FIRST_SEED
    """The first seed, where `seeds` is given; the others follow."""
    benchmark: bool = False
    """Keep the rules of the benchmark (docs/benchmark.md): this version's seeds, evaluation and budgets. Arms are then entries of leaderboard.json."""
    iterations: Count | None = None
    """Iterations of all runs; None is the recipe's or the suite's."""
    points: list[Natural] = field(default_factory=list)
    """Iterations that are evaluated besides the first and the last; empty goes by evaluate.every, or the suite."""
    baseline: str | None = None
    """The arm that others are compared with; None is the first. A recipe's name means its arm with the recipe's own values."""
    out: Folder | None = None
    """Folder of runs.jsonl and what derives from it. Runs that it holds are not made again. None is runs/compare; with `table`, that folder itself."""
    jobs: Count | Literal["auto"] = "auto"
    """Runs side by side. auto: the cores, or 16 of the miniature on a GPU, or one of a real model on each. Where NVIDIA's
    MPS is installed, it lets processes share a GPU."""
    budget: Positive | None = None
    """Seconds after which nothing is running any more. A run that it cuts off goes on from its last point when the command is given again; one
    that would not get to its next point is not started. None is no limit."""
    weights: bool = False
    """Keep the final weights of every run, in weights/."""
    table: Folder | None = None
    """Only draw the tables and figures of this folder again; or those of the suites in it. `out` takes them elsewhere."""

    @property
    def folder(self) -> Path:
        return Path(self.out or "runs/compare")


def defaults(argv: list[str]) -> tuple[None, list[str]]:
    """The words with repeated lists (--vary A --vary B) as one."""
    lists: dict[str, list[str]] = {"--vary": [], "--set": [], "--suite": [], "--arms": []}
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
    """Run what is missing, then draw."""
    if options.table is not None:
        _refuse_to_run(options)
        table = Path(options.table)
        folders, moved = _folders(table), None if options.out is None else (table, Path(options.out))
        if moved is not None:
            _refuse_to_mix(_folders(moved[1]), folders)
        return _draw(folders, moved)
    from sage_grpo.run.preflight import preflight
    from sage_grpo.tools.compare import run as lab
    from sage_grpo.tools.compare.prepare import prepare
    from sage_grpo.tools.compare.report import REPORT
    from sage_grpo.tools.compare.store import KEPT, SUITE

    suites, out = suites_of(options), options.folder
    arms = chosen(suites, options.arms)
    remarks: dict[str, None] = {}  # many arms have the same
    parts = [
        lab.SuiteRun(
            folder=out if len(suites) == 1 else out / suite.name,
            suite=suite,
            jobs=prepare(suite, start, lambda config: remarks.update(dict.fromkeys(preflight(config)))),
            arms=arms,
        )
        for suite in suites
    ]
    for folder in (out, *(part.folder for part in parts)):
        check_links(inside(out, folder.relative_to(out)), KEPT)
    for remark in remarks:
        print(f"sage-grpo: {remark}", file=sys.stderr)
    ended = None
    with suppress(KeyboardInterrupt):
        ended = lab.run(
            parts,
            out=out,
            command=shlex.join(["sage-grpo", *sys.argv[1:]]),
            side_by_side=None if options.jobs == "auto" else int(options.jobs),
            budget=options.budget,
            weights=options.weights,
        )
    # An interruption before the first run leaves nothing to draw.
    folders = [part.folder for part in parts if (part.folder / SUITE).is_file()]
    _draw(folders)
    told = shlex.join(["tar", "-czf", f"{out.name}.tar.gz", "-C", str(out.parent), out.name])
    print(f"Data: {out}. In one file: {told}")
    if ended is None:
        print("Interrupted. The same command continues.", file=sys.stderr)
        return 130
    if ended.failed:
        where = ", ".join(str(folder / REPORT) for folder in folders)
        print(f"{ended.failed} run(s) failed; {where} says why. The same command tries them again.", file=sys.stderr)
    if ended.missing:
        print(f"{ended.missing} run(s) are not done: the budget is spent. The same command continues.", file=sys.stderr)
    return 1 if ended.failed else 3 if ended.missing else 0


def _refuse_to_run(options: Options) -> None:
    """Refuse options of runs where only tables are drawn."""
    plain, names = Options(), [one.name for one in fields(Options) if one.name not in ("table", "out")]
    given = [name for name in names if getattr(options, name) != getattr(plain, name)]
    if given:
        raise ConfigError(f"--table draws what is there and runs nothing: leave out {', '.join(given)}.")


def _refuse_to_mix(there: Sequence[Path], folders: Sequence[Path]) -> None:
    """One comparison's tables beside another's rows would be taken for its own."""
    from sage_grpo.tools.compare.store import ROWS

    own = {folder.resolve() for folder in folders}
    other = [folder for folder in there if (folder / ROWS).is_file() and folder.resolve() not in own]
    if other:
        raise ConfigError(f"{other[0]} has runs of its own, whose tables would be overwritten: name another --out.")


def _draw(folders: Sequence[Path], moved: tuple[Path, Path] | None = None) -> int:
    """Tables, figures and reports of comparisons; `moved` says from which folder to which."""
    from sage_grpo.tools.compare.report import REPORT, render, tables
    from sage_grpo.tools.compare.store import unfinished

    for folder in folders:
        place = folder if moved is None else inside(moved[1], folder.relative_to(moved[0]))
        summary = render(folder, place)
        head = f"{summary.suite.title}\n\n" if len(folders) > 1 else ""
        print(printable(f"{head}{tables(summary)}\n\nReport: {place / REPORT}"))
        if cut_off := unfinished(folder):
            print(cut_off)
    return 0


def _folders(table: Path) -> list[Path]:
    """The folder of a comparison, or those of the suites in it."""
    from sage_grpo.tools.compare.store import SUITE

    inner = [inside(table, file.parent.name) for file in sorted(table.glob(f"*/{SUITE}"))]
    return [table] if (table / SUITE).is_file() or not inner else inner


def suites_of(options: Options) -> list[Suite]:
    """The suites of the files, or that of the grid, with what the options change."""
    if bool(options.suite) == bool(options.recipes):
        raise ConfigError("Name recipes to compare (sage-grpo compare shapes/branch shapes/sage ...), or a --suite.")
    names = [Path(file).stem for file in options.suite]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"--suite names {twice[0]!r} twice.")
    if options.suite and options.vary:
        raise ConfigError("--vary makes arms of recipes; a suite has its own. --set changes a field of all of them.")
    suites = [load(Path(file), options.size) for file in options.suite] or [_grid(options)]
    return [_changed(suite, options) for suite in suites]


def chosen(suites: Sequence[Suite], names: Sequence[str]) -> list[str] | None:
    """The arms whose runs are made; None is all. Each is one of some suite's."""
    known = [arm.name for suite in suites for arm in suite.arms]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--arms: there is no arm {name!r}. Arms: {', '.join(known)}." + did_you_mean(name, known)
            )
    return list(names) or None


def _changed(suite: Suite, options: Options) -> Suite:
    changes = dict(_pair(word) for word in _fields(options.set))
    suite = replace(suite, options={**suite.options, **changes})
    if options.benchmark:
        suite = _as_benchmark(suite, options)
    if options.seeds is not None:
        suite = replace(suite, seeds=tuple(range(options.first_seed, options.first_seed + options.seeds)))
    if options.iterations is not None:
        arms = tuple(replace(arm, iterations=None) for arm in suite.arms)
        suite = replace(suite, iterations=options.iterations, arms=arms)
    if options.points:
        suite = replace(suite, points=tuple(options.points))
    return suite if options.baseline is None else replace(suite, baseline=_baseline(suite, options.baseline))


def _as_benchmark(suite: Suite, options: Options) -> Suite:
    from sage_grpo.tools.compare.leaderboard import BUDGETS, EDITION, EVALUATION

    given = [name for name in ("seeds", "points") if getattr(options, name)]
    if given:
        raise ConfigError(f"--benchmark has its own seeds and evaluations: leave out --{given[0]}.")
    fixed = {**suite.options, **EVALUATION}
    return replace(
        suite, seeds=EDITION.seeds, options=fixed, points=(0,), passes=BUDGETS["passes"], clips=BUDGETS["clips"]
    )


def start(name: str, steps: int | str | None = None) -> TrainConfig:
    """The configuration of a recipe, or of a recipe file; `steps` is the arm's `rollout.steps` (see `sage_grpo.recipes.recipe`)."""
    from sage_grpo.cli.starting import from_recipe
    from sage_grpo.config.parsing import parse
    from sage_grpo.recipes import recipe
    from sage_grpo.training.config import TrainConfig

    if not Path(name).is_file():
        return recipe(name, steps)
    words = [f"--config={name}", *([] if steps is None else [f"--rollout.steps={steps}"])]
    defaults, words = from_recipe(TrainConfig, words)
    return parse(TrainConfig, words, prog="sage-grpo compare", defaults=defaults, recipes=True)


def _grid(options: Options) -> Suite:
    from sage_grpo.tools.compare.prepare import columns_of

    axes = []
    for words in _fields(options.vary):
        key, values = _pair(words)
        axes.append([(key, value) for value in _split(values)])
    tails = [axis[0][0].rpartition(".")[2] for axis in axes]
    names = [axis[0][0] if tails.count(tail) > 1 else tail for axis, tail in zip(axes, tails)]
    arms = []
    for origin in options.recipes:
        for pairs in itertools.product(*axes):
            labels = [f"{name}={value}" for name, (_, value) in zip(names, pairs)]
            arms.append(Arm(name=" ".join([origin, *labels]), recipe=origin, options=dict(pairs)))
    return Suite(
        name=options.folder.name,
        title=f"{' and '.join(options.recipes)}" + (f" over {', '.join(axis[0][0] for axis in axes)}" if axes else ""),
        question="Which settings score best on held-out prompts?",
        arms=tuple(arms),
        baseline=arms[0].name,
        columns=columns_of([start(name) for name in options.recipes]),
    )


def _baseline(suite: Suite, name: str) -> str:
    """An arm by its name; a recipe's name is its arm with the recipe's own values, else its first."""
    from sage_grpo.tools.compare.prepare import configured

    own = [arm for arm in suite.arms if arm.recipe == name]
    if any(arm.name == name for arm in suite.arms) or not own:
        return name  # an unknown one is refused by the suite
    plain = configured(suite, replace(own[0], options={}), start(name))
    return next((arm.name for arm in own if configured(suite, arm, start(name)) == plain), own[0].name)


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
        raise ConfigError(f"{word!r} is no setting: write FIELD=VALUE, such as optimizer.lr=2e-5.")
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
