"""The trainer of one iteration: prompts -> rollout -> decode -> rewards -> advantages -> update -> reference.

Given clips (data.clips) replace the rollout by their latents, and rewards by the known preference.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from sage_grpo.config.parsing import ConfigError
from sage_grpo.data.groups import Member
from sage_grpo.data.prompts import Prompt, PromptStream, look_ahead
from sage_grpo.distributed import checkpoint
from sage_grpo.distributed.world import World
from sage_grpo.health.sentinel import Sentinel
from sage_grpo.health.statistics import ParameterDrift, appearance
from sage_grpo.objectives.advantage import decoupled_advantage, group_advantage
from sage_grpo.objectives.surrogate import clip_range
from sage_grpo.training.adaptive_lr import share_kept
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.decoding import (
    check_differentiable,
    draw_excerpt,
    pixels_read,
)
from sage_grpo.training.evaluate import Evaluation, check_evaluation, evaluate
from sage_grpo.training.inputs import Inputs, conditions_of
from sage_grpo.training.memory import fit_memory
from sage_grpo.training.offload import distribute
from sage_grpo.training.plan import Plan
from sage_grpo.training.planner import choose
from sage_grpo.training.reference import OldPolicy, Snapshot
from sage_grpo.training.rollout import Rollout
from sage_grpo.training.sampling import MakeWorkers, RolloutEngine
from sage_grpo.training.scoring import (
    GroupScores,
    ScoredClips,
    check_groups,
    describe,
    gathered,
    metadata_of,
    no_clips,
    preferred,
)
from sage_grpo.training.state import TrainState
from sage_grpo.training.update import (
    Diverged,
    Objective,
    PreferencePair,
    RewardSignal,
    TrainItem,
    accumulate,
    mean_of,
    path_kl,
    summarize,
    with_anchor,
    with_old,
    with_rivals,
)
from sage_grpo.types import Conditioning, Keep, Sound
from sage_grpo.utils.clock import Clock


class Trainer:
    """Owns the training state and runs one iteration per `step`; the loop does everything between iterations."""

    def __init__(
        self,
        config: TrainConfig,
        inputs: Inputs,
        world: World | None = None,
        clock: Clock | None = None,
        *,
        keep: Sequence[Keep] | None = None,
        workers: MakeWorkers | None = None,
    ) -> None:
        """`keep` is the activation checkpointing of each block; `workers` makes workers that sample in place of this
        process."""
        self.config, self.world, self.clock = config, world or World(), clock or Clock()
        self.model, self.reward, self.held_out = inputs.model, inputs.reward, inputs.held_out
        fit_memory(config, self.model, keep)
        self.engine = distribute(self.model, config.parallel, self.world)  # before anything refers to the parameters
        self.writer = checkpoint.Writer(self.world, background=config.parallel.async_checkpoint)
        params = self.model.trainable()
        self.travel = ParameterDrift(params)
        spec, old = config.objective, None
        differs = any(spec.old_passes(config.update.updates_per_rollout))
        if differs:
            old = OldPolicy(params, lags=spec.lags, samples=spec.old_samples, offload=config.anchor.offload)
        self.old = old
        """The old policy of a loss at fresh noise levels."""
        self.state = TrainState.begin(config, self.model, inputs.prompts, self.old if spec.lags else None)
        self.before = None if config.optimizer.max_kl is None else Snapshot(params)
        """The weights that made the rollout, if its updates may be scaled back."""
        self.studio = RolloutEngine(
            config,
            self.model,
            self.reward,
            world=self.world,
            clock=self.clock,
            examples=inputs.examples is not None,
        )
        self.planner, self.parts, self.vae = self.studio.planner, self.studio.parts, self.studio.vae
        dims = sum(part.dims for part in self.parts) or math.prod(self.model.latent_shape())
        self.objective = Objective(config.surrogate, config.trust_region, dims, spec)
        self.state.sentinel = Sentinel.of(
            config.sentinel,
            self.reward,
            clips=config.batch.prompts * config.rollout.window.branches * config.group_size,
            clip=self.objective.clip,
            deviates=differs,
        )
        self._check_groups()
        if spec.by_gradient:
            check_differentiable(self.model, self.reward, spec.frames)
        self.examples, self.opened = inputs.examples, inputs.opened
        self.encoded: dict[Prompt, Conditioning] = {}
        """Conditionings of held-out prompts and of the iterations before `encoded_until`: the model itself keeps none
        in memory."""
        self.encoded_until = 0
        self.shows: Callable[[int], bool] = lambda number: True
        """True if, after so many iterations, an observer needs full clips of the next one; otherwise only the frames
        for rewards and sentinel are decoded."""
        self.sound: Sound | None = None
        """Sound of the last iteration's clips."""
        clip = clip_range(dims, config.surrogate.clip_scale) if spec.fresh else self.objective.clip
        self.crew = None if workers is None else workers(config, self.studio, params, self.state.past, clip)
        """Workers that sample in place of this process, if any."""
        if self.crew is None and (config.rollout.on != "here" or self.state.past is not None):
            raise ConfigError(
                "rollout.on and rollout.staleness need workers: make the trainer with sage_grpo.run.session.assemble."
            )
        self.done: Plan | None = None
        """The plan of the last iteration, with the clips that it trained."""

    def _check_groups(self) -> None:
        """Refuse rewards that compare clips but would not get whole groups, before anything is sampled."""
        config, planner = self.config, self.planner
        remedy = f"Set batch.prompts times rollout.window.branches to a multiple of the {self.world.size} data-parallel ranks."
        check_groups(self.reward, planner.shares, config.batch.group_size, remedy, self.world)
        if self.held_out:
            check_evaluation(self.reward, len(self.held_out), config.evaluate, config.batch.micro_batch, self.world)

    def step(self) -> dict[str, float]:
        """Run one iteration; returns its metrics."""
        if self.encoded_until < min(self.config.iterations, self.state.iteration + 1 + self.config.rollout.staleness):
            self.encode_prompts()
        plan = self.planner.plan(self.state.iteration, self.state.stream.take(self.config.batch.prompts))
        with self.clock("rollout"):
            rollout = self.roll_out(plan)
        judged = None if plan.examples else self.judge(rollout, plan)
        if judged is None:
            scored = preferred(len(plan.groups), plan.group_size)
            advantages = scored.total
        else:
            scored = self.score(judged)
            advantages = self.advantages(scored)
        plan, pushes = choose(self.config, plan, advantages, scored.valid), {}
        if self.config.objective.by_gradient:
            with self.clock("gradient"):
                pushes = self.differentiate(plan, rollout)
        with self.clock("update"):
            metrics = self.update(plan, rollout, scored, advantages, pushes)
        self.done = plan
        self.state.iteration += 1
        times = self.clock.report()
        self.vae.observe(times)
        self.failures = scored.report
        members = self.studio.scored(plan)
        self.videos = no_clips(self.model.video) if judged is None else judged.videos
        self.sound = None if judged is None else judged.sound
        self.captions = [plan.groups[m.group].prompt.text for m in members]
        seen, rewards = self.travel.measure(self.world), {}
        if judged is not None:
            if judged.thumbnails is not None:
                seen |= appearance(judged.thumbnails, members, self.world)
            rewards = describe(scored, advantages, self.state.sentinel.witnesses.scores)
        crew = {} if self.crew is None else self.crew.row
        return {**rewards, **metrics, **seen, **crew, **times}

    def judge(self, rollout: Rollout, plan: Plan) -> ScoredClips:
        """This process's scored clips, from here or from the workers that sampled them."""
        return rollout.judged or self.studio.judge(rollout, plan, whole=self.shows(plan.iteration))

    def score(self, judged: ScoredClips) -> GroupScores:
        """The scores of all ranks' clips, equal on every rank."""
        return gathered(self.reward, judged.sheet, self.world, torch.float32)

    def encode_prompts(self) -> None:
        """Encode this rank's prompts of the coming iterations, up to `data.encode_ahead`, and drop the text
        encoders."""
        config, state = self.config, self.state
        coming = PromptStream(state.stream.prompts, config.seed)
        coming.position = state.stream.position
        batches = (coming.take(config.batch.prompts) for _ in range(state.iteration, config.iterations))
        places = [self.planner.places(rank) for rank in range(self.world.size)]
        least = (1 + config.rollout.staleness) * config.batch.prompts if config.rollout.staleness else 0
        near = look_ahead(batches, places, max(config.data.encode_ahead, least))
        mine = [batch[place] for batch in near for place in places[self.world.rank]]
        prompts = list(dict.fromkeys([*mine, *self.held_out[: config.evaluate.prompts]]))
        with self.clock("encode"):
            tick = self.clock.ticker(len(prompts))
            self.encoded = {prompt: self.encoded[prompt] for prompt in prompts if prompt in self.encoded}
            for prompt in prompts:
                if prompt not in self.encoded:
                    (self.encoded[prompt],) = conditions_of(self.model, [prompt])
                tick()
        self.model.unload_text()
        self.encoded_until = state.iteration + len(near)

    def roll_out(self, plan: Plan) -> Rollout:
        """Sample this rank's clips, with the old policy if it lags behind and samples."""
        with self.state.old.applied() if self.state.old is not None and self.state.old.samples else nullcontext():
            if self.crew is None:
                return self.studio.sampler(plan).run()
            return self.crew.roll_out(plan, self._coming(), self.shows)

    def _coming(self) -> list[Plan]:
        """Plans of the later iterations that are sampled with the current weights."""
        first, size = self.state.iteration + 1, self.config.batch.prompts
        numbers = range(first, min(first + self.config.rollout.staleness, self.config.iterations))
        prompts = self.state.stream.peek(len(numbers) * size)
        return [self.planner.plan(n, prompts[at * size : (at + 1) * size]) for at, n in enumerate(numbers)]

    def advantages(self, scored: GroupScores) -> Tensor:
        """Group-relative advantages of all rollouts; one column per part if rewards judge parts."""
        if not any(spec.judges for spec in self.config.rewards):
            return self._advantage(scored, self.reward.weights, scored.total)
        columns = []
        for part in self.parts:
            weights = self.reward.judging(part.name)
            total = torch.stack([weight * scored.parts[name] for name, weight in weights.items()] or [scored.total * 0])
            columns.append(self._advantage(scored, weights, total.sum(0)))
        return torch.stack(columns, dim=1)

    def _advantage(self, scored: GroupScores, weights: Mapping[str, float], total: Tensor) -> Tensor:
        config = self.config.advantage
        if config.decoupled and weights:
            return decoupled_advantage(
                scored.parts,
                weights,
                scored.groups,
                valid=scored.valid,
                scale=config.scale,
                clip=config.clip,
            )
        return group_advantage(total, scored.groups, valid=scored.valid, scale=config.scale, clip=config.clip)

    def differentiate(self, plan: Plan, rollout: Rollout) -> dict[tuple[Member, ...], RewardSignal]:
        """The gradient of the reward at the latents of every clip, by micro-batch. Clips go one at a time, because a
        decoder's graph is large, unless they are decoded in batches."""
        tick = self.clock.ticker(sum(len(batch.members) for batch, _ in rollout.latents))
        found, seed, fps, frames = {}, self.config.seed, self.model.video.fps, self.config.objective.frames
        together = self.config.batch.micro_batch if not self.config.model.vae_slicing and frames is None else 1
        with self.vae.decoding() if self.reward.learns_from_clips else nullcontext():
            for batch, latents in rollout.latents:
                rows, prompt = [], plan.group_of(batch).prompt
                for some, member in zip(latents.split(together), batch.members[::together]):
                    draw = Random(f"excerpt/{seed}/{plan.iteration}/{member.group}/{member.index}")
                    excerpt = draw_excerpt(self.model, frames, draw)
                    pixels = partial(pixels_read, self.model, self.reward, excerpt=excerpt)
                    rows.append(self.reward.gradient(some, pixels, prompt.text, fps, metadata_of(prompt)))
                    for _ in some:
                        tick()
                found[batch.members] = RewardSignal(torch.cat(rows).to(torch.float32))
        if self.reward.offload_between:
            self.reward.offload()
        return found

    def update(
        self,
        plan: Plan,
        rollout: Rollout,
        scored: GroupScores,
        advantages: Tensor,
        pushes: Mapping[tuple[Member, ...], RewardSignal],
    ) -> dict[str, float]:
        """Run the optimizer updates of one rollout, with the reward's gradients (`pushes`) if it is differentiated;
        returns their mean metrics."""
        state, device = self.state, self.model.device
        needs = state.reference.needs(state.anchor, state.updates, plan.updates, state.kl.value)
        old_passes = self.config.objective.old_passes(plan.updates)
        extra = [
            (need == "pass") * self.config.objective.reference_passes + old for need, old in zip(needs, old_passes)
        ]
        passes = sum(rounds * (1 + more) for rounds, more in zip(plan.rounds, extra))
        tick = self.clock.ticker(passes + plan.gauge_rounds)
        logs = []
        if self.before is not None:
            self.before.renew()
        if self.old is not None:
            self.old.begin()
        for update in range(plan.updates):
            items = self.items(plan, rollout, scored, advantages, update, pushes)
            if self.old is not None and old_passes[update]:
                with self.old.applied():
                    items = with_old(self.objective, items, device, tick, self.parts)
            if state.anchor is not None:
                items = with_anchor(items, needs[update], state.anchor, device, tick)
            if plan.pairs:
                clips = len(plan.groups) * plan.group_size
                items = with_rivals(self.objective, items, needs[update], clips, self.world, device, tick)
            tally = accumulate(
                self.objective,
                items,
                device,
                kl_lambda=state.kl.value,
                scale=self.engine.scale,
                deterministic=self.config.model.deterministic,
                before_first=self.engine.begin,
                before_last=self.engine.synchronize,
                progress=tick,
                parts=self.parts,
            )
            logs.append(self._apply(summarize(tally, self.world, plan.labels(update))))
            if update == plan.updates - 1 and self.config.optimizer.measures_kl:
                logs[-1] |= self._measure(plan, rollout, tick)
            self._advance(logs[-1])
        if self.old is not None:
            self.old.end(self.config.objective.decay(plan.iteration + 1))
        metrics = mean_of([state.reference.note(log, need) for log, need in zip(logs, needs)])
        if self.config.rollout.staleness:  # the weights have changed since the rollout, so it is not 0
            metrics.pop("ratio/first_log", None)
        return {**metrics, "preference/skipped": float(plan.skipped)} if self.config.objective.by_choice else metrics

    def items(
        self,
        plan: Plan,
        rollout: Rollout,
        scored: GroupScores,
        advantages: Tensor,
        update: int,
        pushes: Mapping[tuple[Member, ...], RewardSignal] | None = None,
    ) -> list[TrainItem]:
        """This rank's replays in an update; every rank has the same number, padded with weight 0."""
        counts = scored.valid.clone()
        if plan.chosen is not None:
            counts &= torch.tensor(
                [Member(*divmod(row, plan.group_size)) in plan.chosen[update] for row in range(len(counts))]
            )
        share = counts.float() / counts.sum().clamp(min=1)
        items = []
        for turn in plan.turns(self.world.rank, update):
            step, members = turn.replay.step, turn.states.members
            group = plan.groups[turn.replay.members[0].group]
            rows = torch.tensor([m.group * plan.group_size + m.index for m in members])
            label = group.label(step)
            items.append(
                TrainItem(
                    record=rollout.record(plan, turn),
                    step=step,
                    label=label,
                    advantage=advantages[rows],
                    # Losses of steps are averaged; parts of one gradient are summed.
                    weight=share[rows] / (1 if pushes else len(group.trained[update])) * turn.counts,
                    equalizer=plan.equalizer[label],
                    network=turn.network,
                    push=pushes[members] if pushes else None,
                    reach=group.reach(step) if pushes else 0.0,
                    duel=self._duel(plan, members, rows) if self.config.objective.kind == "dpo" else None,
                )
            )
        return items

    def _duel(self, plan: Plan, members: Sequence[Member], rows: Tensor) -> PreferencePair:
        """The preference pairs of a replay's members."""
        found = [plan.rivals.get(member, (0, member)) for member in members]
        rivals = torch.tensor([rival.group * plan.group_size + rival.index for _, rival in found])
        return PreferencePair(rows, rivals, torch.tensor([float(side) for side, _ in found]), torch.zeros(len(members)))

    def _apply(self, metrics: dict[str, float]) -> dict[str, float]:
        """One optimizer step."""
        state, config = self.state, self.config.optimizer
        norm = self.engine.clip(state.params.values(), config.max_grad_norm)
        if not torch.isfinite(torch.tensor(norm)):
            state.optimizer.zero_grad()
            raise Diverged(
                f"The gradient norm of optimizer update {state.updates} is {norm}. The weights were not changed. "
                "Lower optimizer.lr or kernel.eta, or set surrogate.equalize_cap."
            )
        metrics["gradient/norm"] = norm
        # AdamW divides by (root mean square + eps): near 1 or below, eps shortens every step.
        metrics["gradient/rms_over_eps"] = norm / math.sqrt(self.state.size) / config.eps
        metrics["kl/lambda"] = state.kl.value
        metrics["optimizer/lr"] = state.optimizer.step(state.updates)
        state.optimizer.zero_grad()
        state.updates += 1
        return metrics

    def _measure(self, plan: Plan, rollout: Rollout, progress: Callable[[], None]) -> dict[str, float]:
        """Measure the KL of the updates, scale them back if it is too large, and adapt the learning rate."""
        pace = self.state.optimizer.pace

        def measure(tick: Callable[[], None] = lambda: None) -> float:
            kl = self.objective.dims * path_kl(plan, rollout, self.world, self.model.device, tick)
            if not math.isfinite(kl):
                raise Diverged(
                    f"After optimizer update {self.state.updates} the policy is at a KL of {kl} from that of its rollout: its "
                    "velocities are not finite. Continue from the last checkpoint with a lower optimizer.lr."
                )
            return kl

        kl = measure(progress)
        kept = 1.0 if self.before is None else self._scale_back(self.before, kl, measure)
        metrics = {"optimizer/kl": kl, "optimizer/kept": kept, "optimizer/lr_factor": pace.factor}
        pace.observe(kl)
        return metrics

    def _scale_back(self, before: Snapshot, kl: float, measure: Callable[[], float]) -> float:
        """Scale the updates back to `optimizer.max_kl` if they exceed it; returns the share that is kept. The KL is the
        same number on all ranks, so they try the same shares."""
        most, kept = self.config.optimizer.max_kl, 1.0
        assert most is not None

        def keep(share: float) -> None:
            nonlocal kept
            before.take_back(share / kept)
            kept = share

        def kl_at(share: float) -> float:
            keep(share)
            return measure()

        share = share_kept(kl, most, kl_at)
        if share != kept:  # no share that was tried is near the limit
            keep(share)
            if self.world.is_main:
                warnings.warn(
                    f"optimizer.max_kl {most:g}: no share of a rollout's updates that was tried has a KL near it, so less is kept (optimizer/kept). "
                    "In bfloat16 rounding alone has a KL: set optimizer.max_kl above it.",
                    stacklevel=2,
                )
        return share

    def _advance(self, metrics: dict[str, float]) -> None:
        """Advance EMA, KL coefficient and reference by one update."""
        state = self.state
        if state.ema is not None:
            state.ema.advance()
        state.kl.observe(metrics["kl/total"], metrics["gradient/kl_share"])
        if state.anchor is not None:
            metrics["anchor/renewed"] = float(state.anchor.advance(state.updates))

    def evaluate(self, after_batch: Callable[[], None] = lambda: None) -> Evaluation:
        """Score the held-out prompts with the ODE; with EMA weights if there are some.

        `after_batch` is called after every micro-batch, by all ranks equally often; it may raise.
        """
        config, weights = self.config, self.state.ema.applied() if self.state.ema is not None else nullcontext()

        def progress(done: int, total: int) -> None:
            self.clock.listen("evaluate", done, total)
            after_batch()

        with self.clock("evaluate"), self.vae.decoding(), weights:
            return evaluate(
                self.model,
                self.reward,
                self.held_out,
                dataclasses.replace(config.evaluate, steps=config.evaluate.steps_for(config.model)),
                micro_batch=config.batch.micro_batch,
                world=self.world,
                progress=progress,
            )

    def save(
        self, root: Path, meta: Mapping[str, object] | None = None, files: Mapping[str, bytes] | None = None
    ) -> Path:
        """Write a checkpoint, with the caller's `meta` and `files`."""
        return self.state.save(root, self.writer, {"config": dataclasses.asdict(self.config), **(meta or {})}, files)

    def close(self) -> None:
        """Stop workers and the rewards' processes."""
        if self.crew is not None:
            self.crew.close()
        self.opened.close()

    def export(self, folder: Path) -> None:
        """Write weights that load into diffusers: the EMA's if there is one. Called by all ranks."""
        weights = self.engine.whole(self.state.params if self.state.ema is None else self.state.ema.copies)
        if self.world.is_main:
            self.model.save(folder, weights=weights)
        self.world.barrier()
