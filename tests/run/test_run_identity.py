"""What changes the meaning of a run is refused on resume unless it is asked for by name; the rest is free."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tiny
from sage_grpo.config.parsing import ConfigError
from sage_grpo.data.prompts import Prompt
from sage_grpo.data.sources import PromptSource
from sage_grpo.models.checkpoints.checkpoint import fingerprint
from sage_grpo.models.spec import AdapterSpec, LoraSpec, ModelSpec
from sage_grpo.recipes import recipe
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run import identity
from sage_grpo.run.session import run as train
from sage_grpo.training.config import DataConfig, TrainConfig
from sage_grpo.training.inputs import Overrides, load_sources


@pytest.fixture
def begun(make_config, tmp_path: Path) -> TrainConfig:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\na red dog\n")
    config = make_config(iterations=1, data=DataConfig(prompts=str(prompts)))
    train(config)
    return replace(config, iterations=2)


def test_a_changed_meaning_is_refused_unless_asked_for(begun: TrainConfig, tmp_path: Path) -> None:
    def files() -> dict[str, bytes]:
        return {str(file): file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}

    before, changed = files(), replace(begun, batch=replace(begun.batch, prompts=3))
    said = r"(?s)differs from this one.*\n  batch.prompts: .*--allow_changes batch.prompts$"
    for allowed in ([], ["model.lora", "code"]):
        with pytest.raises(ConfigError, match=said):
            train(replace(changed, allow_changes=allowed))
    with pytest.raises(ConfigError, match=r"allow_changes: there is no 'bach'.*Did you mean 'batch"):
        train(replace(changed, allow_changes=["bach"]))
    assert files() == before
    train(replace(changed, allow_changes=["batch"]))
    train(replace(changed, iterations=3))  # the change is now the run's own


def test_changed_prompts_are_refused_and_a_moved_file_is_not(begun: TrainConfig, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.txt"
    moved.write_text("# the same prompts\na cat\na red dog\n")
    train(replace(begun, data=DataConfig(prompts=str(moved))))
    moved.write_text("a cat\na blue dog\n")
    with pytest.raises(ConfigError, match=r"\n  prompts: the content of data.prompts, or of data.clips\n"):
        train(replace(begun, iterations=3, data=DataConfig(prompts=str(moved))))


def test_everything_of_a_prompt_is_its_content(tmp_path: Path) -> None:
    def file(name: str) -> Path:
        (tmp_path / name).write_text(name)
        return tmp_path / name

    other = file("other")
    names = ("image", "last_image")
    prompt = Prompt("a cat", seed=3, metadata={"tags": ["red"]}, clips=(file("good"), file("bad")))
    prompt = replace(prompt, **{name: file(name) for name in names})
    changes: list[dict[str, Any]] = [{name: other} for name in names]
    changes += [{"text": "a dog"}, {"seed": 4}, {"seed": None}, {"metadata": {"tags": ["blue"]}}, {"metadata": {}}]
    changes += [{"clips": prompt.clips[::-1]}, {"clips": (prompt.clips[0], other)}]
    changes += [{"rewards": ("ocr",)}, *({"source": PromptSource(path="a", weight=weight)} for weight in (1.0, 2.0))]
    others = [replace(prompt, **change) for change in changes]
    rows = [[], [prompt], [prompt, others[0]], [others[0], prompt], *([one] for one in others)]
    assert len({identity._of_prompts(row) for row in rows}) == len(rows)
    assert identity._of_prompts([prompt]) == identity._of_prompts([replace(prompt)])
    first, second = (replace(prompt, source=PromptSource(path=path)) for path in "ab")
    assert identity._of_prompts([first, first, second]) != identity._of_prompts([first, second, second])
    tried = {name for change in changes for name in change}
    other.write_bytes(bytes(70_000))
    assert identity._of_prompts([Prompt("a", image=other)])[:16] == "42a52a43208e7fff", "runs of earlier versions go on"
    assert tried == {one.name for one in dataclasses.fields(Prompt)}


@pytest.mark.parametrize("option", ["model", "rewards", "kernel", "objective"])
def test_the_file_of_own_code_counts(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_config) -> None:
    (tmp_path / f"my_{option}").mkdir()
    file = tmp_path / f"my_{option}" / "code.py"
    file.write_text("one = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = make_config()
    own = {
        "model": replace(config.model, family="my_model.code"),
        "rewards": [*config.rewards, RewardSpec(name="my_rewards.code:score")],
        "kernel": replace(config.kernel, name="my_kernel.code:Mine"),
        "objective": replace(config.objective, kind="my_objective.code:Mine"),
    }[option]
    changed = replace(config, **{option: own})
    prints = [identity._of_plugins(one, Overrides()) for one in (config, changed)]
    file.write_text("one = 2\n")
    assert len({*prints, identity._of_plugins(changed, Overrides())}) == 3


def test_where_the_files_of_ones_own_family_lie_counts(make_config) -> None:
    spec = make_config().model
    prints = {identity.of_base(spec)}
    for change in ({"path": "here"}, {"path": "there"}, {"revision": "v2"}, {"family": "other.family"}):
        prints.add(identity.of_base(replace(spec, **change)))
    assert len(prints) == 5


@pytest.mark.parametrize("kind", ["wan22_t2v", "wan_i2v", "hunyuan15_i2v", "ltx2"])
def test_everything_that_a_checkpoint_is_made_of_counts(kind: str, checkpoint, tmp_path: Path) -> None:
    folder, adapter = tiny.variant(checkpoint(kind), tmp_path / "base"), tmp_path / "lora" / "one.safetensors"
    adapter.parent.mkdir()
    save_file({"transformer.lora_A.weight": torch.zeros(2, 2)}, adapter)
    frozen = AdapterSpec(path=str(adapter.parent), file=adapter.name, expert="high" if kind == "wan22_t2v" else None)
    spec = ModelSpec(path=str(folder), adapters=[frozen])
    before = identity.of_checkpoint(spec)
    assert before.startswith(f"{identity.of_base(spec)}/")
    inside = [path for path in folder.rglob("*") if path.is_file()]
    assert len({path.parent for path in inside}) > 5
    for file in [*inside, adapter]:
        content = file.read_bytes()
        file.unlink()  # it may be a link
        changed = content.replace(b"{", b'{"more": 1, ', 1) if file.suffix == ".json" else content + b" "
        file.write_bytes(content[:-1] + b"x" if file == adapter else changed)
        assert identity.of_checkpoint(spec) != before, file
        file.write_bytes(content)
    assert identity.of_checkpoint(spec) == before


def test_runs_of_versions_that_looked_at_components_alone_resume(make_config, tmp_path: Path) -> None:
    config = make_config()
    prints = identity.identify(config, load_sources(config))
    meta = {"config": identity.plain(dataclasses.asdict(config)), "identity": dict(prints)}
    meta["identity"]["weights"] = identity.of_base(config.model)
    assert identity.check(config, prints, meta, tmp_path) == []
    for wrong in ("", prints["weights"][:5], prints["weights"].partition("/")[2], None):
        meta["identity"]["weights"] = wrong
        with pytest.raises(ConfigError, match=r"\n  weights: "):
            identity.check(config, prints, meta, tmp_path)


def test_both_experts_of_a_model_object_count(checkpoint) -> None:
    model = ModelSpec(path=str(checkpoint("wan22_t2v")), cache=None, train=False).load("cpu")
    prints = [identity.of_weights(model)]
    for module in (model.network, *model.others):
        with torch.no_grad():
            next(module.parameters()).add_(0.01)
        prints.append(identity.of_weights(model))
    assert len(set(prints)) == 3


FREE_TO_CHANGE = {
    "out", "iterations", "resume", "allow_changes", "max_failed_fraction", "keep", "log", "parallel", "sentinel",
    "evaluate.every", "evaluate.early", "evaluate.show", "batch.micro_batch", "update.gradient_checkpointing", "anchor.offload",
    "rollout.offload", "rollout.on", "rollout.ray", "model.device", "model.cache", "model.compile", "model.attention", "model.deterministic",
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
    below = tuple(f"{one}." for one in FREE_TO_CHANGE)
    assert accepted == {name for name, _ in _leaves(known) if name in FREE_TO_CHANGE or name.startswith(below)}
    assert not accepted & {"model.shift", "rollout.shift", "seed", "kernel.eta", "data.held_out"}


def test_every_fingerprint_is_compared(make_config, tmp_path: Path) -> None:
    config, prints = make_config(), dict.fromkeys(identity.CONTENT, "same")
    for name in identity.CONTENT:
        meta = {"config": identity.plain(dataclasses.asdict(config)), "identity": {**prints, name: "other"}}
        with pytest.raises(ConfigError, match=rf"\n  {name}: "):
            identity.check(config, prints, meta, tmp_path)
        assert identity.check(replace(config, allow_changes=[name]), prints, meta, tmp_path) == [name]


def test_the_code_of_a_model_object_counts() -> None:
    class One:
        level = 1

    class Two:
        level = 2

    models: list[Any] = [None, One(), Two()]
    assert len({identity._of_plugins(recipe("shapes/sage"), Overrides(model=model)) for model in models}) == 3


def test_of_a_reward_only_where_and_how_fast_is_free() -> None:
    free = {"batch_size", "device", "overlap", "try_out"}
    old = identity.plain(dataclasses.asdict(RewardSpec(name="trainer_toys:bright")))
    changed = {name: {"rewards": [{**old, name: "something else"}]} for name in old}
    assert {name for name, new in changed.items() if not identity.differences({"rewards": [old]}, new)} == free


def test_other_code_is_refused(begun: TrainConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "package"
    for name in ("__init__.py", "version.py", "objectives/advantage.py", "cli/train.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    monkeypatch.setattr(identity, "ROOT", package)
    first = identity.of_code()
    for part in ("samplers", "types.py", "rewards", "distributed", "training", "utils"):
        file = package / (part if part.endswith(".py") else f"{part}/some.py")
        file.parent.mkdir(exist_ok=True)
        file.write_text("# what a run computes\n")
        assert identity.of_code() != first, part
        file.unlink()
    (package / "cli" / "train.py").write_text("# what people see\n")
    listed = Path.rglob
    for turned in (False, True):  # a file system may list files in any order
        monkeypatch.setattr(Path, "rglob", lambda *words, t=turned: sorted(listed(*words), reverse=t))
        assert identity.of_code() == first
    (package / "objectives" / "advantage.py").write_text("# what a run computes\n")
    assert identity.of_code() != first
    with pytest.raises(ConfigError, match=r"\n  code: the package's code\n"):
        train(begun)


def test_a_fingerprint_does_not_follow_the_order_of_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vae").mkdir()
    for name in ("a.json", "b.json", "c.json"):
        (tmp_path / "vae" / name).write_text(name)
    before, rglob = fingerprint(tmp_path, ["vae"]), Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: reversed(list(rglob(self, pattern))))
    assert fingerprint(tmp_path, ["vae"]) == before
