"""The whole system on two screens: prompts -> rollout -> decode -> rewards -> advantages -> update -> anchor."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from sage_grpo.data.groups import MicroBatch, deal, split_updates
from sage_grpo.data.prompts import Prompt, PromptStream
from sage_grpo.flow.schedule import Schedule
from sage_grpo.models.policy import Policy
from sage_grpo.parallel import checkpoint
from sage_grpo.parallel.world import World
from sage_grpo.rewards.base import CompositeReward, check_failures
from sage_grpo.rl.advantage import decoupled_advantage, group_advantage
from sage_grpo.rl.equalizer import equalizing_weights
from sage_grpo.train.anchor import Anchor, Ema
from sage_grpo.train.clock import Clock
from sage_grpo.train.config import TrainConfig
from sage_grpo.train.distribute import distribute
from sage_grpo.train.evaluate import Evaluation, evaluate
from sage_grpo.train.optim import Optimizer
from sage_grpo.train.rollout import NoiseKeys, Storage, Trajectory, roll_out
from sage_grpo.train.sources import first_frame, load_sources
from sage_grpo.train.state import TrainState
from sage_grpo.train.update import Diverged, Objective, accumulate, anchor_velocities, summarize


@dataclasses.dataclass(frozen=True)
class Scored:
    """Rewards of all ranks' rollouts, in the order (group, member), and where this rank's are among them."""

    groups: Tensor
    total: Tensor
    valid: Tensor
    parts: dict[str, Tensor]
    mine: list[Tensor]
    """For every micro-batch of this rank, the rows of its members."""


class Trainer:
    """Owns the model, the rewards and the training state. `step` is one iteration; files and signals are the runner's."""

    def __init__(self, config: TrainConfig, world: World | None = None, clock: Clock | None = None) -> None:
        self.config, self.world, self.clock = config, world or World(), clock or Clock()
        torch.manual_seed(config.seed)
        self.model = config.model.load(self.world.device, sharded=self.world.control is not None)
        self.model.gradient_checkpointing(config.update.gradient_checkpointing)
        self.engine = distribute(self.model, config.parallel, self.world)  # before anything refers to the parameters
        self.writer = checkpoint.Writer(self.world, background=config.parallel.async_checkpoint)
        self.reward = CompositeReward(
            config.rewards,
            max_failed_fraction=config.max_failed_fraction,
            device=self.model.device,
            offload_between=self.model.device.type != "cpu",
        )
        prompts, self.held_out = load_sources(config)
        params = self.model.trainable()
        region = config.trust_region
        self.state = TrainState(
            params=params,
            optimizer=Optimizer(
                params, config.optimizer, total_updates=config.iterations * config.update.updates_per_rollout
            ),
            anchor=Anchor(
                params, every=None if region.mode == "fixed" else config.anchor.every, offload=config.anchor.offload
            )
            if region.uses_anchor
            else None,
            ema=None if config.optimizer.ema is None else Ema(params, decay=config.optimizer.ema),
            kl=config.kl.controller(),
            stream=PromptStream(prompts, config.seed),
        )
        dims = 1
        for size in self.model.latent_shape():
            dims *= size
        self.objective = Objective(config.surrogate, region, dims)
        self.share = deal(
            config.batch.prompts, config.batch.group_size, config.batch.micro_batch, world_size=self.world.size
        )[self.world.rank]
        self.groups = sorted({member.group for batch in self.share for member in batch.members})
        """The prompts of an iteration that this rank samples."""
        self.kernel = config.kernel.build()
        self.grid = Schedule(self.model.sigmas(config.rollout.steps, config.rollout.shift))
        self._check_plan()

    def encode_prompts(self) -> None:
        """Encode every prompt that this rank will see in the rest of the run, once, and drop the text encoders for good."""
        config, state = self.config, self.state
        coming = PromptStream(state.stream.prompts, config.seed)
        coming.position = state.stream.position
        batches = (coming.take(config.batch.prompts) for _ in range(state.iteration, config.iterations))
        mine = [batch[group] for batch in batches for group in self.groups]
        prompts = list(dict.fromkeys([*mine, *self.held_out[: config.evaluate.prompts]]))
        with self.clock("encode"):
            tick = self.clock.ticker(len(prompts))
            for prompt in prompts:
                self.model.encode([prompt.text], [first_frame(prompt)])
                tick()
        self.model.unload_text()

    def step(self) -> dict[str, float]:
        """One iteration: the straight line."""
        iteration = self.state.iteration
        prompts = self.state.stream.take(self.config.batch.prompts)
        policy = self.policy_of(iteration)
        steps = self.choose_steps(policy, iteration)
        with self.clock("rollout"):
            trajectories = self.roll_out(policy, prompts, iteration, steps)
        with self.clock("decode"):
            videos = self.decode(trajectories)
        with self.clock("reward"):
            scored = self.score(videos, prompts)
        advantages = self.advantages(scored)
        with self.clock("update"):
            metrics = self.update(policy, trajectories, scored, advantages, steps)
        self.state.iteration += 1
        self.videos, self.captions = videos, [prompts[m.group].text for b in self._scored() for m in b.members]
        return {**self.describe(scored, advantages), **metrics, **self.clock.report()}

    def _check_plan(self) -> None:
        """A plan that cannot work fails before the first rollout, also where the fault is in a window of a late iteration."""
        config, first = self.config.rollout, {}
        for iteration in range(self.config.iterations):
            first.setdefault(config.window.steps(config.steps, iteration, self.config.seed), iteration)
        for iteration in first.values():
            self.choose_steps(self.policy_of(iteration), iteration)

    def policy_of(self, iteration: int) -> Policy:
        """The policy that explores at this iteration's window."""
        config = self.config.rollout
        flags = config.window.steps(config.steps, iteration, self.config.seed)
        last = self.kernel.leaves_noise if config.deterministic_last is None else config.deterministic_last
        schedule = self.grid.exploring(flags, deterministic_last=last)
        guidance = None if self.config.model.guidance_in_training else 1.0
        return Policy(self.model, self.kernel, schedule, guidance)

    def choose_steps(self, policy: Policy, iteration: int) -> list[list[int]]:
        """The trained steps of an iteration, one list per optimizer update."""
        config, steps = self.config.update, list(policy.trained_steps)
        if not steps:
            raise ValueError(
                "No step of the rollout can be trained: kernel.eta is 0, or the window only covers deterministic steps. "
                "Set kernel.eta > 0 (0.3 to 0.7) and look at `sage-grpo inspect`."
            )
        draw = random.Random(f"steps/{self.config.seed}/{iteration}")
        count = max(config.updates_per_rollout, round(config.step_fraction * len(steps)))
        chosen = sorted(draw.sample(steps, min(count, len(steps))))
        if config.permute_steps:
            draw.shuffle(chosen)
        return split_updates(chosen, config.updates_per_rollout)

    def roll_out(
        self, policy: Policy, prompts: Sequence[Prompt], iteration: int, steps: list[list[int]]
    ) -> list[Trajectory]:
        """Sample this rank's micro-batches."""
        config = self.config.rollout
        own = [prompts[group] for group in self.groups]
        conditions = dict(zip(self.groups, self.model.encode([p.text for p in own], [first_frame(p) for p in own])))
        storage = Storage(
            dtype=getattr(torch, config.storage),
            device=torch.device("cpu") if config.offload else self.model.device,
            velocities=self.objective.needs_v_old,
        )
        keys = NoiseKeys(self.config.seed, iteration, same_start=config.same_noise)
        trained = frozenset(step for part in steps for step in part)
        tick = self.clock.ticker(len(self.share) * policy.schedule.num_steps)
        return [
            roll_out(policy, batch, prompts, conditions, keys=keys, trained=trained, storage=storage, progress=tick)
            for batch in self.share
        ]

    def decode(self, trajectories: Sequence[Trajectory]) -> Tensor:
        """The clips that this process scores, uint8; fillers are left out."""
        mine, video = self._scored(), self.model.video
        tick = self.clock.ticker(len(mine))
        clips = []
        with self._vae():
            for trajectory in trajectories:
                if trajectory.batch in mine:
                    clips.append(self.model.decode(trajectory.latents))
                    tick()
        if not clips:  # more ranks share the clips of this one than there are micro-batches
            return torch.zeros((0, video.frames, video.height, video.width, 3), dtype=torch.uint8)
        return torch.cat(clips)

    @contextmanager
    def _vae(self) -> Iterator[None]:
        """The VAE is on an accelerator only while it decodes."""
        self.model.place("vae", self.model.device)
        yield
        if self.model.device.type != "cpu":
            self.model.place("vae", "cpu")

    def score(self, videos: Tensor, prompts: Sequence[Prompt]) -> Scored:
        """Rewards of this rank's clips, then one gather over all ranks, which then all decide alike."""
        members = [member for batch in self._scored() for member in batch.members]
        shown = [prompts[member.group] for member in members]
        scores, report = self.reward.score(
            videos, [p.text for p in shown], self.model.video.fps, metadata=[dict(p.metadata) for p in shown]
        )
        place = torch.tensor([(m.group, m.index) for m in members], dtype=torch.float64).reshape(-1, 2)
        columns = [scores.total, *(scores.parts[name] for name in self.reward.names)]
        rows = self.world.gather(torch.cat([place, torch.stack(columns, 1).double().cpu()], 1))
        size = self.config.batch.group_size
        number = (rows[:, 0] * size + rows[:, 1]).long()
        rows = rows[torch.argsort(number)]
        total = rows[:, 2].float()
        valid = torch.isfinite(total)
        # With no valid reward at all there is nothing to learn from, however much failure is allowed.
        limit = self.config.max_failed_fraction if bool(valid.any()) else 0.0
        failed = int((~valid).sum())
        reports = self.world.texts(report.describe()) if failed else []
        check_failures(failed, len(valid), limit, "\n".join(text for text in reports if text))
        mine = [torch.tensor([m.group * size + m.index for m in batch.members]) for batch in self.share]
        parts = {name: rows[:, 3 + column].float() for column, name in enumerate(self.reward.names)}
        return Scored(rows[:, 0].long(), total, valid, parts, mine)

    def advantages(self, scored: Scored) -> Tensor:
        """Group-relative advantages of all rollouts."""
        config = self.config.advantage
        if config.decoupled:
            return decoupled_advantage(
                scored.parts,
                self.reward.weights,
                scored.groups,
                valid=scored.valid,
                scale=config.scale,
                clip=config.clip,
            )
        return group_advantage(scored.total, scored.groups, valid=scored.valid, scale=config.scale, clip=config.clip)

    def update(
        self, policy: Policy, trajectories: list[Trajectory], scored: Scored, advantages: Tensor, steps: list[list[int]]
    ) -> dict[str, float]:
        """The optimizer updates of one rollout; returns their mean metrics."""
        trained = list(policy.trained_steps)
        sensitivity = torch.stack([policy.transition(step).sensitivity for step in trained])
        surrogate = self.config.surrogate
        weights = equalizing_weights(sensitivity, cap=surrogate.equalize_cap).tolist()
        equalizer = dict(zip(trained, weights if surrogate.equalize else [1.0] * len(trained)))
        mine = [advantages[rows] for rows in scored.mine]
        share = scored.valid.float() / scored.valid.sum()
        shares = [share[rows] * (not batch.filler) for rows, batch in zip(scored.mine, self.share)]
        passes = 2 if self.state.anchor is not None else 1
        tick = self.clock.ticker(passes * len(trajectories) * sum(map(len, steps)))
        logs = []
        for part in steps:
            v_anchor = None
            if self.state.anchor is not None:
                with self.state.anchor.applied():
                    v_anchor = anchor_velocities(policy, trajectories, part, progress=tick)
            self.engine.begin()
            tally = accumulate(
                policy,
                self.objective,
                trajectories,
                mine,
                shares,
                part,
                equalizer=equalizer,
                v_anchor=v_anchor,
                kl_lambda=self.state.kl.value,
                scale=self.engine.scale,
                before_last=self.engine.synchronize,
                progress=tick,
            )
            logs.append(self._apply(summarize(tally, self.world, part)))
        return _mean(logs)

    def _apply(self, metrics: dict[str, float]) -> dict[str, float]:
        """One optimizer step with everything that counts in updates: EMA, KL coefficient, anchor."""
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
        if state.ema is not None:
            state.ema.advance()
        state.kl.observe(metrics["kl/total"])
        if state.anchor is not None:
            metrics["anchor/renewed"] = float(state.anchor.advance(state.updates))
        return metrics

    def describe(self, scored: Scored, advantages: Tensor) -> dict[str, float]:
        """Metrics of the rewards."""
        ok = scored.valid
        spread = [scored.total[ok & (scored.groups == g)].std(correction=0) for g in scored.groups[ok].unique()]
        metrics = {
            "reward/total": float(scored.total[ok].mean()),
            "reward/std": float(scored.total[ok].std(correction=0)),
            "reward/group_std": float(torch.stack(spread).nanmean()),
            "reward/failed": float((~ok).sum()),
            "advantage/std": float(advantages.std(correction=0)),
            "advantage/largest": float(advantages.abs().max()),
        }
        metrics |= {f"reward/{name}": float(values.nanmean()) for name, values in scored.parts.items()}
        return metrics

    def evaluate(self, after_batch: Callable[[], None] = lambda: None) -> Evaluation:
        """Score the held-out prompts with the ODE; with EMA weights when there are some.

        `after_batch` is called after every micro-batch, by all ranks equally often; it may raise.
        """
        config, weights = self.config, self.state.ema.applied() if self.state.ema is not None else nullcontext()

        def progress(done: int, total: int) -> None:
            self.clock.listen("evaluate", done, total)
            after_batch()

        with self.clock("evaluate"), self._vae(), weights:
            return evaluate(
                self.model,
                self.reward,
                self.held_out,
                config.evaluate,
                micro_batch=config.batch.micro_batch,
                world=self.world,
                images=first_frame,
                progress=progress,
            )

    def _scored(self) -> list[MicroBatch]:
        """The micro-batches that this process decodes and scores: ranks that share clips share that work too."""
        real = [batch for batch in self.share if not batch.filler]
        return [real[place] for place in self.world.mine(len(real))]

    def save(self, root: Path) -> Path:
        """Write a checkpoint."""
        return self.state.save(root, dataclasses.asdict(self.config), self.writer)

    def export(self, folder: Path) -> None:
        """Write weights that load into diffusers: the EMA's when there is one. Called by all ranks."""
        weights = self.engine.whole(self.state.params if self.state.ema is None else self.state.ema.copies)
        if self.world.is_main:
            self.model.save(folder, weights=weights)
        self.world.barrier()

    def resume(self, root: Path) -> Path | None:
        """Continue from the newest good checkpoint, if there is one."""
        found = checkpoint.newest_good(root) if self.world.is_main else None
        name = self.world.from_main("" if found is None else found.name)
        if not name:
            return None
        self.state.load(root / name, self.world)
        return root / name


def _mean(logs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean over the updates in which a metric appears; the first update's largest log-ratio tells whether replay is exact."""
    names = sorted({name for log in logs for name in log})
    mean = {name: sum(log[name] for log in logs if name in log) / sum(name in log for log in logs) for name in names}
    mean["ratio/first_update"] = logs[0]["ratio/largest_log"]
    mean["ratio/largest_log"] = max(log["ratio/largest_log"] for log in logs)
    return mean
