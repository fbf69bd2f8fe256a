"""Saved runs: the choice of their weights, and fingerprints of objects."""

from __future__ import annotations

import functools
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sage_grpo.config.parsing import ConfigError
from sage_grpo.distributed import checkpoint
from sage_grpo.distributed.world import World
from sage_grpo.models import ModelError
from sage_grpo.models.spec import LoraSpec, ModelSpec
from sage_grpo.recipes import recipe
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run import identity, lock, saved
from sage_grpo.run.saved import Choice, Weights, find_checkpoint, refuse_own


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of five iterations with checkpoints 2 and 4, whose best evaluation is a number in its folder."""
    root = tmp_path / "run"
    for number in (2, 4):
        (root / "checkpoints" / f"{number:06d}").mkdir(parents=True)
    (root / "best.txt").write_text("3")
    monkeypatch.setattr(checkpoint, "newest_good", lambda root: max(root.glob("0*"), default=None))
    monkeypatch.setattr(checkpoint, "find_fault", lambda folder: "broken" if (folder / "broken").exists() else None)
    monkeypatch.setattr(checkpoint, "read_meta", lambda folder, kinds: json.loads((root / "meta.json").read_text()))
    (root / "meta.json").write_text(json.dumps({"config": {"iterations": 5}, "best": {"iteration": 2}}))
    return root


SPEC, LORA = ModelSpec(path="base"), ModelSpec(path="base", lora=LoraSpec(rank=2))


def test_weights_are_found_where_the_run_has_them(run: Path) -> None:
    def of(spec: ModelSpec = SPEC, **choice: Any) -> Weights:
        return Choice(run=str(run), **choice).find(spec)

    root = run / "checkpoints"
    assert Choice().find(SPEC) == of(weights="base") == Weights(SPEC)
    assert of(checkpoint=2, ema=True) == Weights(SPEC, checkpoint=root / "000002", ema=True)
    assert of(weights="best", ema=False) == Weights(SPEC, checkpoint=root / "000002", ema=False)
    with pytest.raises(FileNotFoundError, match="its newest checkpoint is --checkpoint 4, of 5 iterations"):
        of()  # it is not at its end
    (run / "final").mkdir()
    with pytest.raises(FileNotFoundError, match="no final weights"):
        of()  # of a shorter run, which was then continued
    (run / "meta.json").write_text(json.dumps({"config": {"iterations": 4}, "best": {"iteration": 3}}))
    assert of() == of(weights="final") == Weights(SPEC, checkpoint=root / "000004")
    with pytest.raises(FileNotFoundError, match=r"no best weights.*Best weights need held-out prompts"):
        of(weights="best")
    (run / "best").mkdir()
    assert of(weights="best") == Weights(ModelSpec(path=str(run / "best")), exported=True)
    assert of(LORA, weights="best") == Weights(
        ModelSpec(path="base", lora=LoraSpec(rank=2, path=str(run / "best"))), exported=True
    )
    with pytest.raises(ValueError, match="leave --ema out"):
        of(weights="best", ema=True)
    (run / "meta.json").write_text(json.dumps({"config": {"iterations": 4}, "best": {"iteration": 0}}))
    with pytest.raises(ValueError, match=r"before training, so .* --weights base"):
        of(weights="best")
    for folder in root.iterdir():
        folder.rmdir()
    assert of() == Weights(ModelSpec(path=str(run / "final")), exported=True)
    with pytest.raises(FileNotFoundError, match=r"No checkpoint 2 under .*\(there: none\)"):
        of(checkpoint=2)
    with pytest.raises(FileNotFoundError, match="No usable checkpoint under"):
        find_checkpoint(run)


def test_a_checkpoint_is_whole_and_nothing_is_written_into_the_run(run: Path, tmp_path: Path) -> None:
    assert find_checkpoint(run) == run / "checkpoints" / "000004"
    (run / "checkpoints" / "000002" / "broken").write_text("")
    with pytest.raises(ValueError, match="000002 is damaged: broken"):
        find_checkpoint(run, 2)
    with pytest.raises(FileNotFoundError, match=r"No checkpoint 3 .*\(there: 2, 4\)"):
        find_checkpoint(run, 3)
    refuse_own(tmp_path / "runs", run)
    for out in (run, run / "x", run / ".." / "run"):
        with pytest.raises(ValueError, match="own folder"):
            refuse_own(out, run)


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"weights": "best"}, "--weights chooses among the weights of a run"),
        ({"checkpoint": 0, "ema": False}, "--checkpoint, --ema chooses"),
        ({"run": "r", "lora": "x", "checkpoint": 1}, "--lora and --checkpoint both name weights"),
        ({"run": "r", "lora": "x", "weights": "final"}, "goes on --weights base"),
        ({"run": "r", "weights": "final", "checkpoint": 1}, "--weights final and --checkpoint 1"),
        ({"run": "r", "weights": "base", "ema": False}, "--weights base has none"),
    ],
)
def test_choices_that_exclude_one_another_are_refused(choice: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Choice(**choice).find(SPEC)


def test_a_lora_takes_the_place_of_the_runs_own(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no LoRA"):
        Choice(lora=str(tmp_path)).find(SPEC)
    assert Choice(run="r", lora="x").find(LORA) == Weights(ModelSpec(path="base", train=False), lora="x")
    assert Choice(run="r", lora="x", weights="base").find(SPEC).lora == "x"
    assert Choice(lora="x").find(SPEC) == Weights(SPEC, lora="x")
    with pytest.raises(ValueError, match="both name an adapter"):
        Choice(lora="x").find(LORA)
    tunes = [Choice(lora="x"), Choice(run="r"), Choice(run="r", weights="best")]
    assert [one.tunes for one in (*tunes, Choice(run="r", weights="base"), Choice())] == [True] * 3 + [False] * 2
    assert (Choice(run="r", ema=True).base(), Choice(lora="x").base()) == (Choice(run="r", weights="base"), Choice())


def test_what_a_strangers_configuration_names_is_told() -> None:
    config = recipe("shapes/sage")
    named = [
        RewardSpec(name="remote", options={"urls": ["http://me:abc@host"]}), RewardSpec(name="vlm_judge", options={"url": "u"}),
        RewardSpec(name="mine:one"), RewardSpec(name="object:x"), RewardSpec(name="clip"),
    ]  # fmt: skip
    model = replace(config.model, family="own.family")
    objective = replace(config.objective, kind="own:Objective")
    odd = replace(
        config, rewards=named, model=model, kernel=replace(config.kernel, name="own:Kernel"), objective=objective
    )
    code = [
        "the code own.family (model.family)",
        "the code own:Kernel (kernel.name)",
        "the code own:Objective (objective.kind)",
    ]
    assert saved._foreign(odd, rewards=False) == code
    assert saved._foreign(odd, rewards=True) == [
        *code, "the reward server ['http://***@host']", "the judge at u", "the code mine:one (rewards)",
    ]  # fmt: skip
    for family in (None, "wan", "object:M"):
        plain = replace(model, family=family)
        assert saved._foreign(replace(config, model=plain), rewards=True) == []


HOSTILE = {
    "model": "  family: hostile",
    "kernel": "  name: hostile:A",
    "objective": "  kind: hostile:A",
    "rewards": "- name: hostile:a",
}


@pytest.mark.parametrize("clips", ["", "data: {clips: pairs.jsonl}\n"])
@pytest.mark.parametrize("section", HOSTILE)
def test_code_of_a_strangers_configuration_is_not_imported(section, clips, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "hostile.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    rewards = "" if section == "rewards" else "rewards: [{name: clip}]\n"
    (tmp_path / "config.yaml").write_text(f"{clips}{rewards}{section}:\n{HOSTILE[section]}\n")
    with pytest.raises(ValueError, match=r"hostile.*--trust_run true|data.clips gives clips"):
        saved.read_config(tmp_path)


def test_what_the_main_process_refuses_all_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["=yes"]
    main, other = World(), World()
    monkeypatch.setattr(World, "is_main", property(lambda self: self is main))
    monkeypatch.setattr(
        World, "from_main", lambda self, text: said[0] if self is other else said.__setitem__(0, text) or text
    )
    assert lock.by_main(main, lambda: "found") == lock.by_main(other, lambda: 1 / 0) == "found"
    with pytest.raises(FileNotFoundError, match="gone"):
        lock.by_main(main, lambda: (_ for _ in ()).throw(FileNotFoundError("gone")))
    with pytest.raises(ConfigError, match=r"^gone$"):
        lock.by_main(other, lambda: "")


class Marked:
    def fingerprint(self) -> str:
        return "mine"


class Kind:
    level = 1

    def three(self, x: int = 3) -> int:
        return x


class Heir(Kind):
    """Its code is in its parent."""


def test_an_object_is_its_source_and_what_is_bound_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def score(videos: Any, prompts: Any, fps: Any, *, level: int = 1) -> int:
        return level

    def other(videos: Any, prompts: Any, fps: Any, *, level: int = 2) -> int:
        return level

    partials = [functools.partial(score, 1), functools.partial(score, 2), functools.partial(score, level=2)]
    prints = [identity.of_object(one) for one in (score, other, Kind, Heir, Kind().three, *partials, print)]
    assert len(set(prints)) == len(prints)
    typed = [eval(f"lambda videos: {text}") for text in ("1", "2", "videos", "len(videos)", "1")]
    assert len({identity.of_object(one) for one in typed}) == 4, "without a file its instructions count"
    assert identity.of_object(Kind()) == identity.of_object(Kind)
    assert identity.of_object(Marked()) == "mine"
    assert identity.unsure(identity.Overrides(rewards={"object:a": score, "object:b": Marked()})) == [  # type: ignore[dict-item]
        "The code of a is that of the run so far; whether what it holds or refers to (weights, settings, globals) is unchanged cannot be "
        "checked. A method fingerprint() makes it checkable."
    ]
    assert identity.unsure(identity.Overrides()) == []
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for name, space, value in (("one", "", 1), ("two", "\n\n\n", 1), ("three", "", 2)):
        (tmp_path / f"mine_{name}.py").write_text(
            f"{space}class Parent:\n    level = {value}\n\nclass Mine(Parent):\n    pass\n"
        )
        found.append(identity.of_object(importlib.import_module(f"mine_{name}").Mine()))
    assert found[0] == found[1] != found[2], "its place does not count, and its parents do"
    assert identity.stable({"b": (1, 2.0), "a": {3, 1}, None: b"x"}) == "{'b': [1, 2.0], 'a': {1, 3}, None: b'x'}"


def test_names_of_allowed_changes_are_known() -> None:
    identity.check_names(["optimizer", "optimizer.lr", "code"])
    with pytest.raises(ConfigError, match=r"there is no 'optimzer'\. .*Did you mean 'optimizer"):
        identity.check_names(["optimzer"])
