"""Files of other tools, datasets of the hub, and several sources by weight."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import needs
from sage_grpo.config.parsing import ConfigError, parse
from sage_grpo.data.prompts import Prompt, PromptStream, load_prompts, prompts_of
from sage_grpo.data.sources import PromptSource
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.training.config import DataConfig, TrainConfig
from sage_grpo.training.inputs import Overrides, check_routes, load_sources, training_prompts
from sage_grpo.utils import hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_folder_of_flow_grpo_trains_on_one_file_and_holds_out_the_other(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a cat\na dog\n")
    folder = DataConfig(prompts=str(tmp_path))
    assert [one.text for one in training_prompts(folder)] == ["a cat", "a dog"]
    assert folder.held_out is None
    (tmp_path / "train_metadata.jsonl").write_text(json.dumps({"tag": "color", "prompt": "a red cat"}))
    (tmp_path / "test.txt").write_text("a cow\n")
    config = TrainConfig(data=folder)
    train, held_out = load_sources(config, Overrides())
    assert train == [Prompt("a red cat", metadata={"tag": "color"})]
    assert held_out == [Prompt("a cow")]
    named = replace(config, data=replace(folder, eval_prompts="starter_eval"))
    assert len(load_sources(named)[1]) == 40
    (tmp_path / "train.txt").unlink()
    (tmp_path / "train_metadata.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="has no train prompts: none of train_metadata"):
        load_prompts(tmp_path)


def test_pictures_are_found_in_images_beside_the_rows(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for name in ("images/a.png", "images/b.png", "b.png"):
        (tmp_path / name).write_text("")
    rows = [{"prompt": "x", "image": "a.png"}, {"prompt": "x", "image": "b.png"}, {"prompt": "x", "images": ["a.png"]}]
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    found = [one.image for one in load_prompts(file)]
    assert found == [tmp_path / name for name in ("images/a.png", "b.png", "images/a.png")]


def test_prompts_under_the_names_of_other_trainers() -> None:
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a cat"}]
    rows = [{"input": "a cat"}, {"prompt": chat}]
    assert prompts_of(rows) == [Prompt("a cat"), Prompt("a cat")]
    with pytest.raises(ValueError, match="row 0: the prompt must be a text, got"):
        prompts_of([{"prompt": [*chat, chat[1]]}])


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "p.parquet"
    file.write_text("not parquet")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(ValueError, match=r'p\.parquet needs .* pip install "sage-grpo\[parquet\]"'):
            load_prompts(file)
    arrow, parquet = needs.module("pyarrow"), needs.module("pyarrow.parquet", "pyarrow")
    with pytest.raises(ValueError, match="cannot be read as parquet"):
        load_prompts(file)
    rows = [{"prompt": "a cat", "seed": 3, "extra": {"n": 1}}, {"prompt": "a dog", "seed": None, "extra": None}]
    parquet.write_table(arrow.Table.from_pylist(rows), file)
    assert load_prompts(file) == [
        Prompt("a cat", 3, metadata={"extra": {"n": 1}}),
        Prompt("a dog", metadata={"extra": None}),
    ]


def test_datasets_of_the_hub_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(repo: str, *, revision: str, split: str) -> list[dict[str, Any]]:
        asked.append((repo, revision, split))
        if split == "gone":
            raise ValueError('Unknown split "gone"')
        return [{"caption": f"a cat in {split}"}]

    stand_in = SimpleNamespace(__version__="4.1.0", load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    name = f"hf:me/cats@{COMMIT}"
    for source, split, used in ((name, "train", "train"), (name, "heldout", "test"), (f"{name}:val", "train", "val")):
        assert load_prompts(source, split=split) == [Prompt(f"a cat in {used}")]  # type: ignore[arg-type]
        assert asked[-1] == ("me/cats", COMMIT, used)
    with pytest.raises(ValueError, match=r'gone cannot be loaded \(ValueError: Unknown split "gone"\)'):
        load_prompts(f"{name}:gone")
    stand_in.__version__ = "3.6.0"
    with pytest.raises(ValueError, match="can run code of a repository"):
        load_prompts(name)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r'pip install "sage-grpo\[datasets\]"'):
        load_prompts(name)
    api = SimpleNamespace(dataset_info=lambda repo, revision: SimpleNamespace(sha=COMMIT))
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    for branch in ("hf:me/cats", "hf:me/cats@main:val"):
        with pytest.raises(hub.HubError, match=f"name the commit. The present one is hf:me/cats@{COMMIT}"):
            load_prompts(branch)
    with pytest.raises(hub.HubError, match="not the name of a dataset"):
        load_prompts("hf:cats")


def sourced(*sizes: tuple[int, float]) -> list[Prompt]:
    sources = [PromptSource(path=str(number), weight=weight) for number, (_, weight) in enumerate(sizes)]
    return [
        Prompt(f"{one.path}/{n}", source=one)
        for one, (size, _) in zip(sources, sizes, strict=True)
        for n in range(size)
    ]


def test_sources_are_drawn_by_weight_and_each_goes_through_its_prompts() -> None:
    """The size of a source does not count, a position is all that a resumed run needs, and the seed decides."""
    prompts = sourced((7, 3.0), (50, 1.0))
    taken = [prompt.text for prompt in PromptStream(prompts, 0).take(2000)]
    first = [text for text in taken if text.startswith("0/")]
    assert abs(len(first) / 2000 - 0.75) < 0.04  # four standard errors
    for start in range(0, 700, 7):
        assert max(Counter(first[start : start + 7]).values()) == 1
    resumed = PromptStream(prompts, 0)
    resumed.position = 137
    assert [prompt.text for prompt in resumed.take(40)] == taken[137:177]
    assert [prompt.text for prompt in PromptStream(prompts, 1).take(40)] != taken[:40]


def test_one_source_is_the_stream_that_it_always_was() -> None:
    """The order of runs of earlier versions."""
    prompts = [Prompt(str(number)) for number in range(5)]
    expected = ["4", "2", "1", "3", "0", "3", "4", "1", "0", "2"]
    assert [one.text for one in PromptStream(prompts, 0).take(10)] == expected
    alone = [replace(one, source=PromptSource(path="a", weight=3.0)) for one in prompts]
    assert [one.text for one in PromptStream(alone, 0).take(10)] == expected


def test_a_list_of_sources_is_an_option(tmp_path: Path) -> None:
    for name, text in (("a.txt", "a cat"), ("b.jsonl", '{"prompt": "b dog", "rewards": "clip"}')):
        (tmp_path / name).write_text(text)
    file = tmp_path / "c.yaml"
    file.write_text(
        f"data:\n  prompts:\n  - {{path: {tmp_path}/a.txt, weight: 2}}\n  - path: {tmp_path}/b.jsonl\n"
        "rewards:\n- {name: clip, options: {model: x}}\n"
    )
    config = parse(TrainConfig, ["--config", str(file)], prog="train")
    prompts, held_out = load_sources(config)
    assert [(one.text, one.rewards, one.source.weight) for one in prompts if one.source] == [
        ("a cat", (), 2.0),
        ("b dog", ("clip",), 1.0),
    ]
    assert held_out == []
    plain = parse(TrainConfig, ["--data.prompts", '["a", {"path": "b", "weight": 2}]'], prog="train").data
    assert plain.sources == [PromptSource(path="a"), PromptSource(path="b", weight=2.0)]
    for value, says in (
        ('[{"path": "a", "weight": 0}]', r"data.prompts\[0\].weight must be positive"),
        ('[{"pth": "a"}]', "data.prompts: a source is a FILE or {path: FILE, weight: NUMBER}, got"),
        ('[{"path": "a"}, {"path": "a"}]', "one or more different sources, got a, a"),
        ("[]", "one or more different sources, got none"),
        ('[{"path": "starter_eval"}]', "held out and never trained on"),
    ):
        with pytest.raises(ConfigError, match=says):
            parse(TrainConfig, ["--data.prompts", value], prog="train")


def test_rewards_that_rows_name_are_checked_before_a_run() -> None:
    specs = [RewardSpec(name="clip"), RewardSpec(name="ocr", label="text"), RewardSpec(name="hpsv2", metric_only=True)]
    (both,) = prompts_of([{"prompt": "a", "rewards": "clip, text,clip"}])
    assert both.rewards == ("clip", "text")
    assert not both.metadata
    check_routes(specs, [both, Prompt("b")])
    check_routes([], [both])  # a run without rewards scores nothing
    with pytest.raises(RewardConfigError, match="there is no reward 'ocr'"):
        check_routes(specs, [Prompt("a", rewards=("ocr",))])
    with pytest.raises(RewardConfigError, match=r"none of hpsv2 counts \(metric_only\). Name one of clip, text"):
        check_routes(specs, [Prompt("a", rewards=("hpsv2",))])
    for wrong in ([1.0], 3, ["clip", ""]):
        with pytest.raises(ValueError, match="row 0: rewards must name the rewards"):
            prompts_of([{"prompt": "a", "rewards": wrong}])
    with pytest.raises(RewardConfigError, match="there is no reward 'ocr'"):
        load_sources(TrainConfig(), Overrides(prompts=[], held_out=[Prompt("a", rewards=("ocr",))]))
