"""How a session opens, ends and tells of it, on as much of a world and a trainer as it asks."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sage_grpo.callbacks.terminal import iteration_line
from sage_grpo.cli.train import run
from sage_grpo.data.prompts import Prompt
from sage_grpo.distributed.checkpoint import SaveFailed
from sage_grpo.distributed.world import RankLost
from sage_grpo.models.base import Abilities
from sage_grpo.models.spec import LoraSpec
from sage_grpo.recipes import recipe
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run import session
from sage_grpo.run.identity import FoundRun
from sage_grpo.run.preflight import (
    NOT_EVALUATED,
    check_code,
    check_files,
    check_model,
    check_plan,
    needs,
    preflight,
    prompt_remarks,
)
from sage_grpo.samplers.windows import Window
from sage_grpo.training.config import LogConfig, TrainConfig
from sage_grpo.training.inputs import Overrides
from sage_grpo.utils.imports import ObjectNeeded


@pytest.mark.parametrize(("raised", "closed"), [(None, 1), (ValueError("x"), 1), (RankLost("rank 1"), 0)])
def test_a_world_is_closed_unless_a_rank_is_gone(raised: Exception | None, closed: int, monkeypatch) -> None:
    done, told = [], []
    world = SimpleNamespace(size=2, is_main=True, watching=nullcontext, close=lambda: done.append(1))
    monkeypatch.setattr(session, "start", lambda parallel, device: world)
    monkeypatch.setattr(session, "preflight", lambda config, size, given: [f"{size} ranks", str(given)])
    refused = pytest.raises(type(raised)) if raised else nullcontext()
    with refused, session.session(recipe("shapes/sage"), "given", told.append) as opened:  # type: ignore[arg-type]
        assert opened is world
        if raised:
            raise raised
    assert len(done) == closed
    assert told == ["2 ranks", "given"]
    world.is_main = False
    with session.session(recipe("shapes/sage"), None, told.append):
        pass
    with session.session(recipe("shapes/sage")):
        pass
    assert len(told) == 2


def test_objects_of_a_program_cannot_be_loaded_by_their_names() -> None:
    config = recipe("shapes/sage")
    with pytest.raises(ObjectNeeded, match=r"got its prompts as an object .*Give a file \(--data\.prompts"):
        preflight(replace(config, data=replace(config.data, prompts="object:rows")))


class Said:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str | None]] = []
        self.console = SimpleNamespace(print=lambda table: None)

    def say(self, text: str, *, style: str | None = None) -> None:
        self.lines.append((text, style))


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    sentinel = SimpleNamespace(doubts=[])
    return SimpleNamespace(
        config=replace(recipe("shapes/sage"), out=str(tmp_path)), export=lambda folder: folder.mkdir(),
        state=SimpleNamespace(iteration=4, best={}, sentinel=sentinel, size=9, load=lambda *words: None),
        world=SimpleNamespace(is_main=True, from_main=lambda text: text, barrier=lambda: None),
    )  # fmt: skip


def test_a_run_is_finished_only_with_its_weights(trainer: Any, tmp_path: Path) -> None:
    said: Any = Said()
    session._finish(trainer, said)
    assert (tmp_path / ".finished").read_text() == "4\n"
    assert said.lines[0][0].startswith(f"Done. Weights: {tmp_path / 'final'}   metrics: {tmp_path / 'metrics.jsonl'}")
    (tmp_path / ".finished").unlink()
    with pytest.raises(SaveFailed, match=r"final: FileExistsError: .*Checkpoint 4 has them"):
        session._finish(trainer, said)
    assert not (tmp_path / ".finished").exists()


def test_a_run_begins_with_its_noise_levels_and_says_which_clips_it_learns(trainer: Any, tmp_path: Path) -> None:
    said, examples = Said(), SimpleNamespace(summary="2 of 3 clips")
    groups = [SimpleNamespace(noise=lambda offset=offset: {"offset": offset}) for offset in (3, 4)]
    trainer.inputs, trainer.model = SimpleNamespace(examples=examples), SimpleNamespace(video="format")
    trainer.state.stream = SimpleNamespace(peek=lambda count: [])
    trainer.planner = SimpleNamespace(plan=lambda iteration, prompts: SimpleNamespace(groups=groups))
    found = FoundRun("", {}, ["optimizer.lr", "seed"], ["a note"], None)
    session._open_metrics(trainer, found, said, None).close()  # type: ignore[arg-type]
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert event["text"] == "a note changed: optimizer.lr, seed"
    assert said.lines == [("2 of 3 clips", None)]
    assert json.loads((tmp_path / "schedule.json").read_text()) == {"offset": 3}


def test_the_header_counts_the_branches_of_guidance(trainer: Any, tmp_path: Path, monkeypatch) -> None:
    said, told, asked = Said(), [], []
    said.console.print = told.append
    guided = Abilities(branches=lambda sigma, guidance: asked.append((sigma, guidance)) or 2)
    trainer.model = SimpleNamespace(abilities=guided, device="cpu")
    trainer.planner = SimpleNamespace(plan=lambda number, prompts: None, foresee=lambda plan: plan)
    trainer.dims, trainer.clip_range = 3, 0.1
    trainer.state.stream = SimpleNamespace(peek=lambda count: [])
    monkeypatch.setattr(session, "evaluations_of", lambda config, plan, branches: branches(0.5))
    monkeypatch.setattr(session, "plan_table", lambda config, plan, **named: named["evaluations"])
    session._resume(trainer, tmp_path, FoundRun("", {}, [], [], None), said)  # type: ignore[arg-type]
    assert (told, asked) == ([2], [(0.5, trainer.config.model.training_guidance)])


ROW = {
    "reward/total": 1.175, "reward/group_std": 0.256, "kl/total": 6.7e-4, "kl/position": 6.7e-4, "ratio/clip_fraction": 0.12,
    "ratio/first_log": 0.0, "ratio/largest_log": 0.01,
    "gradient/norm": 1.19, "time/total": 17.9,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sage_grpo.models.spec.ModelSpec.load", lambda *_, **__: pytest.fail("a model was loaded"))


def test_plans_that_cannot_work_are_refused_before_a_model_is_loaded(tmp_path) -> None:
    config = replace(recipe("shapes/sage"), out=str(tmp_path / "run"))
    window = replace(config.rollout, window=Window(kind="drawn", at=[5]))
    for change, said in (
        ({"update": replace(config.update, updates_per_rollout=9)}, "9"),
        ({"rollout": window}, "window.at names step 5"),
        ({"rewards": []}, "rewards: none of them counts"),
        ({"rewards": [RewardSpec(name="no_such_thing:reward")]}, "there is no module no_such_thing"),
        ({"model": replace(config.model, family="os.path")}, "no function load"),
        ({"model": replace(config.model, path=str(tmp_path))}, "model_index.json"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            run(replace(config, **change))
    assert not (tmp_path / "run").exists()


def test_a_line_has_no_kl_and_no_clip_where_the_method_has_none() -> None:
    """One update has ratios of 1, and its largest is that of the first; a trust region without a term has no KL but 0."""
    bare = {name: value for name, value in ROW.items() if name != "kl/position"} | {"kl/total": 0.0}
    once = {"ratio/clip_fraction": 0.0, "ratio/largest_log": 0.0}
    assert "kl" not in iteration_line(1, 9, bare, 1.0)
    assert "clip 12%" in iteration_line(1, 9, bare, 1.0)
    assert "clip" not in iteration_line(1, 9, ROW | once, 1.0)
    assert "kl 6.7e-04" in iteration_line(1, 9, ROW | once, 1.0)
    assert iteration_line(1, 9, bare | once, 1.0) == "1/9  reward 1.175 ± 0.256  grad 1.2  17.9 s  1 s left"


def test_more_evaluation_prompts_than_there_are_is_told_with_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a cat\na dog\n")
    (tmp_path / "held.txt").write_text("a tree\nthe sea\na hill\n")
    config = recipe("shapes/sage")
    data = replace(config.data, prompts=str(tmp_path / "train.txt"), eval_prompts=str(tmp_path / "held.txt"))

    def remarks(asked: int) -> list[str]:
        evaluate = replace(config.evaluate, prompts=asked)
        return preflight(replace(config, data=data, evaluate=evaluate))

    (told,) = remarks(16)
    assert "asks for 16 prompts" in told
    assert "only 3" in told
    assert remarks(3) == []
    data = replace(data, eval_prompts=None)
    assert remarks(3) == [NOT_EVALUATED]


@pytest.mark.parametrize(
    ("dtype", "device", "told"), [("bfloat16", "cpu", True), ("float32", "cpu", False), ("bfloat16", "cuda", False)]
)
def test_bfloat16_on_a_cpu_is_told_before_it_takes_hours(dtype: str, device: str, told: bool, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules[preflight.__module__], "choose_device", torch.device)
    config = recipe("shapes/sage")
    model = replace(config.model, dtype=dtype, device=device)
    remarks = preflight(replace(config, model=model))
    assert [text for text in remarks if "bfloat16 is hundreds of times slower" in text] == remarks
    assert len(remarks) == told


def test_how_much_noise_a_step_holds_is_left_to_the_models_grid() -> None:
    """Preflight knows no grid but an even one, where dance would hold too much before its last step."""
    config = recipe("shapes/dance_grpo")
    rollout = replace(config.rollout, steps=20, window=Window(kind="fixed", start=18, length=1))
    kernel = replace(config.kernel, eta=0.5)
    update = replace(config.update, updates_per_rollout=1)
    config = replace(config, rollout=rollout, kernel=kernel, update=update)
    check_plan(config)
    late = replace(rollout, window=Window(kind="fixed", start=19, length=1))
    with pytest.raises(ValueError, match="No step of the rollout can be trained"):
        check_plan(replace(config, rollout=late))


def test_models_and_code_that_are_named_are_looked_for(tmp_path: Path) -> None:
    config = recipe("shapes/sage")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()

    def of(**changes: object) -> TrainConfig:
        return replace(config, model=replace(config.model, **changes))

    for name, said in (("file", "is a file: give the folder"), ("empty", "model_index.json")):
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            check_model(of(path=str(tmp_path / name)).model)
    check_model(of(path="on/the-hub", family="wan").model)
    check_model(config.model)
    own = Overrides(model=object(), rewards={"object:x": object()})  # type: ignore[arg-type, dict-item]
    named = [RewardSpec(name="clip"), RewardSpec(name="object:x")]
    check_code(replace(of(family="no_such.family"), rewards=named), own)
    for odd, said in (
        (of(family="no_such.family"), "no_such"),
        (replace(config, log=LogConfig(sinks=["no_such:Sink"])), "no_such"),
        (replace(config, rewards=[RewardSpec(name="clip", device="cud")]), "cud"),
        (replace(config, rewards=[RewardSpec(name="object:y")]), "object"),
    ):
        with pytest.raises(ValueError, match=said):
            check_code(odd, Overrides())


def test_what_a_configuration_names_is_needed_and_what_a_program_gives_is_not(monkeypatch) -> None:
    config = recipe("wan/rft")
    data = replace(config.data, clips="clips.jsonl", eval_prompts="startr_eval")
    model = replace(config.model, path="own/Model", lora=LoraSpec(path="my_lora"))
    config = replace(config, data=data, model=model)
    found = {need.key: need for need in needs(config) if not need.key.startswith("rewards")}
    assert list(found) == ["data.clips", "data.eval_prompts", "model.path", "model.lora.path"]
    assert "Did you mean 'starter_eval'" in found["data.eval_prompts"].source
    assert [found[f"model.{name}"].pinned for name in ("lora.path", "path")] == [True, False]
    assert found["model.path"].hub == "model_index.json"
    assert found["model.path"].source.startswith("a diffusers checkpoint")
    data = replace(config.data, clips=None, prompts="startr", eval_prompts=None)
    (prompts, *_) = needs(replace(config, data=data))
    assert (prompts.key, "Did you mean 'starter'" in prompts.source) == ("data.prompts", True)
    own = Overrides(model=object(), prompts=[Prompt("a")], held_out=[Prompt("b")])  # type: ignore[arg-type]
    shapes = recipe("shapes/sage")
    odd = replace(shapes, data=replace(shapes.data, prompts="x.txt", eval_prompts="y.txt"))
    check_files(odd, own)
    with pytest.raises(FileNotFoundError, match=r"2 files or folders are missing:\n  data.prompts x.txt\n"):
        check_files(odd)
    with pytest.raises(FileNotFoundError, match=r"^A file or folder is missing:\n  data.eval_prompts y.txt\n .*$"):
        check_files(odd, Overrides(prompts=[Prompt("a")]))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    fetched = replace(odd, model=replace(odd.model, path="own/Model"))
    with pytest.raises(FileNotFoundError, match=r" data.prompts x.txt\n .*\nWould be downloaded .* hub: own/Model\.$"):
        check_files(fetched, Overrides(held_out=[Prompt("b")]))


def test_prompts_are_alike_by_their_words_and_pictures(tmp_path: Path) -> None:
    a, b = Prompt("A  cat"), Prompt("a dog")
    (told,) = prompt_remarks([a, Prompt("a cat"), b, Prompt("a cat", seed=1)], [])
    assert told.startswith("1 of 4 training prompts are copies of another ('a cat' occurs 2 times)")
    (told,) = prompt_remarks([], [b, b, b])
    assert told.startswith("2 of 3 held-out prompts are copies")
    assert prompt_remarks([a], [b]) == []
    image, other = tmp_path / "a.png", tmp_path / "b.png"
    a, b = Prompt("A  cat", image=image), Prompt("a cat", image=image)
    (told,) = prompt_remarks([a], [b, Prompt("a cat", image=other), Prompt("a dog")])
    assert told.startswith("1 of 3 held-out prompts are trained on as well")
    assert prompt_remarks([Prompt("a", metadata={"n": 1}), Prompt("a", metadata={"n": 2})], []) == []
