"""CLAP hears what was made."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from sage_grpo.rewards.built_in.sound import Clap
from sage_grpo.types import Sound
from sage_grpo.utils.video import resampled

RATE, FPS = 16_000, 8.0


def tone(seconds: float = 3.0, hertz: float = 440.0, level: float = 0.5) -> torch.Tensor:
    return level * torch.sin(2 * math.pi * hertz * torch.arange(int(seconds * RATE)) / RATE)


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
    long = Sound(torch.cat([waves[:1], waves[1:]], -1)[..., : int(1.8 * RATE)], RATE)
    windows = [reward.sounds(Sound(long.waves[..., at], RATE)) for at in (slice(0, RATE), slice(RATE, None))]
    together = reward.sounds(long)  # of length 1, as each of its windows of a second
    torch.testing.assert_close(together, F.normalize(sum(windows), dim=-1), rtol=0, atol=0.02)
    assert float(together.norm()) == pytest.approx(1, abs=1e-5)
    assert float((sum(windows) / 2).norm()) < 0.999
