"""Laws of all built-in rewards on networks: which frames they read, whose clip a score is, and gradients that finite differences find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_rewards import NETWORKS
from torch.autograd.graph import saved_tensors_hooks

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.built_in import pretrained
from sage_grpo.rewards.built_in.hpsv3 import Hpsv3
from sage_grpo.rewards.built_in.ocr import OcrReward
from sage_grpo.rewards.built_in.vlm_judge import VlmJudge
from sage_grpo.rewards.frames import resize_as_pillow, resize_uint8
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.spec import RewardSpec, gather_rewards, load_reward, own_reward

PROMPTS = ['a red "ball"', 'two "squares" that move']
QUICK = ("clip", "aesthetic")
EACH = [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in NETWORKS]
pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture(scope="module")
def loaded(spec) -> Callable[[str], CompositeReward]:
    made: dict[str, CompositeReward] = {}
    return lambda name: made[name] if name in made else made.setdefault(name, CompositeReward([spec(name)]))


def clips(frames: int, count: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    coarse = torch.randint(1, 256, (count, frames, 5, 7, 3), generator=generator)
    return coarse.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3).to(torch.uint8)


def black(videos: torch.Tensor, frames: list[int]) -> torch.Tensor:
    videos = videos.clone()
    videos[:, frames] = 0
    return videos


def check_frames_read(reward: Any, frames: list[int], count: int = 8, fps: float = 4.0, each: bool = True) -> None:
    """What is scored is the same to the bit when all other frames are black, and another when one of these is."""
    videos = clips(count)
    assert list(reward.frames_read(count, fps)) == frames
    scores = reward(videos, PROMPTS, fps)
    others = reward(black(videos, [index for index in range(count) if index not in frames]), PROMPTS, fps)
    assert all(torch.equal(values, scores[part]) for part, values in others.items())
    for index in frames if each else frames[:1]:
        spoilt = reward(black(videos, [index]), PROMPTS, fps)
        assert any(not torch.equal(values, scores[part]) for part, values in spoilt.items()), index


@pytest.mark.parametrize("name", EACH)
def test_the_options_say_which_frames_are_read_and_no_others_are(name, spec) -> None:
    """8 frames at 4 fps: the centers of two slices of a second, or of no more than three."""
    if name == "videoalign":  # two frames a second, and at least four, from the first to the last
        check_frames_read(load_reward(spec(name)), [0, 3, 5, 8], count=9, fps=8.0, each=False)
        return
    slow = load_reward(replace(spec(name), options={**spec(name).options, "sample_fps": 1.0}))
    check_frames_read(slow, [2, 6], each=name == "clip")
    few = load_reward(replace(spec(name), options={**spec(name).options, "sample_fps": 4.0, "num_frames": 3}))
    assert list(few.frames_read(8, 4.0)) == [1, 4, 6]


class Judged(VlmJudge):
    def __call__(self, videos, prompts, fps):
        sent = [self.request(clip, prompt, fps) for clip, prompt in zip(videos, prompts)]
        return {"look": torch.tensor([float(sum(body)) for body in sent])}


def level(frames, prompts):
    return frames.float().mean(dim=(1, 2, 3))


def engine(frame):
    corners = [[0, 0], [9, 0], [9, 9], [0, 9]]
    return [(corners, "ball squares"[: 1 + int(frame.mean()) % 12], 0.9)], None


def test_rewards_without_a_network_read_the_frames_that_they_name() -> None:
    judge = {"url": "http://localhost:1/v1", "model": "m", "dimensions": {"look": "how"}}
    check_frames_read(OcrReward(engine=engine, sample_fps=2.0, num_frames=3), [1, 4, 6], each=False)
    check_frames_read(Judged(**judge, frames={"sample_fps": 2.0, "num_frames": 3}), [1, 4, 6])


class Reads:
    names = ("level",)

    def __init__(self, frames: list[int] | Exception | None) -> None:
        self.frames = frames

    def frames_read(self, count: int, fps: float) -> list[int] | None:
        if isinstance(self.frames, Exception):
            raise self.frames
        return self.frames

    def __call__(self, videos, prompts, fps):
        return {"level": videos.float().mean(dim=(1, 2, 3, 4))}


def together(*rewards: Any, **settings: Any) -> CompositeReward:
    given = [own_reward(one, label=f"r{number}") for number, one in enumerate(rewards)]
    specs = [one.spec if number else replace(one.spec, **settings) for number, one in enumerate(given)]
    return CompositeReward(specs, objects={one.spec.name: one.reward for one in given})


def test_rewards_together_read_what_any_of_them_reads_and_all_where_one_does_not_say() -> None:
    def whole(videos, prompts, fps):
        return videos.float().mean(dim=(1, 2, 3, 4))

    assert together(Reads([7, 2]), Reads([2, 5])).frames_read(9, 8.0) == [2, 5, 7]
    for other in (whole, Reads(None), Reads(ValueError("too short"))):
        assert together(Reads([7, 2]), other).frames_read(9, 8.0) is None
    watched = together(Reads(None), Reads([8, 0]), metric_only=True)
    assert watched.frames_read(9, 8.0) == [0, 8]
    for index in (-1, 9):
        with pytest.raises(RewardConfigError, match=rf"frames_read names frame {index} of a clip of 9 frames"):
            together(Reads([0, index])).frames_read(9, 8.0)


@pytest.mark.parametrize("name", EACH)
def test_a_score_belongs_to_its_own_clip_and_prompt_in_every_batch(name, loaded, monkeypatch) -> None:
    """Also where frames go in several passes; prompts of other lengths are padding that is not seen."""
    prompts, videos = [PROMPTS[0], "x", PROMPTS[1]], clips(4, 3)

    def total(videos: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        return loaded(name).score(videos, prompts, 8.0)[0].total

    whole = total(videos, prompts)
    alone = torch.cat([total(videos[index : index + 1], [prompt]) for index, prompt in enumerate(prompts)])
    torch.testing.assert_close(whole, alone, atol=2e-4, rtol=1e-4)
    assert (whole - whole.roll(1)).abs().min() > 1e-4
    turned = total(videos, prompts[::-1])
    assert torch.allclose(turned, whole, atol=1e-5) == (name == "aesthetic")
    monkeypatch.setattr(Hpsv3, "frames_a_pass", 2)
    torch.testing.assert_close(total(videos, prompts), whole, atol=2e-4, rtol=1e-4)


def smooth(height: int, width: int, frames: int = 4) -> torch.Tensor:
    coarse = torch.rand(frames, 3, 5, 7, generator=torch.Generator().manual_seed(1)) * 180 + 40
    return torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear").permute(0, 2, 3, 1)[None]


@pytest.mark.parametrize("name", EACH)
def test_floats_are_scored_as_the_bytes_that_they_equal(name, loaded) -> None:
    reward, videos = loaded(name)._members[0].reward, smooth(44, 60).round()
    with torch.enable_grad():
        floats = reward.differentiable(videos.requires_grad_(), ["a red ball"], 2.0)
    for part, value in reward(videos.detach().to(torch.uint8), ["a red ball"], 2.0).items():
        assert torch.equal(floats[part].detach(), value)
        assert not value.requires_grad
    assert not [one for one, weight in reward.model.named_parameters() if weight.requires_grad]
    assert not any(module.training for module in reward.model.modules())


@pytest.mark.parametrize("name", EACH)
def test_gradients_are_those_of_finite_differences(name, loaded) -> None:
    reward, videos = loaded(name), smooth(*NETWORKS[name][1])
    gradient = reward.gradient(videos, lambda clips: clips, "a red ball", 2.0)
    assert float(gradient.norm()) > 0

    def score(at: torch.Tensor) -> float:
        with torch.enable_grad():  # the graph's path
            found = reward._members[0].differentiable(at.requires_grad_(), ["a red ball"], 2.0, [{}])
        return found.item()

    noise = torch.randn(videos.shape, generator=torch.Generator().manual_seed(5))
    mixed = gradient / gradient.norm() + noise / noise.norm()
    for direction in (gradient, mixed):
        # as far as changes the score by a few thousandths: beyond its round-off, and before it bends
        step = direction * (3e-3 * max(1.0, abs(score(videos))) / float((gradient * direction).sum()))
        gap = (score(videos + step) - score(videos - step)) / 2
        assert gap == pytest.approx(float((gradient * step).sum()), rel=0.03)


def test_blocks_keep_their_inputs_alone_and_change_no_gradient(spec, monkeypatch) -> None:
    def run() -> tuple[torch.Tensor, int]:
        kept: list[int] = []
        reward = CompositeReward([spec("clip")])
        with saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            gradient = reward.gradient(smooth(44, 60), lambda clips: clips, "a red ball", 2.0)
        return gradient, sum(kept)

    gradient, kept = run()
    monkeypatch.setattr(pretrained, "_blocks", lambda module: iter(()))
    plain, all_kept = run()
    assert torch.equal(gradient, plain)
    assert kept < 0.75 * all_kept


@pytest.mark.parametrize("resize", [resize_as_pillow, resize_uint8])
def test_a_gradient_passes_rounding_as_if_there_were_none(resize) -> None:
    images = (torch.rand(1, 3, 12, 16, generator=torch.Generator().manual_seed(2)) * 300 - 20).clamp(0, 255)
    images.requires_grad_()
    resized, weights = resize(images, 8, 10), torch.rand(1, 3, 8, 10, generator=torch.Generator().manual_seed(3))
    assert torch.equal(resized, resized.round())
    (gradient,) = torch.autograd.grad((resized * weights).sum(), images)
    plain = images
    for size in ((12, 10), (8, 10)) if resize is resize_as_pillow else ((8, 10),):
        plain = torch.nn.functional.interpolate(plain, size, mode="bicubic", antialias=True).clamp(0, 255)
    (wanted,) = torch.autograd.grad((plain * weights).sum(), images)
    # rounding moves a few values over the edge of the range
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=0.05)
    assert float((gradient - wanted).norm()) < 0.02 * float(wanted.norm())


def detached(videos, prompts, fps):
    return videos.detach().float().mean(dim=(1, 2, 3, 4))


def test_a_reward_whose_scores_have_no_graph_is_found_when_it_is_tried_out() -> None:
    spec = RewardSpec(name=f"{__name__}:detached", options={"differentiable": True})
    assert CompositeReward([spec]).try_out("x") == ""
    assert "does not depend on what was read" in CompositeReward([spec]).try_out("x", gradient=True)
    rough = RewardSpec(name="video_stats", weights={"motion": 1.0})
    assert "motion has no gradient" in CompositeReward([rough]).try_out("x", gradient=True)


def mean_latent(latents, prompts, fps):
    return latents.flatten(1).mean(dim=1)


def test_a_reward_of_latents_reads_them_and_is_refused_where_there_are_none() -> None:
    spec = RewardSpec(name=f"{__name__}:mean_latent", options={"reads": "latents", "differentiable": True})
    level = RewardSpec(name="video_stats", weights={"brightness": 1.0})
    reward, videos, latents = CompositeReward([spec]), clips(4, 3), torch.randn(3, 2, 5)
    assert not reward.reads_clips
    assert CompositeReward([spec, level]).reads_clips
    scores, _ = reward.score(videos, ["a"] * 3, 8.0, latents=latents)
    torch.testing.assert_close(scores.total, latents.mean(dim=(1, 2)))
    (given,), objects = gather_rewards(own_reward(mean_latent, options=dict(spec.options)))
    assert not CompositeReward([given], objects=objects).reads_clips
    never = pytest.fail
    gradient = reward.gradient(latents[:1], lambda z: never("nothing is decoded"), "a", 8.0)
    torch.testing.assert_close(gradient, torch.full((1, 2, 5), 0.1))
    with pytest.raises(RewardConfigError, match="reads latents, which only a run has that samples clips"):
        reward.score(videos, ["a"] * 3, 8.0)
    with pytest.raises(RewardConfigError, match="Leave it out here"):
        reward.try_out("a")
    assert reward.try_out("a", sampled=True) == ""
    with pytest.raises(RewardConfigError, match="does not go with"):
        load_reward(RewardSpec(name=spec.name, options={**spec.options, "takes": "group"}))
