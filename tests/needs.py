"""Programs and libraries that a machine may lack. A test that needs it says what is missing and how to get it, and is skipped.

Where it must be there (continuous integration, after installing it) SAGE_GRPO_MUST_RUN names it, and its tests fail instead of being
skipped: SAGE_GRPO_MUST_RUN="chromium git" or "all" (all but a GPU).
"""

from __future__ import annotations

import importlib
import os
import shutil
import socket
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

HOW = {
    "chromium": "`tests/browser/install.sh` as root, `python -m playwright install chromium` as anybody, or name one in SAGE_GRPO_CHROMIUM",
    "playwright": "pip install -e '.[dev]'",
    "pyarrow": "pip install -e '.[parquet]'",
    "wandb": "pip install -e '.[wandb]'",
    "ray": "pip install -e '.[ray]'",
    "git": "install git, and test a clone of the repository",
    "bash": "install bash",
    "a GPU": "a machine with CUDA",
}
"""Every thing that tests ask for, and how to get it."""


def lacking(what: str) -> NoReturn:
    must = os.environ.get("SAGE_GRPO_MUST_RUN", "").split()
    message = f"needs {what}, which this machine lacks: {HOW[what]}"
    if what in must or ("all" in must and what != "a GPU"):
        pytest.fail(f"{message} (SAGE_GRPO_MUST_RUN says that it must be here)", pytrace=False)
    pytest.skip(message)


def program(name: str) -> str:
    return shutil.which(name) or lacking(name)


def module(name: str, package: str | None = None) -> ModuleType:
    """A module that need not be installed; `package` is what brings it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        lacking(package or name)


def checkout(root: Path) -> None:
    if not (root / ".git").exists():
        lacking("git")
    program("git")


def gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        lacking("a GPU")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
