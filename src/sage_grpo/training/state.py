"""Everything that a checkpoint holds: a resumed run continues to the bit.

Also earlier rollouts, where updates learn from them again: as long as the policy has moved little, the ratio of its Gaussian steps says exactly how much
each of their clips still counts (OP-GRPO, arXiv 2604.04142)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sage_grpo.data.prompts import Prompt, PromptStream
from sage_grpo.models.base import VelocityModel
from sage_grpo.models.policy import Policy
from sage_grpo.parallel import checkpoint
from sage_grpo.parallel.world import World
from sage_grpo.rl.kl_control import KlController
from sage_grpo.sentinel.sentinel import Sentinel
from sage_grpo.training.anchor import Anchor, Ema, Old, Past, Reference
from sage_grpo.training.config import SentinelConfig, TrainConfig
from sage_grpo.training.optim import Optimizer
from sage_grpo.training.placing import settle
from sage_grpo.training.plan import Plan, Replay
from sage_grpo.training.planner import choose
from sage_grpo.training.rollout import Kept, Rollout
from sage_grpo.training.scoring import Scored
from sage_grpo.types import Conditioning

PREFIX = "reuse"
"""Of the names of tensors in a checkpoint."""


@dataclass(frozen=True)
class Lesson:
    """An earlier iteration: what its updates learned from."""

    plan: Plan
    """With the clips that were chosen."""
    total: Tensor
    """Rewards of all clips, on every rank."""
    advantages: Tensor
    kept: dict[Replay, Kept]
    """This rank's."""

    @classmethod
    def of(cls, plan: Plan, rollout: Rollout, scored: Scored, advantages: Tensor) -> Lesson:
        """Of an iteration that is over; its records leave the GPU."""
        kept = {replay: Kept.of(record) for replay, record in rollout.records.items()}
        settle(next(iter(rollout.records.values())).policy.model.device)
        return cls(plan, scored.total, advantages, kept)

    @property
    def scored(self) -> Scored:
        """Its scores, as far as updates ask for them."""
        places, size = torch.arange(len(self.total)), self.plan.group_size
        return Scored(places // size, places % size, self.total, {}, {}, "")

    def rollout(self, replayed: Callable[[Replay], tuple[Policy, tuple[Conditioning, ...]]]) -> Rollout:
        """Its records again, under the present weights; `replayed` gives the policy of a replay and what its rows are conditioned on."""
        return Rollout(records={replay: kept.record(*replayed(replay)) for replay, kept in self.kept.items()})


@dataclass
class Shelf:
    """The last iterations' lessons, the oldest first. They are part of a checkpoint: what they hold of policies that are gone cannot be made again."""

    config: TrainConfig
    plan: Callable[[int], Plan]
    """The plan of an iteration, before clips are chosen."""
    rank: int
    ranks: int
    lessons: list[Lesson] = field(default_factory=list)

    def keep(self, lesson: Lesson) -> None:
        """Put an iteration on the shelf; the oldest leaves where there is no room."""
        self.lessons = [*self.lessons, lesson][-self.config.update.reuse :]

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of this rank's."""
        found: dict[str, Tensor] = {}
        for lesson in self.lessons:
            start = self._name(lesson.plan.iteration)
            found |= {f"{start}/total": lesson.total, f"{start}/advantages": lesson.advantages}
            for place, replay in enumerate(self._replays(lesson.plan)):
                rows = vars(lesson.kept[replay])
                found |= {f"{start}/{place}/{name}": own for name, own in rows.items() if own is not None}
        # The end of one step is the start of the next, the same tensor, which safetensors refuses to write twice.
        firsts = {own.data_ptr(): name for name, own in reversed(found.items())}
        return {name: own if firsts[own.data_ptr()] == name else own.clone() for name, own in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """What is not a tensor."""
        return {"iterations": [lesson.plan.iteration for lesson in self.lessons], "ranks": self.ranks}

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse what cannot be taken over."""
        if state["iterations"] and int(state["ranks"]) != self.ranks:
            raise ValueError(
                f"each of {state['ranks']} ranks kept the earlier rollouts of its own clips (update.reuse), and now there are {self.ranks}: continue "
                f"with {state['ranks']}"
            )

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` and `tensors` gave."""
        self.lessons = []
        for iteration in map(int, state["iterations"]):
            start, plan = self._name(iteration), self.plan(iteration)
            total, advantages = tensors[f"{start}/total"], tensors[f"{start}/advantages"]
            clips = len(plan.groups) * plan.group_size
            if len(total) != clips:
                raise ValueError(
                    f"iteration {iteration}, which update.reuse keeps, has {len(total)} clips, and one has {clips} now: keep batch.prompts and "
                    "batch.group_size as they were"
                )
            kept = {}
            for place, replay in enumerate(self._replays(plan)):
                own = {one.name: tensors.get(f"{start}/{place}/{one.name}") for one in fields(Kept)}
                kept[replay] = Kept(**own)  # type: ignore[arg-type]
            self.keep(Lesson(choose(self.config, plan, advantages, torch.isfinite(total)), total, advantages, kept))

    def _name(self, iteration: int) -> str:
        return f"{PREFIX}/{self.rank}/{iteration}"

    def _replays(self, plan: Plan) -> list[Replay]:
        """What this rank's rollout has records of, in an order that the plan alone decides."""
        return list(dict.fromkeys(one for update in range(plan.updates) for one in plan.replayable(self.rank, update)))


@dataclass
class TrainState:
    """Weights, optimizer with its pace, EMA, anchor, KL controller, data position, counters and the best score so far.

    There is no random state: all noise and all choices are keyed by (seed, iteration, ...), so the counters are enough.
    """

    params: dict[str, nn.Parameter]
    optimizer: Optimizer
    anchor: Anchor | None
    ema: Ema | None
    kl: KlController
    stream: PromptStream
    reference: Reference = field(default_factory=Reference)
    old: Old | None = None
    """The policy that samples, where it lags behind the live one."""
    shelf: Shelf | None = None
    """Earlier rollouts, where updates learn from them again."""
    past: Past | None = None
    """Earlier weights, where they sample."""
    sentinel: Sentinel = field(default_factory=lambda: Sentinel(SentinelConfig()))
    iteration: int = 0
    """Iterations completed."""
    updates: int = 0
    """Optimizer updates completed."""
    evaluated: int = -1
    """Iteration of the last evaluation."""
    best: dict[str, float] = field(default_factory=dict)
    """Iteration and score of the best evaluation."""

    @classmethod
    def begin(cls, config: TrainConfig, model: VelocityModel, prompts: Sequence[Prompt], old: Old | None) -> TrainState:
        """The state of a run before its first iteration; `old` is an old policy that lags behind."""
        params, region = model.trainable(), config.trust_region
        updates = config.iterations * config.update.updates_per_rollout
        anchor = None
        if region.uses_anchor:
            every = config.anchor.every if region.renews_anchor else None
            anchor = Anchor(params, every=every, offload=config.anchor.offload)
        return cls(
            params=params,
            optimizer=Optimizer(params, config.optimizer, total_updates=updates),
            anchor=anchor,
            ema=None if config.optimizer.ema is None else Ema(params, decay=config.optimizer.ema),
            kl=config.kl.controller(),
            stream=PromptStream(prompts, config.seed),
            reference=Reference.of(config),
            old=old,
            past=Past(params) if config.rollout.staleness else None,
        )

    @property
    def size(self) -> int:
        """How many numbers are trained, over all ranks."""
        return sum(p.numel() for p in self.params.values())

    def save(
        self, root: Path, writer: checkpoint.Writer, meta: Mapping[str, Any], files: Mapping[str, bytes] | None = None
    ) -> Path:
        """Write a checkpoint of this moment, with what the caller adds to it."""
        tensors, own = self._tensors(), {} if self.shelf is None else self.shelf.tensors()
        own |= {} if self.past is None else self.past.tensors()
        # Every rank has earlier rollouts of its own, under its own names; what state.json lists all checkpoints of a run have.
        known = {**self._meta(), "tensors": sorted(tensors), **meta}
        return writer.save(root, self.iteration, {**tensors, **own}, known, files)

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
            if self.shelf is not None:
                self._take_up(self.shelf, meta["shelf"], folder, world)
            if self.past is not None:
                self.past.load_state_dict(meta["past"])
                checkpoint.load_some(folder, self.past.tensors(), world)

    def _take_up(self, shelf: Shelf, known: Mapping[str, Any], folder: Path, world: World) -> None:
        shelf.check(known)
        prefix = f"{PREFIX}/{shelf.rank}/"
        shelf.load(known, checkpoint.load_under(folder, prefix, world) if known["iterations"] else {})

    def go_back(self, folder: Path, world: World) -> None:
        """Take weights, optimizer, average, anchor and controllers from a checkpoint; counters, prompts and what the sentinel did go on.

        So a run that goes back still ends after its iterations, with new prompts and new noise.
        """
        meta = self._restore(folder, world)
        self.sentinel.go_back(meta["sentinel"])
        self.optimizer.pace.slow_to(self.sentinel.brake)
        if self.shelf is not None:  # what the run goes back from is not learned again
            self.shelf.lessons = []
        if self.past is not None:  # nor does it sample
            self.past.forget()
        if self.anchor is not None:  # the live weights are not the anchor's unless they were then
            was_live = int(meta["anchor_renewed_at"]) == int(meta["updates"])
            self.anchor.renewed_at = self.updates if was_live else -1

    def _restore(self, folder: Path, world: World) -> dict[str, Any]:
        """Everything that goes with the weights; returns the rest."""
        meta = checkpoint.read_meta(folder)
        self.optimizer.materialize()
        tensors = self._tensors()
        with torch.no_grad():
            checkpoint.load(folder, tensors, world)
        self.optimizer.load_tensors(tensors)
        with checkpoint.continuing(folder):
            self.kl.load_state_dict(meta["kl"])
            self.optimizer.pace.load_state_dict(meta["pace"])
            self.reference.load_state_dict(meta["reference"])
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
            "reference": self.reference.state_dict(),
            "sentinel": self.sentinel.state_dict(),
            "anchor_renewed_at": -1 if self.anchor is None else self.anchor.renewed_at,
            "best": self.best,
            **({} if self.shelf is None else {"shelf": self.shelf.state_dict()}),
            **({} if self.past is None else {"past": self.past.state_dict()}),
        }


def has_ema(folder: Path) -> bool:
    """Whether a checkpoint holds a moving average of the weights."""
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
