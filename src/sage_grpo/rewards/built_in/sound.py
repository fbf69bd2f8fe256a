"""Rewards on sound: similarity to the prompt (CLAP), and statistics without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_grpo.rewards.built_in.pretrained import frozen, load_tokenizer, load_whole
from sage_grpo.rewards.functions import check_known
from sage_grpo.types import FileSource, PartScores, RewardFacts, Sound
from sage_grpo.utils.pretrained import from_pretrained
from sage_grpo.utils.video import resampled

MOMENT = 0.05
"""Length in seconds of a window for loudness."""
QUIET = -50.0
"""Loudness in decibels, relative to the largest possible, below which a window is silent."""
FLOOR = -100.0
"""Loudness in decibels of a sound of zeros."""
LAG = 0.2
"""Largest lag in seconds between sound and picture: people do not notice less, and models place sound by frames of latents."""


def decibels(waves: Tensor, size: int) -> Tensor:
    """Loudness of B x channels x samples in stretches of `size` samples: B x stretches, at least FLOOR."""
    kept = waves[..., : waves.shape[-1] // size * size].mean(1)
    power = kept.unflatten(-1, (-1, size)).square().mean(-1)
    return (10 * power.clamp(min=10 ** (FLOOR / 10)).log10()).clamp(min=FLOOR)


def loudness(videos: Tensor, fps: float, sound: Sound) -> Tensor:
    return decibels(sound.waves, sound.waves.shape[-1])[:, 0]


def silence(videos: Tensor, fps: float, sound: Sound) -> Tensor:
    return (decibels(sound.waves, max(1, round(MOMENT * sound.rate))) < QUIET).float().mean(1)


def synchrony(videos: Tensor, fps: float, sound: Sound) -> Tensor:
    """Correlation of sound onsets and picture changes, at the lag within LAG seconds where it is largest; in [-1, 1], NaN where one of them never
    changes."""
    luma = videos.float().mean(-1).flatten(2)
    change = (luma[:, 1:] - luma[:, :-1]).abs().mean(2)
    heard = decibels(sound.waves, max(1, round(sound.rate / fps)))
    begins = (heard[:, 1:] - heard[:, :-1]).clamp(min=0).to(change.device)
    count = min(change.shape[1], begins.shape[1])
    change, begins = change[:, :count], begins[:, :count]
    reach = min(round(LAG * fps), count // 2)
    shifts = [
        _correlation(change[:, max(0, lag) : count + min(0, lag)], begins[:, max(0, -lag) : count - max(0, lag)])
        for lag in range(-reach, reach + 1)
    ]
    return torch.stack(shifts).nan_to_num(nan=-torch.inf).amax(0).where(_moves(change) & _moves(begins), torch.nan)


def _moves(rows: Tensor) -> Tensor:
    return rows.std(1, correction=0) > 1e-6


def _correlation(left: Tensor, right: Tensor) -> Tensor:
    left, right = left - left.mean(1, keepdim=True), right - right.mean(1, keepdim=True)
    return (left * right).sum(1) / (left.norm(dim=1) * right.norm(dim=1))


STATISTICS = {"loudness": loudness, "silence": silence, "synchrony": synchrony}


class SoundStats:
    """Loudness, silence, and synchrony of sound and picture."""

    facts = RewardFacts(
        what="statistics of sounds: loudness, silence, and synchrony with the picture",
        parts="loudness, silence, synchrony",
    )

    def __init__(self, *, parts: Sequence[str] = ("loudness", "silence", "synchrony")) -> None:
        check_known(parts, STATISTICS, "sound_stats has no part")
        self.names = tuple(parts)

    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float, sound: Sound) -> Mapping[str, Tensor]:
        scores = {name: STATISTICS[name](videos, fps, sound) for name in self.names}
        unknown = scores.get("synchrony", torch.zeros(0)).isnan().nonzero().flatten().tolist()
        return PartScores(
            scores, dict.fromkeys(unknown, "its sound or its picture never changes: there is nothing to coincide")
        )


CLAP_FOLDER = FileSource(
    text="a CLAP model in transformers' format, a folder or a hub name (laion/clap-htsat-unfused)", hub="config.json"
)


class Clap:
    """CLAP (Wu et al., 2023): cosine of the sound and the prompt."""

    facts = RewardFacts(
        what="CLAP similarity of sound and prompt",
        parts="CLAP",
        files={"model": CLAP_FOLDER},
        parameters=0.15e9,
        gigabytes=0.6,
        licence="laion/clap-htsat-unfused: Apache 2.0",
    )
    names = ("CLAP",)

    def __init__(self, *, model: str, prefix: str = "") -> None:
        from transformers import ClapFeatureExtractor, ClapModel

        self._model, self._prefix = frozen(load_whole(ClapModel, model)), prefix
        self._tokenizer = load_tokenizer(model, self._model.config.text_config.vocab_size)
        self._features = from_pretrained(ClapFeatureExtractor, model)

    def to(self, device: torch.device) -> Self:
        self._model.to(device)
        return self

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float, sound: Sound) -> Mapping[str, Tensor]:
        length = self._model.config.text_config.max_position_embeddings - 2
        texts = [self._prefix + prompt for prompt in prompts]
        tokens = self._tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
        text = self._unit(self._model.get_text_features(**tokens.to(self._model.device)))
        return {"CLAP": (self.sounds(sound) * text).sum(-1)}

    def sounds(self, sound: Sound) -> Tensor:
        """Unit embeddings of sounds, B x dim; of a sound longer than the model's window, the mean over windows."""
        rate = self._features.sampling_rate
        window = int(rate * self._features.max_length_s)
        rows = []
        for wave in sound.waves.mean(1, keepdim=True):
            pieces = resampled(Sound(wave, sound.rate), rate).waves[0].split(window)
            # Each no longer than the window: the processor would cut it at random.
            inputs = self._features([piece.numpy() for piece in pieces], sampling_rate=rate, return_tensors="pt")
            rows.append(self._unit(self._model.get_audio_features(**inputs.to(self._model.device))).mean(0))
        return F.normalize(torch.stack(rows), dim=-1)

    @staticmethod
    def _unit(features: Any) -> Tensor:
        return F.normalize(getattr(features, "pooler_output", features).float(), dim=-1)
