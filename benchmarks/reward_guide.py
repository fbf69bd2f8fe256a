"""Would the reward's own gradient help branch: as a control variate of its estimate, or as a guide of its exploration? Asked offline, at the base model.

    PYTHONPATH=src python benchmarks/reward_guide.py --out benchmarks/results/reward_guide_cpu.json      # about 5 minutes of one core

Every prompt has one state to branch from, with the law x = m + s e of the next. Branch estimates the direction in which E[R] rises with m from a
group of 12. Here the reward can be differentiated, too. What a direction is worth is measured, not derived, because the judge's gradient does not
see which scene is nearest: m moves by STEP s along it, and the rewards of the same fresh noises before and after are compared.
q is the gradient at one other draw of x. A guided group also explores along q's direction g, by s tau z (z standard normal), or around m + s shift g;
it learns by the law without it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev

import torch
from torch import Tensor

from sage_grpo.models.base import differentiable
from sage_grpo.models.policy import Policy
from sage_grpo.recipes import recipe
from sage_grpo.run.session import assemble
from sage_grpo.samplers.noise import keyed_noise
from sage_grpo.training.inputs import build
from sage_grpo.types import Conditioning
from sage_grpo.worlds.shapes.judge import ShapesJudge

WEIGHTS = {"TA": 1.0, "MQ": 0.5, "VQ": 0.5}
GROUP, GROUPS, FRESH = 12, 1, 12
"""Clips of a group, groups of a prompt, and noises by which a direction is measured."""
STEP, SHIFT, TAU = 4.0, 4.0, 12.0
"""In units of s, in which noise is about 28 long, and 1 along any direction."""


class Branching:
    """A prompt's state to branch from, and what becomes of it."""

    def __init__(self, policy: Policy, condition: Conditioning, prompt: str, first: int, start: Tensor) -> None:
        self.policy, self.condition, self.prompt, self.after = policy, condition, prompt, first + 1
        self.judge = ShapesJudge()
        with torch.no_grad():
            for step in range(first):
                start = policy.step(step, start, [condition]).gaussian.mean
            law = policy.step(first, start, [condition]).gaussian
        self.mean, self.std = law.mean, float(law.std)

    def end(self, x: Tensor) -> Tensor:
        """The latents that the rest of the schedule makes."""
        for step in range(self.after, self.policy.schedule.num_steps):
            x = self.policy.step(step, x, [self.condition] * len(x)).gaussian.mean
        return x

    def reward(self, latents: Tensor) -> Tensor:
        """One value a clip."""
        pixels = differentiable(self.policy.model).pixels(latents)
        scores = self.judge.differentiable(pixels, [self.prompt] * len(latents), self.policy.model.video.fps)
        return sum((weight * scores[name] for name, weight in WEIGHTS.items()), torch.zeros(len(latents)))

    def gradient(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards and their gradients at m + s noise, as rows of numbers."""
        x = (self.mean + self.std * noise).requires_grad_()
        rewards = self.reward(self.end(x))
        (found,) = torch.autograd.grad(rewards.sum(), x)
        return rewards.detach(), found.flatten(1)

    @torch.no_grad()
    def rewards(self, noise: Tensor) -> Tensor:
        """Rewards alone."""
        return self.reward(self.end(self.mean + self.std * noise))


def score_estimate(rewards: Tensor, noise: Tensor, std: float) -> Tensor:
    """G as branch estimates it, without bias: advantages of a group times the noise."""
    return (rewards - rewards.mean()) @ noise.flatten(1) / ((len(rewards) - 1) * std)


def with_control(rewards: Tensor, noise: Tensor, std: float, q: Tensor) -> Tensor:
    """The same with a control variate, without bias for any q that does not depend on the noise."""
    return score_estimate(rewards - std * noise.flatten(1) @ q, noise, std) + q


def measure(branching: Branching, key: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Of one prompt: figures by estimate, and seconds a clip."""
    shape, std, found = tuple(branching.mean.shape[1:]), branching.std, defaultdict(list)

    def drawn(kind: str, group: int, count: int) -> Tensor:
        return torch.stack([keyed_noise(shape, kind, key, group, place) for place in range(count)])

    fresh = drawn("fresh", 0, FRESH)
    begun = time.process_time()
    before = branching.rewards(fresh)
    without = (time.process_time() - begun) / FRESH
    for group in range(GROUPS):
        other, noise = drawn("other", group, 1), drawn("plain", group, GROUP)
        begun = time.process_time()
        rewards, gradients = branching.gradient(noise)
        with_gradient = (time.process_time() - begun) / GROUP
        q = branching.gradient(other)[1][0]
        along = torch.nn.functional.normalize(q, dim=0).view(shape)
        wider = noise + TAU * drawn("along", group, GROUP).flatten(1)[:, :1].view(-1, *[1] * len(shape)) * along
        rewards_of = {
            "plain": rewards,
            "shift": branching.rewards(noise + SHIFT * along),
            "tau": branching.rewards(wider),
        }
        for name, values in rewards_of.items():
            found[f"{name}: mean"].append(float(values.mean()))
            found[f"{name}: best of {GROUP}"].append(float(values.max()))
            found[f"{name}: spread"].append(float(values.std()))
        residual = rewards - std * noise.flatten(1) @ q
        found["share of the variance that q explains"].append(1 - float(residual.var() / rewards.var()))
        directions = {
            "branch": score_estimate(rewards, noise, std),
            "branch, control q": with_control(rewards, noise, std, q),
            # what is common to a group drops out of the estimate, because advantages sum to zero: a shift needs no row of its own
            "branch, explores along q": score_estimate(rewards_of["tau"], wider, std),
            "q alone": q,
            "12 gradients": gradients.mean(0),
        }
        for name, direction in directions.items():
            moved = fresh + STEP * torch.nn.functional.normalize(direction, dim=0).view(shape)
            found[f"{name}: gain"].append(float((branching.rewards(moved) - before).mean()))
            found[f"{name}: length"].append(float(direction.norm()))
    return found, {"with gradient": with_gradient, "without": without}


def main() -> None:
    """Measure some prompts, and write means over them with standard errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=9)
    options = parser.parse_args()
    config = recipe("shapes/branch")
    trainer = assemble(config, build(config))
    model = trainer.model
    for parameter in model.trainable().values():
        parameter.requires_grad_(False)
    rows, seconds = defaultdict(list), defaultdict(list)
    for place, prompt in enumerate(trainer.state.stream.take(options.prompts)):
        group = trainer.planner.plan(0, [prompt] * config.batch.prompts).groups[0]
        (condition,) = model.encode([prompt.text])
        start = keyed_noise(model.latent_shape(), "start", place)[None]
        branching = Branching(trainer.studio.policy(group), condition, prompt.text, group.branch - 1, start)
        figures, times = measure(branching, place)
        for name, values in figures.items():
            rows[name].append(fmean(values))
        for name, value in times.items():
            seconds[name].append(value)
        print(place, prompt.text, flush=True)
        options.out.write_text(json.dumps(summary(rows, seconds), indent=1) + "\n")
    print(options.out.read_text())


def summary(rows: dict[str, list[float]], seconds: dict[str, list[float]]) -> dict[str, object]:
    """Means over prompts, with standard errors."""
    return {
        "prompts": len(seconds["without"]),
        "mean and standard error": {
            name: [round(fmean(values), 4), round(stdev(values) / len(values) ** 0.5, 4) if len(values) > 1 else None]
            for name, values in rows.items()
        },
        "seconds of one core a clip": {name: round(fmean(values), 3) for name, values in seconds.items()},
    }


if __name__ == "__main__":
    main()
