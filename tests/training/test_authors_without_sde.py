"""nft and awm against the loss of their authors' released code, written here from its formulas with the constants that it ships.

DiffusionNFT: config/nft.py, config/base.py and scripts/train_nft_sd3.py of NVlabs/DiffusionNFT. AWM: config/dgx_awm.py and
scripts/train_sd3_awm.py of scxue/advantage_weighted_matching. The presets run as they resolve, on the toy model in float64; every
gradient that reaches the optimizer must be the one of their loss at the same clips, noises and levels.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from double import CLOSE
from sage_grpo.objectives.base import NoisedClips
from sage_grpo.objectives.options import ObjectiveSpec
from sage_grpo.recipes.methods import METHODS
from sage_grpo.samplers.noise import keyed_noise
from sage_grpo.samplers.schedule import Schedule
from sage_grpo.training.config import BatchConfig, OptimizerConfig, UpdateConfig
from trainer_helpers import assert_alike, plan_of, watch_gradients, weights_of
from trainer_toys import bright

PROMPTS, SIZE = 2, 3
MOST = 5.0
"""adv_clip_max of both."""


def each(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1)


def authors_nft(v: Tensor, v_old: Tensor, v_ref: Tensor, x0: Tensor, noise: Tensor, t: float, adv: Tensor) -> Tensor:
    """beta 1, train.beta 1e-4."""
    beta, kl, xt = 1.0, 1e-4, (1 - t) * x0 + t * noise
    r = (adv.clamp(-MOST, MOST) / MOST / 2 + 0.5).clamp(0, 1)
    losses = []
    for prediction in (beta * v + (1 - beta) * v_old, (1 + beta) * v_old - beta * v):
        error = xt - t * prediction - x0
        weight = each(error.detach().abs()).clamp(min=1e-5)
        losses.append(each(error**2) / weight)
    policy = (r * losses[0] / beta + (1 - r) * losses[1] / beta) * MOST
    return policy + kl * each((v - v_ref) ** 2)


def authors_awm(v: Tensor, v_old: Tensor, v_ref: Tensor, x0: Tensor, noise: Tensor, t: float, adv: Tensor) -> Tensor:
    """ghuber_power 0.25, advantage_max 1, clip_range 1, ema_beta 1, train.beta 1e-4; on-policy, so that log_prob is its own old one."""
    power, tiny, kl, kl_ema = 0.25, 1e-10, 1e-4, 1.0
    square = each((v - (noise - x0)) ** 2)
    log_prob = -((square + tiny) ** power - tiny**power) * t / power
    ratio, a = (log_prob - log_prob.detach()).exp(), adv.clamp(-MOST, MOST) / MOST
    policy = torch.maximum(-a * ratio, -a * ratio.clamp(1 - 1.0, 1 + 1.0))
    return policy + kl * each((v - v_ref) ** 2) + kl_ema * each((v - v_old) ** 2)


CASES = {
    "nft": (authors_nft, 10, 9, (0.001, 0.5), 1.0),
    "awm": (authors_awm, 14, 6, (0.001, 0.3), MOST),  # ours leaves the advantages, and multiplies the KLs instead
}
"""Their loss, steps, trained levels, the averaged policy's decay (a step's part and its end), and our loss over theirs."""


@pytest.mark.parametrize("before", [0, 600], ids=["from the start", "late"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("in_double")
def test_a_presets_gradients_are_those_of_its_authors_loss(name: str, before: int, make_config, make_trainer) -> None:
    theirs, steps, trained, (rise, most), factor = CASES[name]
    base = make_config(
        rollout={"steps": steps},
        iterations=before + 3,
        batch=BatchConfig(prompts=PROMPTS, group_size=SIZE, micro_batch=SIZE),
        optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.0, max_grad_norm=1e9),
    )
    trainer = make_trainer(METHODS[name](base))
    model, params, scale = trainer.model, trainer.state.params, math.sqrt(math.prod(trainer.model.latent_shape()))
    trainer.state.iteration = before  # the averaged policy then lags as it does there
    start = old = weights_of(trainer)
    clips, found, sampled = [], watch_gradients(trainer), []
    roll_out, velocity = trainer.sample, model.velocity

    def put(weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for key, p in params.items():
                p.copy_(weights[key])

    def rolled(plan):
        sampled.clear()
        model.velocity = lambda *args, **more: (sampled.append(weights_of(trainer)), velocity(*args, **more))[1]
        rollout = roll_out(plan)
        model.velocity = velocity
        clips.append(torch.cat([latents for _, latents in rollout.latents]))
        return rollout

    trainer.sample = rolled
    for iteration in range(before, before + 3):
        plan, now = plan_of(trainer, iteration), weights_of(trainer)
        metrics = trainer.step()
        after, x0 = weights_of(trainer), clips[-1]
        sampler = old if name == "nft" else now  # AWM samples with the newest weights: off_policy is False
        torch.testing.assert_close(sampled[0], sampler, rtol=0, atol=1e-12)
        reward = bright(trainer.clips.videos, [], 8.0).double()
        mean = reward.view(PROMPTS, SIZE).mean(1).repeat_interleave(SIZE)
        advantage = (reward - mean) / (reward.std(correction=0) + 1e-6)  # theirs adds 1e-4
        conditions = model.encode([prompt.text for prompt in plan.prompts])
        for p in params.values():
            p.grad = None
        total = []
        for group in plan.groups:
            (levels,) = group.trained
            assert len(levels) == trained
            own = slice(group.index * SIZE, (group.index + 1) * SIZE)
            for level in levels:
                t, rows = group.sigma(level), [conditions[group.index]] * SIZE
                keys = [("fresh", 0, iteration, group.index, member, level) for member in range(SIZE)]
                noise = torch.stack([keyed_noise(model.latent_shape(), *key) for key in keys])
                seen = []
                for weights in (old, start):
                    put(weights)
                    with torch.no_grad():
                        seen.append(model.velocity((1 - t) * x0[own] + t * noise, torch.tensor(t), rows))
                put(now)
                v = model.velocity((1 - t) * x0[own] + t * noise, torch.tensor(t), rows)
                loss = theirs(v, *seen, x0[own], noise, t, advantage[own]).mean() / (trained * PROMPTS)
                (factor * scale * loss).backward()
                total.append(float(loss.detach()))
        assert_alike(found[-1], {key: p.grad for key, p in params.items()}, CLOSE)
        assert metrics["loss/policy"] + metrics["loss/kl"] == pytest.approx(factor * sum(total), rel=CLOSE)
        assert (metrics["matching/moved"] == 0) == (iteration == before)
        trainer.state.optimizer.zero_grad()
        put(after)
        decay = min(rise * (iteration + 1), most)
        old = {key: decay * old[key] + (1 - decay) * after[key] for key in old}


def test_strata_are_the_authors_discrete_steps_without_the_first() -> None:
    """Boundaries linspace(1, int(0.9 N), T + 1) as whole numbers, and one step of each part: 1, 2 or 3, ... 10 or 11 of 14."""
    rng = random.Random(0)
    for steps, levels in ((14, 6), (20, 9), (6, 3), (25, 11), (5, 3)):
        spec, grid = ObjectiveSpec(kind="awm", draw="strata", levels=levels), Schedule.shifted(steps, 3.0)
        edges = torch.linspace(1, int(steps * 0.9), levels + 1, dtype=torch.float64).long().tolist()
        allowed = [set(range(low, high)) for low, high in pairwise(edges)]
        seen: list[set[int]] = [set() for _ in allowed]
        for _ in range(100):
            drawn = NoisedClips(spec).targets(grid, lambda sigma: True, rng)
            assert drawn.schedule.sigmas[:-1].tolist() == [float(grid.sigmas[step]) for step in drawn.labels]
            for part, step in zip(seen, drawn.labels, strict=True):
                part.add(step)
        assert seen == allowed
    with pytest.raises(ValueError, match=r"levels is 12, but .* 11 step\(s\) .*without its first step and last tenth"):
        NoisedClips(replace(spec, levels=12)).targets(Schedule.shifted(14, 3.0), lambda sigma: True, rng)


def test_an_nft_without_an_old_policy_of_its_own_is_told_before_it_starts(make_config) -> None:
    preset = METHODS["nft"](make_config(rollout={"steps": 10}))
    alone = replace(preset, objective=replace(preset.objective, old_decay=0.0, old_ramp=0))

    def remarks(config) -> list[str]:
        return config.build_objective().remarks(config.update.updates_per_rollout)

    assert remarks(preset) == []
    assert "awm with a clipped advantage" in remarks(alone)[0]
    assert remarks(replace(alone, update=UpdateConfig(updates_per_rollout=2))) == []
    assert remarks(replace(alone, objective=replace(alone.objective, kind="awm", weight="uniform"))) == []
