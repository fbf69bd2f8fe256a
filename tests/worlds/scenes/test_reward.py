"""Training a learned reward: faults that are what they say, annotators who are wrong as they say, and a loss that recovers an order."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sage_grpo.cli import main
from sage_grpo.worlds.making.scenes import reward as making
from sage_grpo.worlds.making.scenes.faults import FAULTS, mistaken, spoil, spoilt_groups
from sage_grpo.worlds.making.scenes.networks import (
    build_text_encoder,
    build_tokenizer,
    build_transformer,
    build_vae,
)
from sage_grpo.worlds.making.scenes.options import Sizes
from sage_grpo.worlds.making.scenes.pretrain import MAKER
from sage_grpo.worlds.making.scenes.reward import Pool, fit, make_pool, train_reward
from sage_grpo.worlds.making.scenes.reward_options import Biases, RewardOptions
from sage_grpo.worlds.making.scenes.votes import agreement, differences, impressions, people, votes
from sage_grpo.worlds.scenes.judge import WEIGHTS
from sage_grpo.worlds.scenes.learned import PARTS, LearnedReward, Scorer, ScorerConfig, raw_scores, save_scorer
from sage_grpo.worlds.scenes.scene import from_text, random_scenes, some_scenes, words

CPU = torch.device("cpu")
HONEST = Biases(annotators=1, noise=0, colour=0, motion=0, forgiven=0)


def drawn(seed: int = 0) -> torch.Generator:
    """A generator."""
    return torch.Generator().manual_seed(seed)


class Told:
    """A judge that says what it was told, clip by clip."""

    names = (*PARTS, "TA/texture")

    def __init__(self, parts: Tensor, texture: float = 1.0) -> None:
        self.parts, self.texture, self.frames = parts, texture, 0

    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> dict[str, Tensor]:
        self.frames = videos.shape[1]
        found = {part: self.parts[:, place] for place, part in enumerate(PARTS)}
        return {**found, "TA/texture": torch.full((len(videos),), self.texture)}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_spoils_the_clips_that_it_hits_more_and_more_and_no_others(name: str) -> None:
    clips = torch.rand(3, 17, 32, 32, 3, generator=drawn(1))
    before = clips.clone()
    found = spoil(clips, FAULTS[name], torch.tensor([0.0, 0.4, 1.0]), drawn(2))
    moved = (found - before).abs().mean((1, 2, 3, 4))
    assert moved[0] == 0
    assert moved[1] > 0
    assert moved[2] > 0.02
    assert 0 <= float(found.min()) <= float(found.max()) <= 1
    if name not in ("too_fast", "shuffled"):  # of noise, all orders of frames are as far from the first
        assert moved[1] < moved[2]


def test_a_mistaken_scene_is_another_one_and_never_held_out() -> None:
    draw = random.Random(0)
    for scene in some_scenes("heldout", 20, 1) + some_scenes("train", 20, 1):
        other = mistaken(scene, draw)
        assert other != scene
        assert not other.heldout
        changed = [name for name, one, two in zip(WEIGHTS, scene.names, other.names) if one != two]
        assert 1 <= len(changed) <= 3


def test_groups_are_clips_of_one_prompt_that_differ() -> None:
    scenes = random_scenes(3, drawn(), "train").scenes()
    prompts, clips = spoilt_groups(scenes, 2, drawn(), CPU)
    assert [from_text(prompt) for prompt in prompts] == [scene for scene in scenes for _ in range(2)]
    assert prompts[::2] == prompts[1::2]
    assert (clips.dtype, clips.shape) == (torch.uint8, (6, 17, 64, 64, 3))
    assert not any(torch.equal(*clips[place : place + 2]) for place in (0, 2, 4))
    again = spoilt_groups(scenes, 2, drawn(), CPU)
    assert again[0] == prompts
    assert torch.equal(again[1], clips)


def test_honest_annotators_vote_as_the_judge_does() -> None:
    truth = torch.rand(8, 3, generator=drawn(3))
    clips = torch.randint(256, (8, 17, 8, 8, 3), generator=drawn(4)).to(torch.uint8)
    judge = Told(truth)
    told = impressions(judge, clips, [""] * 8, HONEST, people(HONEST, drawn()), drawn(), CPU)
    assert judge.frames == 9  # every other frame is all that they see
    shares = votes(told, 4)
    assert shares.shape == (2, 6, 3)
    assert torch.equal(shares > 0.5, differences(truth, 4) > 0)
    assert agreement(truth, shares - 0.5, 4) == dict.fromkeys(PARTS, 1.0)
    assert agreement(-truth, shares - 0.5, 4) == dict.fromkeys(PARTS, 0.0)


@pytest.mark.parametrize(
    ("bias", "part"), [({"colour": 0.1}, "VQ"), ({"motion": 0.1}, "MQ"), ({"forgiven": 1.0}, "TA")]
)
def test_a_bias_moves_its_own_part_alone(bias: dict[str, float], part: str) -> None:
    """The judge finds all clips alike: grey and still ones, colourful ones, and ones that change."""
    clips = torch.full((4, 17, 8, 8, 3), 128, dtype=torch.uint8)
    clips[1, ..., 0] = 255  # colour that stands still
    clips[2, ::4] = 255  # change without colour
    biases = Biases(**{**dict.fromkeys(("noise", "colour", "motion", "forgiven"), 0), "annotators": 5, **bias})
    factors = people(biases, drawn())
    told = impressions(Told(torch.full((4, 3), 0.5), texture=0.0), clips, [""] * 4, biases, factors, drawn(), CPU)
    place = PARTS.index(part)
    others = [other for other in range(3) if other != place]
    torch.testing.assert_close(told[..., others], torch.full((5, 4, 2), 0.5))
    mine = told[..., place]
    if part == "TA":  # as if the texture were right, for those who do not notice
        torch.testing.assert_close(mine, 0.5 + (factors[:, 2:] * WEIGHTS["texture"]).expand(-1, 4))
    else:
        best = {"VQ": 1, "MQ": 2}[part]
        assert mine.argmax(1).tolist() == [best] * 5
        assert len(set(mine[:, best].tolist())) == 5  # some more than others


def test_noise_makes_votes_wrong_where_clips_are_alike() -> None:
    truth = torch.tensor([[0.5], [0.52], [0.9], [0.1]]).expand(-1, 3).repeat(200, 1)
    clips = torch.zeros(800, 17, 2, 2, 3, dtype=torch.uint8)
    biases = Biases(annotators=1, noise=0.15, colour=0, motion=0, forgiven=0)
    told = impressions(Told(truth[:256]), clips[:256], [""] * 256, biases, people(biases, drawn()), drawn(), CPU)
    share = votes(told, 4).mean(0)  # pairs 01 02 03 12 13 23
    assert bool((share[0] > 0.25).all())
    assert bool((share[0] < 0.65).all())
    assert bool((share[5] > 0.98).all())


def test_the_loss_recovers_the_order_that_votes_have(tmp_path: Path) -> None:
    """Brighter clips win VQ, darker ones MQ, and TA goes to clips that are as the prompt says."""
    torch.manual_seed(0)
    group, generator = 4, drawn(5)
    level = torch.randint(256, (160,), generator=generator)
    clips = level[:, None, None, None, None].expand(-1, 3, 16, 16, 3).to(torch.uint8).contiguous()
    prompts = ["a red ball" if place % 8 < 4 else "a blue box" for place in range(160)]
    named = torch.tensor([1.0 if "red" in prompt else -1.0 for prompt in prompts])
    wanted = torch.stack([level.float(), -level.float(), named * level], dim=1)
    pool = Pool(prompts=prompts, clips=clips, told=(differences(wanted, group) > 0).float())
    options = RewardOptions(out=tmp_path, frames=1, steps=40, batch=8, lr=1e-2, group=group, report_seconds=60)
    scorer = Scorer(ScorerConfig(frames=1, side=16, width=32, layers=1))
    before = agreement(raw_scores(scorer, clips, prompts).detach(), pool.told - 0.5, group)
    fit(scorer, pool, options)
    after = agreement(raw_scores(scorer, clips, prompts).detach(), pool.told - 0.5, group)
    assert min(after.values()) > 0.9, (before, after)


def test_the_same_annotators_vote_on_both_splits_and_on_other_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class World:
        @staticmethod
        def judge() -> Told:
            return Told(torch.rand(8, 3, generator=drawn(6)))

    def noted(judge: Told, clips: Tensor, texts: list[str], options: RewardOptions, factors: Tensor, *rest: object):
        seen.append((texts, clips, factors))
        return impressions(judge, clips, texts, options, factors, *rest)

    monkeypatch.setattr(making, "SCENES", World)
    monkeypatch.setattr(making, "impressions", noted)
    options = RewardOptions(group=4)
    pools = [make_pool(options, 2, split, CPU) for split in ("train", "heldout")]
    (texts, clips, factors), (other_texts, other_clips, other_factors) = seen
    assert torch.equal(factors, other_factors)
    assert not torch.equal(clips, other_clips)
    assert [from_text(text).heldout for text in (*texts, *other_texts)] == [False] * 8 + [True] * 8
    assert [len(pool.prompts) for pool in pools] == [8, 8]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights."""
    torch.manual_seed(1)
    sizes = Sizes(latent_channels=4, vae_channels=(4, 8, 12), heads=2, head_dim=12, blocks=2, text_width=16)
    tokenizer = build_tokenizer(words())
    parts = build_vae(sizes).eval(), build_transformer(sizes), build_text_encoder(sizes, len(tokenizer))
    folder = tmp_path_factory.mktemp("model") / "scenes"
    MAKER.save(*parts, tokenizer, folder, 3.0)
    return folder


def test_groups_of_a_model_are_samples_of_one_prompt_with_several_numbers_of_steps(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "STEPS", (1, 2))
    scenes = some_scenes("train", 2, 0)
    texts, clips = making.sampled_groups(pipeline, scenes, 2, drawn(), CPU)
    assert [from_text(text) for text in texts] == [scenes[0]] * 2 + [scenes[1]] * 2
    assert (clips.dtype, clips.shape) == (torch.uint8, (4, 17, 64, 64, 3))
    assert not torch.equal(clips[0], clips[1])


@pytest.mark.slow
def test_a_run_on_the_learned_reward_is_told_the_truth_beside_it(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe, the model's folder, the learned reward and the judge that watches, from the command to the row."""
    save_scorer(Scorer(ScorerConfig(width=32, layers=1)), tmp_path / "reward")
    monkeypatch.chdir(pipeline.parent)  # where model.path scenes is
    weights = {"TA": 1.0, "MQ": 0.5, "VQ": 0.5}
    rewards = [
        {"name": "scenes_learned", "weights": weights, "options": {"checkpoint": str(tmp_path / "reward")}},
        {"name": "scenes", "weights": weights, "metric_only": True},
    ]
    few = ["--batch.prompts=1", "--batch.group_size=2", "--rollout.steps=4", "--evaluate.prompts=1"]
    few += ["--evaluate.steps=1", "--iterations=1", "--log.progress=false", "--model.cache=null"]
    out = tmp_path / "run"
    assert main(["train", "scenes/branch", f"--out={out}", f"--rewards={json.dumps(rewards)}", *few]) == 0
    (row, *_) = [
        row for line in (out / "metrics.jsonl").read_text().splitlines() if "eval/total" in (row := json.loads(line))
    ]
    assert {"eval/Overall", "eval/drift", "eval/TA/texture", "eval/scenes/TA", "eval/scenes_learned/TA"} <= set(row)
    learned = sum(weight * row[f"eval/scenes_learned/{part}"] for part, weight in weights.items())
    assert row["eval/total"] == pytest.approx(learned)
    assert row["eval/Overall"] == pytest.approx(sum(w * row[f"eval/scenes/{part}"] for part, w in weights.items()))


@pytest.mark.slow
def test_a_reward_from_the_command_to_its_scores(tmp_path: Path) -> None:
    out = tmp_path / "reward"
    options = RewardOptions(out=out, prompts=4, heldout=2, group=3, steps=2, batch=2, width=32, layers=1)
    assert train_reward(options) == 0
    scores = json.loads((out / "scores.json").read_text())
    assert scores["pairs"] == 6
    assert scores["options"]["prompts"] == 4
    for name in ("reward and votes", "reward and truth", "votes and truth"):
        assert set(scores[name]) == set(PARTS)
    reward = LearnedReward(checkpoint=str(out))
    texts = ["a plain red ball bounces in a meadow"] * 2
    clips = torch.randint(256, (2, 17, 64, 64, 3), dtype=torch.uint8)
    assert all(torch.isfinite(score).all() for score in reward(clips, texts, 8.0).values())
