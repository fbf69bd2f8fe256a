"""A trainer on a tiny random checkpoint, fast enough to be run hundreds of times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import double
from sage_grpo.models.spec import ModelSpec
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.session import assemble
from sage_grpo.training.config import (
    BatchConfig,
    DataConfig,
    EvalConfig,
    KeepConfig,
    LogConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
)
from sage_grpo.training.inputs import build
from sage_grpo.training.trainer import Trainer

MakeConfig = Callable[..., TrainConfig]
MakeTrainer = Callable[[TrainConfig], Trainer]


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("a cat\na red dog\na bird\nthe sea\na tree\n")
    return file


@pytest.fixture
def make_config(checkpoint: Callable[[str], Path], prompts: Path, tmp_path: Path) -> MakeConfig:
    """A small configuration, on the toy model or a tiny checkpoint (`kind`); arguments replace its fields, `model` and
    `rollout` only the fields that they name."""

    def make(
        *, kind: str = "toy", model: dict | None = None, rollout: dict | None = None, **fields: Any
    ) -> TrainConfig:
        if kind == "toy":
            spec = ModelSpec(family="trainer_zoo.toy", **(model or {}))
        else:
            base = {"frames": 1, "height": 16, "width": 16, "guidance_scale": 1.0, "cache": None, "vae_slicing": False}
            spec = ModelSpec(path=str(checkpoint(kind)), **{**base, **(model or {})})
        config = TrainConfig(
            out=str(tmp_path / "run"),
            iterations=3,
            model=spec,
            rewards=[RewardSpec(name="trainer_toys:bright", batch_size=0)],
            data=DataConfig(prompts=str(prompts), eval_prompts=str(prompts)),
            batch=BatchConfig(prompts=2, group_size=4, micro_batch=4),
            # Tiny checkpoints take few steps on grids that end near 0: with noise up to the last step there is enough to train.
            rollout=RolloutConfig(
                **{"steps": 5, "deterministic_last": None if kind == "toy" else True, **(rollout or {})}
            ),
            optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0),
            evaluate=EvalConfig(every=2, prompts=2, steps=3, show=1),
            keep=KeepConfig(checkpoint_every=1, videos_every=0),
            log=LogConfig(tensorboard=False, progress=False),
        )
        return replace(config, **fields)

    return make


_MODELS: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {}


@pytest.fixture(autouse=True)
def _one_model_per_spec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Load a checkpoint once; every trainer gets it with its first weights. Loading itself is tested in tests/models."""
    load = ModelSpec.load

    def cached(self: ModelSpec, device: Any = None, *, sharded: bool = False) -> Any:
        if self.path is None:
            return load(self, device, sharded=sharded)
        key = repr(self)
        if key not in _MODELS:
            model = load(self, device, sharded=sharded)
            _MODELS[key] = model, {name: p.detach().clone() for name, p in model.network.named_parameters()}
        model, first = _MODELS[key]
        with torch.no_grad():
            for name, p in model.network.named_parameters():
                p.copy_(first[name])
                p.grad = None
        return model

    monkeypatch.setattr(ModelSpec, "load", cached)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)


_DOUBLES: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {}
"""Those of tests in float64."""


@pytest.fixture
def in_double(monkeypatch: pytest.MonkeyPatch, _one_model_per_spec: None) -> Iterator[None]:
    """The whole test in float64, network and trainer: see double.py. What it compares agrees to `double.CLOSE`."""
    monkeypatch.setitem(globals(), "_MODELS", _DOUBLES)
    with double.whole():
        yield


@pytest.fixture
def make_trainer() -> MakeTrainer:
    """A trainer whose updates can be watched: `trainer.log` holds the metrics of every single optimizer update."""

    def make(config: TrainConfig) -> Trainer:
        trainer = assemble(config, build(config))
        apply, log = trainer.updater.apply, []

        def watched(metrics: dict[str, float]) -> dict[str, float]:
            log.append(dict(metrics))
            log[-1] |= apply(metrics)
            return log[-1]

        trainer.updater.apply = watched  # type: ignore[method-assign]
        trainer.log = log  # type: ignore[attr-defined]
        return trainer

    return make
