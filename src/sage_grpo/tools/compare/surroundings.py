"""Hardware, versions and code of a run: they may explain different numbers on another machine."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sage_grpo.run.identity import of_code
from sage_grpo.training.config import TrainConfig
from sage_grpo.version import ROOT, __version__


def surroundings(config: TrainConfig) -> dict[str, Any]:
    cuda = torch.cuda.is_available() and config.model.device != "cpu"
    versions = {"sage-grpo": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("diffusers", "transformers", "peft"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "machine": {
            "device": torch.cuda.get_device_name() if cuda else _processor(),
            "cores": os.cpu_count(),
            "system": platform.system(),
        },
        "versions": versions,
        "commit": commit(),
        "code": _code(),
    }


_code = cache(of_code)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*: (.+)", info.read_text(), re.MULTILINE) if info.is_file() else None
    return name[1].strip() if name else platform.processor() or platform.machine()


@cache
def commit() -> str:
    """The commit of the source, "+changes" where it was edited; empty outside a checkout."""
    words = ("describe", "--always", "--dirty=+changes", "--abbrev=12", "--exclude=*")
    try:
        found = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    except OSError:  # no git
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
