"""Imports by name (installed or in the current folder), and objects that a Python program hands to a run in the place of a name.

A configuration with the name of an object records its use, and cannot be loaded from alone.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from sage_grpo.utils.suggest import did_you_mean

PREFIX = "object:"
"""Prefix of these names; `object:bright` is the reward `bright` of a user's program."""


class NoSuchModule(ValueError):
    """A module, or a name in it, cannot be imported; the message gives the reason and the remedy."""


def import_object(path: str, field: str) -> Any:
    """The object that `module:name` names; NoSuchModule in one line, which begins with the field, if there is none."""
    module_name, _, name = path.partition(":")
    try:
        module = import_named(module_name)
    except NoSuchModule as error:
        raise NoSuchModule(f"{field} {path!r}: {error}") from error
    public = [one for one in vars(module) if not one.startswith("_")]
    if name not in public:
        raise NoSuchModule(f"{field} {path!r}: module {module_name} has no {name!r}.{did_you_mean(name, public)}")
    return vars(module)[name]


def is_there(top: str) -> bool:
    here = Path.cwd()
    return _is_installed(top) or (here / f"{top}.py").is_file() or (here / top).is_dir()


def _is_installed(top: str) -> bool:
    try:
        return top in sys.modules or find_spec(top) is not None
    except ValueError:  # a module without a spec, such as __main__
        return True


def import_named(name: str) -> ModuleType:
    """The module of this name; NoSuchModule in one line where it is not there or does not import.

    The console script does not look into the current folder, as `python -m` does. A name that a user gives may mean a file there;
    the folder goes to the end of the path, so that it hides nothing that is installed, and only once a name needs it.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise NoSuchModule(f"{name!r} is not the name of a module: write it as in `import`, without .py and slashes.")
    top, here = name.split(".")[0], Path.cwd()
    if not _is_installed(top) and is_there(top):
        sys.path.append(str(here))
    cause: Exception
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing, cause = error.name or name, error
        if name == missing or name.startswith(f"{missing}."):
            fault = f"there is no module {name}, neither installed nor in {here}. Is its folder on PYTHONPATH?"
        else:
            fault = f"module {name!r} needs {missing!r}, which is not installed."
    except Exception as error:  # noqa: BLE001 - users' code may raise anything when it is imported
        frame, cause = traceback.extract_tb(error.__traceback__)[-1], error
        file, line, text = frame.filename, frame.lineno, str(error)
        if isinstance(error, SyntaxError):
            file, line, text = error.filename or file, error.lineno, error.msg
        fault = f"module {name!r} does not import: {type(error).__name__}: {text} ({file}, line {line})."
    raise NoSuchModule(fault) from cause


class ObjectNeeded(ValueError):
    """Only the program that had the object can do this; the message gives the remedy."""


def name_of(label: str) -> str:
    return f"{PREFIX}{label}"


def is_object(name: str | None) -> bool:
    return name is not None and name.startswith(PREFIX)


def refuse_object(name: str | None, what: str, instead: str) -> None:
    """Refuse to load an object by its name; `instead` is the alternative."""
    if is_object(name):
        raise ObjectNeeded(
            f"This run got {what} as an object of a Python program ({name}), which no file holds. "
            f"{instead}, or hand it over in Python (docs/api.md)."
        )
