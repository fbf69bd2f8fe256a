"""Hundreds of malformed calls: each is refused with exit status 2 and one message, none raises, none is accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from sage_grpo.cli import COMMANDS, main
from sage_grpo.hints import leaves


class Accepted(BaseException):
    """Something expensive was about to start; no command may catch this."""


def accept(*args: object, **kwargs: object) -> None:
    raise Accepted


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Whatever takes time, writes or listens fails the test instead; the current folder has a few useless files."""
    for place in (
        "sage_grpo.train.runner.train",
        "sage_grpo.models.hunyuan15.load",
        "sage_grpo.models.wan.load",
        "sage_grpo.models.checkpoint._download",
        "sage_grpo.shapes.making.pretrain.pretrain",
        "sage_grpo.shapes.making.pretrain.score",
        "sage_grpo.video.contact_sheet",
        "sage_grpo.commands.inspect_figure.save_figure",
        "sage_grpo.parallel.elastic.run_module",
        "uvicorn.Server.run",
    ):
        monkeypatch.setattr(place, accept)
    monkeypatch.chdir(tmp_path)
    files = {
        "good.txt": "a cat\n",
        "empty.txt": "",
        "binary.txt": b"\xff\xfe\x00\x81",
        "prompts.doc": "a cat\n",
        "no_column.csv": "text\na cat\n",
        "no_json.jsonl": "{prompt\n",
        "list.yaml": "- 1\n",
        "broken.yaml": "kernel: [\n",
        "binary.yaml": b"\xff\x00\x81",
        "unknown.yaml": "optmizer: {lr: 1}\n",
        "recipe.yaml": "recipe: SAGE\n",
        "number.yaml": "recipe: [1]\n",
        "syntax_error.py": "def reward(:\n",
        "raises.py": "raise RuntimeError('no licence')\n",
        "exits.py": "def reward(videos): return 1\n\nvalue = 3\n",
        "needs.py": "import not_installed_anywhere\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "folder").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("iterations: none\n")
    return tmp_path


def bad_values(kind: Any) -> list[str]:
    """Values that no option of this type can have."""
    origin, inner = get_origin(kind), get_args(kind)
    if type(None) in inner:
        inner = tuple(one for one in inner if one is not type(None))
        return bad_values(inner[0]) if len(inner) == 1 else []
    if origin is Literal:
        return ["nonsense", str(inner[0]).upper() + "_"]
    if origin is list:
        return ["{a: 1}"] if inner[0] is not str else []
    if origin in (tuple, dict):
        return ["nonsense"]
    if kind in (int, float, bool):
        return {int: ["1.5", "many"], float: ["much", "[1]"], bool: ["maybe"]}[kind]
    return ["nonsense", "{nonsense: 1}"] if isinstance(kind, type) and kind.__module__.startswith("sage_grpo") else []


def needed(name: str) -> list[str]:
    """Words without which a command is refused for another reason."""
    return {"shapes": ["render"], "study": ["results"], "serve-reward": ["--rewards", '[{"name": "video_stats"}]']}.get(
        name, []
    )


def by_type(name: str) -> Iterator[list[str]]:
    """Every option of a command with values of a wrong type, and one misspelt, in turn."""
    import importlib

    options = importlib.import_module(f"sage_grpo.commands.{COMMANDS[name].module}").Options
    # The model's options are the same everywhere: once is enough.
    own = [(key, kind) for key, kind in leaves(options) if name == "train" or not key.startswith("model.")]
    if name == "download":  # train's, and one
        own = [(key, kind) for key, kind in own if key == "dry_run"]
    for place, (key, kind) in enumerate(own):
        values = bad_values(kind)
        if values:
            yield [name, *needed(name), f"--{key}", values[place % len(values)]]
        if place % 5 == 0:
            yield [name, *needed(name), f"--{key}_x", "1"]
        if place % 10 == 1:
            yield [name, *needed(name), f"--{key}.nonsense", "1"]


def reward(name: object, **more: object) -> list[str]:
    return ["--rewards", json.dumps([{"name": name, **more}])]


REWARDS = [
    *(reward(name) for name in (
        "videoalgn", "", ":", "good:", ":reward", "no_such_module:reward", "syntax_error:reward", "raises:reward",
        "exits:reward", "exits:value", "exits:nothing", "needs:reward", "a b:c", "../x:reward", "x.py:reward", "os:system",
        "subprocess:Popen", "math:sqrt", "builtins:print", 5, None, ["x"],
    )),
    reward("exits:reward", device="cuda:99"), reward("video_stats", batch_size="all"), reward("video_stats", weight=1),
    reward("video_stats", weights={"brightness": "much"}), reward("video_stats", weights="much"),
    ["--rewards", "[]"], ["--rewards", "video_stats"], ["--rewards", "[{}]"], ["--rewards", "[1]"], ["--rewards", "{"],
]  # fmt: skip
"""Rewards that cannot be loaded, found out by train, evaluate and serve-reward alike."""
PROMPTS = [
    "nowhere.txt",
    "empty.txt",
    "binary.txt",
    "prompts.doc",
    "no_column.csv",
    "no_json.jsonl",
    "folder",
    "x" * 400,
]
DEVICES = ["cud", "cuda:99", "cpu:1", "tpu", "gpu", "cuda:", "cuda:-1", "0", "meta", "a b"]
FAMILIES = ["hunyun", "wan21", "no.such.module", "os.path", "a b.c", ".x", "x.", "json.decoder"]
FILES = [
    "nowhere.yaml",
    "folder",
    "list.yaml",
    "broken.yaml",
    "binary.yaml",
    "unknown.yaml",
    "recipe.yaml",
    "number.yaml",
]
RECIPES = [
    "",
    "SAGE",
    "shapes/",
    "/sage",
    "shapes/sag",
    "shapes/sage/c",
    "hunyuan",
    "shapes/sage/a",
    "1",
    "[a]",
    "../x",
]
PLANS = [
    ["--kernel.eta", "0"], ["--rollout.steps", "1"], ["--update.updates_per_rollout", "99"], ["--kernel.name", "ode"],
    ["--rollout.window.kind", "drawn", "--rollout.window.at", "[99]"], ["--rollout.before_steps", "3"],
    ["--rollout.window.kind", "drawn", "--rollout.window.branches", "99"], ["--kernel.name", "cps", "--kernel.eta", "2"],
    ["--kernel.name", "flow", "--kernel.sigma_max", "0.9"],
]  # fmt: skip


def by_hand() -> Iterator[list[str]]:
    """What the types do not tell: names, files, devices, modules and plans."""
    yield from (
        ["trian"],
        ["Train"],
        ["--train"],
        ["train", "stray"],
        ["train", "--"],
        ["train", "-x"],
        ["train", "---out", "x"],
    )
    yield from (["train", "--help", topic] for topic in ("optmizer", "nonsense", "model.loar"))
    for command, share in (
        ("train", slice(None)),
        ("evaluate", slice(0, None, 3)),
        ("serve-reward", slice(1, None, 3)),
    ):
        yield from ([command, *words] for words in REWARDS[share])
    for recipe in RECIPES:
        yield ["train", "--recipe", recipe]
        yield ["train", f"--recipe={recipe}"]
        yield ["demo", "--recipe", recipe]
    for file in FILES:
        yield from ([name, *needed(name), "--config", file] for name in ("train", "generate", "inspect", "shapes"))
    for file in PROMPTS:
        yield ["train", "--data.prompts", file]
        yield ["train", "--data.eval_prompts", file]
        yield ["evaluate", "--prompts", file]
        yield ["evaluate", "--videos", "folder", "--prompts", file]
    for device in DEVICES:
        yield ["train", "--model.device", device]
        yield ["evaluate", "--model.device", device]
        yield ["serve-reward", *needed("serve-reward"), "--device", device]
    for family in FAMILIES:
        yield from (
            [name, "--model.family", family, "--prompts", "a cat"][: 3 if name == "train" else 5]
            for name in ("train", "generate")
        )
    for path in ("./nowhere", "/nowhere/at/all", "a/b/c", "~/nowhere", "folder", "good.txt", "x" * 400, "\0"):
        yield ["train", "--model.path", path]
        yield ["generate", "--model.path", path, "--prompts", "a cat"]
    yield from (["train", *words] for words in PLANS)
    for run in ("nowhere", "folder", "run", "good.txt", "", "x" * 400):
        yield from (
            [name, "--run", run, *(["--prompts", "x"] if name == "generate" else [])]
            for name in ("generate", "evaluate", "export")
        )
    for port in ("-1", "65536", "1e9", "http"):
        yield ["serve-reward", *needed("serve-reward"), "--port", port]
    yield ["serve-reward", *needed("serve-reward"), "--host", "0.0.0.0"]
    yield from (
        ["launch"],
        ["launch", "trian"],
        ["launch", "--nproc", "2"],
        ["launch", "--nproc", "-1", "train"],
        ["launch", "--nproc", "x", "train"],
    )
    yield from (
        ["shapes"],
        ["shapes", "paint"],
        ["shapes", "score"],
        ["shapes", "score", "--model", "folder"],
        ["shapes", "--action"],
    )
    create = ["study", "create", "--methods", "{a: folder, b: run}"]
    yield from (["study"], ["study", "open"], ["study", "create"], create, [*create, "--methods", "[a, b]"])
    yield from ([*create, "--prompts", file] for file in (*PROMPTS, "good.txt"))
    yield from (
        ["study", action, "--study", folder]
        for folder in ("nowhere", "folder", "good.txt")
        for action in ("links", "serve", "results", "export")
    )
    yield from (["completion"], ["completion", "tcsh"], ["completion", "--shell", "BASH"])
    yield from (
        ["inspect", "--kernels", "sagee"],
        ["inspect", "--kernels", "[]"],
        ["inspect", "--eta", "-1"],
        ["inspect", "--steps", "0"],
    )
    yield from (
        ["generate"],
        ["generate", "--prompts", "nowhere.txt"],
        ["generate", "--prompts", "a", "--images", "b", "c"],
    )
    yield from (
        ["generate", "--prompts", "a", "--kernel.name", "sage", "--solver", "ab2"],
        ["generate", "--prompts", "a", "--weights", "best"],
    )
    yield from (["train", option] for option in ("--config", "--recipe", "--iterations", "--model.path", "--rewards"))


CALLS = [call for name in COMMANDS for call in by_type(name)] + list(by_hand())


def test_there_are_enough_of_them() -> None:
    assert len(CALLS) >= 500
    assert {call[0] for call in CALLS} >= set(COMMANDS)


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(part, marks=pytest.mark.slow) for part in range(2, 8))])
def test_malformed_calls_are_refused_in_words(part: int, no_work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problems = []
    for call in CALLS[part::8]:
        try:
            status: Any = main(call)
        except SystemExit as left:
            status = f"SystemExit({left.code})"
        except Accepted:
            status = "accepted"
        except Exception as error:  # noqa: BLE001 - exactly what must not happen
            status = f"{type(error).__name__}: {error}"
        said = capsys.readouterr()
        lines = [line for line in said.err.splitlines() if line.startswith("sage-grpo: ")]
        if status != 2 or not lines or len(lines[-1]) < 20 or "Traceback" in said.err or said.out:
            problems.append(f"{' '.join(call)[:100]}: {str(status)[:200]} {said.err[-100:]!r} {said.out[-100:]!r}")
    assert not problems, f"{len(problems)}\n" + "\n".join(problems)
