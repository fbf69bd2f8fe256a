"""The whole system on two screens: prompts -> rollout -> decode -> rewards -> advantages -> update -> anchor.

Where clips are given (data.clips), their latents stand in place of the rollout's, and which of them is better in place of rewards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from sage_grpo.data.groups import Member, MicroBatch
from sage_grpo.data.prompts import Prompt, PromptStream, look_ahead
from sage_grpo.flow.schedule import Schedule
from sage_grpo.forecast.costs import fit_memory
from sage_grpo.models.base import network_of
from sage_grpo.models.decoders import load_decoder
from sage_grpo.models.parts import Sounds, sound_of
from sage_grpo.models.policy import Policy
from sage_grpo.parallel import checkpoint
from sage_grpo.parallel.world import World
from sage_grpo.rewards.base import Early
from sage_grpo.rl.advantage import decoupled_advantage, group_advantage
from sage_grpo.rl.pace import share_kept
from sage_grpo.sentinel.figures import Travel, appearance
from sage_grpo.sentinel.sentinel import Sentinel
from sage_grpo.telling.clock import Clock
from sage_grpo.training.anchor import Old, Snapshot
from sage_grpo.training.config import TrainConfig
from sage_grpo.training.decoding import (
    LATENTS,
    Clips,
    Encoder,
    check_differentiable,
    draw_excerpt,
    frames_needed,
    pixels_read,
)
from sage_grpo.training.evaluate import Evaluation, check_evaluation, evaluate
from sage_grpo.training.inputs import Inputs, pictures_of
from sage_grpo.training.placing import VaeMover, distribute
from sage_grpo.training.plan import Group, Plan
from sage_grpo.training.planner import Planner, check_cheap, choose, parts_of
from sage_grpo.training.rollout import NoiseKeys, Rollout, Sampler, Storage
from sage_grpo.training.scoring import (
    Scored,
    check_groups,
    describe,
    metadata_of,
    no_clips,
    preferred,
    score_everywhere,
)
from sage_grpo.training.state import TrainState
from sage_grpo.training.update import (
    Diverged,
    Duel,
    Item,
    Objective,
    Push,
    accumulate,
    mean_of,
    path_kl,
    summarize,
    with_anchor,
    with_old,
    with_rivals,
)
from sage_grpo.types import Conditioning, Sound


class Trainer:
    """Trains what it is handed and owns the training state. `step` is one iteration; what stands between iterations is the loop's."""

    def __init__(
        self, config: TrainConfig, inputs: Inputs, world: World | None = None, clock: Clock | None = None
    ) -> None:
        self.config, self.world, self.clock = config, world or World(), clock or Clock()
        self.model, self.reward, self.held_out = inputs.model, inputs.reward, inputs.held_out
        fit_memory(config, self.model, self.world)
        self.engine = distribute(self.model, config.parallel, self.world)  # before anything refers to the parameters
        self.writer = checkpoint.Writer(self.world, background=config.parallel.async_checkpoint)
        params = self.model.trainable()
        self.travel = Travel(params)
        spec, old = config.objective, None
        if any(spec.old_passes(config.update.updates_per_rollout)):
            old = Old(params, lags=spec.lags, samples=spec.old_samples, offload=config.anchor.offload)
        self.old = old
        """The old policy of a loss at fresh noise levels."""
        self.state = TrainState.begin(config, self.model, inputs.prompts, self.old if spec.lags else None)
        self.before = None if config.optimizer.max_kl is None else Snapshot(params)
        """The weights that made the rollout, where its updates may be taken back."""
        self.parts = parts_of(config, self.model)
        """Parts of a clip that are learned each for itself; mostly none."""
        dims = sum(part.dims for part in self.parts) or math.prod(self.model.latent_shape())
        self.objective = Objective(config.surrogate, config.trust_region, dims, spec)
        self.state.sentinel = Sentinel.of(config, self.reward, self.objective.clip)
        grid = Schedule(self.model.sigmas(config.rollout.steps, config.rollout.shift))
        self.planner = Planner(
            config, grid, config.kernel.build(grid), self.model.trains, self.world.size, network_of(self.model)
        )
        self.planner.check()
        self._check_groups()
        if spec.by_gradient:
            check_differentiable(self.model, self.reward, spec.frames)
        check_cheap(config, self.model, self.planner, split=self.world.sequence_group is not None)
        self.vae = VaeMover(self.model, config.model)
        self.examples = inputs.examples
        self.encoder = None
        """What makes latents of clips that are given."""
        if inputs.examples is not None:
            self.encoder = Encoder(self.model, Path(config.out) / LATENTS, self.vae.decoding)
        self.encoded: dict[Prompt, Conditioning] = {}
        """Held-out prompts and those of the iterations before `encoded_until`: the model itself keeps none in memory."""
        self.encoded_until = 0
        self.small = None if config.model.decoder is None else load_decoder(config.model.decoder, self.model)
        """What decodes in the VAE's place."""
        self.whole = True
        """Whether somebody else than rewards and sentinel looks at the clips of the coming iteration: else only their frames are decoded."""
        self.sound: Sound | None = None
        """Of the last iteration's clips."""
        self.done: Plan | None = None
        """The plan of the last iteration, with the clips that it trained."""

    def _check_groups(self) -> None:
        """Rewards that compare clips get whole groups, or are refused before anything is sampled."""
        config, planner = self.config, self.planner
        remedy = f"Set batch.prompts times rollout.window.branches to a multiple of the {self.world.size} data-parallel ranks."
        check_groups(self.reward, planner.shares, config.batch.group_size, remedy, self.world)
        if self.held_out:
            check_evaluation(self.reward, len(self.held_out), config.evaluate, config.batch.micro_batch, self.world)

    def step(self) -> dict[str, float]:
        """One iteration: the straight line."""
        if self.state.iteration >= self.encoded_until:
            self.encode_prompts()
        plan = self.planner.plan(self.state.iteration, self.state.stream.take(self.config.batch.prompts))
        with self.clock("rollout"):
            rollout = self.roll_out(plan)
        if plan.examples:
            videos, scored = no_clips(self.model.video), preferred(len(plan.groups), plan.group_size)
            advantages = scored.total
        else:
            videos, scored = self.judge(rollout, plan)
            advantages = self.advantages(scored)
        plan = choose(self.config, plan, advantages, scored.valid)
        with self.clock("update"):
            metrics = self.update(plan, rollout, scored, advantages)
        self.done = plan
        self.state.iteration += 1
        times = self.clock.report()
        self.vae.observe(times)
        self.failures = scored.report
        members = self._scored(plan)
        self.videos, self.captions = videos, [plan.groups[m.group].prompt.text for m in members]
        seen, rewards = self.travel.measure(self.world), {}
        if not plan.examples:
            if self.whole or self.reward.reads_clips:
                seen |= appearance(videos, members, self.world)
            rewards = describe(scored, advantages, self.state.sentinel.witnesses.scores)
        return {**rewards, **metrics, **seen, **times}

    def judge(self, rollout: Rollout, plan: Plan) -> tuple[Tensor, Scored]:
        """This process's clips, decoded, and the scores of all."""
        with self.reward.early(self.model.video.fps) as early:
            with self.clock("decode"):
                videos = self.decode(rollout, early, plan.prompts)
                self.sound = self.listen(rollout)
            with self.clock("reward"):
                return videos, self.score(videos, plan, early, self.latents(rollout), self.sound)

    def encode_prompts(self) -> None:
        """Encode what this rank samples in the coming iterations, up to `data.encode_ahead` prompts, and drop the text encoders."""
        config, state = self.config, self.state
        coming = PromptStream(state.stream.prompts, config.seed)
        coming.position = state.stream.position
        batches = (coming.take(config.batch.prompts) for _ in range(state.iteration, config.iterations))
        places = [self.planner.places(rank) for rank in range(self.world.size)]
        near = look_ahead(batches, places, config.data.encode_ahead)
        mine = [batch[place] for batch in near for place in places[self.world.rank]]
        prompts = list(dict.fromkeys([*mine, *self.held_out[: config.evaluate.prompts]]))
        with self.clock("encode"):
            tick = self.clock.ticker(len(prompts))
            self.encoded = {prompt: self.encoded[prompt] for prompt in prompts if prompt in self.encoded}
            for prompt in prompts:
                if prompt not in self.encoded:
                    (self.encoded[prompt],) = self.model.encode([prompt.text], [pictures_of(prompt)])
                tick()
        self.model.unload_text()
        self.encoded_until = state.iteration + len(near)

    def roll_out(self, plan: Plan) -> Rollout:
        """Sample this rank's clips, with the old policy where that lags behind and samples."""
        with self.state.old.applied() if self.state.old is not None and self.state.old.samples else nullcontext():
            return self.sampler(plan).run()

    def sampler(self, plan: Plan) -> Sampler:
        """What samples this rank's clips."""
        config = self.config.rollout
        groups = [plan.groups[index] for index in plan.members(self.world.rank)]
        conditions = self.model.encode([g.prompt.text for g in groups], [pictures_of(g.prompt) for g in groups])
        passes = plan.rollout_passes(self.world.rank) + plan.idle_passes(self.world.rank)
        return Sampler(
            plan,
            self.world.rank,
            self.policy,
            {group.index: condition for group, condition in zip(groups, conditions)},
            keys=NoiseKeys(
                self.config.seed,
                plan.iteration,
                same_start=config.same_noise,
                same_fresh=self.config.objective.kind == "dpo",
            ),
            storage=Storage(
                dtype=getattr(torch, config.storage),
                device=torch.device("cpu") if config.offload else self.model.device,
                velocities=self.objective.needs_v_old,
            ),
            solver=config.solver,
            cheap=config.cheap,
            examples=partial(self.example, plan) if plan.examples else None,
            progress=self.clock.ticker(passes.total()),
        )

    def example(self, plan: Plan, member: Member) -> Tensor:
        """The latents of a clip that is given."""
        assert self.encoder is not None
        return self.encoder(plan.groups[member.group].prompt.clips[member.index])

    def policy(self, group: Group) -> Policy:
        """The policy that samples a group."""
        places = tuple(part.place for part in self.parts)
        return Policy(self.model, self.planner.kernel, group.schedule, self.config.model.training_guidance, places)

    def decode(self, rollout: Rollout, early: Early | None = None, prompts: Sequence[Prompt] = ()) -> Tensor:
        """The clips that this process scores, uint8. Rewards that compute elsewhere (`early`) get each micro-batch's as soon as they are there,
        with the prompts of their groups."""
        mine = self._mine(rollout)
        tick = self.clock.ticker(len(mine))
        frames = None if self.whole else frames_needed(self.model, self.reward)
        frames = None if frames and self.small is not None else frames  # another decoder makes whole clips
        clips = Clips(self.model, frames, sum(len(latents) for _, latents in mine))
        with self.vae.decoding() if self.small is None and frames != [] else nullcontext():
            for batch, latents in mine:
                decoded = clips.add(latents, self.small)
                if early is not None:
                    shown = [prompts[member.group] for member in batch.members]
                    texts, metadata = [prompt.text for prompt in shown], [metadata_of(prompt) for prompt in shown]
                    early.add(decoded, texts, metadata, latents)
                tick()
        return clips.videos

    def latents(self, rollout: Rollout) -> Tensor | None:
        """What the clips that this process scores are decoded from."""
        mine = self._mine(rollout)
        return torch.cat([latents for _, latents in mine]) if mine else None

    def _mine(self, rollout: Rollout) -> list[tuple[MicroBatch, Tensor]]:
        return [rollout.latents[index] for index in self.world.mine(len(rollout.latents))]

    def listen(self, rollout: Rollout) -> Sound | None:
        """What the clips that this process scores sound like, where they do and somebody listens."""
        latents = self.latents(rollout) if self.whole or self.reward.hears else None
        with self.vae.decoding() if isinstance(self.model, Sounds) else nullcontext():
            return None if latents is None else sound_of(self.model, latents)

    def score(
        self,
        videos: Tensor,
        plan: Plan,
        early: Early | None = None,
        latents: Tensor | None = None,
        sound: Sound | None = None,
    ) -> Scored:
        """Rewards of this rank's clips, then one gather over all ranks, which then all decide alike."""
        members = self._scored(plan)
        shown = [plan.groups[member.group].prompt for member in members]
        fps = self.model.video.fps
        return score_everywhere(
            self.reward, videos, members, shown, fps, self.world, early, torch.float32, latents, sound
        )

    def advantages(self, scored: Scored) -> Tensor:
        """Group-relative advantages of all rollouts; with a column for each part where rewards judge parts."""
        if not any(spec.judges for spec in self.config.rewards):
            return self._advantage(scored, self.reward.weights, scored.total)
        columns = []
        for part in self.parts:
            weights = self.reward.judging(part.name)
            total = torch.stack([weight * scored.parts[name] for name, weight in weights.items()] or [scored.total * 0])
            columns.append(self._advantage(scored, weights, total.sum(0)))
        return torch.stack(columns, dim=1)

    def _advantage(self, scored: Scored, weights: Mapping[str, float], total: Tensor) -> Tensor:
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

    def differentiate(self, plan: Plan, rollout: Rollout) -> dict[tuple[Member, ...], Push]:
        """The gradient of the reward at the latents of every clip, by micro-batch. One clip at a time: a decoder's graph is large."""
        tick = self.clock.ticker(sum(len(batch.members) for batch, _ in rollout.latents))
        found, seed, fps = {}, self.config.seed, self.model.video.fps
        with self.vae.decoding() if self.reward.learns_from_clips else nullcontext():
            for batch, latents in rollout.latents:
                rows = []
                for row, member in zip(latents, batch.members):
                    prompt = plan.groups[member.group].prompt
                    draw = Random(f"excerpt/{seed}/{plan.iteration}/{member.group}/{member.index}")
                    excerpt = draw_excerpt(self.model, self.config.objective.frames, draw)
                    pixels = partial(pixels_read, self.model, self.reward, excerpt=excerpt)
                    rows.append(self.reward.gradient(row[None], pixels, prompt.text, fps, metadata_of(prompt)))
                    tick()
                found[batch.members] = Push(torch.cat(rows).to(torch.float32))
        if self.reward.offload_between:
            self.reward.offload()
        return found

    def update(self, plan: Plan, rollout: Rollout, scored: Scored, advantages: Tensor) -> dict[str, float]:
        """The optimizer updates of one rollout; returns their mean metrics."""
        pushes = self.differentiate(plan, rollout) if self.config.objective.by_gradient else {}
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
        return {**metrics, "preference/skipped": float(plan.skipped)} if self.config.objective.by_choice else metrics

    def items(
        self,
        plan: Plan,
        rollout: Rollout,
        scored: Scored,
        advantages: Tensor,
        update: int,
        pushes: Mapping[tuple[Member, ...], Push] | None = None,
    ) -> list[Item]:
        """What this rank replays in an update; as many items as on any other rank, those over have weight 0."""
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
                Item(
                    record=rollout.record(plan, turn),
                    step=step,
                    label=label,
                    advantage=advantages[rows],
                    # Losses of steps are averaged; parts of one gradient are not.
                    weight=share[rows] / (1 if pushes else len(group.trained[update])) * turn.counts,
                    equalizer=plan.equalizer[label],
                    network=turn.network,
                    push=pushes[members] if pushes else None,
                    reach=group.reach(step) if pushes else 0.0,
                    duel=self._duel(plan, members, rows) if self.config.objective.kind == "dpo" else None,
                )
            )
        return items

    def _duel(self, plan: Plan, members: Sequence[Member], rows: Tensor) -> Duel:
        """Where the members of a replay stand in the plan's pairs."""
        found = [plan.rivals.get(member, (0, member)) for member in members]
        rivals = torch.tensor([rival.group * plan.group_size + rival.index for _, rival in found])
        return Duel(rows, rivals, torch.tensor([float(side) for side, _ in found]), torch.zeros(len(members)))

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
        # AdamW divides by (root mean square + eps): near 1 or below, eps holds every step back.
        metrics["gradient/rms_over_eps"] = norm / math.sqrt(self.state.size) / config.eps
        metrics["kl/lambda"] = state.kl.value
        metrics["optimizer/lr"] = state.optimizer.step(state.updates)
        state.optimizer.zero_grad()
        state.updates += 1
        return metrics

    def _measure(self, plan: Plan, rollout: Rollout, progress: Callable[[], None]) -> dict[str, float]:
        """How far the updates moved the policy: take back what is too far, and let the learning rate follow."""
        config, pace = self.config.optimizer, self.state.optimizer.pace
        kl = self.objective.dims * path_kl(plan, rollout, self.world, self.model.device, progress)
        if not math.isfinite(kl):
            raise Diverged(
                f"After optimizer update {self.state.updates} the policy is at a KL of {kl} from that of its rollout: its "
                "velocities are not finite. Continue from the last checkpoint with a lower optimizer.lr."
            )
        kept = share_kept(kl, config.max_kl)
        if self.before is not None and kept < 1.0:
            self.before.take_back(kept)
        metrics = {"optimizer/kl": kl, "optimizer/kept": kept, "optimizer/lr_factor": pace.factor}
        pace.observe(kl)
        return metrics

    def _advance(self, metrics: dict[str, float]) -> None:
        """What counts in updates: EMA, KL coefficient, anchor."""
        state = self.state
        if state.ema is not None:
            state.ema.advance()
        state.kl.observe(metrics["kl/total"], metrics["gradient/kl_share"])
        if state.anchor is not None:
            metrics["anchor/renewed"] = float(state.anchor.advance(state.updates))

    def evaluate(self, after_batch: Callable[[], None] = lambda: None) -> Evaluation:
        """Score the held-out prompts with the ODE; with EMA weights when there are some.

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
                config.evaluate,
                micro_batch=config.batch.micro_batch,
                world=self.world,
                progress=progress,
            )

    def _scored(self, plan: Plan) -> list[Member]:
        """The rollouts that this process decodes and scores: ranks that share clips share that work too. Given clips nobody does."""
        if plan.examples:
            return []
        batches = plan.batches(self.world.rank)
        return [member for place in self.world.mine(len(batches)) for member in batches[place].members]

    def save(
        self, root: Path, meta: Mapping[str, object] | None = None, files: Mapping[str, bytes] | None = None
    ) -> Path:
        """Write a checkpoint, with what the caller adds to its state and its files."""
        return self.state.save(root, self.writer, {"config": dataclasses.asdict(self.config), **(meta or {})}, files)

    def export(self, folder: Path) -> None:
        """Write weights that load into diffusers: the EMA's when there is one. Called by all ranks."""
        weights = self.engine.whole(self.state.params if self.state.ema is None else self.state.ema.copies)
        if self.world.is_main:
            self.model.save(folder, weights=weights)
        self.world.barrier()
