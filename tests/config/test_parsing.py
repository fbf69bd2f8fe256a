"""Configuration: YAML, dotted overrides, recipes as defaults, and errors that name the nearest valid key or value."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from sage_grpo.config import parsing
from sage_grpo.config.parsing import ConfigError, given, parse, read_yaml
from sage_grpo.config.ranges import Count, Positive
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.samplers.kernels import KernelSpec
from sage_grpo.training.config import TrainConfig, UpdateConfig


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An optional part."""

    rank: int = 4
    """The rank."""
    seed: int = 0
    """The seed."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a test."""

    kernel: KernelSpec = KernelSpec()
    """Which kernel explores."""
    adapter: Adapter | None = None
    """An adapter, or none."""
    lr: float = 1e-5
    """Learning rate."""
    share: float | Literal["auto"] = "auto"
    """A number, or a word."""
    quiet: bool = False
    """Say nothing."""
    names: list[str] = field(default_factory=list)
    """Some names."""
    weights: dict[str, float] = field(default_factory=dict)
    """Named weights."""
    adapters: list[Adapter] = field(default_factory=list)
    """Some adapters."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "options.yaml"


def run(*argv: str, defaults: Options | None = None) -> Options:
    return parse(Options, argv, prog="test", defaults=defaults)


def test_a_parser_that_was_used_before_starts_from_the_same_defaults(file: Path) -> None:
    """It is kept: neither what was given before, nor what was refused, nor who changes what he got may be seen in it."""
    file.write_text("names: [z]\nweights: {MQ: 3.0}\nadapters: [{seed: 7}]\n")
    recipe = Options(names=["a"], weights={"VQ": 0.5}, adapters=[Adapter(rank=9)], adapter=Adapter(seed=3))
    for defaults in (None, recipe):
        words = ["--adapter.rank", "8", "--weights.TA", "2", "--names", "b", "c", "--adapters=[{rank: 1}]", "--quiet"]
        assert run(*words, defaults=defaults).weights == {**(defaults.weights if defaults else {}), "TA": 2.0}
        assert run("--config", str(file), defaults=defaults).names == ["z"]
        with pytest.raises(ConfigError):
            run("--weights.TA", "2", "--kernel.name", "no", defaults=defaults)
        got = run(defaults=defaults)
        got.names.append("x")
        got.weights["x"] = 1.0
        got.adapters.append(Adapter())
        assert run(defaults=defaults) == (defaults or Options())
    assert recipe == Options(names=["a"], weights={"VQ": 0.5}, adapters=[Adapter(rank=9)], adapter=Adapter(seed=3))


@pytest.mark.parametrize("words", [("a", "b"), ("a,b",), ('["a", "b"]',)])
def test_lists_of_words_are_written_as_people_do(words) -> None:
    assert run("--names", *words, "--lr", "2") == Options(names=["a", "b"], lr=2.0)


@pytest.mark.parametrize("form", ["--adapters {}", "--adapters={}", "--config={file}"])
def test_a_list_of_parts_replaces_the_one_before(form: str, file: Path) -> None:
    """The parser would merge lists of one length, item by item: a new reward would inherit the recipe's options."""
    file.write_text("adapters: [{seed: 7}]")
    words = form.format('[{"seed":7}]', file=file).split(" ")
    recipe = Options(adapters=[Adapter(rank=9)])
    assert run(*words, defaults=recipe).adapters == [Adapter(rank=4, seed=7)]
    assert run("--config", str(file), "--adapters", '[{"rank": 2}]', defaults=recipe).adapters == [Adapter(rank=2)]
    assert run("--lr", "2", defaults=recipe).adapters == [Adapter(rank=9)]


def test_command_line_wins_over_yaml_wins_over_recipe(file: Path) -> None:
    recipe = Options(lr=1.0, kernel=KernelSpec(name="flow", eta=0.1), adapter=Adapter(rank=2))
    file.write_text("lr: 2.0\nkernel: {eta: 0.2}\n")
    assert run("--config", str(file), "--lr", "3", defaults=recipe) == Options(
        lr=3.0, kernel=KernelSpec(name="flow", eta=0.2), adapter=Adapter(rank=2)
    )
    assert run("--adapter", "null", defaults=recipe).adapter is None
    options = run("--kernel.name", "cps", "--quiet", "--adapter.rank", "8", "--weights.VQ", "0.5")
    assert options == Options(kernel=KernelSpec(name="cps"), quiet=True, adapter=Adapter(rank=8), weights={"VQ": 0.5})
    for words in (["--recipe", "shapes/sage"], ["--help"]):
        with pytest.raises(ConfigError, match=f"no option '{words[0].removeprefix('--')}'"):
            run(*words)


def test_what_is_given_is_known_before_parsing(file: Path) -> None:
    file.write_text("run: c\nother: {run: d}\n")
    assert given(["--lr", "1"], "run") is None
    assert given(["--run", "a", "--lr", "1"], "run") == "a"
    assert given(["--run=a=b", "--runs", "x"], "run") == "a=b"
    assert given(["--run", "a", "--config", str(file)], "run") == "c"
    assert given([f"--config={file}", "--run", "a"], "run") == "a"
    assert given(["--config", "nowhere.yaml", "--run"], "run") == ""


def test_an_option_that_is_gone_is_taken_in_files_where_it_is_off(file: Path, monkeypatch) -> None:
    """Every run of earlier versions has it in its config.yaml."""

    def read(value: object) -> TrainConfig:
        file.write_text(f"update: {{deal: clips, reuse: {value}}}\n")
        return parse(TrainConfig, ["--config", str(file)], prog="test")

    assert read(0).update == UpdateConfig(deal="clips")
    for refused in (lambda: read(2), lambda: parse(TrainConfig, ["--update.reuse", "0"], prog="test")):
        with pytest.raises(
            ConfigError, match=r"no option 'update\.reuse' any more \(learning again .*\): leave it out"
        ):
            refused()
    monkeypatch.setattr(parsing, "GONE", {"old": (None, "why"), "update.pair": ([1, "a"], "why")})
    file.write_text("old: null\nupdate: {pair: [1, a]}\n")
    assert parse(TrainConfig, ["--config", str(file)], prog="test") == TrainConfig()
    with pytest.raises(ConfigError, match=r"There is no option 'kernel\.reuse'"):
        run("--kernel.reuse", "0")


def test_rewards_of_earlier_runs_are_read_without_their_actors(file: Path) -> None:
    def read(actors: int) -> TrainConfig:
        file.write_text(
            f"rewards: [{{name: a:b, actors: {actors}, actor_gpus: 0.0, actor_cpus: 1.0, standardize: {{}}, batch_size: 2}}]\n"
        )
        return parse(TrainConfig, ["--config", str(file), "--seed", "3"], prog="test")

    assert (read(0).rewards, read(0).seed) == ([RewardSpec(name="a:b", batch_size=2)], 3)
    with pytest.raises(ConfigError, match=r"no option 'rewards\[\]\.actors' any more .*serve-reward.*: leave it out"):
        read(2)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcde", "bcdef")
)
"""A few hundred bytes that stand for more than a million values."""


def test_a_small_file_that_is_enormous_in_memory_is_refused(file: Path) -> None:
    file.write_text(BOMB)
    for call in (lambda: run(f"--config={file}"), lambda: read_yaml(file)):
        with pytest.raises(ConfigError, match="aliases"):
            call()


def test_options_are_nested_as_deep_as_allowed_and_no_deeper(file: Path) -> None:
    for deeper, refused in ((0, nullcontext()), (1, pytest.raises(ConfigError, match="is nested deeper than"))):
        depth = parsing.MAX_YAML_DEPTH - 1 + deeper
        file.write_text(f"a: {'[' * depth}{']' * depth}")
        with refused:
            read_yaml(file)


def test_aliases_on_the_command_line_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--adapters has aliases \(\*a\)"):
        run("--adapters", "[&a {rank: 2}, *a]")


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ("--config {}/pipe", "is a pipe"),
        ("--kernel {}/pipe", "kernel is a group of options"),
        ("--kernel {}/part.yaml", "kernel is a group of options"),
        ("--config {}/nested.yaml", r"nested\.yaml: rollout\.window must be a group of options, got 'pipe'"),
    ],
)
def test_a_group_of_options_is_no_file_and_a_file_no_pipe(form: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "part.yaml").write_text("name: flow")
    (tmp_path / "nested.yaml").write_text("rollout: {window: pipe}")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=lambda: pipe.open("wb").close(), daemon=True).start()  # else its reader would wait for ever
    with pytest.raises(ValueError, match=says):
        parse(TrainConfig, form.format(tmp_path).split(" "), prog="test")


@pytest.mark.parametrize(
    "text",
    [
        "", "- 1\n", "a: [\n", "a: 1\n---\nb: 2\n", "lr: !!bool maybe\n", "lr: !!timestamp x\n",
        "lr: 2001-99-99\n", f"lr: {'1' * 5000}\n", "a: *b\n", "a: &a [*a]\n", "? {a: 1}\n: 2\n", "x: " + "[" * 60 + "]" * 60 + "\n",
        "a: !!python/object/apply:os.getcwd []\n", "lr: " + "[" * 100_000, "lr: " + "{a: " * 3000 + "1" + "}" * 3000,
        "a: &a {x: 1}\nb: &b {<<: *b, y: 2}\n", "adapter:\n  rank: 2\n\tseed: 1\n", "lr: " + "x" * 2_000_000, "adapters: [{on: 1}]\n",
    ],
)  # fmt: skip
def test_what_is_no_yaml_of_options_is_refused_in_one_line(text: str, file: Path) -> None:
    file.write_text(text)
    for call in (lambda: read_yaml(file), lambda: run("--config", str(file))):
        with pytest.raises(ConfigError, match=r"options\.yaml") as refused:
            call()
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("lr: null", "lr"), ("names: null", "names"), ("weights: null", "weights"), ("adapters: [null]", "adapters"),
        ("adapters: [{rank: null}]", "rank"), ("adapter: {rank: null}", "rank"), ("weights: {VQ: null}", "weights"),
        ("names: [null]", "names"), ("kernel: null", "kernel"), ("kernel: {name: null}", "kernel.name"),
        ("share: null", "share"),
    ],
)  # fmt: skip
def test_nothing_is_no_value_where_one_is_needed(text: str, key: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=key):
        run("--config", str(file))


@pytest.mark.parametrize("number", [10**30, -(10**30), 10**400])
def test_numbers_of_any_size_are_answered_in_words(number: int, file: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Sizes:
        """Numbers with ranges and without."""

        count: Count = 1
        """How many."""
        scale: Positive = 1.0
        """How large."""
        rate: float = 1.0
        """Any."""

    for key, says in (("count", "count must be"), *((key, "larger") for key in ("scale", "rate") if number == 10**400)):
        file.write_text(f"{key}: {number}\n")
        with pytest.raises(ConfigError, match=says):
            parse(Sizes, ["--config", str(file)], prog="test")
    with pytest.raises(ValueError, match="63 bits"):
        KernelSpec(eta=10**400)


def test_a_list_of_parts_may_stand_in_a_file_of_its_own(file: Path, tmp_path: Path) -> None:
    file.write_text("adapters: [{rank: 2}, {rank: 3, seed: 1}]\n")
    bare, other = tmp_path / "bare.yml", tmp_path / "bare.json"
    bare.write_text("- rank: 2\n- {rank: 3, seed: 1}\n")
    other.write_text('[\n\t{"rank": 2},\n\t{"rank": 3, "seed": 1}\n]')
    for words in (["--adapters", str(file)], ["--adapters", str(bare)], [f"--adapters={other}"]):
        assert parse(Options, words, prog="test").adapters == [Adapter(rank=2), Adapter(rank=3, seed=1)]
    for text, fault in (("[{rank: 2, rank: 3}]", "twice"), ("- {rank: 2", "not valid YAML"), ("3", "no options")):
        bare.write_text(text)
        with pytest.raises(ConfigError, match=rf"bare\.yml.*{fault}"):
            parse(Options, ["--adapters", str(bare)], prog="test")
    file.write_text("adapters: [{rank: 2}]\nlr: 1.0\n")  # lr would be passed over
    with pytest.raises(ConfigError, match=r"adapters: \[\.\.\.\] and nothing else, it holds adapters, lr\. .*--config"):
        parse(Options, ["--adapters", str(file)], prog="test")
    with pytest.raises(ConfigError, match="there is no such file"):
        parse(Options, ["--adapters", str(tmp_path / "none.yaml")], prog="test")
