"""The straight line: prompts -> rollout -> decode -> rewards -> advantages -> update -> anchor.

`sage_grpo.train(config)` trains: the package can be called like the function `sage_grpo.api.train`, whose name it bears.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """Whatever was imported first, `from sage_grpo import train` gives this package, and a user means the function."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return import_module("sage_grpo.api").train(*arguments, **named)


sys.modules[__name__].__class__ = _Callable
