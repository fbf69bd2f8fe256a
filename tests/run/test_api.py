"""The Python API: runs with objects and code of one's own, callbacks, and what is left of them."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sage_grpo
import trainer_toys
from sage_grpo import StopRequest, evaluate, generate, own_reward
from sage_grpo.callbacks.journal import read_events, read_rows
from sage_grpo.callbacks.terminal import Terminal
from sage_grpo.cli.train import run as command
from sage_grpo.config.parsing import ConfigError
from sage_grpo.distributed.world import World
from sage_grpo.models.spec import ModelSpec
from sage_grpo.objectives.options import ObjectiveSpec
from sage_grpo.run.preflight import preflight
from sage_grpo.run.session import run
from sage_grpo.samplers.kernels import KernelSpec
from sage_grpo.training.config import EvalConfig, LogConfig, TrainConfig
from sage_grpo.training.events import RunEnded
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
    reward = own_reward(bright, batch_size=0)
    return {"model": toy(), "rewards": reward, "prompts": WORDS, "held_out": WORDS}


def final(out: Path | str) -> bytes:
    return (Path(out) / "final" / "toy.safetensors").read_bytes()


def values(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def test_objects_train_as_what_they_stand_for(config, own, tmp_path: Path) -> None:
    run(config)
    result = sage_grpo.train(replace(config, out=str(tmp_path / "own")), **own)
    assert (result.iteration, result.stopped, result.out) == (2, False, tmp_path / "own")
    assert final(config.out) == final(result.out)
    assert values(result.metrics) == values(read_rows(Path(config.out) / "metrics.jsonl"))
    assert result.model is own["model"]
    assert any(not torch.equal(p, q) for p, q in zip(result.model.network.parameters(), toy().network.parameters()))


def test_what_a_callback_raises_ends_the_run_saved(config, tmp_path: Path) -> None:
    config = replace(config, keep=replace(config.keep, checkpoint_every=9))

    def fails(event) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        sage_grpo.train(config, on_iteration=fails)
    assert [folder.name for folder in (Path(config.out) / "checkpoints").iterdir()] == ["000001"]
    assert sage_grpo.train(config).iteration == 2
    run(replace(config, out=str(tmp_path / "whole")))
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


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        ({"model": torch.nn.Linear(1, 1)}, "A Linear is not a VelocityModel: it lacks spec, video"),
        ({"held_out": []}, "held_out holds no prompts"),
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


OWN = "trainer_toys:Quiet"


def test_a_kernel_of_ones_own_trains_and_replays_to_the_bit(make_config, make_trainer) -> None:
    config = make_config(kernel=KernelSpec(name=OWN, eta=0.5))
    trainer = make_trainer(config)
    assert type(trainer.planner.kernel) is trainer_toys.Quiet
    assert trainer.step()["ratio/first_log"] == 0.0
    assert trainer.log[1]["ratio/largest_log"] > 0


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"kernel": KernelSpec(name="subprocess:Popen")}, "is not a kernel: it must be a dataclass with"),
        ({"objective": ObjectiveSpec(kind="trainer_toys:bright")}, "'trainer_toys:bright' is not an objective"),
        ({"log": LogConfig(sinks=["trainer_toys:Kep"])}, "trainer_toys has no 'Kep'. Did you mean 'Kept'"),
        ({"log": LogConfig(sinks=["trainer_toys:bright"])}, "log.sinks 'trainer_toys:bright' is not a sink"),
    ],
)
def test_wrong_own_code_is_refused_before_a_run(named, said: str, make_config) -> None:
    with pytest.raises(ValueError, match=said):
        preflight(make_config(**named))


def test_a_sink_of_ones_own_gets_every_row(make_config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_toys.Kept, "rows", [])
    monkeypatch.setattr(trainer_toys.Kept, "closed", [])
    config = make_config(iterations=1, log=LogConfig(tensorboard=False, progress=False, sinks=["trainer_toys:Kept"]))
    run(config)
    written = [row["iteration"] for row in read_rows(Path(config.out) / "metrics.jsonl")]
    assert [iteration for iteration, _ in trainer_toys.Kept.rows] == written
    assert trainer_toys.Kept.closed == [Path(config.out)]


def test_training_ends_with_its_report_and_clips_side_by_side(make_config, capsys, monkeypatch) -> None:
    config = make_config(iterations=1, evaluate=EvalConfig(every=1, prompts=2, steps=2, show=1))
    out, phases, seen = Path(config.out), [], []
    monkeypatch.setattr("sage_grpo.run.session.opening", lambda config, ranks: ["a forecast", f"of {ranks}"])
    monkeypatch.setattr(World, "note", lambda self, where: phases.append(where))
    monkeypatch.setattr(Terminal, "listen", lambda self, phase, *counts: seen.append("{} {}/{}".format(phase, *counts)))
    assert command(config) == 0
    said = capsys.readouterr().out
    assert said.startswith("a forecast\nof 1\n")
    assert f"Report: {out / 'report.html'}   before and after: {out / 'before_after'}" in said
    assert " x 1 branches" not in said, "which every run without branches has"
    assert {phase.split()[0] for phase in phases} >= {"evaluate", "rollout", "decode", "update"}
    assert all(re.fullmatch(r"\w+ \d+/\d+", phase) for phase in phases)
    assert seen == phases
    assert [line.split(":")[0] for line in (out / "config.yaml").read_text().splitlines() if line[0] not in " -"] == [
        one.name for one in fields(config)
    ]
    assert replace(run(config), model=None) == RunEnded(1, stopped=False), "it is finished"
    assert "a cat" in (out / "report.html").read_text()
    assert [file.name for file in (out / "before_after").iterdir()] == ["00-a-cat.mp4"]
    index = [json.loads((out / "videos" / f"heldout-00000{number}.json").read_text()) for number in (0, 1)]
    for found in index:
        assert [(row["prompt"], row["noise"], row["clip"] is None) for row in found["rows"]] == [
            ("a cat", "1234/0/0", False),
            ("a red dog", "1234/1/0", True),
        ]
    scores = [row["scores"]["total"] for row in index[1]["rows"]]
    assert scores[0] != scores[1]
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval/total"] == pytest.approx(sum(scores) / 2)
    assert index[0]["rows"][0]["scores"] != index[1]["rows"][0]["scores"]
    assert len(json.loads((out / "schedule.json").read_text())["sigmas"]) == config.rollout.steps + 1
    assert [event["kind"] for event in read_events(out)] == ["start", "finish"]
    # What goes wrong with the page does not touch the command.
    monkeypatch.setattr("sage_grpo.tools.report.page.render", lambda data: 1 / 0)
    begun: list[int] = []
    monkeypatch.setattr("sage_grpo.callbacks.terminal.Terminal.start_at", lambda terminal, number: begun.append(number))
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        assert command(replace(config, iterations=2)) == 0
    assert (out / ".finished").read_text().strip() == "2"
    assert begun == [1]
    assert [event["kind"] for event in read_events(out)] == ["start", "finish", "resume", "finish"]


def test_every_row_has_the_scores_of_its_own_clip(make_config, make_trainer) -> None:
    config = make_config(evaluate=EvalConfig(every=1, prompts=3, per_prompt=2, steps=2, show=5))
    trainer = make_trainer(config)
    trainer.encode_prompts()
    found = trainer.evaluate()
    assert [row["clip"] for row in found.rows] == [0, 1, 2, 3, 4, None]
    assert len({row["noise"] for row in found.rows}) == 6
    for row in found.rows[:5]:
        assert row["prompt"] == found.captions[row["clip"]]
        assert row["scores"]["total"] == pytest.approx(float(found.clips[row["clip"]].float().mean()) / 255, abs=1e-5)
    assert len({round(row["scores"]["total"], 7) for row in found.rows}) > 3
