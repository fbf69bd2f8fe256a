"""Forecasts a run from its description: passes of every rank, bytes and seconds of every phase, GPU-hours, and an iteration with workers."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from sage_grpo.distributed.world import World
from sage_grpo.models.base import VelocityModel
from sage_grpo.models.guidance import TOGETHER
from sage_grpo.models.spec import FAMILIES
from sage_grpo.plan import formulas
from sage_grpo.plan.architecture import Architecture
from sage_grpo.plan.description import RunDescription
from sage_grpo.plan.formulas import COMPUTE, GIB, MASTER, Memory, NetworkShape, RunShape
from sage_grpo.plan.hardware import Hardware, here
from sage_grpo.plan.passes import Counts, Guiding, PassCount, PassKind, count, evaluation, kinds, references
from sage_grpo.rewards.spec import RewardSpec, facts_of
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.inputs import compiles
from sage_grpo.training.loss import needs_velocity_old
from sage_grpo.training.offload import SHARE as STAYS
from sage_grpo.training.offload import configured
from sage_grpo.training.plan import Plan
from sage_grpo.types import Keep

REWARD_TOKENS = 3000  # tokens of a clip that a built-in reward with networks reads; it computes in bfloat16
SPARE = 0.93
"""Share of a GPU's memory that a run may fill by the formula: the rest is for the CUDA context and the allocator's
fragmentation."""


@dataclass(frozen=True)
class Phase:
    """A phase of an iteration on the busiest GPU."""

    name: str
    seconds: float
    memory: Memory


@dataclass(frozen=True, kw_only=True)
class Forecast(RunDescription):
    """The forecast of a run: its passes, memory and time on some hardware."""

    hardware: Hardware
    held_out: int  # prompts of an evaluation

    @property
    def passes(self) -> list[dict[str, PassCount]]:
        return self.counts[0].phases

    @cached_property
    def counts(self) -> list[Counts]:
        guiding = self._guiding(self.config.model.training_guidance)
        needed = [references(self.config, plan.iteration, plan.updates) for plan in self.plans]
        rows = zip(self.plans, self._kinds, needed, strict=True)
        return [count(plan, parts, guiding, reference=need) for plan, parts, need in rows]

    @cached_property
    def _kinds(self) -> list[list[list[PassKind]]]:
        branches = self._guiding(self.config.model.training_guidance).branches
        return [kinds(plan, branches) for plan in self.plans]

    def _guiding(self, guidance: float | None) -> Guiding:
        """`guidance` overrides the model's scale."""
        model = self.architecture.model
        together = 0 if self.hardware.is_cpu else TOGETHER // (2 * model.tokens)
        return Guiding(lambda sigma: model.branches(sigma, guidance), together)

    @cached_property
    def evaluation(self) -> list[PassCount]:
        grid = self.architecture.grid(self.config.evaluate.steps_for(self.config.model))
        sigmas = grid.sigmas[:-1].tolist()
        return evaluation(self.config, self.held_out, self.layout.data, sigmas, self._guiding(None))

    @property
    def network(self) -> NetworkShape:
        return self.architecture.network

    @cached_property
    def job(self) -> RunShape:
        return replace(self._job, keep=tuple(Counter(self.activations).items()))

    @cached_property
    def _job(self) -> RunShape:
        """Without the activations that blocks keep, which it decides."""
        config, built = self.config, self.architecture.model
        model, parallel, video = config.model, config.parallel, built.video
        vae = model.vae_dtype or ("float32" if self.hardware.is_cpu else model.dtype)
        return RunShape(
            layout=self.layout,
            lora_rank=None if model.lora is None else model.lora.rank,
            frames=video.frames,
            height=video.height,
            width=video.width,
            text_tokens=built.text_tokens,
            given_tokens=built.given_tokens,
            micro_batch=max(len(batch.members) for share in self.plan.shares for batch in share),
            guidance=any(built.branches(sigma, model.training_guidance) > 1 for sigma in (1.0, 0.0)),
            negative_gradient=model.negative_gradient,
            compute=_bytes(model.dtype),
            compiled=compiles(config, torch.device("cpu" if self.hardware.is_cpu else "cuda"))[0],
            same_bits=model.deterministic and not self.hardware.is_cpu,
            anchor=config.trust_region.uses_anchor,
            anchor_offload=config.anchor.offload,
            ema=config.optimizer.ema is not None,
            # Both are a copy of the trainable weights, and are never combined.
            max_kl=config.optimizer.max_kl is not None or any(config.build_objective().old_passes(self.plan.updates)),
            moments=1 if config.optimizer.kind == "muon" else 2,
            reshard=parallel.reshard,
            cpu_offload=parallel.cpu_offload,
            sync_every_pass=parallel.sync_every_pass,
            vae_bytes=_bytes(vae),
            vae_tiling=model.vae_tiling,
            kept_states=max(self._kept(rank) for rank in range(self.layout.data)),
        )

    @cached_property
    def activations(self) -> list[Keep]:
        asked, cuda = self.config.update.gradient_checkpointing, not self.hardware.is_cpu
        if asked != "auto" or not cuda:
            return configured(asked, self.network.blocks, cuda=cuda)
        fitting = formulas.activations_within(self.network, self._job, self.room)
        return [level for level, count in fitting.items() for _ in range(count)]

    def _clips(self, rank: int, step: int = 1) -> int:
        return sum(len(batch.members) for batch in self.plan.batches(rank)[::step])

    def _kept(self, rank: int) -> float:
        """Bytes of the trajectories that a rank keeps on its GPU from rollout to update."""
        config, plan = self.config, self.plan
        element = math.prod(self.architecture.model.latent_shape())
        clips = self._clips(rank)
        if config.rollout.offload:
            return float(MASTER * element * clips)
        parts = [(kind.times, *self._stored(kind.plan)) for kind in self._kinds[0][rank]]
        states = sum(times * size for times, size, _ in parts)
        rows = [sum(times * rows[update] for times, _, rows in parts) for update in range(plan.updates)]
        references = config.trust_region.uses_anchor + any(config.build_objective().old_passes(plan.updates))
        return float(element * (states + MASTER * max(rows) * references + MASTER * clips))

    def _stored(self, plan: Plan, rank: int = 0) -> tuple[int, list[int]]:
        """Bytes of a rank's records, of one latent element, and the rows that each update replays."""
        config = self.config
        size, measured = _bytes(config.rollout.storage), plan.kl_replays(rank)
        needs_old = config.explores and needs_velocity_old(config.build_objective(), config.trust_region)
        stored = {replay for update in range(plan.updates) for replay in plan.replayable(rank, update)}
        # A step's x_next is the next record's x; a target at a fresh noise level is not shared.
        before = set() if not config.explores else {(replay.step + 1, replay.members) for replay in stored}
        states = sum(
            size * (len(one.members) + one.rows * ((one.step, one.members) not in before))
            + MASTER * (one in measured or needs_old) * one.rows
            for one in stored
        )
        return states, [sum(replay.rows for replay in plan.replays(rank, update)) for update in range(plan.updates)]

    @cached_property
    def phases(self) -> list[Phase]:
        network, job = self.network, self.job
        seconds = [self._seconds(counts.phases) for counts in self.counts]
        sampling, update = formulas.sampling_memory(network, job), formulas.memory(network, job)
        reward = replace(sampling, activations=0.0, gathered=0.0, visitor=self._reward_bytes)
        decoding, decoded = formulas.decoding_memory(network, job), self._decoded()
        vae = float(job.vae_bytes * network.vae.parameters)
        gradient = self._gradient
        with_vae = [replace(one, visitor=one.visitor + vae) for one in (sampling, reward, update)]
        peak = max(one.total for one in (decoding, *(phase.memory for phase in gradient), *with_vae))
        if not self.hardware.is_cpu and peak <= STAYS * self.gib * GIB:  # then the VAE stays between decodings
            sampling, reward, update = with_vae
        return [
            Phase("rollout", statistics.fmean(s["rollout"] for s in seconds), sampling),
            Phase("decode", decoded * formulas.decode_seconds(network, job, self.hardware.rates), decoding),
            Phase("reward", decoded * self._reward_seconds, reward),
            *gradient,
            Phase("update", statistics.fmean(s["update"] for s in seconds), update),
        ]

    @property
    def _gradient(self) -> list[Phase]:
        """The phase of a differentiated reward: decoding every clip with a graph, and the backward pass to its latents."""
        network, job = self.network, self.job
        if not self.config.build_objective().differentiates or all(
            one.reads_latents for one in self.config.rewards if one.counts
        ):
            return []
        clips = max(self._clips(rank) for rank in range(self.layout.data))
        decode = formulas.DIFFERENTIATED * formulas.decode_seconds(network, job, self.hardware.rates)
        # The reward runs forward twice, because its blocks run again, and backward once, to the pixels only.
        seconds = clips * (decode + 3 * self._reward_seconds)
        held = formulas.differentiating_memory(network, job)
        return [Phase("gradient", seconds, replace(held, visitor=held.visitor + self._reward_bytes))]

    def _seconds(self, counts: list[dict[str, PassCount]]) -> dict[str, float]:
        forward = [self._pass(row["shared"] + row["sampling"] + row["idle"]) for row in counts]
        # The mean of the run's reference passes: in the first iteration the policy equals the reference.
        updates, iterations = self.plan.updates, range(self.config.iterations)
        referenced = statistics.fmean(
            need for number in iterations for need in references(self.config, number, updates)
        )
        update = [
            referenced * self._pass(row["replay"]) + self._pass(row["gauge"]) + self._pass(row["replay"], backward=True)
            for row in counts
        ]
        job, rates = self.job, self.hardware.rates
        trained = formulas.trainable(self.network, job) / self.layout.weight_shards
        # An optimizer reads weight, gradient and moments and writes all but the gradient.
        step = self.plan.updates * MASTER * (3 + 2 * job.moments) * trained / rates.bandwidth
        return {"rollout": max(forward), "update": max(update) + step}

    def _pass(self, passes: PassCount, *, backward: bool = False) -> float:
        network, job, rates = self.network, self.job, self.hardware.rates
        seconds = formulas.forward_seconds(network, job, rates)
        again = 0.0
        if backward:
            # If the other branch of guidance is a constant, only one of the two has a backward pass.
            share = 1.0 if job.negative_gradient or not passes.forwards else passes.velocities / passes.forwards
            seconds += share * formulas.backward_seconds(network, job, rates)
            again = share * (2 if job.activations(network).get("input") else 1)
        shards, sp = self.layout.weight_shards, self.layout.sequence
        times = 1 + again
        weights = COMPUTE * network.parameters * (shards - 1) / shards
        gather = passes.forwards * (min(times, 2) if job.reshard else 1) * weights / rates.link
        # Attention exchanges tokens for heads and back: q, k, v and the output.
        local = formulas.tokens(network, job) / sp * network.width * COMPUTE
        exchange = passes.clips * times * network.blocks * 4 * local * (sp - 1) / sp / rates.link
        return max(passes.clips * seconds, gather) + exchange

    def _decoded(self) -> int:
        if self.plan.examples or all(spec.reads_latents for spec in self.config.rewards):
            return 0
        return max(self._clips(rank, self.layout.sequence) for rank in range(self.layout.data))

    @property
    def _reward_bytes(self) -> float:
        """Bytes of rewards on the run's own device; those on another device take none here."""
        here = ("", "cpu") if self.hardware.is_cpu else ("", "cuda", "cuda:0")
        return 1.15 * COMPUTE * _parameters(one for one in self.config.rewards if one.device in here)

    @property
    def _reward_seconds(self) -> float:
        """Scoring time of a clip; small rewards take none by this formula."""
        return 2 * _parameters(self.config.rewards) * REWARD_TOKENS / (0.3 * self.hardware.rates.products)

    @property
    def iteration_seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def evaluation_seconds(self) -> float:
        if not self.held_out:
            return 0.0
        clips = -(-self.held_out * self.config.evaluate.per_prompt // self.layout.processes)
        decode = formulas.decode_seconds(self.network, self.job, self.hardware.rates) + self._reward_seconds
        return max(map(self._pass, self.evaluation)) + clips * decode

    @property
    def gpu_hours(self) -> float:
        evaluations = len(self.config.evaluate.points(self.config.iterations))
        seconds = self.config.iterations * self.iteration_seconds + evaluations * self.evaluation_seconds
        return seconds * self.layout.processes / 3600

    @property
    def peak(self) -> float:
        return max(phase.memory.total for phase in self.phases)

    @property
    def room(self) -> float:
        return SPARE * self.gib * GIB

    @property
    def gib(self) -> float:
        """GiB of the device, or of the run's budget."""
        return self.config.model.budget(self.hardware.gib)

    @property
    def fits(self) -> bool:
        return self.peak <= self.room


def forecast(
    config: TrainConfig,
    hardware: Hardware,
    *,
    gpus: int = 1,
    architecture: Architecture | None = None,
    held_out: int | None = None,
) -> Forecast:
    """The forecast of a run; raises a ValueError where its parts do not go together."""
    config.model.check_budget("cpu" if hardware.is_cpu else "cuda")
    most = config.evaluate.prompts if held_out is None else min(held_out, config.evaluate.prompts)
    held_out = 0 if config.held_out is None else most
    return Forecast(config=config, processes=gpus, known=architecture, hardware=hardware, held_out=held_out)


def _bytes(dtype: str) -> int:
    return COMPUTE if dtype == "bfloat16" else MASTER


def _parameters(rewards: Iterable[RewardSpec]) -> float:
    return sum(facts.parameters for one in rewards if (facts := facts_of(one.name)) is not None)


def choose_activations(config: TrainConfig, model: VelocityModel, world: World) -> list[Keep]:
    """Kept activations of every block. The choice depends on the GPU's size, not on its free memory, so that a resumed
    run chooses the same."""
    asked, blocks, cuda = config.update.gradient_checkpointing, len(model.blocks()), model.device.type == "cuda"
    if asked == "auto" and cuda and config.model.family in (None, *FAMILIES):
        found = forecast(config, here(world.processes), gpus=world.processes).activations
        if len(found) == blocks:
            return found
    return configured(asked, blocks, cuda=cuda)


def worker_costs(trainer: Forecast, worker: Forecast) -> dict[str, Any] | None:
    """An iteration with workers on the hardware of `worker`; None if the run has none. `tasks` are the parts of an
    iteration that workers take one at a time, `rounds` those of the busiest."""
    config, plan = trainer.config, trainer.plan
    if config.rollout.on != "ray":
        return None
    own, workers, ranks = len(plan.tasks()), config.rollout.ray.workers, range(len(plan.shares))
    rounds = math.ceil(own / max(1, workers // len(ranks)))  # every training process has its own workers
    theirs = ("rollout", "decode", "reward")
    phases = [phase for phase in worker.phases if phase.name in theirs]
    sampling = sum(phase.seconds for phase in phases) * rounds / own
    updating = sum(phase.seconds for phase in trainer.phases if phase.name not in theirs)
    tasks, gib = sum(len(plan.tasks(rank)) for rank in ranks), max(phase.memory.total for phase in phases) / GIB
    if gib > worker.room / GIB:
        bottleneck = f"a worker does not fit: it needs {gib:.1f} GiB of {worker.room / GIB:.0f} that can be used"
    elif workers > tasks:
        bottleneck = (
            f"tasks: {workers - tasks} workers have nothing to do; use more prompts, or a smaller batch.micro_batch"
        )
    elif sampling > updating:
        bottleneck = "workers: more of them shorten an iteration"
    else:
        bottleneck = "the trainer's updates: more workers do not help"
    return {
        "workers": workers,
        "tasks": tasks,
        "rounds": rounds,
        "sampling_seconds": sampling,
        "updating_seconds": updating,
        "iteration_seconds": max(sampling, updating) if config.rollout.staleness else sampling + updating,
        "gib": gib,
        "bottleneck": bottleneck,
    }
