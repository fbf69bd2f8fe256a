"""What the ranks of a test do. Everything comes back as plain numbers and arrays."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from double import in_double
from in_process_pool import InProcess
from sage_grpo.distributed import checkpoint, heartbeat
from sage_grpo.distributed.spec import ParallelSpec, RaySpec
from sage_grpo.distributed.world import World
from sage_grpo.models.spec import LoraSpec, ModelSpec
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.member import RewardFailure
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.session import assemble, run
from sage_grpo.samplers.noise import keyed_noise
from sage_grpo.samplers.transition import expanded
from sage_grpo.training import config as c
from sage_grpo.training.events import CallbackFailed, Hooks, IterationEvent
from sage_grpo.training.inputs import adopt, build
from sage_grpo.training.kl_coefficient import KlCoefficient
from sage_grpo.training.offload import distribute
from sage_grpo.training.trainer import Trainer
from sage_grpo.types import BatchScores
from sage_grpo.workers import ray_pool
from sage_grpo.workers.messages import RolloutTask, WorkerError

PROMPTS = ("a red ball rolls", "a cat", "two green squares jump up", "rain", "a boat on a lake at night")


def configure(
    checkpoint: Path | None, folder: Path, *, lora: bool = False, guidance: float = 2.0, **changes: Any
) -> c.TrainConfig:
    """Two prompts of different lengths x 3 members: groups span 2 ranks, and 4 ranks have unequal shares.

    AdamW's epsilon is above the rounding error of gradients that are zero in exact arithmetic (a bias on attention keys);
    with 1e-8 AdamW would blow their noise up to steps of the size of the learning rate. Without a checkpoint it is a toy, whose two blocks are
    sharded like any network's.
    """
    adapter = LoraSpec(rank=4) if lora else None
    model = ModelSpec(family="trainer_zoo.toy", lora=adapter)
    if checkpoint is not None:
        model = ModelSpec(path=str(checkpoint), cache=None, guidance_scale=guidance, lora=adapter)
    prompts = folder / "prompts.txt"
    if not prompts.exists():
        prompts.write_text("\n".join(PROMPTS))
    base = c.TrainConfig(
        out=str(folder / "run"),
        iterations=2,
        model=model,
        rewards=[RewardSpec(name="video_stats", weights={"brightness": 1.0, "saturation": 0.5})],
        data=c.DataConfig(prompts=str(prompts), eval_prompts=str(prompts)),
        batch=c.BatchConfig(prompts=2, group_size=3, micro_batch=2),
        rollout=c.RolloutConfig(steps=3, deterministic_last=True),
        update=c.UpdateConfig(updates_per_rollout=2),
        anchor=c.AnchorConfig(every=3),
        kl=KlCoefficient(kind="share", share=0.1),
        optimizer=c.OptimizerConfig(lr=1e-3, eps=1e-4, ema=0.9, max_grad_norm=0.05, target_kl=0.01, max_kl=0.1),
        evaluate=c.EvalConfig(every=0, prompts=3, steps=2, show=1),
        log=c.LogConfig(tensorboard=False, progress=False),
        keep=c.KeepConfig(checkpoint_every=1, videos_every=0),
    )
    return dataclasses.replace(base, **changes)


def whole(trainer: Trainer) -> dict[str, Any]:
    """Weights, EMA, anchor and old policy of a trainer, unsharded; empty on all but the main process."""
    state = trainer.state
    tensors = {f"weights/{name}": p for name, p in state.params.items()}
    tensors |= {f"ema/{name}": p for name, p in (state.ema.copies if state.ema else {}).items()}
    tensors |= {f"anchor/{name}": p for name, p in (state.anchor.copies if state.anchor else {}).items()}
    tensors |= {f"old/{name}": p for name, p in (state.old.copies if state.old else {}).items()}
    return {name: tensor.numpy() for name, tensor in trainer.sharding.whole(tensors).items()}


@in_double
def train(world: World, config: c.TrainConfig, resume: bool = False, save: bool = False) -> dict[str, Any]:
    trainer = assemble(config, build(config, world), world)
    root = Path(config.out) / "checkpoints"
    if resume:
        trainer.state.load(checkpoint.newest_good(root), world)
    record = Recorder(trainer)
    rows, passes = [], {}
    while trainer.state.iteration < config.iterations:
        with counted(trainer) as seen:
            rows.append(trainer.step())
        passes.setdefault("iteration", seen)
        if save:
            trainer.save(root)
    if save:
        trainer.export(Path(config.out) / "final")
    with counted(trainer) as passes["evaluation"]:
        evaluation = trainer.evaluate().metrics
    return {"rows": rows, "evaluation": evaluation, "state": whole(trainer), "passes": passes, **record.records()}


@contextmanager
def counted(trainer: Trainer) -> Iterator[dict[bool, tuple[int, int]]]:
    """Forward passes and their clips on this rank, by whether they keep a graph; filled when this ends."""
    seen: list[tuple[bool, int]] = []

    def note(module, arguments, named):
        x = named.get("hidden_states", arguments[0] if arguments else None)
        seen.append((torch.is_grad_enabled(), len(x)))

    networks = (trainer.model.network, *trainer.model.others)
    handles = [network.register_forward_pre_hook(note, with_kwargs=True) for network in networks]
    found: dict[bool, tuple[int, int]] = {}
    yield found
    for handle in handles:
        handle.remove()
    for graph in (False, True):
        rows = [clips for kept, clips in seen if kept == graph]
        found[graph] = len(rows), sum(rows)


@in_double
def train_beside_workers(world: World, config: c.TrainConfig) -> dict[str, Any]:
    """The same run here, with workers, and with workers that always fail rank 1 or lie to it."""

    def outcome(worker: str, task: RolloutTask) -> str:
        return "wrong" if worker == "wrong 1" else "fails" if worker == "lazy 1" else ""

    def run(config: c.TrainConfig, *names: str) -> tuple[list[dict[str, float]], dict[str, Any], dict[str, float]]:
        def pool(config: c.TrainConfig, engine: Any, rank: int, ranks: int) -> InProcess:
            return InProcess(config, [f"{name} {rank}" for name in names], outcome, ranks)

        with mock.patch.object(ray_pool, "RayWorkerPool", pool), mock.patch.object(ray_pool, "find_ray"):
            trainer = assemble(config, build(config, world), world)
            rows = [trainer.step() for _ in range(config.iterations)]
            trainer.close()
        figures = [{k: v for k, v in row.items() if not k.startswith(("time/", "crew/"))} for row in rows]
        return figures, whole(trainer), {} if trainer.workers is None else trainer.workers.row

    stale = dataclasses.replace(config.rollout, staleness=1)
    ray = dataclasses.replace(stale, on="ray", ray=RaySpec(address="127.0.0.1:1"))
    found = {
        "here": run(dataclasses.replace(config, rollout=stale)),
        "workers": run(dataclasses.replace(config, rollout=ray), "good", "other"),
    }
    for name in ("lazy", "wrong"):
        try:
            run(dataclasses.replace(config, rollout=ray), name)
        except WorkerError as stopped:
            found[name] = str(stopped)
    return found


class Recorder:
    """Keeps noise, rewards, advantages and gradients as they pass by.

    Rewards are replaced by numbers that depend on (iteration, group, member) only, each given by the rank that has the clip.
    Real ones are kept beside them: a clip is 8 bit, so a rounding error that tips one pixel moves a reward by 1e-6 or so, and
    dividing by a small group spread would make that the largest difference between two runs by far.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.noise: dict[tuple[int, int, int], Any] = {}
        self.real: dict[tuple[int, int, int], float] = {}
        self.totals: list[torch.Tensor] = []
        self.advantages: list[torch.Tensor] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self._methods = trainer.sample, trainer.score, trainer.advantages, trainer.updater.apply
        trainer.sample, trainer.score = self._sample, self._score
        trainer.advantages, trainer.updater.apply = self._advantages, self._apply

    def _sample(self, plan):
        rollout = self._methods[0](plan)
        for replay, record in rollout.records.items():
            if replay.step == 0:
                for member, x in zip(replay.members, expanded(record.x, len(replay.members))):
                    self.noise[plan.iteration, member.group, member.index] = x.numpy()
        return rollout

    def _score(self, rollout, plan):
        reward, iteration = self.trainer.reward.score, self.trainer.state.iteration
        members = self.trainer.engine.scored(plan)

        def keyed(clips, captions, fps, metadata=None, *more):
            scores, report = reward(clips, captions, fps, metadata, *more)
            places = [(iteration, member.group, member.index) for member in members]
            self.real |= {place: float(value) for place, value in zip(places, scores.total)}
            total = torch.tensor([float(keyed_noise((1,), "reward", *place)) for place in places])
            return BatchScores(parts=scores.parts, total=total, valid=torch.isfinite(total)), report

        self.trainer.reward.score = keyed
        try:
            return self._methods[1](rollout, plan)
        finally:
            self.trainer.reward.score = reward

    def _advantages(self, scored, plan):
        result = self._methods[2](scored, plan)
        self.totals.append(scored.total)
        self.advantages.append(result)
        return result

    def _apply(self, metrics):
        gradients = {name: p.grad for name, p in self.trainer.state.params.items() if p.grad is not None}
        self.gradients.append(self.trainer.sharding.whole(gradients))
        return self._methods[3](metrics)

    def records(self) -> dict[str, Any]:
        return {
            "noise": self.noise,
            "real": self.real,
            "rewards": torch.stack(self.totals).numpy(),
            "advantages": torch.stack(self.advantages).numpy(),
            "gradients": [{name: g.numpy() for name, g in update.items()} for update in self.gradients],
        }


def stop_a_rank(world: World, lost: int, how: str, folder: Path) -> None:
    """A rank stops or dies while the others wait for it in a collective; they write down what they noticed."""
    beat = world.heartbeat
    heartbeat.SILENT, heartbeat.INTERVAL = 1.0, 0.1
    processes = world.texts(str(os.getpid()))
    others = [rank for rank in range(world.processes) if rank != lost]

    def leave(message: str) -> None:
        (folder / f"{world.number}").write_text(message)
        while not all((folder / f"{rank}").exists() for rank in others):
            time.sleep(0.05)
        if world.number == others[0] and how == "stops":
            os.kill(int(processes[lost]), signal.SIGKILL)
        os._exit(1)

    beat.leave = leave
    world.note("iteration 0")
    world.barrier()
    while any(sign.where != "iteration 0" for sign in beat._seen.values()):  # everyone has been seen alive
        time.sleep(0.05)
    world.barrier()
    if world.number == lost:
        os.kill(os.getpid(), signal.SIGSTOP if how == "stops" else signal.SIGKILL)
    if how == "stops":
        world.barrier()
    time.sleep(4)  # busy with something else: nothing but the heartbeat can notice


def failing_save(world: World, where: str, folder: Path) -> dict[str, Any]:
    """Two checkpoints; in the second the disk of one rank is full."""
    tensors = {f"w{world.number}": torch.ones(3)}
    checkpoint.save(folder, 1, tensors, {"value": 1}, world=world)

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if where == "tensors" and world.number == 1:
        checkpoint.HuggingFaceStorageWriter.write_data = full
    if where == "state":
        checkpoint._write = full
    try:
        checkpoint.save(folder, 2, tensors, {"value": 2}, world=world)
    except checkpoint.SaveFailed as failed:
        return {"failed": str(failed)}
    return {"failed": ""}


class FailsOnRankOne:
    names = ("constant",)

    def __call__(self, videos, prompts, fps):
        if os.environ.get("RANK") == "1":
            raise ConnectionError("the judge of rank 1 is down")
        return {"constant": videos.float().mean(dim=(1, 2, 3, 4))}


class DiesOnce:
    """A reward that kills rank 1 at its second call, if the file is not there yet."""

    names = ("brightness",)

    def __init__(self, marker: str) -> None:
        self.marker, self.calls = Path(marker), 0

    def __call__(self, videos, prompts, fps):
        self.calls += 1
        if os.environ.get("RANK") == "1" and self.calls == 2 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"brightness": videos.float().mean(dim=(1, 2, 3, 4)) / 255}


def handed_over(world: World, config: c.TrainConfig) -> list[dict[str, Any]]:
    """A run with a reward and a callback of a program's own, which raises in the second iteration; and the same run again, without that."""
    found = []
    config, own = adopt(config, rewards=lambda videos, prompts, fps: videos.float().mean((1, 2, 3, 4)))
    for fails in (True, False):
        told: list[int] = []

        def note(event: IterationEvent, fails: bool = fails, told: list[int] = told) -> None:
            told.append(event.iteration)
            if fails and event.iteration == 2:
                raise ZeroDivisionError("mine")

        try:
            ended = run(config, world, own, Hooks(iteration=note)).iteration
        except (ZeroDivisionError, CallbackFailed) as error:
            ended = type(error).__name__
        found.append({"told": told, "ended": ended})
    return found


def run_whole(world: World, config: c.TrainConfig) -> None:
    run(config, world)


def failing_reward(world: World, configs: Sequence[c.TrainConfig]) -> list[dict[str, Any]]:
    """One iteration of each run, with a reward that fails on rank 1."""
    found = []
    for config in configs:
        try:
            trainer = assemble(config, build(config, world), world)
            row = trainer.step()
        except (RewardConfigError, RewardFailure) as refused:
            found.append({type(refused).__name__: str(refused)})
            continue
        metrics = trainer.evaluate().metrics
        names = "reward/failed", "reward/failed/FailsOnRankOne"
        found.append({"report": trainer.scores.report, "failed": [row[name] for name in names]})
        found[-1]["eval"] = [metrics[name.replace("reward", "eval", 1)] for name in names]
    return found


@in_double
def every_family(world: World, checkpoints: dict[str, str]) -> dict[str, Any]:
    """Velocities at high and low noise, a gradient, and the tokens that every network's first block sees, of checkpoints of several kinds."""
    import tiny

    results = {}
    for kind, path in checkpoints.items():
        model = ModelSpec(path=path, cache=None, guidance_scale=1.0).load("cpu")
        engine = distribute(model, ParallelSpec(), world)
        seen: list[int] = []
        for network in (model.network, *model.others):
            blocks = getattr(getattr(network, "transformer", network), next(iter(model.traits.blocks)))
            blocks[0].register_forward_pre_hook(partial(_tokens, seen), with_kwargs=True)
        image = tiny.image() if max(model.pictures) else None
        conditions = model.encode(["a cat"], [image])
        x = keyed_noise((1, *model.latent_shape()), "x")
        high, low = (model.velocity(x, torch.tensor(sigma), conditions) for sigma in (0.95, 0.3))
        loss = (high * keyed_noise(tuple(x.shape), "gradient")).sum()
        (loss * engine.scale).backward()
        norm = engine.clip_gradients(model.trainable().values(), 1e9)
        results[kind] = {"high": high.detach().numpy(), "low": low.detach().numpy(), "norm": norm, "tokens": seen[:2]}
    return results


def _tokens(seen: list[int], block: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    seen.append((named["hidden_states"] if "hidden_states" in named else given[0]).shape[1])
