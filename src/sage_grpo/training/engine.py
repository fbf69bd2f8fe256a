"""Samples, decodes and scores clips, in the trainer and in workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from sage_grpo.data.groups import Member
from sage_grpo.distributed.world import World
from sage_grpo.health.statistics import thumbnails
from sage_grpo.models.base import VelocityModel, abilities, network_of, pixels_of, sound_of
from sage_grpo.models.policy import Policy, conditions_of
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.inputs import LATENTS, Encoder
from sage_grpo.training.lockstep import Lockstep
from sage_grpo.training.loss import needs_velocity_old
from sage_grpo.training.offload import VaeMover
from sage_grpo.training.parts import parts_of
from sage_grpo.training.plan import Group, Plan, Replay
from sage_grpo.training.planner import Planner
from sage_grpo.training.rollout import NoiseKeys, Rollout, Sampler, Storage, learned
from sage_grpo.training.scoring import ScoredClips, Scores, black_clips, metadata_of, score_here
from sage_grpo.types import Conditioning, Sound
from sage_grpo.utils.clock import Clock

Conditions = Mapping[int, Conditioning]
"""Conditionings of groups, by their index."""


class Workers(Protocol):
    """Sampling by other processes, or with older weights."""

    row: dict[str, float]

    def roll_out(self, due: Plan, coming: Sequence[Plan], shows: Callable[[int], bool]) -> Rollout:
        """The rollout of the due iteration; the `coming` ones may be started."""

    def close(self) -> None:
        """Stop all running work."""


@dataclass
class RolloutEngine:
    """Samples, decodes and scores the clips of a plan with the current weights of its model."""

    config: TrainConfig
    model: VelocityModel
    reward: CompositeReward
    world: World = field(default_factory=World)
    clock: Clock = field(default_factory=Clock)
    _: KW_ONLY
    examples: bool = False
    """Clips are given, and encoded."""

    def __post_init__(self) -> None:
        config, model = self.config, self.model
        self.parts = parts_of(config, model)
        """Parts of a clip with a ratio of their own; mostly none."""
        grid = Schedule(model.sigmas(config.rollout.steps, config.rollout.shift))
        kernel = config.kernel.build(grid)
        self.planner = Planner(config, grid, kernel, model.trains, self.world.size, network_of(model))
        self.planner.check()
        self.vae = VaeMover(model, config.model)
        self.clip_encoder = Encoder(model, Path(config.out) / LATENTS, self.vae.decoding) if self.examples else None

    @property
    def storage(self) -> Storage:
        config = self.config
        return Storage(
            dtype=getattr(torch, config.rollout.storage),
            device=torch.device("cpu") if config.rollout.offload else self.model.device,
            velocities=needs_velocity_old(self.planner.objective, config.trust_region),
        )

    def conditions(self, plan: Plan) -> dict[int, Conditioning]:
        groups = [plan.groups[index] for index in plan.members(self.world.rank)]
        found = conditions_of(self.model, [group.prompt for group in groups])
        return {group.index: condition for group, condition in zip(groups, found)}

    def sampler(self, plan: Plan, conditions: Conditions | None = None) -> Sampler:
        config, rank = self.config.rollout, self.world.rank
        passes = plan.rollout_passes(rank) + Lockstep(plan).idle_passes(rank)
        paired = self.planner.objective.in_pairs
        return Sampler(
            plan,
            rank,
            self.policy,
            self.conditions(plan) if conditions is None else conditions,
            keys=NoiseKeys(self.config.seed, plan.iteration, same_start=config.same_noise, same_fresh=paired),
            storage=self.storage,
            solver=config.solver,
            examples=partial(self.example, plan) if plan.examples else None,
            progress=self.clock.ticker(passes.total()),
        )

    def example(self, plan: Plan, member: Member) -> Tensor:
        assert self.clip_encoder is not None
        return self.clip_encoder(plan.groups[member.group].prompt.clips[member.index])

    def policy(self, group: Group) -> Policy:
        places = tuple(part.place for part in self.parts)
        return Policy(self.model, self.planner.kernel, group.schedule, self.config.model.training_guidance, places)

    def replayed(self, plan: Plan, replay: Replay, conditions: Conditions) -> tuple[Policy, tuple[Conditioning, ...]]:
        groups = [member.group for member in replay.members]
        first, rows = plan.groups[groups[0]], dict.fromkeys(groups) if replay.shared else groups
        return learned(self.policy(first), first), tuple(conditions[group] for group in rows)

    def judge(self, rollout: Rollout, plan: Plan, *, whole: bool = True) -> ScoredClips:
        """Decode and score this process's clips; `whole` decodes also what no reward reads, for observers."""
        with self.clock("decode"):
            videos, sound = self.decode(rollout, whole=whole), self.listen(rollout, whole=whole)
            small = thumbnails(videos) if whole or self.reward.reads_clips else None
        with self.clock("reward"):
            scores = self.score(videos, plan, self.latents(rollout), sound)
        return ScoredClips(videos, scores, small, sound)

    def decode(self, rollout: Rollout, *, whole: bool = True) -> Tensor:
        """The clips that this process scores, uint8; black where no reward reads them, unless `whole`."""
        batches = self._own(rollout)
        tick, done = self.clock.ticker(len(batches)), 0
        videos = black_clips(self.model.video, sum(map(len, batches)))
        if whole or self.reward.reads_clips:
            with self.vae.decoding():
                for latents in batches:
                    videos[done : done + len(latents)] = self.model.decode(latents)
                    done += len(latents)
                    tick()
        return videos

    def latents(self, rollout: Rollout) -> Tensor | None:
        batches = self._own(rollout)
        return torch.cat(batches) if batches else None

    def _own(self, rollout: Rollout) -> list[Tensor]:
        return [rollout.latents[index][1] for index in self.world.mine(len(rollout.latents))]

    def listen(self, rollout: Rollout, *, whole: bool = True) -> Sound | None:
        """Sound of the clips that this process scores, if they have any and `whole` or a reward needs it."""
        latents = self.latents(rollout) if whole or self.reward.hears else None
        with self.vae.decoding() if abilities(self.model).sound else nullcontext():
            return None if latents is None else sound_of(self.model, latents)

    def score(self, videos: Tensor, plan: Plan, latents: Tensor | None = None, sound: Sound | None = None) -> Scores:
        members = self.scored(plan)
        shown = [plan.groups[member.group].prompt for member in members]
        return score_here(self.reward, videos, members, shown, self.model.video.fps, latents, sound, plan.iteration)

    def gather(self, scores: Scores) -> Scores:
        return scores.gathered(self.world, self.reward.max_failed_fraction, torch.float32)

    def differentiate(self, plan: Plan, rollout: Rollout) -> dict[tuple[Member, ...], Tensor]:
        """The gradient of the reward at all latents, by micro-batch. A decoder's graph is large: clips go one at a time with model.vae_slicing, else by micro-batch."""
        tick = self.clock.ticker(sum(len(batch.members) for batch, _ in rollout.latents))
        signals, video = {}, self.model.video
        together = 1 if self.config.model.vae_slicing else self.config.batch.micro_batch
        read = self.reward.frames_read(video.frames, video.fps)

        def pixels(latents: Tensor) -> Tensor:
            return pixels_of(self.model)(latents, read)

        with self.vae.decoding() if self.reward.learns_from_clips else nullcontext():
            for batch, latents in rollout.latents:
                rows, prompt = [], plan.group_of(batch).prompt
                for some in latents.split(together):
                    about = metadata_of(prompt), prompt.rewards, plan.iteration
                    rows.append(self.reward.gradient(some, pixels, prompt.text, video.fps, *about))
                    for _ in some:
                        tick()
                signals[batch.members] = torch.cat(rows).to(torch.float32)
        if self.reward.offload_between:
            self.reward.offload()
        return signals

    def scored(self, plan: Plan) -> list[Member]:
        """The clips that this process decodes and scores; ranks that share clips divide this work. Empty for given clips."""
        if plan.examples:
            return []
        batches = plan.batches(self.world.rank)
        return [member for place in self.world.mine(len(batches)) for member in batches[place].members]
