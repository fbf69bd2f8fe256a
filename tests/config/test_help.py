"""Help by group, from the dataclasses."""

from __future__ import annotations

import ast
import importlib
import re

import pytest

from sage_grpo.cli.main import COMMANDS, main
from sage_grpo.config.errors import ALSO_CALLED, leaves
from sage_grpo.config.help import entries
from sage_grpo.recipes import meanings as recipe_meanings
from sage_grpo.training.config import TrainConfig
from sage_grpo.version import ROOT


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def test_options_that_messages_and_hints_name_are_there() -> None:
    modules = [importlib.import_module(f"sage_grpo.cli.{command.module}") for command in COMMANDS.values()]
    kinds = [module.Options for module in modules if hasattr(module, "Options")]
    known = {entry.key.replace("[]", "") for kind in kinds for entry in entries(kind)}
    sections = "|".join({key.partition(".")[0] for key, _ in leaves(TrainConfig) if "." in key})
    name = re.compile(rf"(?<![\w./])(?:{sections})(?:\[\])?\.[a-z][\w.]*\w")
    files = (".json", ".pth", ".py", ".safetensors")
    for file in ROOT.rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if name.search(source) else ():
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            for option in name.findall(text) if " " in text else ():
                assert option.replace("[]", "") in known or option.endswith(files), (file, node.lineno, option)
    assert set(ALSO_CALLED) <= known


def test_help_says_null_where_null_is_what_is_written_and_cuts_no_meaning(capsys) -> None:
    for name in COMMANDS:
        lines = said(capsys, name, "--help").splitlines()
        assert lines[0].startswith(f"usage: sage-grpo {name}")
        assert len(lines) <= 80
        assert max(map(len, lines)) <= 80
    text = said(capsys, "train", "--help", "all")
    assert "null" in text
    assert "None" not in text
    flat = " ".join(said(capsys, "train", "--help", "recipes").split())
    for meanings in recipe_meanings().values():
        assert all(meaning and " ".join(meaning.split()) in flat for meaning in meanings.values())
