"""The judge: clean clips get full marks, every fault costs, and nothing empty or doubled passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sage_grpo.worlds.making.imperfect import blur, jitter
from sage_grpo.worlds.shapes.judge import NaiveProxy, ShapesJudge
from sage_grpo.worlds.shapes.render import backdrop, coverage, palette, render, to_uint8, trajectory
from sage_grpo.worlds.shapes.scene import ATTRIBUTES, SceneBatch, random_scenes

JUDGE = ShapesJudge()
FRAMES = 9
FAULTS = ("VQ", "MQ", "TA")


def some(n: int, seed: int = 0) -> SceneBatch:
    return random_scenes(n, torch.Generator().manual_seed(seed), "all")


def judged(videos: Tensor, batch: SceneBatch) -> dict[str, Tensor]:
    return JUDGE(to_uint8(videos), batch.texts(1), 8.0)


@pytest.fixture(scope="module")
def batch() -> SceneBatch:
    return some(32)


@pytest.fixture(scope="module")
def clean(batch: SceneBatch) -> Tensor:
    return render(batch, FRAMES, 32, 32)


@pytest.mark.parametrize("name", ["shapes", "shapes_proxy"])
def test_a_prompt_outside_the_grammar_is_named(name: str, batch: SceneBatch, clean: Tensor) -> None:
    from sage_grpo.rewards.base import CompositeReward
    from sage_grpo.rewards.spec import RewardSpec

    prompts = [batch.texts(1)[0], "a large red unicorn moves right", "a red circle"]
    reward = CompositeReward([RewardSpec(name=name)], require_weights=False)
    scores, report = reward.score(to_uint8(clean[:3]), prompts, 8.0)
    assert {failure.index for failure in report.failures} == {1, 2}
    unknown, missing = (failure.reason for failure in report.failures)
    assert "outside the grammar of the shapes world: Unknown word 'unicorn'" in unknown
    assert "outside the grammar of the shapes world: The text does not name: " in missing
    if name == "shapes":
        assert scores.parts["VQ"].isfinite().all()  # what needs no prompt is still judged


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_clean_clip_gets_full_marks(count: int) -> None:
    batch = some(count, seed=1)
    videos = to_uint8(render(batch, FRAMES, 32, 32))
    scores = JUDGE(videos, batch.texts(4), 8.0)
    assert tuple(scores) == JUDGE.names
    for name in FAULTS:
        assert scores[name].min() >= 0.95, name
        assert scores[name].max() <= 1 + 1e-6, name
    assert scores["drift"].max() < 0.01
    total = scores["TA"] + scores["MQ"] / 2 + scores["VQ"] / 2
    assert torch.allclose(scores["Overall"], total, atol=1e-6)


def test_the_nearest_clip_of_a_clean_clip_is_itself(batch: SceneBatch, clean: Tensor) -> None:
    nearest = JUDGE.examine(clean).nearest
    assert nearest.scenes() == batch.scenes()
    assert (trajectory(nearest, FRAMES) - trajectory(batch, FRAMES)).abs().max() < 0.02


@pytest.mark.parametrize("attribute", list(ATTRIBUTES))
def test_each_wrong_attribute_costs(attribute: str) -> None:
    values = len(ATTRIBUTES[attribute])
    batch = some(24, seed=2)
    videos = render(batch, FRAMES, 32, 32)
    right = judged(videos, batch)
    for shift in range(1, values):
        wrong = SceneBatch(**{**vars(batch), attribute: (getattr(batch, attribute) + shift) % values})
        told = JUDGE(to_uint8(videos), wrong.texts(1), 8.0)
        assert (right["TA"] - told["TA"]).min() >= 0.1
        assert told[f"TA/{attribute}"].max() < 0.1
        for other in set(ATTRIBUTES) - {attribute}:
            assert torch.equal(told[f"TA/{other}"], right[f"TA/{other}"])
        assert torch.equal(told["VQ"], right["VQ"])
        assert torch.equal(told["MQ"], right["MQ"])


STRENGTHS = {
    "noise": (0.0, 0.03, 0.06, 0.12, 0.25, 0.5),
    "blur": (0.0, 0.5, 0.8, 1.2, 2.0),
    "flicker": (0.0, 0.03, 0.08, 0.2, 0.4),
    "jitter": (0.0, 0.02, 0.05, 0.1, 0.2),
}


def spoil(kind: str, strength: float, batch: SceneBatch, clean: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    if kind == "jitter":
        return render(batch, FRAMES, 32, 32, jitter(torch.full((len(batch),), strength), FRAMES, generator))
    if kind == "blur":
        return blur(clean, torch.full((len(clean),), strength))
    if kind == "flicker":  # every frame has a brightness of its own
        return (clean * (1 + strength * torch.randn(*clean.shape[:2], 1, 1, 1, generator=generator))).clamp(0, 1)
    return noisy(clean, strength, generator)


def noisy(videos: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """White noise of this standard deviation; 0.03 is 30 dB."""
    return (videos + strength * torch.randn(videos.shape, generator=generator)).clamp(0, 1)


@pytest.mark.parametrize("kind", list(STRENGTHS))
def test_scores_fall_as_a_fault_grows(kind: str, batch: SceneBatch, clean: Tensor) -> None:
    runs = [judged(spoil(kind, strength, batch, clean), batch) for strength in STRENGTHS[kind]]
    means = {name: torch.stack([run[name].mean() for run in runs]) for name in JUDGE.names}
    main = "MQ" if kind == "jitter" else "VQ"
    assert (means["Overall"].diff() < 0).all(), means["Overall"]
    assert (means[main].diff() < 0).all(), means[main]
    assert means[main][-1] < 0.75 * means[main][0]
    assert (means["drift"].diff() > 0).all(), means["drift"]
    for name in FAULTS:
        assert (means[name].diff() < 0.005).all(), (name, means[name])


def test_what_an_autoencoder_does_is_forgiven(batch: SceneBatch, clean: Tensor) -> None:
    for spoiled in (spoil("noise", 0.0316, batch, clean), spoil("blur", 0.5, batch, clean)):
        scores = judged(spoiled, batch)
        assert scores["VQ"].min() >= 0.85
        assert scores["MQ"].min() >= 0.95
        assert scores["TA"].min() >= 0.95


def second_object(batch: SceneBatch, clean: Tensor) -> Tensor:
    """Paint another object, of any shape, size and colour, on the other side of the frame."""
    other = some(len(batch), seed=9)
    centres = trajectory(batch, FRAMES)
    place = (-0.6 * centres.mean(1, keepdim=True).sign()).expand_as(centres).flatten(0, 1)
    mask = coverage(other.shape.repeat_interleave(FRAMES), other.size.repeat_interleave(FRAMES), place, 32, 32).reshape(
        *clean.shape[:4], 1
    )
    return torch.lerp(clean, palette(other.colour)[:, None, None, None], mask)


@pytest.mark.parametrize("kind", ["blank", "black", "blank noise", "noise", "doubled", "off screen", "flood"])
def test_nothing_without_exactly_one_object_passes(kind: str, batch: SceneBatch, clean: Tensor) -> None:
    generator = torch.Generator().manual_seed(3)
    blank = backdrop(batch.background, 32, 32).unsqueeze(1).expand_as(clean)
    videos = {
        "blank": lambda: blank,
        "black": lambda: torch.zeros_like(clean),
        "blank noise": lambda: noisy(blank, 0.1, generator),
        "noise": lambda: torch.rand(clean.shape, generator=generator),
        "doubled": lambda: second_object(batch, clean),
        "off screen": lambda: render(batch, FRAMES, 32, 32, torch.full((len(batch), FRAMES, 2), 3.0)),
        "flood": lambda: palette(batch.colour)[:, None, None, None].expand_as(clean),
    }[kind]()
    scores = judged(videos, batch)
    assert scores["Overall"].max() <= 0.4
    assert scores["drift"].min() > 0.03


def test_an_object_missing_from_some_frames_costs(batch: SceneBatch, clean: Tensor) -> None:
    gone = clean.clone()
    gone[:, 3:6] = backdrop(batch.background, 32, 32).unsqueeze(1)
    scores = judged(gone, batch)
    assert scores["MQ"].max() < 0.5
    assert scores["VQ"].max() < 0.7
    assert scores["TA"].max() < 0.7


def test_standing_still_loses_motion(batch: SceneBatch, clean: Tensor) -> None:
    scores = judged(clean[:, 4:5].expand_as(clean), batch)
    assert scores["MQ"].max() < 0.2
    assert scores["TA/motion"].max() < 0.1
    assert scores["TA/speed"].max() < 0.1
    assert scores["VQ"].min() > 0.95
    assert scores["TA/shape"].min() > 0.95


def test_a_colour_that_holds_for_half_the_clip_gets_half_the_credit(batch: SceneBatch, clean: Tensor) -> None:
    changed = SceneBatch(**{**vars(batch), "colour": (batch.colour + 1) % 6})
    videos = torch.cat([clean[:, :5], render(changed, FRAMES, 32, 32)[:, 5:]], dim=1)
    scores = judged(videos, batch)
    assert (scores["TA/colour"] - 5 / 9).abs().max() < 0.05
    assert scores["MQ"].max() < judged(clean, batch)["MQ"].min(), "an object that changes is not steady"


def test_a_prompt_that_is_not_understood_is_masked(batch: SceneBatch, clean: Tensor) -> None:
    prompts = batch.texts(0)
    prompts[1] = "a cat plays the piano"
    for reward, names in ((JUDGE, ("TA", "Overall", "TA/shape")), (NaiveProxy(), ("proxy",))):
        scores = reward(to_uint8(clean), prompts, 8.0)
        for name in names:
            assert scores[name].isnan().nonzero().flatten().tolist() == [1]
        if reward is JUDGE:
            assert not scores["VQ"].isnan().any()
            assert not scores["drift"].isnan().any()


@pytest.mark.parametrize("form", [(17, 64, 64), (9, 48, 80), (13, 33, 27)])
def test_other_formats_are_judged_at_their_own_size(form: tuple[int, int, int]) -> None:
    batch = some(16, seed=4)
    scores = judged(render(batch, *form), batch)
    assert min(scores[name].min() for name in FAULTS) >= 0.95
    assert scores["drift"].max() < 0.01


def test_the_proxy_is_hacked_by_a_flood_that_the_judge_refuses(batch: SceneBatch, clean: Tensor) -> None:
    flood = palette(batch.colour)[:, None, None, None].expand_as(clean)
    proxy, prompts = NaiveProxy(), batch.texts(0)
    honest = proxy(to_uint8(clean), prompts, 8.0)["proxy"]
    assert (proxy(to_uint8(flood), prompts, 8.0)["proxy"] > honest).all()
    blank = backdrop(batch.background, 32, 32).unsqueeze(1).expand_as(clean)
    assert (honest > proxy(to_uint8(blank), prompts, 8.0)["proxy"]).float().mean() > 0.9, "it is not senseless"
