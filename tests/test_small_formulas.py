"""Small functions of the package's first level, by values that are worked out by hand: hints, help, the hub's words, checks of pretrained files,
the inspector's warnings, parts of the API."""

from __future__ import annotations

import dataclasses
import json
import socket
from dataclasses import field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from sage_grpo import api
from sage_grpo.config.errors import explain, groups, nearest_key, recipe_hint
from sage_grpo.config.help import kind_in_words, manual
from sage_grpo.config.parsing import ConfigError
from sage_grpo.config.ranges import Count, Share, check_prompt, checked, faults, ranges
from sage_grpo.generation.generate import GenerateSpec
from sage_grpo.training.config import TrainConfig
from sage_grpo.types import Sound
from sage_grpo.utils import http_server, hub, pretrained
from sage_grpo.utils.json_schema import DocumentError
from sage_grpo.utils.suggest import did_you_mean


@checked
class Part:
    """A part."""

    level: Share = 0.5
    """How much. More is better."""


@checked
class Whole:
    """Options of a test."""

    name: str
    """What it is called."""
    count: Count | None = None
    """How many, or None."""
    kind: Literal["one", "two"] = "one"
    """Which."""
    part: Part = Part()
    """A part of it; small."""
    parts: list[Part] = field(default_factory=list)
    """Several."""
    on: bool = True
    """Whether."""
    weights: dict[str, Share] = field(default_factory=dict)
    """By name."""
    pair: tuple[Share, Count] = (0.5, 1)
    """Two numbers."""


HELP = """\
usage: prog [--recipe NAME] [--config FILE.yaml] [--option value ...]

About this.

options:
  --recipe        Start from a recipe; --help recipes lists them.
  --config        A YAML file with any of these options.
  --print_config  Print all options as YAML and stop.
  --name          What it is called. (needed)
  --count         How many, or null.
  --kind          Which. (one)
  --on            Whether. (true)
  --weights       By name.
  --pair          Two numbers. ((0.5, 1))

groups of options (--help GROUP lists one, --help all everything):
  part     A part of it. (1)
  parts[]  Several. (1)"""


def test_help_is_an_overview_a_group_or_an_option() -> None:
    def told(topic: str, **more: Any) -> str:
        return manual(Whole, topic, prog="prog", about="About\n this.", **more)

    recipes = {"methods": {"a": "first", "longer": "second"}}
    assert told("", recipes=recipes) == HELP
    assert "--recipe" not in told("")
    assert told("recipes", recipes=recipes) == "methods:\n  a       first\n  longer  second"
    level = "  --part.level NUMBER (0.5)\n      How much. More is better. Must be in [0, 1]."
    assert told("part") == f"\npart: A part of it; small.\n{level}"
    assert told("--part.level") == level
    assert told("kind") == "  --kind {one,two} (one)\n      Which."
    assert told("parts").startswith("\nparts[]: Several. A list of these, as YAML or JSON.\n  --parts[].level NUMBER")
    assert told("part.level", values=Whole(name="x", part=Part(level=0.25))).startswith(
        "  --part.level NUMBER (0.25)\n"
    )
    assert len(told("all").splitlines()) == 20
    assert manual(TrainConfig, "micro_batch", prog="prog", about="").startswith("  --batch.micro_batch ")
    with pytest.raises(ValueError, match=r"no option or group 'prat'\. Did you mean --help part\? Groups: part, parts"):
        told("prat")
    assert kind_in_words(dict[str, int]) == "{NAME: INT}"
    assert kind_in_words(list[float] | None) == "[NUMBER,...]|null"
    assert (kind_in_words(Path), kind_in_words(Any), kind_in_words(bool)) == ("PATH", "ANY", "true|false")


def test_values_out_of_their_range_are_told_with_their_place() -> None:
    assert ranges(Whole) == {"count": "at least 1", "weights": "in [0, 1]", "pair": "at least 1"}
    with pytest.raises(TypeError, match="positional"):
        Part(0.25)  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Part().level = 0.25  # type: ignore[misc]
    good: dict[str, Any] = {one.name: getattr(Whole(name="x"), one.name) for one in dataclasses.fields(Whole)}
    assert list(faults(Whole, good)) == []
    for changes, said in (
        ({"count": 0}, "count must be at least 1, got 0."),
        ({"count": 1.5}, "count must be a whole number, got 1.5."),
        ({"count": True}, "count must be a number, got True."),
        ({"count": 2**63}, f"count must be a number of at most 63 bits, got {2**63}."),
        ({"count": -(2**63)}, f"count must be a number of at most 63 bits, got {-(2**63)}."),
        ({"kind": "three"}, "kind must be one of one, two, got 'three'."),
        ({"name": None}, "name must be a text, got null: give a value, or leave name out."),
        ({"weights": {"a": 2.0}}, "weights.a must be in [0, 1], got 2.0."),
        ({"pair": (1.5, 1)}, "pair[0] must be in [0, 1], got 1.5."),
        ({"parts": [{"level": 0.5}, {"level": 2.0}]}, "parts[1].level must be in [0, 1], got 2.0."),
        ({"part": [1]}, "part must be a group of options ({name: value}), got [1]."),
        ({"part": None}, "part must be a group of options ({name: value}), got null: give a value, or leave part out."),
    ):
        assert list(faults(Whole, {**good, **changes})) == [said]
    check_prompt("x" * 20_000)
    with pytest.raises(ValueError, match="has 20,001 characters, more than 20,000"):
        check_prompt("x" * 20_001)


def test_the_nearest_name_is_meant() -> None:
    keys = ("optimizer.lr", "optimizer.eps", "batch.group_size", "rollout.steps", "out")
    for name, near in (
        ("Optimizer-lr", "optimizer.lr"), ("learning_rate", "optimizer.lr"), ("x.num_generations", "batch.group_size"),
        ("lr", "optimizer.lr"), ("output", "out"), ("qqqq", ""),
    ):  # fmt: skip
        assert nearest_key(name, keys) == near
    assert did_you_mean("SAEG", ["sage", "flow"]) == " Did you mean 'sage'?"
    assert did_you_mean("abc", ["xyz"]) == ""
    assert recipe_hint("sd3/branch", ["wan", "ltx"]).startswith(" sd3 is a family of models")
    assert recipe_hint("wan/branch", ["wan"]) == recipe_hint("nothing", ["wan"]) == ""
    assert groups(Whole) == ["part"]


def test_a_parsers_complaint_is_one_line_of_advice(tmp_path: Path) -> None:
    wanted = "Expected a typing.Literal['one', 'two']. Got value: onne"
    maybe, several = (f"Expected a <class '{kind}'>. Got value: x" for kind in ("int'> or <class 'NoneType", "list"))
    stray = "'stray' belongs to no option: options are written --name value, lists --name [a, b]."
    mapping = """Each is a mapping: --parts '[{"level": ...}]'."""
    part = "part is a group of options: --part.NAME value or {NAME: value}; got 'x'."
    for message, said in (
        ("Option 'kimd' is not accepted", "There is no option 'kimd'. Did you mean 'kind'?"),
        ("Option 'zzz' is not accepted", "There is no option 'zzz'. --help lists all."),
        ("Group 'part' does not accept option 'levle'", "There is no option 'part.levle'. Did you mean 'part.level'?"),
        ("unrecognized arguments: --cuont 3", "There is no option 'cuont'. Did you mean 'count'?"),
        ("unrecognized arguments: stray word", stray),
        ("the following arguments are required: kind, name", "--kind is needed: one of one, two. --name is needed."),
        ("Parser key \"config\": File does not exist: 'x.yaml'", "--config x.yaml: there is no such file to read."),
        ("argument --on: expected one argument", "--on needs a value."),
        (f'Parser key "kind": {wanted}', "kind must be one of one, two, got 'onne'. Did you mean 'one'?"),
        (f'Parser key "count": {maybe}', "count must be a whole number, got 'x'."),
        ("something  else\nhappened", "something else happened"),
        (f'Parser key "parts": {several}', f"parts must be a list ([a, b]), got 'x'. {mapping}"),
        (f'Parser key "parts": {maybe}', "parts must be a whole number, got 'x'."),
        (f'Parser key "weights": {several}', "weights must be a list ([a, b]), got 'x'."),
        ("Parser key \"part\": Unable to load config 'x'", part),
        (
            'Parser key "part": Parser key "level": Expected a <class \'float\'>. Got value: y',
            "part.level must be a number, got 'y'.",
        ),
    ):
        assert explain(message, Whole) == said
    (tmp_path / "config.yaml").write_text("")
    run = f"unrecognized arguments: {tmp_path} more"
    assert explain(run, GenerateSpec).endswith(f"--name [a, b]. Did you mean --run {tmp_path}?")
    assert "Did you mean" not in explain(run, Whole)
    assert "Did you mean" not in explain(f"unrecognized arguments: {tmp_path.parent}", GenerateSpec)


def test_sizes_and_files_of_the_hub_in_words(tmp_path: Path) -> None:
    sizes = {999: "999 B", 1000: "1 kB", 1.5e6: "2 MB", 2.25e9: "2.2 GB"}
    assert {size: hub.in_words(size) for size in sizes} == sizes
    assert hub.hub_name("owner/name@v1") == ("owner/name", "v1")
    assert hub.hub_name("owner/name") == ("owner/name", None)
    assert hub.hub_name("name") is hub.hub_name("/a/b") is hub.hub_name(str(tmp_path)) is None
    files = hub.Listing("r", "c", {"a": 1500, "b": 20})
    assert (files.size, files.table) == (1520, "       2 kB  a\n       20 B  b\n       2 kB  in 2 file(s)")


def test_checks_of_pretrained_files(tmp_path: Path) -> None:
    assert pretrained.weights_fault() is None
    assert pretrained.weights_fault("fedcba", ["x"], [("m", 1, 2), "k"]) == (
        "lacks a, b, c, d, e and 1 more; it also holds x; it holds in another shape k, m"
    )
    assert pretrained.weights_fault("abcde") == "lacks a, b, c, d, e"
    info = {"missing_keys": ["a"], "unexpected_keys": ["b"], "mismatched_keys": []}
    assert pretrained.loading_fault(info) == "lacks a; it also holds b"
    names = {"tokenizer_file": "tokenizer.json", "vocab": "vocab.json", "merges": "merges.txt"}
    (tmp_path / "vocab.json").write_text("{}")
    assert (
        "needs tokenizer.json, or vocab.json and merges.txt, and there is no tokenizer.json and no merges.txt"
        in str(pretrained.tokenizer_files_fault(names, tmp_path))
    )
    (tmp_path / "merges.txt").write_text("")
    assert pretrained.tokenizer_files_fault(names, tmp_path) is None
    assert pretrained.tokenizer_files_fault(names, tmp_path / "none") is None
    (tmp_path / "merges.txt").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    assert pretrained.tokenizer_files_fault(names, tmp_path) is None

    def vocabulary(size: int, rows: int) -> str | None:
        words = {str(number): number for number in range(size)}
        return pretrained.vocabulary_fault(SimpleNamespace(get_vocab=lambda: words, vocab_files_names={}), "f", rows)

    assert "knows 9 tokens, but its model has 8 embeddings: they do not" in str(vocabulary(9, 8))
    assert "knows 5 tokens, but its model has 8 embeddings: its files (added_tokens.json)" in str(vocabulary(5, 8))
    assert vocabulary(6, 8) is vocabulary(8, 8) is None
    config = tmp_path / "config.json"
    for values, rows in (
        ({"vocab_size": 5}, 5),
        ({"text_config": {"vocab_size": 6}}, 6),
        ({"vocab_size": 5, "text_config": {"vocab_size": 6}}, 5),
        ({}, None),
    ):
        config.write_text(json.dumps(values))
        assert pretrained.embedding_rows(config) == rows
    for odd in (True, "5", 1.5):
        config.write_text(json.dumps({"vocab_size": odd}))
        with pytest.raises(DocumentError, match="vocab_size must be a whole number"):
            pretrained.embedding_rows(config)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_layers": 10_001}, "networks have at most 10,000"),
        ({"depths": [1, 20_000]}, "depths is"),
        ({"a": {"num_blocks": 1e9}}, "num_blocks is"),
        ({"attn_implementation": "owner/kernel"}, "fetched from the hub"),
        ({"_experts_implementation_internal": {"a": "owner/kernel"}}, "fetched from the hub"),
        ({"quantization_config": {"bits": 4}}, "Quantized weights are not read"),
    ],
)
def test_what_a_network_s_configuration_may_ask_for(values: dict[str, Any], said: str) -> None:
    allowed = {"num_layers": 10_000, "depth": None, "attn_implementation": "sdpa", "blocks": True}
    pretrained.check_config({**allowed, "quantization_config": None}, "it")
    with pytest.raises(DocumentError, match=said):
        pretrained.check_config({"inner": [values]}, "it")


def test_a_loras_configuration_is_of_known_keys_and_sizes() -> None:
    for values, said in (
        ({"r": 4, "lora_alpha": 1e6, "rank_pattern": {"a": 8}, "use_rslora": True, "bias": "none"}, None),
        ({"r": 9}, 'has 9 in "r", which must be a number above 0 and at most 8'),
        ({"r": 0}, 'has 0 in "r", which must be a number above 0 and at most 8'),
        ({"rank_pattern": {"a": 8, "b": True}}, 'has true in "rank_pattern", which must be a number above 0 and at most 8'),
        ({"lora_alpha": 1e6 + 1}, 'has 1000001.0 in "lora_alpha", which must be a number above 0 and at most 1e+06'),
        ({"bias": "all"}, 'has "all" as "bias", and only "none" is supported'),
        ({"eva": 1}, 'has the key "eva", which is none of peft\'s for a LoRA'),
    ):  # fmt: skip
        assert pretrained.lora_config_fault(values, 8) == said
    assert pretrained.lora_config_fault({"r": 10**6}) is None


def test_the_api_refuses_what_it_cannot_do_and_saves_clips_with_sound(tmp_path: Path) -> None:
    for settings in (api.WeightsSettings, api.EvaluateSettings, api.GenerateSettings):
        assert not settings.__required_keys__
    with pytest.raises(ConfigError, match=r"evaluate has no option 'micro'; it has .*micro_batch"):
        api.evaluate(micro=3)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="not a model object"):
        api.evaluate_pairs(model=object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="train needs a TrainConfig"):
        api.train("shapes/sage")  # type: ignore[arg-type]
    clips = torch.zeros(2, 3, 16, 16, 3, dtype=torch.uint8)
    made = api.Clips(clips, ["a", "b"], [0, 1], 8.0, ["a.mp4", "b.mp4"], Sound(torch.zeros(2, 1, 1600), 16000))
    assert made.save(tmp_path) == [tmp_path / "a.mp4", tmp_path / "b.mp4"]
    assert {file.name for file in tmp_path.iterdir()} == {"a.mp4", "b.mp4", "contact_sheet.png"}


def test_addresses_and_ports_that_can_be_listened_on() -> None:
    assert all(map(http_server.is_loopback, ("127.0.0.1", "::1", "localhost")))
    assert not any(map(http_server.is_loopback, ("0.0.0.0", "10.0.0.1", "host")))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="Nothing can listen on"):
            http_server.check_port("127.0.0.1", taken.getsockname()[1])
    http_server.check_port("127.0.0.1", 0)
    for port in (-1, 65536):
        with pytest.raises(ValueError, match=r"port must be in \[0, 65535\]"):
            http_server.check_port("127.0.0.1", port)
