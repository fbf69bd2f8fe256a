"""A worker process: samples jobs with the trainer's weights of the requested version."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from sage_grpo.distributed.world import World
from sage_grpo.models.devices import choose_device
from sage_grpo.rewards.ray_reward import RewardActors
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.engine import RolloutEngine
from sage_grpo.training.inputs import load_model
from sage_grpo.training.offload import get_ready, hold_to_budget, settle
from sage_grpo.training.rollout import SavedRecord
from sage_grpo.training.scoring import ScoredClips, compose, no_clips
from sage_grpo.workers.messages import RolloutTask, TaskResult, checked, log_prob, moved, unpack

CPU = torch.device("cpu")


def title(device: torch.device) -> str:
    """Name of a device's type."""
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
        away: Mapping[str, RewardActors],
        chosen: tuple[str, str] | None = None,
    ) -> None:
        """ranks: training processes, among which plans divide clips. threads: PyTorch's CPU threads, as in the trainer:
        other numbers change the last bits of sums. paths: import paths of the trainer. away: rewards with actors of
        their own, by title. chosen: the trainer's device, and the attention that it measured to be the fastest. The
        same kind of card uses it without measuring: beside other processes another one could win, with other last
        bits."""
        torch.set_num_threads(threads)
        sys.path += [path for path in paths if path not in sys.path]
        if (config.model.device or "").startswith("cuda:"):  # Ray shows every worker only its own GPU
            config = replace(config, model=replace(config.model, device="cuda"))
        if chosen is not None and chosen[0] == title(choose_device(config.model.device)):
            config = replace(config, model=replace(config.model, attention=chosen[1]))
        get_ready(wanted=config.model.deterministic)
        model = load_model(config, World())
        hold_to_budget(config.model, model.device)
        scores = config.rollout.ray.scores == "workers"
        reward = compose(config, model.device, away=away, scores=scores)
        self.studio = RolloutEngine(config, model, reward, world=World(size=ranks))
        self.scores, self.version = scores, -1

    def ready(self) -> str:
        """Name of its device."""
        return title(self.studio.model.device)

    def make(self, job: RolloutTask, weights: bytes) -> TaskResult:
        """Run a job."""
        began, studio = time.perf_counter(), self.studio
        if job.version != self.version:
            unpack(weights, studio.model.trainable())
            self.version = job.version
        plan = studio.planner.plan(job.iteration, job.prompts).tasks(job.rank)[job.part]
        rollout = studio.sampler(plan, moved(job.conditions, studio.model.device)).run()
        judged = self._shown(studio.judge(rollout, plan, whole=job.whole), job) if self.scores else None
        replay = checked(plan, rollout.records)
        record = rollout.records[replay]
        proof = log_prob(record, replay.step).to(CPU) if record.log_prob_old is None else None
        sends = not self.scores or studio.config.build_objective().differentiates
        result = TaskResult(
            {replay: SavedRecord.of(record) for replay, record in rollout.records.items()},
            proof,
            [(batch, rows.to(CPU)) for batch, rows in rollout.latents if sends],
            judged,
            time.perf_counter() - began,
        )
        settle(studio.model.device)
        return result

    def _shown(self, judged: ScoredClips, job: RolloutTask) -> ScoredClips:
        """Send clips only if an observer needs them."""
        videos = judged.videos.to(CPU) if job.whole else no_clips(self.studio.model.video)
        return replace(judged, videos=videos, sound=judged.sound if job.whole else None)
