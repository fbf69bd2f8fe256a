"""The reward's own gradient: what is sent to the weights is the derivative of the mean reward through the sampler."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from sage_grpo.data.groups import Member
from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.functions import FunctionReward, RewardConfigError
from sage_grpo.rewards.spec import RewardSpec
from sage_grpo.run.preflight import preflight
from sage_grpo.run.session import assemble
from sage_grpo.training import inputs
from sage_grpo.training.inputs import Overrides, build
from sage_grpo.training.rollout import NoiseKeys
from sage_grpo.training.trainer import Trainer
from sage_grpo.worlds.shapes.render import render
from sage_grpo.worlds.shapes.scene import random_scenes
from trainer_helpers import assert_alike, of_method, watch_gradients
from trainer_toys import bright

REWARD = RewardSpec(name="trainer_toys:bright", options={"differentiable": True})
STEPS, PROMPTS, SIZE = 3, 1, 2


def small(config, **objective):
    return replace(
        config,
        rewards=[REWARD],
        batch=replace(config.batch, prompts=PROMPTS, group_size=SIZE, micro_batch=2),
        rollout=replace(config.rollout, steps=STEPS),
        objective=replace(config.objective, **objective),
        optimizer=replace(config.optimizer, max_grad_norm=1e9),
    )


def whole(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The same by autograd through the whole sampler: only at trained steps do weights count, and only an exact gradient passes the network."""
    model, params = trainer.model, trainer.state.params
    plan = trainer.planner.plan(0, trainer.state.stream.take(PROMPTS))
    total = torch.zeros(())
    for group in plan.groups:
        (condition,) = model.encode([group.prompt.text])
        exact, trained = trainer.config.objective.credit == "exact", set(group.levels.labels)
        for member in range(SIZE):
            x = NoiseKeys(trainer.config.seed, 0).start(group, Member(group.index, member), model.latent_shape())[None]
            sigmas = group.schedule.sigmas.tolist()
            for step, (now, following) in enumerate(itertools.pairwise(sigmas)):
                at = x if exact and step > min(trained) else x.detach()
                v = model.velocity(at, torch.tensor(now), [condition])
                v = v if step in trained else v.detach()
                x = x + (following - now) * v
            total = total + model.pixels(x).mean() / 255 / (PROMPTS * SIZE)
    names = [name for name, p in params.items() if p.requires_grad]
    return dict(zip(names, torch.autograd.grad(-total, [params[name] for name in names], allow_unused=True)))


@pytest.mark.parametrize(
    ("method", "objective"),
    [
        ("draft", {}),
        ("draft", {"levels": 3}),
        ("draft", {"levels": 2, "credit": "affine"}),
        ("adjoint", {"levels": 2}),
        ("refl", {"predict": 0.7}),
    ],
    ids=["draft-1", "draft-3", "affine", "adjoint", "refl"],
)
def test_what_is_sent_is_the_gradient_of_the_mean_reward(method: str, objective: dict, make_config) -> None:
    config = small(of_method(method, make_config()), **objective)
    wanted = whole(assemble(config, build(config)))
    trainer = assemble(config, build(config))
    found = watch_gradients(trainer)
    trainer.step()
    assert_alike(found[0], wanted, 1e-4)


def test_clips_that_are_decoded_together_are_differentiated_together(make_config, monkeypatch) -> None:
    config, rows = small(of_method("draft", make_config())), []
    trainer = assemble(config, build(config))
    plan = trainer.planner.plan(0, trainer.state.stream.take(PROMPTS))
    rollout = trainer.sample(plan)
    ((members, alone),) = trainer.engine.differentiate(plan, rollout).items()
    trainer.engine.config = replace(config, model=replace(config.model, vae_slicing=False))
    pixels = trainer.model.pixels
    there = []  # with the VAE on the device
    monkeypatch.setattr(trainer.engine.vae, "decoding", lambda: nullcontext(there.append("VAE")))
    monkeypatch.setattr(trainer.model, "pixels", lambda x, read: (rows.append((len(x), *there)), pixels(x, read))[1])
    found = trainer.engine.differentiate(plan, rollout)[members]
    assert rows == [(SIZE, "VAE")]
    torch.testing.assert_close(found, alone, rtol=1e-3, atol=1e-6)


def test_a_clip_without_a_finite_gradient_counts_nothing_and_its_neighbours_do() -> None:
    reward = CompositeReward([REWARD])
    clips = torch.rand(3, 2, 4, 4, 3, generator=torch.Generator().manual_seed(1))
    alone = [reward.gradient(clip[None], lambda x: x, "any", 8.0)[0] for clip in clips]
    clips[1, 0, 0, 0, 0] = float("nan")
    found = reward.gradient(clips, lambda x: x, "any", 8.0)
    assert not found[1].any()
    torch.testing.assert_close(found[::2], torch.stack(alone[::2]))


@pytest.mark.parametrize("objects", [{}, {"trainer_toys:bright": FunctionReward(bright)}], ids=["named", "object"])
def test_a_reward_without_a_gradient_is_refused_before_anything_is_loaded(make_config, objects: dict) -> None:
    config = replace(small(of_method("refl", make_config())), rewards=[RewardSpec(name="trainer_toys:bright")])
    with pytest.raises(RewardConfigError, match=r"'bright' cannot be: .*differentiable: true"):
        preflight(config, given=Overrides(rewards=objects))


def detached(videos: torch.Tensor, prompts: list[str], fps: float) -> torch.Tensor:
    return bright(videos.detach(), prompts, fps)


def test_a_reward_whose_scores_have_no_graph_is_refused_before_the_model_is_loaded(make_config, monkeypatch) -> None:
    graphless = RewardSpec(name=f"{__name__}:detached", options={"differentiable": True})
    config = replace(small(of_method("refl", make_config())), rewards=[graphless])
    monkeypatch.setattr(inputs, "load_model", lambda *_, **__: pytest.fail("the model is loaded"))
    with pytest.raises(RewardConfigError, match="does not depend on what was read"):
        build(config)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        *(("video_stats", part) for part in ("brightness", "saturation", "sharpness", "flicker")),
        *(("shapes", "VQ"), ("shapes", "TA"), ("shapes_proxy", "proxy")),
    ],
)
def test_gradients_of_rewards_are_those_of_finite_differences(name: str, part: str) -> None:
    draw = torch.Generator().manual_seed(3)
    scenes = random_scenes(1, draw)
    clips = (render(scenes, 9, 32, 32) + 0.05 * torch.randn(1, 9, 32, 32, 3, generator=draw)).clamp(0.02, 0.98) * 255
    prompt, reward = scenes.texts()[0], CompositeReward([RewardSpec(name=name, weights={part: 1.0})])
    gradient = reward.gradient(clips, lambda clips: clips, prompt, 8.0)

    def score(at: torch.Tensor) -> float:
        return float(reward._members[0].differentiable(at.requires_grad_(), [prompt], 8.0, [{}]).detach())

    draw = torch.randn(clips.shape, generator=torch.Generator().manual_seed(5))
    for direction in (draw / draw.norm(), gradient / gradient.norm()):
        gap = (score(clips + 8 * direction) - score(clips - 8 * direction)) / 16
        slope = float((gradient * direction).sum())
        assert gap == pytest.approx(slope, rel=0.05, abs=0.02 * float(gradient.norm()))
    assert float(gradient.norm()) > 0
