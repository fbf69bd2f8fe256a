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
    seen: list[Any] = []

    def checkpoint(event) -> None:
        assert event.complete
        assert event.folder.is_dir()
        seen.append(event)

    result = sage_grpo.train(config, on_iteration=seen.append, on_evaluation=seen.append, on_checkpoint=checkpoint)
    assert [(type(event).__name__.removesuffix("Event"), event.iteration) for event in seen] == [
        ("Evaluation", 0), ("Iteration", 1), ("Checkpoint", 1), ("Iteration", 2), ("Evaluation", 2), ("Checkpoint", 2),
    ]  # fmt: skip
    told = [event for event in seen if hasattr(event, "metrics")]
    assert [(len(event.videos), len(event.prompts)) for event in told] == [(1, 1), (8, 8), (8, 8), (1, 1)]
    for event, row in zip(told, result.metrics):
        assert {name: row[name] for name in event.metrics} == event.metrics
    assert told[0].best
    assert seen[2].folder == Path(config.out) / "checkpoints" / "000001"


def test_what_a_callback_raises_ends_the_run_saved(config, tmp_path: Path) -> None:
    config = replace(config, keep=replace(config.keep, checkpoint_every=9))

    def fails(event) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        sage_grpo.train(config, on_iteration=fails)
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

    text = "class A:\n    'words'\n    def __call__(self, x, y=1):\n        return x in {0, 8}\n"
    assert of(text) == of("\n\n" + text.replace("'words'", "'other words'"))  # neither its place nor its description
    assert of(text) == of(text.replace("{0, 8}", "{8, 0}"))  # sets have an order of their own in every process
    for old, new in (("{0, 8}", "{0, 9}"), ("y=1", "y=2"), ("x in", "x not in")):
        assert of(text) != of(text.replace(old, new)), new
    assert stable(object()) == "<object>"


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


def test_a_run_with_objects_is_evaluated_with_them_and_makes_their_clips(config, own, tmp_path: Path) -> None:
    result = sage_grpo.train(replace(config, iterations=1), **own)
    found = {name: value for name, value in result.metrics[-1].items() if name.startswith("eval/")}
    out, objects = str(result.out), {"rewards": own["rewards"], "prompts": WORDS}
    assert evaluate(out, model=toy(), **objects).metrics == found
    assert evaluate(out, model=toy(), weights="base", **objects).metrics != found
    settings = EvalConfig(prompts=2, steps=3, show=1)
    assert evaluate(model=own["model"], **objects, settings=settings, micro_batch=4).metrics == found
    wanted = [{"prompt": "a cat", "seed": 3}, "a dog"]
    clips = generate(wanted, run=out, model=toy(), steps=3)
    assert (clips.prompts, clips.seeds, clips.fps) == (["a cat", "a dog"], [3, 1], 8.0)
    other, same = (generate(those, model=own["model"], steps=3) for those in (["a cat", "a dog"], wanted))
    assert torch.equal(clips.videos, same.videos)
    assert not torch.equal(clips.videos, other.videos)
    assert [file.is_file() for file in clips.save(tmp_path / "clips")] == [True, True]
    with pytest.raises(ConfigError, match=r"generate has no option 'stpes'.*Did you mean 'steps'"):
        generate("a cat", model=toy(), stpes=3)
