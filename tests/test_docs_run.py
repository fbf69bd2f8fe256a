"""The documents work as written: every command parses by its own parser, every file is read, every Python block runs.

`make test` has the quick part: commands go through the real program up to the point where it would begin, and Python blocks run with
stand-ins for what would train or load. `make test-slow` executes the commands on tiny inputs, but for blocks under a line
`<!-- not run: REASON -->`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import inspect
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import diffusers
import pytest
import torch
import yaml

import sage_grpo
from documents import ROOT, Block, blocks, commands, ours
from sage_grpo import api
from sage_grpo.cli import COMMANDS
from sage_grpo.cli.main import main
from sage_grpo.cli.starting import from_recipe, plain
from sage_grpo.config.parsing import parse
from sage_grpo.models import lora
from sage_grpo.recipes import recipe
from sage_grpo.run.preflight import NOT_EVALUATED, preflight
from sage_grpo.tools.compare.design import load
from sage_grpo.training.config import TrainConfig

ELSEWHERE = ("git", "pip", "hf", "curl", "export", "make", "python", "ray", "kubectl")
"""Programs that are not ours, or scripts of the repository."""
PROMPTS = "a large red circle moves right quickly on a white background\na small blue cross moves left slowly on a white background\n"
SHELL, PYTHON = blocks("bash"), blocks("python")


def by_page(found: list[Block]) -> dict[str, list[Block]]:
    return {page: [block for block in found if block.page == page] for page in dict.fromkeys(b.page for b in found)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the pages take for granted; it is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("prompts.txt", "eval.txt", "held_out.txt", "new.txt"):
        (tmp_path / name).write_text(PROMPTS)
    for name in ("mine.yaml", "run.yaml"):
        (tmp_path / name).write_text("recipe: shapes/branch\nbatch:\n  prompts: 8\n")
    (tmp_path / "research").symlink_to(ROOT / "research")
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "snippet.yaml").write_text("rollout:\n  window:\n    at: [2]\n")
    return tmp_path


def write_files(page: str, folder: Path) -> None:
    """Files that a page shows: a block whose first line is a comment with their name."""
    for block in blocks("yaml", "python"):
        named = re.match(r"# (\w+\.(?:yaml|py))\n", block.text)
        if block.page == page and named:
            (folder / named[1]).write_text(block.text)


# ---- commands


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Commands stop where they would begin: what each was asked for is in this list."""
    asked: list[Any] = []
    for command in COMMANDS.values():
        module = importlib.import_module(f"sage_grpo.cli.{command.module}")
        monkeypatch.setattr(module, "run", lambda options: asked.append(options) or 0)
    return asked


def pretend(words: list[str], folder: Path) -> None:
    """Files of prompts, and folders of runs as far as a parser reads them, wherever a command names some."""
    for place, word in enumerate(words):
        if words[place - 1] == "--prompts" and re.search(r"\.json$|/prompts$", word):
            (folder / word).parent.mkdir(exist_ok=True)
            (folder / word).write_text("[]")
        named = word if re.fullmatch(r"runs/[\w-]+|out", word) else ""
        if named and words[place - 1] != "--out" and not (folder / named).exists():
            (folder / named).mkdir(parents=True)
            config = dataclasses.replace(recipe("shapes/branch"), out=named)
            values = json.loads(json.dumps(dataclasses.asdict(config)))
            (folder / named / "config.yaml").write_text(yaml.safe_dump(values))


@pytest.mark.parametrize(
    "page",
    [page if page == "docs/rewards.md" else pytest.param(page, marks=pytest.mark.slow) for page in by_page(SHELL)],
)
def test_commands_parse(page: str, folder: Path, parsed: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    write_files(page, folder)
    for block in by_page(SHELL)[page]:
        for words in commands(block):
            own = ours(words)
            if own is None:
                assert words[0] in ELSEWHERE, f"{block}: {words[0]}"
                continue
            pretend(own, folder)
            if "--print_config" in own:  # jsonargparse leaves by itself
                with pytest.raises(SystemExit, match="0"):
                    main(own)
                continue
            before = len(parsed)
            assert main(own) == 0, f"{block}: {capsys.readouterr().err}"
            assert len(parsed) > before


@pytest.mark.parametrize("page", ["README.md", "docs/guides/wan-one-gpu.md"])
def test_first_runs_need_no_file_but_the_checkpoint(
    page: str, tmp_path: Path, parsed: list[Any], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(page, tmp_path)
    lines = [ours(words) or [] for block in by_page(SHELL)[page] for words in commands(block)]
    trained = [words for words in lines if words[:1] == ["train"]]
    assert trained
    for words in trained:
        assert main([*words, "--model.path", str(checkpoint("wan_t2v"))]) == 0
        config = plain(parsed[-1])
        assert config.held_out == "starter_eval"
        assert NOT_EVALUATED not in preflight(config)


TINY = {
    "train": "--iterations 3 --batch.prompts 2 --batch.group_size 2 --evaluate.prompts 2 --evaluate.steps 4",
    "compare": "--seeds 1 --iterations 1 --set evaluate.prompts=2 --set batch.prompts=2 --set batch.group_size=2 --jobs 1",
    "probe": "--probe.prompts 2 --probe.steps [2] --probe.etas [1.0]",
    "generate": "--steps 2",
}
"""Words that make a command small."""
UNTIL_STOPPED = ("--watch", "serve")
"""What a command has among its words that goes on until it is stopped."""


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("small") / "run"
    assert main(["train", "--recipe", "shapes/branch", *TINY["train"].split(), "--out", str(out)]) == 0
    return out


@pytest.mark.slow
@pytest.mark.parametrize("page", by_page([block for block in SHELL if not block.not_run]))
def test_commands_run(
    page: str, folder: Path, small_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "my_package").mkdir()
    (folder / "my-checkpoint").mkdir()
    shutil.copy(ROOT / "tests" / "models" / "toy_family.py", folder / "my_package" / "my_family.py")
    for module, function in (("my_file", "my_reward"), ("my_reward", "warm")):
        code = f"def {function}(videos, prompts, fps):\n    return videos.float().mean((1, 2, 3, 4))\n"
        (folder / f"{module}.py").write_text(code)
    write_files(page, folder)
    tiny = parse(TrainConfig, TINY["train"].split(), prog="train", defaults=recipe("shapes/sage"))
    # The demo has no options for its sizes.
    monkeypatch.setattr(
        "sage_grpo.recipes.recipe", lambda name, *steps: tiny if name == "shapes/sage" else recipe(name, *steps)
    )
    for block in by_page(SHELL)[page]:
        for words in commands(block) if not block.not_run else ():
            own = ours(words)
            assert own is not None, f"{block}: say why {words[0]} is not run"
            if set(own) & set(UNTIL_STOPPED):
                continue
            for place, word in enumerate(own):
                if (
                    re.fullmatch(r"runs/[\w-]+|out", word)
                    and own[place - 1] != "--out"
                    and not (folder / word).exists()
                ):
                    shutil.copytree(small_run, folder / word)
            if "--print_config" not in own:  # test_commands_parse has it
                small = [] if "--table" in own else TINY.get(own[0], "").split()
                assert main([*own, *small]) == 0, f"{block}: {capsys.readouterr().err}"


# ---- files


@pytest.mark.slow
@pytest.mark.parametrize("page", by_page(blocks("yaml")))
def test_files_are_configurations(page: str, folder: Path) -> None:
    write_files(page, folder)
    for block in by_page(blocks("yaml"))[page]:
        (folder / "shown.yaml").write_text(block.text)
        if "arms:" in block.text:
            assert load(folder / "shown.yaml", "smoke").arms
            continue
        if "serve.yaml" in block.text:
            options = importlib.import_module("sage_grpo.cli.serve_reward").Options
            assert parse(options, ["--config", "shown.yaml"], prog="serve-reward").rewards
            continue
        start, words = from_recipe(TrainConfig, ["--config", "shown.yaml"])
        assert parse(TrainConfig, words, prog="train", defaults=start, recipes=True) != recipe("shapes"), block


# ---- Python


def stand_in(real: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        inspect.signature(real).bind(*given, **named)
        return answer

    return call


def score_clips(function: Callable[..., Any]) -> None:
    """Call a reward of a page on two clips; it must give a score to each."""
    clips = torch.randint(0, 256, (2, 3, 4, 4, 3), dtype=torch.uint8)
    extra = {"metadata": [{}, {"image": "a.png"}]} if "metadata" in inspect.signature(function).parameters else {}
    scores = function(clips, ["a", "b"], 8.0, **extra)
    scores = asyncio.run(scores) if inspect.isawaitable(scores) else scores
    for values in scores.values() if isinstance(scores, dict) else [scores]:
        assert len(values) == 2


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    """What the Python blocks find: stand-ins for what trains and loads, and the objects that a reader has."""
    assert "WanPipeline" in dir(diffusers)  # importing it takes seconds

    pairs = MagicMock(differences={"total": SimpleNamespace(change=0.1, low=0.0, high=0.2, win_share=0.6)})
    for name in ("train", "generate", "evaluate", "evaluate_pairs"):
        answer = pairs if name == "evaluate_pairs" else MagicMock()
        monkeypatch.setattr(sage_grpo, name, stand_in(getattr(api, name), answer), raising=False)
    monkeypatch.setitem(vars(diffusers), "WanPipeline", MagicMock())
    monkeypatch.setattr(lora, "load_lora", stand_in(lora.load_lora, None))

    async def ask(clip: torch.Tensor, prompt: str) -> float:
        return 0.5

    given = {"my_function": len, "my_rows": ["a cat"], "rows": ["a cat"], "model": object(), "pipe": object()}
    return {**given, "folder": "my-lora", "asyncio": asyncio, "ask": ask, "similarity": lambda clip, image: 0.5}


@pytest.mark.parametrize("page", by_page(PYTHON))
def test_python_runs(page: str, names: dict[str, Any]) -> None:
    for block in by_page(PYTHON)[page]:
        if block.not_run:
            continue
        before = set(names)
        exec(compile("\n" * block.line + block.text, page, "exec"), names)
        for name in set(names) - before:
            if inspect.isfunction(names[name]) and list(inspect.signature(names[name]).parameters)[:1] == ["videos"]:
                score_clips(names[name])
    if page == "docs/extending.md":
        assert names["MyKernel"]()(0.8, 0.6).std > 0
    if page == "docs/guides/own-reward.md":
        red, blue = torch.zeros(2, 1, 3, 4, 4, 3, dtype=torch.uint8)
        red[..., 0], blue[..., 2] = 255, 255
        assert names["warm"](torch.cat([red, blue]), ["a", "b"], 8.0).tolist() == [1.0, -1.0]
