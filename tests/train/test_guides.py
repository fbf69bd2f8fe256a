"""The guides work as written: commands parse with the options of the command that they name, files are configurations, code runs."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch

from sage_grpo.commands import COMMANDS
from sage_grpo.configure import loose_words, parse

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
PAGES = sorted(path.name for path in GUIDES.glob("*.md") if path.name != "README.md")
ELSEWHERE = ("pip", "hf", "curl")
"""Programs that are not ours."""


def blocks(page: str, language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", (GUIDES / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    return [text for spoken, text in found if spoken == language]


def read(name: str, argv: list[str]) -> None:
    """Parse words as cli.main does; what a folder of a run would say is left out, because there is none."""
    command = COMMANDS[name]
    module = importlib.import_module(f"sage_grpo.commands.{command.module}")
    if command.positional == "command":
        inner = next(place for place, word in enumerate(argv) if word in COMMANDS)
        read(argv[inner], argv[inner + 1 :])
        argv = module.arguments(argv, COMMANDS)
    elif command.many:
        argv = loose_words(argv, command.positional, module.Options)
    elif command.positional and not argv[0].startswith("-"):
        argv = [f"--{command.positional}", *argv]
    start = None
    if command.recipes:
        start, argv = module.defaults(argv)
    parse(module.Options, argv, prog=name, defaults=start, recipes=command.recipes)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_guide_parses(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in blocks(page, "yaml"):
        Path(text.splitlines()[0].removeprefix("# ")).write_text(text)
    lines = [line for block in blocks(page) for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    assert lines
    for words in map(shlex.split, lines):
        if words[0] == "sbatch":  # the words after the script are those of train
            assert (GUIDES.parents[1] / words[2]).is_file()
            words = ["sage-grpo", "train", *words[3:]]
        if words[0] not in ELSEWHERE:
            assert words[0] == "sage-grpo"
            read(words[1], words[2:])


def test_the_list_of_guides_is_whole() -> None:
    assert sorted(re.findall(r"\]\(([\w-]+\.md)\)", (GUIDES / "README.md").read_text())) == PAGES


def test_the_reward_of_the_guide_prefers_red() -> None:
    names: dict[str, object] = {}
    exec(blocks("own-reward.md", "python")[0], names)
    clips = torch.zeros(2, 3, 4, 4, 3, dtype=torch.uint8)
    clips[0, ..., 0] = 255
    clips[1, ..., 2] = 255
    assert names["warm"](clips, ["a", "b"], 8.0).tolist() == [1.0, -1.0]  # type: ignore[operator]
