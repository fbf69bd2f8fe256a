"""SAGE-GRPO: reinforcement-learning post-training of flow-matching video generators.

From Python (docs/api.md): `train`, `evaluate` and `generate`, the recipes, the configuration's parts, and the types of arguments
and events. __init__.pyi lists them; each is imported when it is first used, so that `import sage_grpo` costs nothing.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from sage_grpo.version import __version__ as __version__

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOMES = {name: home for home, name in re.findall(r"^from (\S+) import ([a-zA-Z]\w+)", _STUB, re.MULTILINE)}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return [*{*globals(), *__all__}]
