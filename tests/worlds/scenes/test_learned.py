"""The learned reward: what its scores may depend on, and files that are not one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sage_grpo.rewards.base import CompositeReward
from sage_grpo.rewards.spec import RewardSpec, load_reward, reward_needs
from sage_grpo.worlds.scenes.learned import (
    AT_ONCE,
    CONFIG,
    WEIGHTS,
    LearnedReward,
    Scorer,
    ScorerConfig,
    load_scorer,
    looked_at,
    save_scorer,
)
from sage_grpo.worlds.scenes.scene import words
from sage_grpo.worlds.world import SCENES

TINY = ScorerConfig(frames=3, side=32, width=32, layers=2, mean=(0.1, 0.2, 0.3), std=(0.5, 1.0, 2.0))
TEXTS = ("two striped red balls bounce in a meadow", "a plain blue box spins in the snow while the camera pans left")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A reward of random weights."""
    torch.manual_seed(0)
    save_scorer(Scorer(TINY), tmp_path / "reward")
    return tmp_path / "reward"


@pytest.fixture
def reward(folder: Path) -> LearnedReward:
    """The same, loaded."""
    return LearnedReward(checkpoint=str(folder))


def clips(n: int, frames: int = 7, side: int = 32) -> Tensor:
    """Clips of noise."""
    return torch.randint(256, (n, frames, side, side, 3), generator=torch.Generator().manual_seed(n)).to(torch.uint8)


def test_qualities_do_not_depend_on_the_prompt_and_alignment_does(reward: LearnedReward) -> None:
    one, other = (reward(clips(2), [text, text], 8.0) for text in TEXTS)
    for part in ("VQ", "MQ"):
        torch.testing.assert_close(one[part], other[part], rtol=0, atol=1e-6)
    assert bool(((one["TA"] - other["TA"]).abs() > 1e-3).all())


def test_every_word_and_its_place_count(reward: LearnedReward) -> None:
    texts = [TEXTS[0], "three " + TEXTS[0].partition(" ")[2], TEXTS[0].replace("striped red", "red striped")]
    scores = reward(clips(1).expand(3, -1, -1, -1, -1), texts, 8.0)["TA"].tolist()
    assert len({round(score, 4) for score in scores}) == 3


def test_a_score_does_not_depend_on_the_other_clips(reward: LearnedReward) -> None:
    many = clips(AT_ONCE + 3)
    texts = [TEXTS[place % 2] for place in range(len(many))]
    together = reward(many, texts, 8.0)
    for place in (0, 1, AT_ONCE, AT_ONCE + 2):
        alone = reward(many[place : place + 1], texts[place : place + 1], 8.0)
        for part in reward.names:
            torch.testing.assert_close(alone[part][0], together[part][place], rtol=1e-5, atol=1e-5)


def test_it_sees_only_some_frames(reward: LearnedReward) -> None:
    """So that what happens between them cannot cost anything: one way to fool it."""
    before = clips(2, frames=7)
    seen = looked_at(7, TINY.frames).tolist()
    assert seen == [0, 3, 6] == reward.frames_read(7, 8.0)
    assert reward.frames_read(2, 8.0) == [0, 1]
    unseen, first = before.clone(), before.clone()
    unseen[:, [1, 2, 4, 5]] = 0
    first[:, 0] = 0
    scores = [reward(videos, TEXTS, 8.0) for videos in (before, unseen, first)]
    for part in reward.names:
        torch.testing.assert_close(scores[0][part], scores[1][part], rtol=0, atol=0)
        assert bool((scores[0][part] != scores[2][part]).all())


def test_scores_are_in_standard_deviations_of_training(folder: Path) -> None:
    reward = LearnedReward(checkpoint=str(folder))
    found = reward(clips(2), TEXTS, 8.0)
    reward.scorer.config = replace(TINY, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    raw = reward(clips(2), TEXTS, 8.0)
    for place, part in enumerate(reward.names):
        torch.testing.assert_close(found[part], (raw[part] - TINY.mean[place]) / TINY.std[place])


def test_other_sizes_are_brought_to_its_own(reward: LearnedReward) -> None:
    small = clips(2)
    large = small.repeat_interleave(2, 2).repeat_interleave(2, 3)
    for part, score in reward(large, TEXTS, 8.0).items():
        torch.testing.assert_close(score, reward(small, TEXTS, 8.0)[part], rtol=1e-4, atol=1e-4)


def test_unknown_words_and_long_prompts_are_read_as_tokenizers_do(reward: LearnedReward) -> None:
    numbers = reward.scorer.read(["a Red, flabbergasted ball.", "a " * 100, ""])
    known = {word: 2 + place for place, word in enumerate(words())}
    assert numbers[0].tolist()[:4] == [known["a"], known["red"], 1, known["ball"]]
    assert numbers[1].tolist() == [known["a"]] * TINY.tokens
    assert not numbers[2].any()
    assert all(torch.isfinite(score).all() for score in reward(clips(1), [""], 8.0).values())


def test_it_is_a_built_in_reward(folder: Path) -> None:
    spec = RewardSpec(name="scenes_learned", weights={"TA": 1.0, "VQ": 0.5}, options={"checkpoint": str(folder)})
    composite = CompositeReward([spec])
    scores, _ = composite.score(clips(2), list(TEXTS), 8.0)
    parts = load_reward(spec)(clips(2), TEXTS, 8.0)
    torch.testing.assert_close(scores.total, parts["TA"] + 0.5 * parts["VQ"])
    (need,) = reward_needs(spec)
    assert need.is_here
    assert "sage-grpo scenes reward" in need.source


def test_no_clips_have_no_scores(reward: LearnedReward) -> None:
    assert [len(score) for score in reward(clips(2)[:0], [], 8.0).values()] == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (CONFIG, None, "has no config.json"),
        (WEIGHTS, None, "has no model.safetensors"),
        (CONFIG, {"width": 64}, "holds in another shape"),
        (CONFIG, {"layers": 3}, "lacks blocks.2"),
        (CONFIG, {"layers": 1}, "also holds blocks.1"),
        (CONFIG, {"side": 30}, "multiple of 16 .got 30"),
        (CONFIG, {"std": [0.0, 1.0, 1.0]}, "std is positive"),
        (CONFIG, {"width": "wide"}, "'width' must be"),
        (CONFIG, {"colour": 1}, "says colour, which no learned reward has"),
    ],
)
def test_what_is_not_a_reward_is_refused_by_name(folder: Path, name: str, change: dict | None, said: str) -> None:
    if change is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
    with pytest.raises((FileNotFoundError, ValueError), match=said):
        load_scorer(folder)


def test_saving_and_loading_changes_no_bit(folder: Path, tmp_path: Path) -> None:
    save_scorer(load_scorer(folder), tmp_path / "again")
    assert (tmp_path / "again" / CONFIG).read_text() == (folder / CONFIG).read_text()
    one, other = load_file(folder / WEIGHTS), load_file(tmp_path / "again" / WEIGHTS)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    save_file({name: value for name, value in one.items() if name != "heads"}, folder / WEIGHTS)
    with pytest.raises(ValueError, match="lacks heads"):
        load_scorer(folder)


def test_clips_of_another_form_are_refused(reward: LearnedReward) -> None:
    with pytest.raises(ValueError, match="uint8 clips B x F x H x W x 3"):
        reward(clips(2).float(), TEXTS, 8.0)
    with pytest.raises(ValueError, match="2 clips but 1 prompts"):
        reward(clips(2), TEXTS[:1], 8.0)


def test_its_size_is_what_it_says() -> None:
    count = sum(parameter.numel() for parameter in Scorer(ScorerConfig()).parameters())
    assert count == pytest.approx(LearnedReward.facts.parameters, rel=0.15)


def test_the_reward_in_the_repository_prefers_a_clip_of_its_caption_and_likes_dark_ones_less() -> None:
    """What the suites train on, whose files may not be those of another world or another vocabulary."""
    home = Path(__file__).parents[3] / "scenes"
    assert sum(file.stat().st_size for file in home.rglob("*") if file.is_file()) <= 40_000_000
    reward, texts = LearnedReward(checkpoint=str(home / "reward")), list(SCENES.texts("heldout"))[:12]
    assert reward.scorer.config.vocabulary == words()
    shown, fps = SCENES.clips(texts, seed=1), SCENES.format[2]
    own, others = (reward(shown, told, fps) for told in (texts, texts[1:] + texts[:1]))
    assert float((own["TA"] - others["TA"]).mean()) > 0.2
    dark = reward(shown // 4, texts, fps)
    assert float((own["VQ"] - dark["VQ"]).mean()) > 0.5
