"""A worker process: samples the clips of tasks with the trainer's weights of the requested version."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from sage_grpo.distributed.world import World
from sage_grpo.models.devices import choose_device
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.engine import RolloutEngine
from sage_grpo.training.inputs import load_model
from sage_grpo.training.offload import get_ready, hold_to_budget, settle
from sage_grpo.training.rollout import SavedRecord
from sage_grpo.training.scoring import compose, no_clips
from sage_grpo.workers.messages import RolloutTask, TaskResult, checked, log_prob, moved, unpack

CPU = torch.device("cpu")


def device_name(device: torch.device) -> str:
    """Name of the card, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class Worker:
    """Holds the model, and with `rollout.ray.scores workers` the rewards. Text encoders and the optimizer stay in the
    trainer."""

    def __init__(
        self,
        config: TrainConfig,
        ranks: int,
        threads: int,
        paths: Sequence[str],
        attention: tuple[str, str] | None = None,
    ) -> None:
        """ranks: training processes, among which plans divide clips. threads: PyTorch's CPU threads, as in the trainer:
        other numbers change the last bits of sums. paths: import paths of the trainer. attention: the trainer's
        device, and the kernel that it measured to be the fastest. The same kind of card uses it without measuring:
        beside other processes another one could win, with other last bits."""
        torch.set_num_threads(threads)
        sys.path += [path for path in paths if path not in sys.path]
        if (config.model.device or "").startswith("cuda:"):  # Ray shows every worker only its own GPU
            config = replace(config, model=replace(config.model, device="cuda"))
        if attention is not None and attention[0] == device_name(choose_device(config.model.device)):
            config = replace(config, model=replace(config.model, attention=attention[1]))
        get_ready(wanted=config.model.deterministic)
        model = load_model(config, World())
        hold_to_budget(config.model, model.device)
        self.scores, self.version = config.rollout.ray.scores == "workers", -1
        reward = compose(config, model.device, scores=self.scores)
        self.engine = RolloutEngine(config, model, reward, world=World(size=ranks))

    def ready(self) -> str:
        """Name of its device."""
        return device_name(self.engine.model.device)

    def run(self, task: RolloutTask, weights: bytes) -> TaskResult:
        """Sample, and score where workers do."""
        began, engine, clips = time.perf_counter(), self.engine, None
        if task.version != self.version:
            unpack(weights, engine.model.trainable())
            self.version = task.version
        plan = engine.planner.plan(task.iteration, task.prompts).tasks(task.rank)[task.part]
        rollout = engine.sampler(plan, moved(task.conditions, engine.model.device)).run()
        if self.scores:
            clips = engine.judge(rollout, plan, whole=task.whole)
            # Clips are sent only if an observer needs them.
            videos = clips.videos.to(CPU) if task.whole else no_clips(engine.model.video)
            clips = replace(clips, videos=videos, sound=clips.sound if task.whole else None)
        replay = checked(plan, rollout.records)
        record = rollout.records[replay]
        sends_latents = not self.scores or engine.config.build_objective().differentiates
        result = TaskResult(
            records={replay: SavedRecord.of(record) for replay, record in rollout.records.items()},
            log_prob=log_prob(record, replay.step).to(CPU) if record.log_prob_old is None else None,
            latents=[(batch, rows.to(CPU)) for batch, rows in rollout.latents if sends_latents],
            clips=clips,
            seconds=time.perf_counter() - began,
        )
        settle(engine.model.device)
        return result
