"""All planted errors: those of every `*_errors.py` beside this file."""

from __future__ import annotations

import importlib
from pathlib import Path

from mutants.mutant import Mutant

TABLES = sorted(path.stem for path in Path(__file__).parent.glob("*_errors.py"))
MUTANTS: tuple[Mutant, ...] = tuple(
    mutant for name in TABLES for mutant in importlib.import_module(f"mutants.{name}").MUTANTS
)
