"""The Python API: runs with objects of one's own, callbacks, threads, and what is left of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sage_grpo
from sage_grpo import StopRequest, evaluate, generate, own_reward
from sage_grpo.configure import ConfigError
from sage_grpo.folder.identity import of_object, stable
from sage_grpo.folder.journal import read_rows
from sage_grpo.models.spec import ModelSpec
from sage_grpo.session import run as run_command
from sage_grpo.training.config import EvalConfig, TrainConfig
from trainer_toys import bright
from trainer_zoo.toy import ToyModel

WORDS = ["a cat", "a red dog", "a bird", "the sea", "a tree"]


class Level:
    """A reward object with a state."""

    names = ("bright",)

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def __call__(self, videos: torch.Tensor, prompts: list[str], fps: float) -> dict[str, torch.Tensor]:
        return {"bright": bright(videos, prompts, fps) * self.factor}


def toy() -> ToyModel:
    return ToyModel(ModelSpec(family="trainer_zoo.toy"))


@pytest.fixture
def config(make_config) -> TrainConfig:
    return make_config(iterations=2)


@pytest.fixture
def own() -> dict[str, Any]:
    """Objects that are what the configuration names."""
    reward = own_reward(bright, batch_size=0)
    return {"model": toy(), "rewards": reward, "prompts": WORDS, "held_out": WORDS}


def final(out: Path | str) -> bytes:
    return (Path(out) / "final" / "toy.safetensors").read_bytes()


def values(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def test_objects_train_as_what_they_stand_for(config, own, tmp_path: Path) -> None:
    run_command(config)
    result = sage_grpo.train(replace(config, out=str(tmp_path / "own")), **own)
    assert (result.iteration, result.stopped, result.out) == (2, False, tmp_path / "own")
    assert final(config.out) == final(result.out)
    assert values(result.metrics) == values(read_rows(Path(config.out) / "metrics.jsonl"))
    assert result.model is own["model"]
    assert any(not torch.equal(p, q) for p, q in zip(result.model.network.parameters(), toy().network.parameters()))


def test_callbacks_see_what_the_journal_has(config) -> None:
    seen: list[tuple[str, int]] = []
    rows, folders, best = [], [], []

    def iteration(event) -> None:
        seen.append(("iteration", event.iteration))
        rows.append(event.metrics)
        assert event.videos.shape == (8, 2, 8, 8, 3)
        assert len(event.prompts) == 8

    def evaluation(event) -> None:
        seen.append(("evaluation", event.iteration))
        rows.append(event.metrics)
        best.append(event.best)
        assert len(event.videos) == len(event.prompts) == 1

    def checkpoint(event) -> None:
        seen.append(("checkpoint", event.iteration))
        folders.append(event.folder)
        assert event.complete
        assert event.folder.is_dir()

    hooks = {"on_iteration": iteration, "on_evaluation": evaluation, "on_checkpoint": checkpoint}
    result = sage_grpo.train(config, **hooks)
    assert seen == [
        ("evaluation", 0), ("iteration", 1), ("checkpoint", 1), ("iteration", 2), ("evaluation", 2), ("checkpoint", 2),
    ]  # fmt: skip
    for told, row in zip(rows, result.metrics):
        assert {name: row[name] for name in told} == told
    assert best[0]
    assert folders == [Path(config.out) / "checkpoints" / f"00000{number}" for number in (1, 2)]


@pytest.mark.parametrize(
    "where",
    ["on_iteration", *(pytest.param(f"on_{what}", marks=pytest.mark.slow) for what in ("evaluation", "checkpoint"))],
)
def test_what_a_callback_raises_ends_the_run_saved(where: str, config, tmp_path: Path) -> None:
    config = replace(config, keep=replace(config.keep, checkpoint_every=1 if where == "on_checkpoint" else 9))
    config = replace(config, evaluate=replace(config.evaluate, every=1))

    def fails(event) -> None:
        if event.iteration == 1:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        sage_grpo.train(config, **{where: fails})
    assert [folder.name for folder in (Path(config.out) / "checkpoints").iterdir()] == ["000001"]
    assert sage_grpo.train(config).iteration == 2
    run_command(replace(config, out=str(tmp_path / "whole")))
    assert final(config.out) == final(tmp_path / "whole")


def test_a_stop_before_the_first_iteration_leaves_nothing_half_done(config) -> None:
    stop = StopRequest()
    stop.set()
    result = sage_grpo.train(config, stop=stop)
    assert (result.iteration, result.stopped) == (0, True)
    assert not (Path(config.out) / "checkpoints").exists()


def test_own_objects_are_compared_when_a_run_is_continued(config, own, capsys: pytest.CaptureFixture[str]) -> None:
    one = replace(config, iterations=1)
    sage_grpo.train(one, **own)
    with pytest.raises(ConfigError, match=r"differs from this one.*\n  prompts: "):
        sage_grpo.train(config, **{**own, "prompts": [*WORDS[:-1], "a flower"]})

    def bright(videos, prompts, fps):  # the same name, other code
        return videos.float().mean(dim=(1, 2, 3, 4))

    with pytest.raises(ConfigError, match=r"\n  plugins: the code of rewards or of a model of your own\n"):
        sage_grpo.train(config, **{**own, "rewards": own_reward(bright, batch_size=0)})
    with pytest.raises(ConfigError, match=r"\n  rewards: .*object:bright"):
        sage_grpo.train(config, **{**own, "rewards": Level()})
    with pytest.raises(ConfigError, match=r"\n  model.family: .*object:ToyModel"):
        sage_grpo.train(config, **{**own, "model": None})
    capsys.readouterr()
    assert sage_grpo.train(config, **{**own, "model": toy()}).iteration == 2
    assert "The code of bright is that of the run so far" in " ".join(capsys.readouterr().out.split())


def test_frozen_weights_of_a_model_object_count_and_trained_ones_do_not(config) -> None:
    def half_frozen(frozen: float, trained: float) -> ToyModel:
        model = toy()
        with torch.no_grad():
            model.network.first.weight[0, 0] = frozen
            model.network.second.weight[0, 0] = trained
        model.network.first.requires_grad_(False)
        chosen = {name: p for name, p in model.network.named_parameters() if p.requires_grad}
        model.trainable = lambda: chosen
        return model

    sage_grpo.train(replace(config, iterations=1), model=half_frozen(0.5, 0.5))
    with pytest.raises(ConfigError, match=r"\n  weights: .*frozen weights of a model object"):
        sage_grpo.train(config, model=half_frozen(0.6, 0.5))
    assert sage_grpo.train(config, model=half_frozen(0.5, 0.6)).iteration == 2


def test_fingerprints_tell_code_apart_and_nothing_else() -> None:
    def of(text: str) -> str:
        names: dict[str, Any] = {"__name__": "notebook"}
        exec(text, names)
        return of_object(names["A"]())

    text = "class A:\n    'words'\n    level = 3\n    def __call__(self, x, y=1):\n        return x in {0, 8}\n"
    assert of(text) == of("\n\n" + text.replace("'words'", "'other words'"))  # neither its place nor its description
    assert of(text) == of(text.replace("{0, 8}", "{8, 0}"))  # sets have an order of their own in every process
    for old, new in (("level = 3", "level = 4"), ("{0, 8}", "{0, 9}"), ("y=1", "y=2"), ("x in", "x not in")):
        assert of(text) != of(text.replace(old, new)), new
    assert stable({"picture": object(), "worth": [1, {"a"}]}) == "{'picture': <object>, 'worth': [1, {'a'}]}"


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        ({"model": torch.nn.Linear(1, 1)}, "A Linear is no VelocityModel: it lacks spec, video"),
        ({"held_out": []}, "held_out: there is no row"),
        ({"rewards": []}, "none of them counts"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_written(objects: dict[str, Any], said: str, config) -> None:
    with pytest.raises(ValueError, match=said):
        sage_grpo.train(config, **objects)
    assert not Path(config.out).exists()


@pytest.fixture
def ran(config, own) -> dict[str, Any]:
    """A run with objects of its own, and what its last evaluation found."""
    result = sage_grpo.train(config, **own)
    found = {name: value for name, value in result.metrics[-1].items() if name.startswith("eval/")}
    return {"out": str(result.out), "found": found, **own}


@pytest.mark.slow
def test_a_run_with_objects_is_evaluated_with_them(ran) -> None:
    objects = {"rewards": ran["rewards"], "prompts": WORDS}
    assert evaluate(ran["out"], model=toy(), **objects).metrics == ran["found"]
    assert evaluate(ran["out"], model=toy(), weights="base", **objects).metrics != ran["found"]
    settings = {"settings": EvalConfig(prompts=2, steps=3, show=1), "micro_batch": 4}
    assert evaluate(model=ran["model"], **objects, **settings).metrics == ran["found"]
    seen: list[str] = []

    def count(videos, prompts, fps):
        seen.extend(prompts)
        return [0.0] * len(prompts)

    evaluate(model=toy(), rewards=own_reward(count, try_out=False), prompts=WORDS * 15)
    assert len(seen) == 75  # more than a run evaluates by default


def test_clips_of_a_model_object_are_those_of_the_command(ran, tmp_path: Path) -> None:
    clips = generate([{"prompt": "a cat", "seed": 3}, "a dog"], run=ran["out"], model=toy(), steps=3)
    assert (clips.prompts, clips.seeds, clips.fps) == (["a cat", "a dog"], [3, 1], 8.0)
    assert torch.equal(clips.videos, generate(["a cat", "a dog"], model=ran["model"], steps=3, seed=0).videos) is False
    same = generate([{"prompt": "a cat", "seed": 3}, "a dog"], model=ran["model"], steps=3, batch=2)
    assert torch.equal(clips.videos, same.videos)
    files = clips.save(tmp_path / "clips")
    assert [file.is_file() for file in files] == [True, True]
    with pytest.raises(ConfigError, match=r"generate has no option 'stpes'.*Did you mean 'steps'"):
        generate("a cat", model=toy(), stpes=3)
