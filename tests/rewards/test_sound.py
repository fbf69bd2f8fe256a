"""Rewards that listen: what they hear is what was made, and what they measure is what it is called."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from sage_grpo.rewards.built_in.sound import Clap, SoundStats
from sage_grpo.types import Sound
from sage_grpo.utils.video import resampled

RATE, FPS, FRAMES = 16_000, 8.0, 24


def tone(seconds: float = 3.0, hertz: float = 440.0, level: float = 0.5) -> torch.Tensor:
    return level * torch.sin(2 * math.pi * hertz * torch.arange(int(seconds * RATE)) / RATE)


def clicks(frames: list[int]) -> torch.Tensor:
    wave = torch.zeros(FRAMES * RATE // int(FPS))
    for frame in frames:
        start = frame * RATE // int(FPS)
        wave[start : start + 400] = 0.8
    return wave


def flashes(frames: list[int]) -> torch.Tensor:
    clip = torch.zeros(FRAMES, 8, 8, 3, dtype=torch.uint8)
    for frame in frames:
        clip[frame:] = 255 - clip[frame:]
    return clip


def test_statistics_keep_their_scale() -> None:
    """Of clips by a formula, in stereo, shorter and longer than their pictures; as users have them in their logs."""
    samples = torch.arange(30_011) / 16_000
    wave = torch.sin(2000 * samples) * (0.5 + 0.5 * torch.sin(9 * samples)) * (samples % 0.7 < 0.5)
    waves = torch.stack([torch.stack([wave, 0.3 * wave]), torch.stack([0.001 * wave.flip(0), wave.roll(5000)])])
    clips = ((torch.arange(30).view(1, 30, 1) * torch.tensor([7, 11]).view(2, 1, 1) + torch.arange(9) ** 2) % 97).to(
        torch.uint8
    )
    videos = clips.view(2, 30, 3, 3, 1).expand(-1, -1, -1, -1, 3)
    found = {fps: SoundStats()(videos, ["", ""], fps, sound=Sound(waves, 16_000)) for fps in (12.0, 20.0)}
    assert found[12.0]["loudness"].tolist() == pytest.approx([-10.70819, -12.983], abs=1e-3)
    assert found[12.0]["silence"].tolist() == pytest.approx([8 / 37, 7 / 37])
    assert found[12.0]["synchrony"].tolist() == pytest.approx([0.41227, 0.14922], abs=1e-4)
    assert found[20.0]["synchrony"].tolist() == pytest.approx([0.79423, 0.35514], abs=1e-4)


def test_synchrony_is_for_moments_that_coincide() -> None:
    moments, others = [4, 9, 11, 18], [1, 7, 14, 21]
    videos = torch.stack([flashes(moments)] * 4)
    waves = torch.stack([clicks(moments), clicks([m + 1 for m in moments]), clicks(others), torch.zeros(3 * RATE)])
    scores = SoundStats(parts=["synchrony"])(videos, [""] * 4, FPS, sound=Sound(waves[:, None], RATE))
    together, near, apart, never = scores["synchrony"].tolist()
    assert together > 0.95
    assert near > 0.9  # an eighth of a second late
    assert apart < 0.5
    assert math.isnan(never)
    assert "never changes" in scores.reasons[3]
    nothing = SoundStats(parts=["loudness", "silence"])(videos[:1], [""], FPS, sound=Sound(waves[3:, None], RATE))
    assert {part: value.tolist() for part, value in nothing.items()} == {"loudness": [-100.0], "silence": [1.0]}
    once = SoundStats(parts=["synchrony"])(flashes([1])[None], [""], FPS, sound=Sound(clicks([1])[None, None], RATE))
    assert float(once["synchrony"]) == pytest.approx(1.0)  # at other lags nothing is left that changes


@pytest.fixture(scope="module")
def tiny_clap(tmp_path_factory):
    from transformers import ClapConfig, ClapFeatureExtractor, ClapModel, RobertaTokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    folder = tmp_path_factory.mktemp("clap")
    torch.manual_seed(0)
    text = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"intermediate_size": 16, "projection_dim": 16}
    audio = {"patch_embeds_hidden_size": 16, "depths": [1, 1], "num_attention_heads": [2, 2], "num_hidden_layers": 2}
    audio |= {"hidden_size": 32, "spec_size": 64, "num_mel_bins": 16, "window_size": 4, "patch_size": 4}
    audio |= {"patch_stride": [4, 4], "projection_dim": 16}
    ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=16)).save_pretrained(folder)
    features = ClapFeatureExtractor(feature_size=16, max_length_s=1, truncation="rand_trunc", padding="repeatpad")
    features.save_pretrained(folder)
    symbols = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *bytes_to_unicode().values()]
    RobertaTokenizer(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]).save_pretrained(folder)
    return folder


def test_clap_is_transformers_own(tiny_clap) -> None:
    from transformers import AutoTokenizer, ClapFeatureExtractor, ClapModel

    reward = Clap(model=str(tiny_clap))
    waves = torch.stack([tone(0.9, 440), tone(0.9, 3000)])[:, None].expand(-1, 2, -1)
    prompts = ["a low tone", "a high tone whistles"]
    videos, sound = torch.zeros(2, 4, 8, 8, 3), Sound(waves, RATE)
    found = reward(videos, prompts, FPS, sound=sound)["CLAP"]
    model, features = ClapModel.from_pretrained(tiny_clap).eval(), ClapFeatureExtractor.from_pretrained(tiny_clap)
    tokens = AutoTokenizer.from_pretrained(tiny_clap)(prompts, padding=True, return_tensors="pt")
    sounds = [resampled(Sound(wave[:1], RATE), 48_000).waves[0].numpy() for wave in waves]
    with torch.no_grad():
        output = model(**tokens, **features(sounds, sampling_rate=48_000, return_tensors="pt"))
    expected = (output.audio_embeds * output.text_embeds).sum(-1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert abs(float(found[0] - found[1])) > 1e-4
    prefixed = Clap(model=str(tiny_clap), prefix="this is ")(videos, prompts, FPS, sound=sound)["CLAP"]
    assert not torch.equal(found, prefixed)
    long = Sound(torch.cat([waves[:1], waves[1:]], -1)[..., : int(1.8 * RATE)], RATE)
    windows = [reward.sounds(Sound(long.waves[..., at], RATE)) for at in (slice(0, RATE), slice(RATE, None))]
    together = reward.sounds(long)  # of length 1, as each of its windows of a second
    torch.testing.assert_close(together, F.normalize(sum(windows), dim=-1), rtol=0, atol=0.02)
    assert float(together.norm()) == pytest.approx(1, abs=1e-5)
    assert float((sum(windows) / 2).norm()) < 0.999
