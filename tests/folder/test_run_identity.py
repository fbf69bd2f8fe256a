"""What changes the meaning of a run is refused on resume unless it is asked for by name; the rest is free."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sage_grpo.configure import ConfigError
from sage_grpo.data.prompts import Prompt, load_prompts
from sage_grpo.flow.kernels import KernelSpec
from sage_grpo.folder import identity
from sage_grpo.models.spec import LoraSpec
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.session import run as train
from sage_grpo.training.config import DataConfig, KeepConfig, LogConfig, TrainConfig
from sage_grpo.training.inputs import Given


@pytest.fixture
def begun(make_config, tmp_path: Path) -> TrainConfig:
    """A run of one of two iterations, with a prompt file of its own."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\na red dog\n")
    config = make_config(iterations=1, data=DataConfig(prompts=str(prompts)))
    train(config)
    return replace(config, iterations=2)


CHANGES: dict[str, Callable[[TrainConfig], TrainConfig]] = {
    "seed": lambda c: replace(c, seed=1),
    "kernel.eta": lambda c: replace(c, kernel=KernelSpec(eta=0.3)),
    "rewards": lambda c: replace(c, rewards=[RewardSpec(name="trainer_toys:flat", label="bright", batch_size=0)]),
    "optimizer.lr": lambda c: replace(c, optimizer=replace(c.optimizer, lr=2e-3)),
    "batch.prompts": lambda c: replace(c, batch=replace(c.batch, prompts=3)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_meaning_is_refused_unless_asked_for(name: str, begun: TrainConfig, tmp_path: Path) -> None:
    before = files(tmp_path / "run")
    changed = CHANGES[name](begun)
    with pytest.raises(ConfigError, match=rf"(?s)differs from this one.*\n  {name}: .*--allow_changes {name}$"):
        train(changed)
    with pytest.raises(ConfigError, match=name):
        train(replace(changed, allow_changes=["model.lora", "code"]))
    assert files(tmp_path / "run") == before
    train(replace(changed, allow_changes=[name.split(".")[0]]))
    train(replace(changed, iterations=3))  # the change is now the run's own


def files(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_changed_prompts_are_refused_and_a_moved_file_is_not(begun: TrainConfig, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.txt"
    moved.write_text("# the same prompts\na cat\na red dog\n")
    train(replace(begun, data=DataConfig(prompts=str(moved))))
    moved.write_text("a cat\na blue dog\n")
    with pytest.raises(ConfigError, match=r"\n  prompts: the content of data.prompts, or of data.clips\n"):
        train(replace(begun, iterations=3, data=DataConfig(prompts=str(moved))))


def test_a_changed_picture_changes_its_prompt(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"one")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a cat", "image": "a.png"}\n')
    before = identity._of_prompts(load_prompts(tmp_path / "p.jsonl"))
    (tmp_path / "a.png").write_bytes(b"two")
    assert identity._of_prompts(load_prompts(tmp_path / "p.jsonl")) != before


PROMPT = Prompt("a cat", seed=3, metadata={"count": 2, "tags": ["red", "small"]})


@pytest.mark.parametrize(
    "change",
    [{"text": "a dog"}, {"seed": 4}, {"seed": None}, {"metadata": {"count": 3}}, {"metadata": {}}],
    ids=lambda change: str(next(iter(change.items()))),
)
def test_everything_of_a_prompt_is_its_content(change: dict[str, Any]) -> None:
    """Its own seed fixes its noise, and its metadata is read by rewards."""
    assert identity._of_prompts([PROMPT]) == identity._of_prompts([replace(PROMPT)])
    assert identity._of_prompts([replace(PROMPT, **change)]) != identity._of_prompts([PROMPT])
    assert identity._of_prompts([PROMPT, replace(PROMPT, **change)]) != identity._of_prompts([PROMPT])


def test_prompts_are_a_row() -> None:
    """Which prompts a rank draws goes by their places."""
    one, two = Prompt("a cat"), Prompt("a dog")
    assert identity._of_prompts([one, two]) != identity._of_prompts([two, one])
    assert identity._of_prompts([]) != identity._of_prompts([one])


def test_the_file_of_a_model_of_ones_own_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_config) -> None:
    """As the file of a reward does: both are code that the run computes with."""
    for name in ("own_family_of_mine", "own_rewards_of_mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "code.py").write_text("one = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = make_config()
    model = replace(config.model, family="own_family_of_mine.code")
    config = replace(config, model=model, rewards=[RewardSpec(name="own_rewards_of_mine.code:score")])
    prints = [identity._of_plugins(config, Given())]
    for name in ("own_family_of_mine", "own_rewards_of_mine"):
        (tmp_path / name / "code.py").write_text("one = 2\n")
        prints.append(identity._of_plugins(config, Given()))
    prints.append(identity._of_plugins(replace(config, model=replace(model, family=None)), Given()))
    prints.append(identity._of_plugins(replace(config, rewards=make_config().rewards), Given()))
    assert len(set(prints)) == 5


def test_where_the_files_of_ones_own_family_lie_counts(make_config) -> None:
    """They are its own affair, so that what names them stands for them."""
    spec = make_config().model
    prints = {identity.of_base(spec)}
    for change in ({"path": "here"}, {"path": "there"}, {"revision": "v2"}, {"family": "other.family"}):
        prints.add(identity.of_base(replace(spec, **change)))
    assert len(prints) == 5


FREE_TO_CHANGE = {
    "out", "iterations", "resume", "allow_changes", "max_failed_fraction", "keep", "log", "profile", "parallel", "sentinel",
    "evaluate.every", "evaluate.early", "evaluate.show", "batch.micro_batch", "update.gradient_checkpointing", "anchor.offload",
    "rollout.offload", "rollout.on", "rollout.ray", "model.device", "model.cache", "model.compile", "model.attention", "model.deterministic", "model.packed",
    "model.memory", "model.vae_slicing", "model.path", "model.revision", "data.prompts", "data.clips", "data.eval_prompts", "data.encode_ahead",
}  # fmt: skip
"""Where, how long, how fast, what is logged, and paths whose content has a fingerprint; said once more, because a field that slips into
the product's list would be changed in the middle of a run without a word."""
OTHER_THAN = {bool: lambda value: not value, int: lambda value: value + 1, float: lambda value: value + 0.5}


def _leaves(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [leaf for name, inner in value.items() for leaf in _leaves(inner, f"{prefix}{name}.")]
    return [(prefix.rstrip("."), value)]


def test_every_other_field_is_part_of_what_a_run_is(make_config, tmp_path: Path) -> None:
    """Each leaf of the configuration in turn, as a checkpoint holds it: refused, unless it is one of those that are free."""
    config = make_config(model={"lora": LoraSpec(rank=2)})
    known = identity.plain(dataclasses.asdict(config))
    prints = dict.fromkeys(identity.CONTENT, "same")
    accepted = set()
    for name, value in _leaves(known):
        meta = {"config": json.loads(json.dumps(known)), "identity": prints}
        *path, last = name.split(".")
        inner = meta["config"]
        for part in path:
            inner = inner[part]
        inner[last] = OTHER_THAN.get(type(value), lambda value: "something else")(value)
        with suppress(ConfigError):
            identity.check(config, prints, meta, tmp_path)
            accepted.add(name)
    free = {
        name for name, _ in _leaves(known) if any(name == one or name.startswith(f"{one}.") for one in FREE_TO_CHANGE)
    }
    assert accepted == free
    for name in ("model.shift", "rollout.shift", "seed", "kernel.eta", "data.held_out"):
        assert name not in accepted


@pytest.mark.parametrize("name", identity.CONTENT)
def test_every_fingerprint_is_compared(name: str, make_config, tmp_path: Path) -> None:
    config = make_config()
    prints = dict.fromkeys(identity.CONTENT, "same")
    meta = {"config": identity.plain(dataclasses.asdict(config)), "identity": {**prints, name: "other"}}
    with pytest.raises(ConfigError, match=rf"\n  {name}: "):
        identity.check(config, prints, meta, tmp_path)
    assert identity.check(replace(config, allow_changes=[name]), prints, meta, tmp_path) == [name]


@pytest.mark.parametrize("field", [one.name for one in dataclasses.fields(RewardSpec)])
def test_of_a_reward_only_where_and_how_fast_is_free(field: str) -> None:
    free = ("batch_size", "device", "overlap", "isolate_failures", "try_out", "actors", "actor_gpus", "actor_cpus")
    old = identity.plain(dataclasses.asdict(RewardSpec(name="trainer_toys:bright")))
    found = identity.differences({"rewards": [old]}, {"rewards": [{**old, field: "something else"}]})
    assert bool(found) == (field not in free)


def test_changed_base_weights_under_a_lora_are_refused(make_config, checkpoint, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(checkpoint("wan_t2v"), base)
    config = make_config(kind="wan_t2v", model={"lora": LoraSpec(rank=2)}, rollout={"steps": 3}, iterations=1)
    config = replace(config, model=replace(config.model, path=str(base)))
    train(config)
    (weights,) = (base / "transformer").glob("*.safetensors")
    tensors = load_file(weights)
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name] = tensors[name] + 1e-3 * torch.ones_like(tensors[name])
    save_file(tensors, str(weights))
    with pytest.raises(ConfigError, match=r"\n  weights: the base model's files, or"):
        train(replace(config, iterations=2))


def test_other_code_is_refused(begun: TrainConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "rl").mkdir(parents=True)
    (package / "commands").mkdir()
    for name in ("__init__.py", "rl/advantage.py", "commands/train.py"):
        (package / name).write_text("")
    monkeypatch.setattr(identity, "ROOT", package)
    first = identity.of_code()
    for part in (
        "flow",
        "rl",
        "gaussian.py",
        "models",
        "data",
        "rewards",
        "parallel",
        "shapes",
        "train",
        "types.py",
        "video.py",
    ):
        file = package / (part if part.endswith(".py") else f"{part}/some.py")
        file.parent.mkdir(exist_ok=True)
        file.write_text("# what a run computes\n")
        assert identity.of_code() != first, part
        file.unlink()
    (package / "commands" / "train.py").write_text("# what people see\n")
    assert identity.of_code() == first
    (package / "rl" / "advantage.py").write_text("# what a run computes\n")
    assert identity.of_code() != first
    with pytest.raises(ConfigError, match=r"\n  code: the package's code\n"):
        train(begun)


def test_a_changed_reward_function_is_refused(
    begun: TrainConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "trainer_toys.py"
    other.write_text("def bright(videos, prompts, fps):\n    return [0.0] * len(prompts)\n")
    monkeypatch.setattr(identity, "_source", lambda module: other)
    with pytest.raises(ConfigError, match=r"\n  plugins: the code of rewards"):
        train(begun)


def test_what_does_not_change_the_meaning_is_free(begun: TrainConfig) -> None:
    free = replace(
        begun,
        keep=KeepConfig(checkpoint_every=2, videos_every=0),
        log=LogConfig(tensorboard=False, progress=True),
        batch=replace(begun.batch, micro_batch=2),
        evaluate=replace(begun.evaluate, every=1),
        rewards=[replace(begun.rewards[0], batch_size=2)],
        max_failed_fraction=0.5,
    )
    train(free)
