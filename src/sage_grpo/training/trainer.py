"""The trainer of one iteration: prompts -> plan -> rollout -> rewards -> advantages -> objective -> update -> reference.

Given clips (data.clips) replace the rollout by their latents, and rewards by the known preference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from torch import Tensor

from sage_grpo.config.parsing import ConfigError
from sage_grpo.distributed.world import World
from sage_grpo.health.sentinel import Sentinel
from sage_grpo.health.statistics import ParameterDrift, appearance
from sage_grpo.models.base import pixels_of
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.engine import RolloutEngine, Workers
from sage_grpo.training.evaluate import Evaluation, check_evaluation, evaluate
from sage_grpo.training.inputs import EncodeAhead, Inputs
from sage_grpo.training.offload import distribute, set_activations
from sage_grpo.training.plan import Plan
from sage_grpo.training.reference import OldPolicy
from sage_grpo.training.rollout import Rollout
from sage_grpo.training.scoring import ScoredClips, Scores, advantages_of, black_clips, check_groups, preferred, summary
from sage_grpo.training.state import TrainState
from sage_grpo.training.update import Updater
from sage_grpo.types import Keep
from sage_grpo.utils.clock import Clock


class Trainer:
    """Owns the training state and runs one iteration per `step`; the loop does everything between iterations."""

    plan: Plan
    clips: ScoredClips
    scores: Scores

    def __init__(
        self,
        config: TrainConfig,
        inputs: Inputs,
        world: World | None = None,
        clock: Clock | None = None,
        *,
        activations: Sequence[Keep] | None = None,
        workers: Callable[[Trainer], Workers | None] | None = None,
    ) -> None:
        """`activations` are what each block keeps for the backward pass; `workers` makes those that sample in place of this process."""
        self.config, self.world, self.clock = config, world or World(), clock or Clock()
        self.inputs, self.model, self.reward, self.held_out = inputs, inputs.model, inputs.reward, inputs.held_out
        given = inputs.examples is not None
        self.engine = RolloutEngine(config, self.model, self.reward, self.world, self.clock, examples=given)
        self.planner, parts = self.engine.planner, self.engine.parts
        self.objective = self.planner.objective
        self._refuse()
        set_activations(config.update.gradient_checkpointing, self.model, activations)
        self.sharding = distribute(self.model, config.parallel, self.world)  # before anything refers to the parameters
        params = self.model.trainable()
        self.drift = ParameterDrift(params)
        self.old = OldPolicy.of(self.objective, params, config.update.updates_per_rollout, config.anchor.offload)
        self.state = TrainState.begin(config, self.model, inputs.prompts, self.old if self.objective.lags else None)
        of = self.model, self.state, self.sharding, self.objective, parts, self.old, self.world, self.clock
        self.updater = Updater(config.optimizer, config.trust_region, *of)
        self.dims = self.updater.dims
        self.clip_range = self.objective.clip_range(self.dims)
        clips = config.batch.prompts * config.group_size
        self.state.sentinel = Sentinel.of(config.sentinel, self.reward, clips=clips, clip_range=self.clip_range)
        self.prompt_encoder = EncodeAhead(self.model, self.planner, self.held_out, self.world.rank, self.clock)
        self.needs_clips: Callable[[int], bool] = lambda number: True
        """True if, after so many iterations, an observer needs the clips of the next one; otherwise they are decoded if rewards read them."""
        self.workers = None if workers is None else workers(self)
        if workers is None and (config.rollout.on != "here" or self.state.past is not None):
            raise ConfigError(
                "rollout.on and rollout.staleness need workers: make the trainer with sage_grpo.run.session.assemble."
            )

    def _refuse(self) -> None:
        """Refuse what the loaded model and rewards cannot do."""
        config, world = self.config, self.world
        config.check_objective()  # one of your own is not checked with the configuration
        remedy = f"Set batch.prompts to a multiple of the {world.size} data-parallel ranks."
        check_groups(self.reward, self.planner.shares, config.batch.group_size, remedy, world)
        if self.held_out:
            check_evaluation(self.reward, len(self.held_out), config.evaluate, config.batch.micro_batch, world)
        if self.objective.differentiates and self.reward.learns_from_clips:
            pixels_of(self.model)

    def step(self) -> dict[str, float]:
        self.encode_prompts()
        plan = self.planner.plan(self.state.iteration, self.state.stream.take(self.config.batch.prompts))
        with self.clock("rollout"):
            rollout = self.sample(plan)
        scores = self.score(rollout, plan)
        advantages = self.advantages(scores, plan)
        plan, signals = self.planner.choose(plan, advantages, scores.valid), {}
        if self.objective.differentiates:
            with self.clock("gradient"):
                signals = self.engine.differentiate(plan, rollout)
        with self.clock("update"):
            metrics = self.updater.run(plan, rollout, scores, advantages, signals)
        self.plan, self.scores = plan, scores
        self.state.iteration += 1
        return self._described(advantages) | metrics

    def encode_prompts(self) -> None:
        self.prompt_encoder.run(self.state.stream, self.state.iteration)

    def sample(self, plan: Plan) -> Rollout:
        old = self.state.old
        with old.applied() if old is not None and old.samples else nullcontext():
            if self.workers is None:
                return self.engine.sampler(plan).run()
            return self.workers.roll_out(plan, self._coming(), self.needs_clips)

    def _coming(self) -> list[Plan]:
        """Plans of the next iterations, as many as weights may lag: workers may sample them now."""
        first, size = self.state.iteration + 1, self.config.batch.prompts
        numbers = range(first, min(first + self.config.rollout.staleness, self.config.iterations))
        prompts = self.state.stream.peek(len(numbers) * size)
        return [self.planner.plan(n, prompts[at * size : (at + 1) * size]) for at, n in enumerate(numbers)]

    def score(self, rollout: Rollout, plan: Plan) -> Scores:
        """The scores of all ranks' clips, equal on every rank; this process's clips are scored here, or were by the workers that sampled them."""
        if plan.examples:
            self.clips = ScoredClips(black_clips(self.model.video))
            return preferred(len(plan.groups), plan.group_size)
        clips = rollout.judged or self.engine.judge(rollout, plan, whole=self.needs_clips(plan.iteration))
        captions = [plan.groups[member.group].prompt.text for member in self.engine.scored(plan)]
        self.clips = dataclasses.replace(clips, captions=captions)
        assert clips.scores is not None
        return self.engine.gather(clips.scores)

    def advantages(self, scores: Scores, plan: Plan) -> Tensor:
        """Group-relative advantages of all clips; one column per part if rewards judge parts. A given clip's is its known preference."""
        if self.config.data.clips is not None:
            return scores.total
        parts, routes = [part.name for part in self.engine.parts], [prompt.rewards for prompt in plan.prompts]
        return advantages_of(self.config.advantage, self.reward, parts, scores, routes, plan.iteration)

    def _described(self, advantages: Tensor) -> dict[str, float]:
        """Metrics of the iteration besides the updates'; its memory peaks decide where the VAE stays."""
        times, row = self.clock.report(), {}
        self.engine.vae.observe(times)
        look = self.drift.measure(self.world)
        if not self.plan.examples:
            if self.clips.thumbnails is not None:
                look |= appearance(self.clips.thumbnails, self.engine.scored(self.plan), self.world)
            row = summary(self.scores, advantages, self.state.sentinel.witnesses)
        return {**row, **look, **({} if self.workers is None else self.workers.row), **times}

    def evaluate(self, after_batch: Callable[[], None] = lambda: None) -> Evaluation:
        """Score the held-out prompts with the ODE; with EMA weights if there are some.

        `after_batch` is called after every micro-batch, by all ranks equally often; it may raise.
        """
        config, weights = self.config, self.state.ema.applied() if self.state.ema is not None else nullcontext()
        settings = dataclasses.replace(config.evaluate, steps=config.evaluate.steps_for(config.model))

        def progress(done: int, total: int) -> None:
            self.clock.listen("evaluate", done, total)
            after_batch()

        with self.clock("evaluate"), self.engine.vae.decoding(), weights:
            of = self.model, self.reward, self.held_out, settings
            return evaluate(*of, micro_batch=config.batch.micro_batch, world=self.world, progress=progress)

    def save(
        self, root: Path, meta: Mapping[str, object] | None = None, files: Mapping[str, bytes] | None = None
    ) -> Path:
        return self.state.save(root, self.world, {"config": dataclasses.asdict(self.config), **(meta or {})}, files)

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()

    def export(self, folder: Path) -> None:
        """Write weights that load into diffusers: the EMA's if there is one. Called by all ranks."""
        weights = self.sharding.whole(self.state.params if self.state.ema is None else self.state.ema.copies)
        if self.world.is_main:
            self.model.save(folder, weights=weights)
        self.world.barrier()
