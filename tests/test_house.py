"""The rules of the house, read from the source alone (ast, no imports of the package)."""

from __future__ import annotations

import ast
import fnmatch
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "sage_grpo"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)

# The house from the ground up: a room imports rooms of lower floors only, and itself.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("types", "version"),
    ("utils",),
    ("config",),
    ("data", "distributed", "rewards", "samplers"),
    ("health", "models", "objectives", "worlds"),
    ("training",),
    ("callbacks", "plan", "recipes", "workers"),
    ("run",),
    ("generation", "tools"),
    ("api", "cli"),
)
RANKS = {unit: rank for rank, units in enumerate(FLOORS) for unit in units}
QUARANTINE = {
    "diffusers": ("models/", "rewards/", "tools/rehearse/"),
    "transformers": ("models/", "rewards/", "utils/pretrained.py", "tools/rehearse/"),
    "peft": ("models/", "rewards/"),
    "torch.distributed": ("distributed/",),
    "tensorboard": ("callbacks/metrics.py",),
    "torch.utils.tensorboard": ("callbacks/metrics.py",),
    "wandb": ("callbacks/metrics.py",),
    "ray": ("workers/ray_pool.py",),
}
FORBIDDEN_MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")
PRIVATE_PLACES = re.compile(r"(?<![\w.])/(?:work|home|root|Users|opt)/\w|\b(?:pypi|devpi|registry)[\w.-]*\.internal\b")


def _relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _module_name(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(["sage_grpo", *parts])


def _at_start(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: not those in functions, nor those for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _at_start(child)


@cache
def _imports(path: Path, *, lazy: bool = True) -> tuple[tuple[str, int], ...]:
    return tuple(_read_imports(path, lazy=lazy))


def _read_imports(path: Path, *, lazy: bool) -> Iterator[tuple[str, int]]:
    """Every imported dotted name (for `from a import b` both a and a.b) with its line; `lazy` ones too or not."""
    package = _module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(_tree(path)) if lazy else _at_start(_tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.Call) and node.args and _called(node) == "import_module":
            if name := _leading(node.args[0]):
                yield name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            if not (base == "sage_grpo" and all(f"{base}.{alias.name}" in _modules() for alias in node.names)):
                yield base, node.lineno
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", None) or getattr(node.func, "id", "")


def _leading(argument: ast.expr) -> str:
    """The part of a module's name that stands in a call of import_module: all of it, or what comes before its first variable."""
    if isinstance(argument, ast.JoinedStr):
        argument = argument.values[0]
    text = argument.value if isinstance(argument, ast.Constant) else ""
    return text.rstrip(".") if isinstance(text, str) else ""


def _unit(module: str) -> str | None:
    """The named part of the house that a module of the package belongs to; None for the package itself."""
    parts = module.split(".")[1:]
    if not parts:
        return None
    return ".".join(parts[:2]) if ".".join(parts[:2]) in RANKS else parts[0]


@cache
def _modules() -> frozenset[str]:
    return frozenset(_module_name(path) for path in FILES)


def _package_imports(path: Path, *, lazy: bool = True) -> Iterator[tuple[str, int]]:
    for name, line in _imports(path, lazy=lazy):
        if name.split(".")[0] == "sage_grpo" and name in _modules():
            yield name, line


def _report(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


def test_every_module_has_a_place() -> None:
    units = {_unit(_module_name(path)) for path in FILES} - {None, "__main__"}
    _report([f"{unit}: give it a rank in tests/test_house.py" for unit in sorted(units - set(RANKS))])


def test_imports_point_down_and_siblings_do_not_import_one_another() -> None:
    problems = []
    for path in FILES:
        own = _unit(_module_name(path))
        for name, line in _package_imports(path):
            other = _unit(name)
            if own in (None, "__main__") or other == own:  # doors: the package hands out names of every floor
                continue
            if other is None:
                problems.append(f"{_relative(path)}:{line}: {own} must not import the package itself: name the module")
            elif RANKS[other] >= RANKS[own]:
                problems.append(f"{_relative(path)}:{line}: {own} must not import {other} ({name})")
    _report(problems)


@pytest.mark.slow
def test_the_picture_of_the_house_is_drawn_from_the_code() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "draw_house.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_room_is_in_the_plan_of_the_house() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    first = dict(re.findall(r"^\| `(\w+)` \| .* \| `([\w/]+\.py)` \|$", page, flags=re.MULTILINE))
    _report([f"docs/architecture.md: no row for {room}" for room in sorted(rooms - first.keys())])
    _report([f"docs/architecture.md: {room} is not a room" for room in sorted(first.keys() - rooms)])
    files = re.findall(r"`([\w/]+/\w+\.py)`", page)
    files = [name for name in files if not name.startswith(("tests/", "scripts/"))]
    _report([f"docs/architecture.md: there is no {name}" for name in files if not (PACKAGE / name).is_file()])
    words = re.findall(r"^\| ([\w ]+) \|", page.partition("## The words")[2], flags=re.MULTILINE)
    assert words[1:] == sorted(set(words[1:])), "a word stands once, in order"


def _circle(graph: dict[str, set[str]]) -> str:
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> str:
        if module in trail:
            return " -> ".join([*trail[trail.index(module) :], module])
        if module not in done:
            for other in sorted(graph.get(module, ())):
                # a package's __init__ is imported with any of its modules; that is not a circle of its own making
                if not module.startswith(other + ".") and (found := visit(other, (*trail, module))):
                    return found
            done.add(module)
        return ""

    return next((found for module in sorted(graph) if (found := visit(module, ()))), "")


def test_modules_do_not_import_in_circles() -> None:
    graph = {
        _module_name(path): {name for name, _ in _package_imports(path)} - {_module_name(path), "sage_grpo"}
        for path in FILES
    }
    assert not _circle(graph)
    graph["sage_grpo.models.spec"].add("sage_grpo.models.family")  # the search finds one
    assert "sage_grpo.models.family -> " in _circle(graph)


def test_heavy_libraries_stay_in_quarantine() -> None:
    problems = []
    for path in FILES:
        names = list(_imports(path))
        names += [
            (f"{node.value.id}.{node.attr}", node.lineno)
            for node in ast.walk(_tree(path))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"
        ]
        for library, homes in QUARANTINE.items():
            if _relative(path).startswith(homes):
                continue
            lines = {line for name, line in names if name == library or name.startswith(library + ".")}
            problems += [f"{_relative(path)}:{line}: {library} belongs in {', '.join(homes)}" for line in sorted(lines)]
    _report(problems)


def test_the_parser_needs_only_the_standard_library_and_jsonargparse() -> None:
    allowed = {*sys.stdlib_module_names, "jsonargparse", "docstring_parser", "yaml"}
    own = tuple(
        f"sage_grpo.{name}"
        for name in ("config", "utils.imports", "utils.json_schema", "utils.safe_io", "utils.suggest", "version")
    )
    for path in (path for path in FILES if _module_name(path).startswith(own)):
        names = [(name, line) for name, line in _imports(path) if not name.startswith(own)]
        _report([f"{path.name}:{line}: {name}" for name, line in names if name.split(".")[0] not in allowed])


def _is_broad(kind: ast.expr | None) -> bool:
    if kind is None:
        return True
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(isinstance(item, ast.Name) and item.id in ("Exception", "BaseException") for item in kinds)


def test_no_broad_except_without_a_reason() -> None:
    problems = []
    for path in FILES:
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(_tree(path)):
            if not isinstance(node, ast.ExceptHandler) or not _is_broad(node.type):
                continue
            if isinstance(node.body[-1], ast.Raise):  # nothing is swallowed
                continue
            if not re.search(r"noqa: BLE001\W+\w{3,}", lines[node.lineno - 1]):
                problems.append(
                    f"{_relative(path)}:{node.lineno}: name the exceptions, or add `# noqa: BLE001` and the reason"
                )
    _report(problems)


def _must_be_documented(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef]:
    yield from [tree] if tree.body else []
    yield from (node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))


def test_modules_and_public_classes_are_documented() -> None:
    problems = [
        f"{_relative(path)}: {getattr(node, 'name', 'the module')} has no docstring"
        for path in FILES
        for node in _must_be_documented(_tree(path))
        if ast.get_docstring(node) is None
    ]
    _report(problems)


def _dangers(path: Path) -> Iterator[tuple[int, str]]:
    for name, line in _imports(path):
        if name.split(".")[0] in FORBIDDEN_MODULES:
            yield line, f"{name}: read safetensors or JSON instead"
    for node in ast.walk(_tree(path)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called in ("eval", "exec"):
            yield node.lineno, f"{called}() runs text as code"
        if called == "torch.load" and options.get("weights_only") != "True":
            yield node.lineno, "torch.load needs weights_only=True"
        if called in ("np.load", "numpy.load") and options.get("allow_pickle") == "True":
            yield node.lineno, "allow_pickle=True runs code from a file"
        if called in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
            yield node.lineno, f"{called}: use yaml.safe_load"
        if called.endswith(".from_pretrained") and _relative(path) != "utils/pretrained.py":
            yield node.lineno, f"{called}: call sage_grpo.utils.pretrained.from_pretrained, which fetches no kernel"


def test_nothing_runs_code_from_a_file() -> None:
    _report([f"{_relative(path)}:{line}: {text}" for path in FILES for line, text in _dangers(path)])


def test_pytest_skips_no_folder(request: pytest.FixtureRequest) -> None:
    """pytest does not look into folders of some names ("dist", "build") unless they are named on its command line."""
    patterns = request.config.getini("norecursedirs")
    folders = {file.parent.name for file in (ROOT / "tests").rglob("test_*.py")}
    assert not [name for name in folders for pattern in patterns if fnmatch.fnmatch(name, pattern)]


def _ours() -> list[Path]:
    """Files of the project, not what runs and tools have left beside them: those that git has or would take, or all where there is no git."""
    folders = [
        name
        for name in ("src", "tests", "docs", "research", "examples", "scripts", ".ci", ".github")
        if (ROOT / name).exists()
    ]
    if shutil.which("git") is not None and (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *folders, ":(glob)*"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if listed.returncode == 0:
            return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    files = [path for name in folders for path in (ROOT / name).rglob("*") if path.is_file()]
    return files + [path for path in ROOT.iterdir() if path.is_file()]


def test_no_private_place_is_written_down() -> None:
    suffixes = {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".json", ".cfg", ".html", ".js", ".sh"}
    problems, files = [], _ours()
    assert len(files) > len(FILES)
    for path in files:
        if path.suffix not in suffixes and path.name not in ("Makefile", "run", "Dockerfile"):
            continue
        for number, text in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if PRIVATE_PLACES.search(text):
                problems.append(f"{path.relative_to(ROOT)}:{number}: {text.strip()[:100]}")
    _report(problems)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import pickle\n", "pickle"),
        ("import torch\ntorch.load('x')\n", "weights_only"),
        ("eval('1')\n", "runs text as code"),
        ("AutoModel.from_pretrained('x')\n", "fetches no kernel"),
    ],
)
def test_the_house_rules_can_fail(source: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bad.py"
    path.write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert any(problem in text for _, text in _dangers(path))
