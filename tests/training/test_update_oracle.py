"""Gradients of whole updates, recomputed from the formulas of the method with none of the package's mathematics.

Only the network, the decoder, the reward, the keyed noise and the choice of steps are taken from the trainer. Everything else is written
out here: guidance, grid, kernel, rollout, advantages, equalizer, clip, masks, both KL terms and the ramp of their coefficient.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from double import CLOSE
from sage_grpo.objectives.trust_region import TrustRegion
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.samplers.kernels import KernelSpec
from sage_grpo.samplers.noise import keyed_noise
from sage_grpo.training.config import AnchorConfig, BatchConfig, OptimizerConfig, SurrogateConfig, UpdateConfig
from sage_grpo.training.kl_coefficient import KlCoefficient
from sage_grpo.types import Conditioning
from trainer_helpers import assert_alike, steps_of, watch_updates
from trainer_toys import bright

GUIDANCE, SHIFT, ETA, STEPS = 6.0, 4.0, 0.6, 5
PROMPTS, SIZE, BAD = 2, 3, 4
CLIP, BETA_POSITION, BETA_VELOCITY = 4e-3, 1.5, 0.4
LAMBDA_MIN, LAMBDA_MAX, RAMP, EVERY = 0.5, 8.0, 5, 3


def shifted(sigma: float) -> float:
    return SHIFT * sigma / (1 + (SHIFT - 1) * sigma)


class Oracle:
    def __init__(self, trainer, prompts: list[str], iteration: int) -> None:
        self.model, self.iteration = trainer.model, iteration
        self.params = trainer.state.params
        self.conditions = self.model.encode(prompts)
        grid = [1 - index / STEPS for index in range(STEPS + 1)]
        # diffusers' schedulers keep theirs in float32, whatever we do: from here on those numbers.
        self.sigmas = trainer.planner.grid.sigmas.tolist()
        assert self.sigmas == pytest.approx([shifted(s) for s in grid], rel=1e-6)
        self.coefficients = [self.sage(s, t) for s, t in zip(self.sigmas, self.sigmas[1:])]
        self.trained = list(range(STEPS - 1))  # the last step is deterministic

    @staticmethod
    def sage(sigma: float, following: float) -> tuple[float, float, float]:
        p, q = min(sigma, 1 - 3e-3), min(following, 1 - 3e-3)
        w = ETA**2 * (math.log((1 - q) / (1 - p)) - (p - q))
        return 1 - w / (2 * sigma), (following - sigma) - w * (1 - sigma) / (2 * sigma), math.sqrt(w)

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(weights[name])
                p.grad = None

    def velocity(self, x: Tensor, step: int) -> Tensor:
        sigma = torch.tensor(self.sigmas[step])
        rows = [self.conditions[group] for group in range(PROMPTS) for _ in range(SIZE)]
        yes = self.model.velocity(x, sigma, rows, guidance=1.0)
        no = self.model.velocity(x, sigma, [Conditioning(row.negative) for row in rows], guidance=1.0)
        return no + GUIDANCE * (yes - no)

    @torch.no_grad()
    def roll_out(self, clips: Tensor) -> None:
        """`clips` are the trainer's: a pixel of ours may stand at the edge of a gray level and round the other way; rewards would see it."""
        shape, place = self.model.latent_shape(), (0, self.iteration)
        members = [(group, member) for group in range(PROMPTS) for member in range(SIZE)]
        x = torch.stack([keyed_noise(shape, "start", *place, *member) for member in members])
        self.states, self.v_old = [x], []
        for step in range(STEPS):
            v = self.velocity(x, step)
            a, b, std = self.coefficients[step]
            if step in self.trained:
                noise = torch.stack([keyed_noise(shape, "step", *place, *member, step) for member in members])
                x = a * x + b * v + std * noise
            else:
                x = x + (self.sigmas[step + 1] - self.sigmas[step]) * v
            self.states.append(x)
            self.v_old.append(v)
        off = (self.model.decode(x).int() - clips.int()).abs()
        assert off.max() <= 1
        assert (off > 0).float().mean() < 1e-3
        rewards = bright(clips, [], 8.0).double()
        self.valid = [row for row in range(PROMPTS * SIZE) if row != BAD]
        self.advantage = torch.zeros(PROMPTS * SIZE, dtype=torch.float64)
        for group in range(PROMPTS):
            rows = [row for row in self.valid if row // SIZE == group]
            mean = sum(rewards[row] for row in rows) / len(rows)
            std = (sum((rewards[row] - mean) ** 2 for row in rows) / len(rows)).sqrt()
            for row in rows:
                self.advantage[row] = (rewards[row] - mean) / (std + 1e-6)

    def log_prob(self, v: Tensor, step: int) -> Tensor:
        a, b, std = self.coefficients[step]
        residual = self.states[step + 1] - (a * self.states[step] + b * v)
        return -(residual.flatten(1) ** 2).mean(1) / (2 * std**2) - math.log(std * math.sqrt(2 * math.pi))

    def gradients(self, steps: list[int], update: int, weights: dict, weights_old: dict, anchor: dict) -> dict:
        sensitivity = {step: abs(self.coefficients[step][1]) / self.coefficients[step][2] for step in self.trained}
        ordered = sorted(sensitivity.values())
        median = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
        ramp = LAMBDA_MIN + (LAMBDA_MAX - LAMBDA_MIN) * min(1.0, update / RAMP)
        dims = math.prod(self.model.latent_shape())
        pieces = {}
        for step in steps:
            self.set_weights(weights_old)
            with torch.no_grad():
                log_prob_old = self.log_prob(self.velocity(self.states[step], step), step)
            self.set_weights(anchor)
            with torch.no_grad():
                pieces[step] = log_prob_old, self.velocity(self.states[step], step)
        self.set_weights(weights)
        self.clipped = 0.0
        for step in steps:
            log_prob_old, v_reference = pieces[step]
            v = self.velocity(self.states[step], step)
            ratio = (self.log_prob(v, step) - log_prob_old).exp()
            loss = torch.zeros(())
            for row in self.valid:
                bounded = min(max(float(ratio[row].detach()), 1 - CLIP), 1 + CLIP)
                plain, clipped = ratio[row] * self.advantage[row], bounded * self.advantage[row]
                self.clipped += float(clipped < plain) / len(self.valid) / len(steps)
                kl = BETA_POSITION * ((v[row] - v_reference[row]) ** 2).mean()
                kl = kl + BETA_VELOCITY * ((v[row] - self.v_old[step][row]) ** 2).mean()
                kl = 0.5 * sensitivity[step] ** 2 * kl
                loss = loss - (median / sensitivity[step]) * (clipped if clipped < plain else plain) + ramp * kl
            (math.sqrt(dims) * loss / len(self.valid) / len(steps)).backward()
        return {name: p.grad.clone() for name, p in self.params.items()}


@pytest.mark.usefixtures("in_double")
def test_gradients_of_every_update_are_those_of_the_formulas(make_config, make_trainer) -> None:
    config = make_config(
        model={"guidance_scale": GUIDANCE, "frames": 5, "shift": SHIFT},
        rollout={"steps": STEPS},
        kernel=KernelSpec(name="sage", eta=ETA),
        rewards=[RewardSpec(name="trainer_toys:bright_but", options={"bad": [BAD]}, batch_size=0, try_out=False)],
        batch=BatchConfig(prompts=PROMPTS, group_size=SIZE, micro_batch=4),
        update=UpdateConfig(updates_per_rollout=2),
        surrogate=SurrogateConfig(clip_range=CLIP),
        trust_region=TrustRegion(mode="dual", beta_position=BETA_POSITION, beta_velocity=BETA_VELOCITY),
        kl=KlCoefficient(kind="two_stage", lambda_min=LAMBDA_MIN, lambda_max=LAMBDA_MAX, warmup_updates=RAMP),
        anchor=AnchorConfig(every=EVERY),
        optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.0),
    )
    trainer = make_trainer(replace(config, model=replace(config.model, family="trainer_zoo.guided")))
    caught, texts, steps, clips = watch_updates(trainer), [], [], []
    for iteration in range(2):
        texts.append([prompt.text for prompt in trainer.state.stream.peek(PROMPTS)])
        steps += steps_of(trainer, iteration)
        trainer.step()
        clips.append(trainer.clips.videos)
    weights = [one for one, _ in caught]
    clipped = []
    for update in range(4):
        iteration, start = divmod(update, 2)[0], update // 2 * 2
        oracle = Oracle(trainer, texts[iteration], iteration)
        oracle.set_weights(weights[start])
        oracle.roll_out(clips[iteration])
        anchor = weights[update // EVERY * EVERY]
        expected = oracle.gradients(steps[update], update, weights[update], weights[start], anchor)
        clipped.append(oracle.clipped)
        assert_alike(caught[update][1], expected, CLOSE)
        assert trainer.log[update]["ratio/clip_fraction"] == pytest.approx(oracle.clipped, abs=1e-6)
    assert any(0 < share < 1 for share in clipped)  # else the clip was not tested
