"""Clips with several parts: what explores, and what a reward for one part moves."""

from __future__ import annotations

from dataclasses import replace

import torch

from sage_grpo.samplers.kernels import Ode
from sage_grpo.samplers.transition import expanded
from sage_grpo.training import update
from sage_grpo.training.config import BatchConfig
from trainer_helpers import of_method, plan_of


def run_of(make_config, make_trainer, method: str = "sage", rewards=None, explore=(), **more):
    batch = BatchConfig(prompts=2, group_size=2, micro_batch=2)
    config = make_config(
        kind="ltx2", model={"guidance_scale": 1.0, "height": 32, "width": 32}, rollout={"steps": 4}, batch=batch, **more
    )
    config = of_method(method, config)
    config = replace(config, rollout=replace(config.rollout, explore=list(explore)), rewards=rewards or config.rewards)
    return make_trainer(config)


def test_only_what_explores_has_noise_and_a_ratio(make_config, make_trainer, monkeypatch) -> None:
    trainer = run_of(make_config, make_trainer, explore=["audio"])
    assert [(part.name, part.share) for part in trainer.engine.parts] == [("audio", 1.0)]
    plan = plan_of(trainer)
    rollout = trainer.sample(plan)
    parts = trainer.model.parts
    for replay, record in rollout.records.items():
        policy, step = record.policy, replay.step
        velocity = policy.model.velocity(record.x, policy.schedule.pair(step)[0], record.conditions)
        law = policy.at(step, record.x, velocity)
        ode = Ode()(*policy.schedule.pair(step))(record.x, law.velocity).mean
        after, plain = parts.split(record.x_next), parts.split(expanded(ode, len(record.x_next)))
        torch.testing.assert_close(after["video"], plain["video"], rtol=0, atol=1e-6)
        assert (after["audio"] - plain["audio"]).abs().max() > 1e-2
        whole = policy.transition(step)(record.x, law.velocity).expand(len(record.x_next))
        place = parts.places()["audio"]
        gap = (record.x_next[:, place] - whole.mean[:, place]) / whole.std
        by_hand = -0.5 * gap.square().mean(1) - whole.std.log() - 0.918938533
        torch.testing.assert_close(record.log_prob_old[:, 0], by_hand.detach(), rtol=1e-5, atol=1e-5)
    sent, joined = dict.fromkeys(parts.shapes, 0.0), update.joined

    def spy(gradients, own, whole):
        total = joined(gradients, own, whole)
        for name, part in parts.split(total).items():
            sent[name] += float(part.abs().sum())
        return total

    monkeypatch.setattr(update, "joined", spy)
    assert trainer.step()["ratio/first_log"] == 0.0
    assert (sent["video"], sent["audio"] > 0) == (0.0, True)
