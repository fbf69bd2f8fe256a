"""Gradients of the learned rewards: one scoring for bytes and floats, and slopes that finite differences find, on tiny random networks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from authors_layouts import open_clip_state, write_bert_tokenizer, write_imagereward
from safetensors.torch import save_file
from tiny_reward_checkpoints import (
    TEMPLATE,
    qwen_tokenizer,
    reference_model,
    write_clip,
    write_dino,
    write_qwen_base,
    write_videoalign,
)
from torch.autograd.graph import saved_tensors_hooks

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.built_in import pretrained
from sage_grpo.rewards.frames import resize_as_pillow, resize_uint8
from sage_grpo.rewards.functions import RewardConfigError
from sage_grpo.rewards.spec import RewardSpec, gather_rewards, load_reward, own_reward
from slowly import slow_but

PROMPT, FPS = "a red ball", 2.0


def clip_reward(name: str, folder: Path, **options: object) -> RewardSpec:
    model = write_clip(folder)
    return RewardSpec(name=name, options={"model": str(model), **options})


def aesthetic(folder: Path) -> RewardSpec:
    torch.manual_seed(1)
    save_file({"0.weight": torch.randn(8, 16), "1.weight": torch.randn(1, 8)}, folder / "head.safetensors")
    return clip_reward("aesthetic", folder / "clip", head=str(folder / "head.safetensors"))


def hpsv2(folder: Path) -> RewardSpec:
    save_file(open_clip_state(), folder / "hps.safetensors")
    base = write_clip(folder / "base")
    return RewardSpec(name="hpsv2", options={"checkpoint": str(folder / "hps.safetensors"), "base": str(base)})


def imagereward(folder: Path) -> RewardSpec:
    write_imagereward(folder)
    write_bert_tokenizer(folder / "bert")
    names = {"checkpoint": "imagereward.safetensors", "config": "med_config.json", "tokenizer": "bert"}
    return RewardSpec(name="imagereward", options={option: str(folder / name) for option, name in names.items()})


def videoalign(folder: Path) -> RewardSpec:
    base = write_qwen_base(folder / "base")
    model, head, _ = reference_model(base, lora=True, output_dim=3)
    write_videoalign(folder / "reward", model, head, kind="adapter")
    (folder / "template.txt").write_text(TEMPLATE)
    names = {"checkpoint": "reward", "base": "base", "template": "template.txt"}
    options = {option: str(folder / name) for option, name in names.items()}
    return RewardSpec(name="videoalign", weights={"VQ": 0.5, "TA": 1.0}, options=options)


def hpsv3(folder: Path) -> RewardSpec:
    from transformers import Qwen2VLForConditionalGeneration

    base, tokenizer = write_qwen_base(folder / "base"), qwen_tokenizer()
    tokenizer.add_tokens(["<|Reward|>"], special_tokens=True)
    model = Qwen2VLForConditionalGeneration.from_pretrained(base, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer))
    state = {name: value.detach().clone().contiguous() for name, value in model.state_dict().items()}
    torch.manual_seed(2)
    head = {"0.weight": torch.randn(8, 32), "0.bias": torch.zeros(8), "2.weight": torch.randn(2, 8)}
    head["2.bias"] = torch.zeros(2)
    save_file(state | {f"rm_head.{name}": value for name, value in head.items()}, folder / "hpsv3.safetensors")
    (folder / "template.txt").write_text("Judge {text_prompt} <|Reward|> END")
    names = {"checkpoint": "hpsv3.safetensors", "base": "base", "template": "template.txt"}
    options = {option: str(folder / name) for option, name in names.items()}
    return RewardSpec(name="hpsv3", options={**options, "dtype": "float32"})


def subject(folder: Path) -> RewardSpec:
    return RewardSpec(name="subject_consistency", options={"model": str(write_dino(folder)), "size": 32})


REWARDS: dict[str, tuple[Callable[[Path], RewardSpec], tuple[int, int]]] = {
    "clip": (lambda folder: clip_reward("clip", folder, clamp=False), (30, 30)),
    "pickscore": (lambda folder: clip_reward("pickscore", folder), (30, 30)),
    "aesthetic": (aesthetic, (30, 30)),
    "background_consistency": (lambda folder: clip_reward("background_consistency", folder), (30, 30)),
    "subject_consistency": (subject, (32, 32)),
    "hpsv2": (hpsv2, (30, 30)),
    "imagereward": (imagereward, (24, 24)),
    "videoalign": (videoalign, (308, 336)),
    "hpsv3": (hpsv3, (448, 448)),
}
"""How a spec with tiny weights is made, and a size of frames that is the network's own: nothing is resized, and so nothing rounded."""


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> Callable[[str], RewardSpec]:
    made: dict[str, RewardSpec] = {}

    def of(name: str) -> RewardSpec:
        if name not in made:
            made[name] = REWARDS[name][0](tmp_path_factory.mktemp(name))
        return made[name]

    return of


def smooth(height: int, width: int, frames: int = 4) -> torch.Tensor:
    """A float clip in the middle of the range: nothing is cut off."""
    coarse = torch.rand(frames, 3, 5, 7, generator=torch.Generator().manual_seed(1)) * 180 + 40
    return torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear").permute(0, 2, 3, 1)[None]


@pytest.mark.parametrize("name", slow_but(REWARDS, "clip", "imagereward"))
def test_floats_are_scored_as_the_bytes_that_they_equal(name, spec) -> None:
    """At a size that is resized and rounded, to the bit."""
    reward, videos = load_reward(spec(name)), smooth(44, 60).round()
    with torch.enable_grad():
        floats = reward.differentiable(videos.requires_grad_(), [PROMPT], FPS)
    for part, value in reward(videos.detach().to(torch.uint8), [PROMPT], FPS).items():
        assert torch.equal(floats[part].detach(), value)
        assert not value.requires_grad


@pytest.mark.parametrize("name", slow_but(REWARDS, "clip", "imagereward"))
def test_gradients_are_those_of_finite_differences(name, spec) -> None:
    """Along the gradient and along a random direction."""
    reward, videos = CompositeReward([spec(name)]), smooth(*REWARDS[name][1])
    gradient = reward.gradient(videos, lambda clips: clips, PROMPT, FPS)
    assert float(gradient.norm()) > 0

    def score(at: torch.Tensor) -> float:
        with torch.enable_grad():  # the graph's path
            return float(reward._members[0].differentiable(at.requires_grad_(), [PROMPT], FPS, [{}]).double())

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
            gradient = reward.gradient(smooth(44, 60), lambda clips: clips, PROMPT, FPS)
        return gradient, sum(kept)

    gradient, kept = run()
    monkeypatch.setattr(pretrained, "_blocks", lambda module: iter(()))
    plain, all_kept = run()
    assert torch.equal(gradient, plain)
    assert kept < 0.75 * all_kept


@pytest.mark.parametrize(("name", "model"), [("videoalign", "model"), ("imagereward", "_text")])
def test_no_weight_wants_a_gradient_and_nothing_is_dropped(name, model, spec) -> None:
    model = getattr(load_reward(spec(name)), model)
    assert not [name for name, p in model.named_parameters() if p.requires_grad]
    assert not any(module.training for module in model.modules())


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
    torch.testing.assert_close(
        gradient, wanted, rtol=0, atol=0.05
    )  # rounding moves a few values over the edge of the range
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
    reward, clips, latents = (
        CompositeReward([spec]),
        torch.zeros(3, 4, 8, 8, 3, dtype=torch.uint8),
        torch.randn(3, 2, 5),
    )
    assert not reward.reads_clips
    assert CompositeReward([spec, level]).reads_clips
    scores, _ = reward.score(clips, ["a"] * 3, 8.0, latents=latents)
    torch.testing.assert_close(scores.total, latents.mean(dim=(1, 2)))
    (given,), objects = gather_rewards(own_reward(mean_latent, options=dict(spec.options)))
    assert not CompositeReward([given], objects=objects).reads_clips
    never = pytest.fail
    gradient = reward.gradient(latents[:1], lambda z: never("nothing is decoded"), "a", 8.0)
    torch.testing.assert_close(gradient, torch.full((1, 2, 5), 0.1))
    with pytest.raises(RewardConfigError, match="reads latents, which only a run has that samples clips"):
        reward.score(clips, ["a"] * 3, 8.0)
    with pytest.raises(RewardConfigError, match="Leave it out here"):
        reward.try_out("a")
    assert reward.try_out("a", sampled=True) == ""
    with pytest.raises(RewardConfigError, match="per_frame does not go with reads"):
        load_reward(RewardSpec(name=spec.name, options={"reads": "latents", "per_frame": True}))
    with pytest.raises(RewardConfigError, match="Did you mean 'latents'"):
        load_reward(RewardSpec(name=spec.name, options={"reads": "latent"}))
