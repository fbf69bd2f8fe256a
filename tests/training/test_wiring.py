"""Every field of TrainConfig does what wiring_table.py says, and nothing before it in the line of data changes."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import wiring
import wiring_rewards
from wiring_table import GUIDED, ROWS, Row, Seen

import trainer_toys
from sage_grpo import session
from sage_grpo.crew import on_ray, studio
from sage_grpo.effects import MEANING, Effect, affects
from sage_grpo.models.spec import LoraSpec, ModelSpec
from sage_grpo.parallel import cluster
from sage_grpo.parallel.spec import lay_out
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.rl.kl_control import KlCoefficient
from sage_grpo.sentinel.guard import Guard
from sage_grpo.telling import metrics
from sage_grpo.training import inputs, placing, scoring, state
from sage_grpo.training.config import TrainConfig
from sage_grpo.video import write_mp4
from slowly import slow_but
from trainer_zoo.toy import ToyModel

_KNOWN: dict[str, Any] = {}
"""What the base runs did: most rows share theirs."""


@pytest.fixture
def base(make_config, prompts: Path, tmp_path: Path) -> Callable[[str], tuple[TrainConfig, TrainConfig]]:
    """key -> the configuration of its row, without and with the change."""

    def make(key: str) -> tuple[TrainConfig, TrainConfig]:
        row = ROWS[key]
        config = make_config(
            iterations=4,
            rewards=[
                RewardSpec(name="wiring_rewards:two_parts", weights={"level": 1.0, "texture": 0.5}),
                RewardSpec(name="trainer_toys:bright", weights={"bright": 0.1}, options={"differentiable": True}),
            ],
            kl=KlCoefficient(lambda_min=0.1, lambda_max=1.0, warmup_updates=3),
        )
        config = wiring.changed(config, row.base)
        return config, wiring.changed(config, {key: _value(row.to, prompts, tmp_path)})

    return make


def _value(value: Any, prompts: Path, folder: Path) -> Any:
    """Values that are files are made here."""
    if value == "OTHER_PROMPTS":
        file = folder / "other.txt"
        file.write_text("a fox\na house\nrain\n")
        return str(file)
    if value == "EXAMPLES":
        for name, grey in (("win", 200), ("lose", 50)):
            write_mp4(folder / f"{name}.mp4", torch.full((2, 8, 8, 3), grey, dtype=torch.uint8), 8.0)
        file = folder / "pairs.jsonl"
        file.write_text('{"prompt": "a cat", "win": "win.mp4", "lose": "lose.mp4"}')
        return str(file)
    return str(folder / value) if value in ("elsewhere", "OWN_CACHE") else value


def _known(phase: Any, config: TrainConfig) -> Any:
    name = phase.func.__name__ if isinstance(phase, partial) else phase.__name__
    key = f"{name}/{dataclasses.replace(config, out='-')}"
    if key not in _KNOWN:
        _KNOWN[key] = phase(config)
    return _KNOWN[key]


def rows(kind: type, *effects: Effect) -> list[str]:
    """Rows of a kind, for fields that affect this."""
    return [key for key, row in ROWS.items() if type(row) is kind and affects(TrainConfig, key) in effects]


COMPUTED: tuple[Effect, ...] = (*MEANING, "course", "content")
HARMLESS: tuple[Effect, ...] = ("speed", "machine", "record", "start")


def test_every_field_has_a_row_and_every_row_a_field() -> None:
    assert sorted(ROWS) == sorted(wiring.leaf_fields(TrainConfig))


def test_every_row_that_is_only_seen_says_why() -> None:
    assert all(row.look in globals() for row in ROWS.values() if isinstance(row, Seen))
    assert [key for key in rows(Seen, *COMPUTED) if not ROWS[key].why] == []


def test_a_matter_of_speed_or_of_the_machine_is_seen_where_it_is_used() -> None:
    """No phase shows it."""
    assert rows(Row, "speed", "machine") == []


@pytest.mark.parametrize("key", rows(Row, *COMPUTED))
def test_a_field_changes_its_phase_and_nothing_before_it(key: str, base) -> None:
    row, (config, other) = ROWS[key], base(key)
    assert wiring.first_difference(_known(wiring.training, config), wiring.training(other)) == row.changes
    assert wiring.equal(_known(wiring.evaluation, config), wiring.evaluation(other)) != row.evaluation


@pytest.mark.parametrize(
    "key", slow_but(rows(Row, "record", "start"), "evaluate.every", "keep.checkpoints", "keep.videos_every")
)
def test_a_field_changes_files_and_nothing_else(key: str, base) -> None:
    config, other = base(key)
    assert wiring.first_difference(_known(wiring.training, config), wiring.training(other)) == ""
    assert wiring.equal(_known(wiring.evaluation, config), wiring.evaluation(other))
    other = dataclasses.replace(other, out=f"{config.out}-other")
    assert _known(wiring.files, config) != wiring.files(other)


def test_the_comparison_can_fail(base) -> None:
    """Two equal runs differ nowhere; a change in the last weights alone is found there."""
    config, _ = base("seed")
    line = list(wiring.training(config))
    assert wiring.first_difference(line, wiring.training(config)) == ""
    spoilt = [*line[:-1], ("average", {name: value + 1e-6 for name, value in line[-1][1].items()})]
    assert wiring.first_difference(line, spoilt) == "average"
    phases = [phase for phase, _ in line]
    assert phases[:3] == ["rollout", "reward", "advantage"]
    assert phases.count("weights") == wiring.ITERATIONS * 2
    assert GUIDED["model.family"] != config.model.family


# ---- looks: config, monkeypatch -> what is seen


class Caught(Exception):
    """Ends a call as soon as it has shown what it was called with."""


def _catch(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Calls of a function, which then ends the run."""
    calls: list[Any] = []

    def caught(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        raise Caught

    patch.setattr(owner, name, caught)
    return calls


def folder(config: TrainConfig, patch: pytest.MonkeyPatch) -> list[str]:
    session.run(config)
    return sorted(one.parent.name for one in Path(config.out).parent.glob("*/final"))


def second_start(config: TrainConfig, patch: pytest.MonkeyPatch) -> str:
    first = dataclasses.replace(config, iterations=1)
    if not Path(config.out).exists():
        session.run(dataclasses.replace(first, resume="auto"))
    try:
        return f"{session.run(first).iteration} iterations"
    except ValueError as error:
        return str(error)


def interventions(config: TrainConfig, patch: pytest.MonkeyPatch) -> list[Any]:
    """What is said and done in a made-up run: a gradient that scatters, jumps a little, then a lot; a held-out total that falls."""
    one, said = wiring.trainer_of(config), []
    guard = Guard(config, one.state, one.writer, Path(config.out), held_out=True)
    guard.tell = said.append
    for number in range(1, 41):
        one.state.iteration = one.state.evaluated = number
        norm = 1e6 if number > 25 else 300.0 if 12 <= number < 16 else (1.0, 2.7, 7.3)[number % 3]
        guard.see_row({"gradient/norm": norm, "reward/group_std": 1.0 if number <= 5 else 0.04})
        if number % 5 == 0:
            total = 1.0 + 0.1 * min(number, 20) - 0.06 * max(0, number - 20) * (number < 30)
            guard.see_evaluation([{"scores": {"total": total + 0.01 * (clip * number % 7)}} for clip in range(20)])
        guard.act()
        if guard.mark(saving=False):
            one.state.optimizer.materialize()
            one.save(guard.root)
    return [(event.iteration, event.name, event.action) for event in said] + [one.state.sentinel.brake]


def reward_names(config: TrainConfig, patch: pytest.MonkeyPatch) -> tuple[str, ...]:
    twin = RewardSpec(name="wiring_rewards:other_parts", weights={"level": 1.0})
    return wiring.trainer_of(dataclasses.replace(config, rewards=[config.rewards[0], twin])).reward.names


def learned_parts(config: TrainConfig, patch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, float]]]:
    trainer = wiring.trainer_of(config)
    return [(part.name, trainer.reward.judging(part.name)) for part in trainer.parts]


def learned_formats(config: TrainConfig, patch: pytest.MonkeyPatch) -> list[str]:
    patch.setattr(ToyModel, "in_format", lambda self, video: self, raising=False)
    return list(map(str, inputs._formats(config, ToyModel(config.model), [])))


def reward_calls(config: TrainConfig, patch: pytest.MonkeyPatch) -> int:
    wiring_rewards.CALLS["count"] = 0
    wiring.trainer_of(config).step()
    return wiring_rewards.CALLS["count"]


def reward_device(config: TrainConfig, patch: pytest.MonkeyPatch) -> str:
    wiring.trainer_of(config).reward.score(torch.zeros(2, 2, 4, 4, 3, dtype=torch.uint8), ["a", "b"], 8.0)
    return wiring_rewards.CALLS["device"]


def reward_thread(config: TrainConfig, patch: pytest.MonkeyPatch) -> bool:
    wiring.trainer_of(config).step()
    return wiring_rewards.CALLS["thread"]


def calls_after_a_failure(config: TrainConfig, patch: pytest.MonkeyPatch) -> int:
    picky = dataclasses.replace(config.rewards[0], name="wiring_rewards:picky", weights={}, batch_size=0)
    one = wiring.trainer_of(dataclasses.replace(config, rewards=[picky, config.rewards[1]]))
    wiring_rewards.CALLS["count"] = 0
    one.reward.score(torch.zeros(4, 2, 4, 4, 3, dtype=torch.uint8), ["a cat", "a dog", "a fox", "an ox"], 8.0)
    return wiring_rewards.CALLS["count"]


def tried_out(config: TrainConfig, patch: pytest.MonkeyPatch) -> int:
    wiring_rewards.CALLS["count"] = 0
    wiring.trainer_of(config).reward.try_out("a cat")
    return wiring_rewards.CALLS["count"]


def encoded(config: TrainConfig, patch: pytest.MonkeyPatch) -> int:
    """How many prompts are encoded before the first iteration, besides the held-out ones."""
    one = wiring.trainer_of(dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, prompts=1)))
    texts: list[str] = []
    encode = one.model.encode
    patch.setattr(one.model, "encode", lambda prompts, images=None: texts.extend(prompts) or encode(prompts, images))
    one.encode_prompts()
    return len(set(texts))


def changed_start(config: TrainConfig, patch: pytest.MonkeyPatch) -> str:
    first = dataclasses.replace(config, iterations=1, allow_changes=[])
    if not Path(config.out).exists():
        session.run(first)
    try:
        return f"{session.run(wiring.changed(config, {'optimizer.lr': 7e-3, 'iterations': 2})).iteration} iterations"
    except ValueError as error:
        return str(error)


def passes(config: TrainConfig, patch: pytest.MonkeyPatch) -> list[int]:
    """Clips of every forward pass of a rollout."""
    one = wiring.trainer_of(config)
    sizes: list[int] = []
    velocity = one.model.velocity
    patch.setattr(one.model, "velocity", lambda x, *rest, **more: sizes.append(len(x)) or velocity(x, *rest, **more))
    one.roll_out(one.planner.plan(0, one.state.stream.take(config.batch.prompts)))
    return sizes


def given_steps(config: TrainConfig, patch: pytest.MonkeyPatch) -> list[Any]:
    """The latents of a rollout, and the attention of its passes."""
    one = wiring.trainer_of(config)
    used: list[str] = []
    forward = one.model._forward
    block = one.model.blocks()[0]
    patch.setattr(
        one.model,
        "_forward",
        lambda *given: used.append(str(block.attn1.processor._attention_backend)) or forward(*given),
    )
    rollout = one.roll_out(one.planner.plan(0, one.state.stream.take(config.batch.prompts)))
    return [torch.cat([latents for _, latents in rollout.latents]), used]


def storage(config: TrainConfig, patch: pytest.MonkeyPatch) -> torch.device:
    one = wiring.trainer_of(config)
    one.model.device = torch.device("cuda:7")
    calls = _catch(patch, studio, "Storage")
    with pytest.raises(Caught):
        one.roll_out(one.planner.plan(0, one.state.stream.take(2)))
    return calls[0][1]["device"]


def judges(config: TrainConfig, patch: pytest.MonkeyPatch) -> Any:
    """The actors that rewards get, and where they compute."""
    patch.setattr(scoring, "connected", lambda address, cpus: contextlib.nullcontext(cpus))
    patch.setattr(
        scoring, "hired", lambda ray, kind, given, **size: contextlib.nullcontext((ray, kind, given[-1], size))
    )
    return scoring.hire(config, contextlib.ExitStack())


def crew(config: TrainConfig, patch: pytest.MonkeyPatch) -> Any:
    """What Ray is asked for, what every worker is made with, and how long and how closely its foreman looks."""
    ray = mock.MagicMock()
    ray.is_initialized.return_value, ray.nodes.return_value = False, [{"NodeManagerAddress": "127.0.0.1"}]
    for module in (on_ray, cluster):
        patch.setattr(module, "find_ray", lambda address: ray)
    patch.setattr(cluster, "_knock", lambda address: None)
    found = wiring.trainer_of(config).crew
    if found is None:
        return None
    options = ray.remote.return_value.options
    made = options.return_value.remote.call_args_list
    workers = [call.args[0].rollout.ray.scores for call in made]
    return ray.init.call_args, options.call_args, workers, found.limit, found.spec.patience


def feedback(config: TrainConfig, patch: pytest.MonkeyPatch) -> float:
    one = wiring.trainer_of(wiring.changed(config, {"kl.kind": "ppo", "kl.warmup_updates": 0, "kl.target": 1.0}))
    return [one.state.kl.observe(value) for value in (10.0, 10.0, 0.9, 0.0)][-1]


def anchor(config: TrainConfig, patch: pytest.MonkeyPatch) -> bool:
    calls = _catch(patch, state, "Anchor")
    with pytest.raises(Caught):
        wiring.trainer_of(config)
    return calls[0][1]["offload"]


def checkpointing(config: TrainConfig, patch: pytest.MonkeyPatch) -> bool:
    from trainer_zoo.toy import ToyModel

    calls = _catch(patch, ToyModel, "keep")
    with pytest.raises(Caught):
        wiring.trainer_of(config)
    return calls[0][0][-1]


def sinks(config: TrainConfig, patch: pytest.MonkeyPatch) -> list[Any]:
    services = {name: _catch(patch, metrics, name) for name in ("Wandb", "Trackio")}
    for name in services:  # they need not be installed
        patch.setitem(sys.modules, name.lower(), types.ModuleType(name.lower()))
    with contextlib.suppress(Caught):
        session.run(
            dataclasses.replace(config, iterations=1, out=f"{config.out}-{config.log.wandb}-{config.log.trackio}")
        )
    return [(name, calls[0][0][0]) for name, calls in services.items() if calls]


def own_sinks(config: TrainConfig, patch: pytest.MonkeyPatch) -> list[int]:
    """Iterations that a sink of the user's own gets."""
    patch.setattr(trainer_toys.Kept, "rows", [])
    session.run(dataclasses.replace(config, iterations=2, out=f"{config.out}-{len(config.log.sinks)}"))
    return [iteration for iteration, _ in trainer_toys.Kept.rows]


def terminal(config: TrainConfig, patch: pytest.MonkeyPatch) -> bool:
    calls = _catch(patch, session, "Terminal")
    with pytest.raises(Caught):
        session.run(config)
    return calls[0][1]["progress"]


def layout(config: TrainConfig, patch: pytest.MonkeyPatch) -> Any:
    try:
        return lay_out(config.parallel, 8)
    except ValueError as error:
        return str(error)


def sharding(config: TrainConfig, patch: pytest.MonkeyPatch) -> Any:
    calls = _catch(patch, placing, "shard")
    with pytest.raises(Caught):
        wiring.trainer_of(config)
    return calls[0][0][1]


def writer(config: TrainConfig, patch: pytest.MonkeyPatch) -> bool:
    return wiring.trainer_of(config).writer.background


def started(config: TrainConfig, patch: pytest.MonkeyPatch) -> Any:
    from sage_grpo.commands.train import run

    calls = _catch(patch, session, "start")
    with pytest.raises(Caught):
        run(config)
    return calls[0][0]


def refusal(config: TrainConfig, patch: pytest.MonkeyPatch) -> str:
    return "trains"


def download(config: TrainConfig, patch: pytest.MonkeyPatch) -> Any:
    from diffusers import DiffusionPipeline

    calls = _catch(patch, DiffusionPipeline, "download")
    with pytest.raises(Caught):
        dataclasses.replace(config.model, path="someone/model", family="wan").load()
    return calls[0][1]["revision"]


def device(config: TrainConfig, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        return str(config.model.load().device)
    except ValueError as error:
        return str(error)


def fixed_order(config: TrainConfig, patch: pytest.MonkeyPatch) -> set[bool]:
    """Whether backward passes add up in a fixed order, as on a GPU."""
    patch.setattr(placing, "DEVICES", ("cpu",))
    patch.setenv(placing.WORKSPACE, ":4096:8")  # it sets it too, for the whole process
    one, seen = wiring.trainer_of(config), set()
    for parameter in one.model.trainable().values():
        parameter.register_hook(lambda gradient: seen.add(torch.are_deterministic_algorithms_enabled()))
    one.step()
    return seen


def budget(config: TrainConfig, patch: pytest.MonkeyPatch) -> float | None:
    """What a process is held to before anything is loaded."""
    calls = _catch(patch, inputs, "hold_to_budget")
    with pytest.raises(Caught):
        inputs.build(config)
    spec: ModelSpec = calls[0][0][0]
    return spec.memory


def compiled(config: TrainConfig, patch: pytest.MonkeyPatch) -> int:
    from sage_grpo.models import family

    calls: list[Any] = []
    patch.setattr(family, "compile_blocks", lambda *args, **kwargs: calls.append(args))
    config.model.load()
    return len(calls)


def stock_passes(config: TrainConfig, patch: pytest.MonkeyPatch) -> int:
    """How often diffusers' own forward runs for a velocity."""
    one: Any = config.model.load()
    calls: list[Any] = []
    handle = one.transformer.register_forward_pre_hook(lambda *given: calls.append(given))
    with torch.no_grad():
        one.velocity(torch.zeros(1, *one.latent_shape()), torch.tensor(0.5), one.encode(["a cat"]))
    handle.remove()
    return len(calls)


def model(config: TrainConfig, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a loaded model is and does."""
    one: Any = config.model.load()
    decoded: list[int] = []
    pixels = one._pixels
    patch.setattr(one, "_pixels", lambda z: decoded.append(len(z)) or pixels(z))
    conditions = one.encode(["a cat", "a cat"])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, *one.latent_shape(), generator=generator)
    with torch.no_grad():
        one.decode(x)
        velocities = [one.velocity(x, torch.tensor(sigma), conditions) for sigma in (0.95, 0.1)]
    patch.undo()
    processors = {
        type(module.processor): module.processor for module in one.network.modules() if hasattr(module, "processor")
    }
    return {
        "class": type(one).__name__,
        "grid": one.sigmas(config.rollout.steps),
        "folder": str(one.folder),
        "velocities": velocities,
        "trainable": {name: p.detach().clone() for name, p in one.trainable().items()},
        "scaling": [module.scaling for module in one.network.modules() if hasattr(module, "scaling")],
        "vae": (one.pipe.vae.dtype, bool(one.pipe.vae.use_tiling), tuple(decoded)),
        "video": one.video,
        "components": one.experts.components,
        "attention": sorted(
            f"{kind.__name__} {getattr(p, '_attention_backend', None)}" for kind, p in processors.items()
        ),
        "cache": str(one._cache.folder),
    }


@pytest.mark.parametrize("key", rows(Seen, *COMPUTED, *HARMLESS))
def test_a_field_is_seen_where_it_is_used(key: str, base, checkpoint, tmp_path: Path, monkeypatch) -> None:
    row = ROWS[key]
    assert isinstance(row, Seen)
    if key == "model.train":
        with pytest.raises(ValueError, match=r"model\.train must be true"):
            base(key)
        return
    config, other = base(key)
    if row.kind:
        config, other = (_on_checkpoint(one, row, checkpoint, tmp_path) for one in (config, other))
    look = globals()[row.look]
    with monkeypatch.context() as patch:
        # Rows on checkpoints mostly share their first value.
        first = _known(partial(look, patch=patch), config) if row.kind else look(config, patch)
    with monkeypatch.context() as patch:
        second = look(other, patch)
    assert not wiring.equal(first, second), f"{key} changes nothing that {row.look} sees"


def _on_checkpoint(config: TrainConfig, row: Seen, checkpoint: Callable[[str], Path], folder: Path) -> TrainConfig:
    """The same configuration on a tiny checkpoint instead of the toy."""
    spec = dataclasses.replace(config.model, family=None, device=config.model.device)
    spec = dataclasses.replace(spec, path=str(checkpoint("wan22_5b_t2v" if spec.path else row.kind)))
    if spec.cache == "auto":
        spec = dataclasses.replace(spec, cache=None)
    if spec.lora is not None and spec.lora.path:
        saved = folder / "lora"
        _lora(dataclasses.replace(spec, lora=dataclasses.replace(spec.lora, path=None)), saved)
        spec = dataclasses.replace(spec, lora=dataclasses.replace(spec.lora, path=str(saved)))
    adapters = []
    for adapter in spec.adapters:  # another LoRA under every other name
        place = folder / f"{adapter.path} {adapter.file}"
        bare = dataclasses.replace(spec, adapters=[], lora=LoraSpec(rank=2), expert=adapter.expert or "high")
        _lora(bare, place, 0.1 * len(f"{adapter.path}{adapter.file}"))
        (place / "pytorch_lora_weights.safetensors").rename(place / adapter.file)
        adapters.append(dataclasses.replace(adapter, path=str(place)))
    return dataclasses.replace(config, model=dataclasses.replace(spec, adapters=adapters))


def _lora(spec: ModelSpec, folder: Path, value: float = 1.0) -> None:
    one = spec.load()
    one.save(folder, weights={name: torch.full_like(p, value) for name, p in one.trainable().items()})
