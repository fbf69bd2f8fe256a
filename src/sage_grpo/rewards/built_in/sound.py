"""CLAP: similarity of sound and prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from sage_grpo.rewards.built_in.pretrained import frozen, load_tokenizer, load_whole
from sage_grpo.types import FileSource, RewardFacts, Sound
from sage_grpo.utils.pretrained import from_pretrained
from sage_grpo.utils.video import resampled

CLAP_FOLDER = FileSource(text="CLAP in transformers' format, a folder or laion/clap-htsat-unfused", hub="config.json")


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

    def __init__(self, *, model: str) -> None:
        from transformers import ClapFeatureExtractor, ClapModel

        self._model = frozen(load_whole(ClapModel, model))
        self._tokenizer = load_tokenizer(model, self._model.config.text_config.vocab_size)
        self._features = from_pretrained(ClapFeatureExtractor, model)

    def to(self, device: torch.device) -> Self:
        self._model.to(device)
        return self

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float, sound: Sound) -> Mapping[str, Tensor]:
        length = self._model.config.text_config.max_position_embeddings - 2
        tokens = self._tokenizer(list(prompts), padding=True, truncation=True, max_length=length, return_tensors="pt")
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
