"""Rollouts that start from a clip: a schedule that begins at the level of the strength, and a start with so much of the clip left."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import tiny
from sage_grpo.generation.generate import GenerateSpec, clips_of, sample
from sage_grpo.samplers.path import interpolate
from sage_grpo.training import evaluate as evaluation
from sage_grpo.training.config import BatchConfig, DataConfig
from sage_grpo.training.inputs import conditions_of
from sage_grpo.utils.video import write_mp4
from trainer_helpers import of_method, plan_of, same, weights_of

STRENGTH, STEPS = 0.6, 4


@pytest.fixture
def rows(tmp_path):
    lines = []
    for place, words in enumerate(("a cat", "a dog")):
        clip = torch.stack([tiny.image(10 * place + frame, 24, 16) for frame in range(6)])
        write_mp4(tmp_path / f"{place}.mp4", clip, 8.0)
        lines.append({"prompt": words, "source_video": f"{place}.mp4", "seed": place})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(tmp_path / "rows.jsonl")


@pytest.fixture
def config(make_config, rows):
    made = make_config(
        kind="wan_t2v",
        model={"frames": 5, "options": {"strength": STRENGTH}},
        rollout={"steps": STEPS},
        batch=BatchConfig(prompts=2, group_size=2, micro_batch=2),
        data=DataConfig(prompts=rows, eval_prompts=rows),
    )
    return replace(made, evaluate=replace(made.evaluate, prompts=2, steps=3, show=2))


def test_rollouts_start_from_the_noised_clips_on_the_tail_of_the_grid(config, make_trainer) -> None:
    trainer = make_trainer(config)
    plan, model = plan_of(trainer), trainer.model
    sampler = trainer.engine.sampler(plan)
    rollout = sampler.run()
    grid = model.schedule.sigmas(7)[-STEPS - 1 :]  # int(7 x 0.6) = 4
    assert torch.equal(trainer.planner.grid.sigmas, grid)
    assert grid[0] < 0.97
    assert plan.rollout_passes(0).total() == 2 * STEPS
    first = {replay.members: record for replay, record in rollout.records.items() if replay.step == 0}
    for batch in plan.batches(0):
        for row, member in enumerate(batch.members):
            group = plan.groups[member.group]
            source = conditions_of(model, [group.prompt])[0].source
            noise = sampler.keys.start(group, member, model.latent_shape())
            expected = interpolate(source, noise, float(grid[0]))
            assert torch.equal(sampler.start(group, [member])[0], expected)
            assert torch.equal(first[batch.members].x[row], expected)
            assert (expected - grid[0] * noise).abs().max() > 0.01


def test_sources_differ_and_matter(config, make_trainer) -> None:
    trainer = make_trainer(config)
    prompts = [group.prompt for group in plan_of(trainer).groups]
    one, two = conditions_of(trainer.model, prompts)
    assert one.source.shape == trainer.model.latent_shape()
    assert (one.source - two.source).abs().max() > 0.01
    again = conditions_of(trainer.model, prompts[:1])[0]
    assert torch.equal(one.source, again.source)
    assert torch.equal(one.tensors["text"], trainer.model.encode([prompts[0].text])[0].tensors["text"])


@pytest.mark.parametrize("method", ["sage", pytest.param("nft", marks=pytest.mark.slow)])
def test_the_first_ratio_is_exactly_one(method: str, config, make_trainer) -> None:
    trainer = make_trainer(of_method(method, config))
    before = weights_of(trainer)
    assert trainer.step().get("ratio/first_log") == (0.0 if method == "sage" else None)
    assert not same(before, weights_of(trainer))


def test_an_evaluation_shows_what_generate_makes(config, make_trainer) -> None:
    trainer = make_trainer(config)
    chosen = replace(config.evaluate, solver="checkpoint")
    found = evaluation.evaluate(trainer.model, trainer.reward, trainer.held_out, chosen, micro_batch=2)
    options = GenerateSpec(prompts=config.data.prompts, steps=3, solver="checkpoint", progress=False)
    clips = torch.cat([videos for _, videos, _ in sample(options, trainer.model, clips_of(options))])
    assert torch.equal(found.clips, clips)
    others = [replace(a, source_video=b.source_video) for a, b in zip(trainer.held_out, trainer.held_out[::-1])]
    other = evaluation.evaluate(trainer.model, trainer.reward, others, chosen, micro_batch=2)
    assert not torch.equal(other.clips, clips)
