"""Everything that a checkpoint holds: a resumed run continues to the bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sage_grpo.data.prompts import Prompt, PromptStream
from sage_grpo.distributed import checkpoint
from sage_grpo.distributed.world import World
from sage_grpo.health.config import SentinelConfig
from sage_grpo.health.sentinel import Sentinel
from sage_grpo.models.base import VelocityModel
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.kl_coefficient import KlController
from sage_grpo.training.optim import Optimizer
from sage_grpo.training.reference import OldPolicy, PastWeights, ReferencePolicy, Snapshot


@dataclass
class TrainState:
    """All state of a run. There is no random state: noise and choices are keyed by (seed, iteration, ...), so the counters are enough."""

    params: dict[str, nn.Parameter]
    optimizer: Optimizer
    anchor: ReferencePolicy | None
    ema: Snapshot | None
    kl: KlController
    stream: PromptStream
    old: OldPolicy | None = None
    """The old policy, if it lags behind the live one."""
    past: PastWeights | None = None
    sentinel: Sentinel = field(default_factory=lambda: Sentinel(SentinelConfig()))
    iteration: int = 0
    updates: int = 0
    evaluated: int = -1
    """Iteration of the last evaluation."""
    best: dict[str, float] = field(default_factory=dict)

    @classmethod
    def begin(
        cls, config: TrainConfig, model: VelocityModel, prompts: Sequence[Prompt], old: OldPolicy | None
    ) -> TrainState:
        params, region, anchor = model.trainable(), config.trust_region, None
        if region.uses_anchor:
            every = config.anchor.every if region.renews_anchor else None
            anchor = ReferencePolicy(params, every=every, offload=config.anchor.offload)
        updates = config.iterations * config.update.updates_per_rollout
        return cls(
            params=params,
            optimizer=Optimizer(params, config.optimizer, total_updates=updates),
            anchor=anchor,
            ema=None if config.optimizer.ema is None else Snapshot(params),
            kl=KlController(config.kl),
            stream=PromptStream(prompts, config.seed),
            old=old,
            past=PastWeights(params) if config.rollout.staleness else None,
        )

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.params.values())

    def save(self, root: Path, world: World, meta: Mapping[str, Any], files: Mapping[str, bytes] | None = None) -> Path:
        tensors, past = self._tensors(), {} if self.past is None else self.past.tensors()
        # The tensors listed in state.json are in every checkpoint of a run; the number of earlier weights varies.
        known = {**self._meta(), "tensors": sorted(tensors), **meta}
        return checkpoint.save(root, self.iteration, {**tensors, **past}, known, files, world)

    def load(self, folder: Path, world: World) -> None:
        """Continue from a checkpoint; resharding where the number of ranks differs."""
        meta = self._restore(folder, world)
        with checkpoint.continuing(folder):
            self.iteration, self.updates, self.best = int(meta["iteration"]), int(meta["updates"]), dict(meta["best"])
            self.evaluated = int(meta["evaluated"])
            self.stream.position = int(meta["stream_position"])
            self.sentinel.load_state_dict(meta["sentinel"])
            if self.anchor is not None:
                self.anchor.renewed_at = int(meta["anchor_renewed_at"])
            if self.past is not None:
                self.past.load_state_dict(meta["past"])
                checkpoint.load_some(folder, self.past.tensors(), world)

    def go_back(self, folder: Path, world: World) -> None:
        """Take all that belongs to the weights from a checkpoint; counters, prompts and the sentinel's record continue, so that the run still
        ends after its iterations, with new prompts and new noise."""
        meta = self._restore(folder, world)
        self.sentinel.go_back(meta["sentinel"])
        self.optimizer.pace.slow_to(self.sentinel.brake)
        if self.past is not None:  # the discarded weights must not sample
            self.past.forget()
        if self.anchor is not None:  # the live weights equal the reference only if they did in the checkpoint
            was_live = int(meta["anchor_renewed_at"]) == int(meta["updates"])
            self.anchor.renewed_at = self.updates if was_live else -1

    def _restore(self, folder: Path, world: World) -> dict[str, Any]:
        """Restore all state that belongs to the weights; returns the checkpoint's metadata."""
        meta = checkpoint.read_meta(folder)
        self.optimizer.materialize()
        tensors = self._tensors()
        with torch.no_grad():
            checkpoint.load(folder, tensors, world)
        self.optimizer.load_tensors(tensors)
        with checkpoint.continuing(folder):
            self.kl.load_state_dict(meta["kl"])
            self.optimizer.pace.load_state_dict(meta["pace"])
        return meta

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"weights/{name}": p.detach() for name, p in self.params.items()} | self.optimizer.tensors()
        for prefix, snapshot in (("anchor", self.anchor), ("ema", self.ema), ("old", self.old)):
            if snapshot is not None:
                tensors |= {f"{prefix}/{name}": copy for name, copy in snapshot.copies.items()}
        return tensors

    def _meta(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "updates": self.updates,
            "evaluated": self.evaluated,
            "stream_position": self.stream.position,
            "kl": self.kl.state_dict(),
            "pace": self.optimizer.pace.state_dict(),
            "sentinel": self.sentinel.state_dict(),
            "anchor_renewed_at": -1 if self.anchor is None else self.anchor.renewed_at,
            "best": self.best,
            **({} if self.past is None else {"past": self.past.state_dict()}),
        }


def has_ema(folder: Path) -> bool:
    return any(name.startswith("ema/") for name in checkpoint.read_meta(folder)["tensors"])


def load_weights(folder: Path, model: VelocityModel, *, ema: bool = False) -> dict[str, Tensor]:
    """The trainable weights (or their EMA) of a checkpoint, by parameter name."""
    meta = checkpoint.read_meta(folder)
    prefix = "ema" if ema else "weights"
    if ema and not has_ema(folder):
        raise ValueError(f"{folder} has no EMA: the run was trained without optimizer.ema.")
    wanted = {f"{prefix}/{name}": torch.empty_like(p, device="cpu") for name, p in model.trainable().items()}
    saved = {name for name in meta["tensors"] if name.startswith(f"{prefix}/")}
    different = sorted(saved ^ set(wanted))
    if different:
        name, where = different[0].partition("/")[2], "the checkpoint" if different[0] in saved else "the model"
        raise ValueError(
            f"{folder} holds the weights of another model: only {where} trains {name} ({len(different)} such names). "
            "Use the run's own model, LoRA and model.train settings."
        )
    checkpoint.load_some(folder, wanted)
    return {name.removeprefix(f"{prefix}/"): tensor for name, tensor in wanted.items()}
