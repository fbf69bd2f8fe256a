"""The learned reward: what its scores may depend on, and files that are not one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from research.scenes import learned
from research.scenes.learned import AT_ONCE, CONFIG, WEIGHTS, LearnedReward, Scorer, ScorerConfig
from research.scenes.scene import words
from research.scenes.world import SCENES

TINY = ScorerConfig(frames=3, side=32, width=32, layers=2, mean=(0.1, 0.2, 0.3), std=(0.5, 1.0, 2.0))
TEXTS = ("two striped red balls bounce in a meadow", "a plain blue box spins in the snow while the camera pans left")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A reward of random weights."""
    torch.manual_seed(0)
    learned.save_scorer(Scorer(TINY), tmp_path / "reward")
    return tmp_path / "reward"


@pytest.fixture
def reward(folder: Path) -> LearnedReward:
    return LearnedReward(checkpoint=str(folder))


def clips(n: int) -> Tensor:
    return torch.randint(256, (n, 7, 32, 32, 3), generator=torch.Generator().manual_seed(n)).to(torch.uint8)


def test_qualities_do_not_depend_on_the_prompt_and_alignment_does(reward: LearnedReward) -> None:
    one, other = (reward(clips(2), [text, text], 8.0) for text in TEXTS)
    for part in ("VQ", "MQ"):
        torch.testing.assert_close(one[part], other[part], rtol=0, atol=1e-6)
    assert bool(((one["TA"] - other["TA"]).abs() > 1e-3).all())


def test_a_score_does_not_depend_on_the_other_clips(reward: LearnedReward) -> None:
    many = clips(AT_ONCE + 3)
    texts = [TEXTS[place % 2] for place in range(len(many))]
    with torch.autocast("cpu", torch.bfloat16):  # a caller's half precision is none of its business
        together = reward(many, texts, 8.0)
    for place in (0, 1, AT_ONCE, AT_ONCE + 2):
        alone = reward(many[place : place + 1], texts[place : place + 1], 8.0)
        for part in reward.names:
            torch.testing.assert_close(alone[part][0], together[part][place], rtol=1e-5, atol=1e-5)


def test_it_sees_only_some_frames(reward: LearnedReward) -> None:
    """So that what happens between them cannot cost anything: one way to fool it."""
    before = clips(2)
    seen = learned.looked_at(7, TINY.frames).tolist()
    assert seen == [0, 3, 6] == reward.frames_read(7, 8.0)
    assert reward.frames_read(2, 8.0) == [0, 1]
    unseen, first = before.clone(), before.clone()
    unseen[:, [1, 2, 4, 5]] = 0
    first[:, 0] = 0
    scores = [reward(videos, TEXTS, 8.0) for videos in (before, unseen, first)]
    for part in reward.names:
        torch.testing.assert_close(scores[0][part], scores[1][part], rtol=0, atol=0)
        assert bool((scores[0][part] != scores[2][part]).all())


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (WEIGHTS, None, "has no model.safetensors"),
        (CONFIG, {"width": 64}, "holds in another shape"),
        (CONFIG, {"layers": 3}, "lacks blocks.2"),
        (CONFIG, {"side": 30}, "multiple of 16 .got 30"),
        (CONFIG, {"std": [0.0, 1.0, 1.0]}, "std is positive"),
        (CONFIG, {"colour": 1}, "says colour, which no learned reward has"),
    ],
)
def test_what_is_not_a_reward_is_refused_by_name(folder: Path, name: str, change: dict | None, said: str) -> None:
    if change is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
    with pytest.raises((FileNotFoundError, ValueError), match=said):
        learned.load_scorer(folder)


def test_the_reward_in_the_repository_prefers_a_clip_of_its_caption_and_likes_dark_ones_less() -> None:
    """What the suites train on, whose files may not be those of another world or another vocabulary."""
    home = Path(__file__).parents[1] / "scenes" / "model"
    reward, texts = LearnedReward(checkpoint=str(home / "reward")), list(SCENES.texts("heldout"))[:12]
    assert reward.scorer.config.vocabulary == words()
    shown, fps = SCENES.clips(texts, seed=1), SCENES.format[2]
    own, others = (reward(shown, told, fps) for told in (texts, texts[1:] + texts[:1]))
    assert float((own["TA"] - others["TA"]).mean()) > 0.2
    dark = reward(shown // 4, texts, fps)
    assert float((own["VQ"] - dark["VQ"]).mean()) > 0.5
