"""A small network that scores clips of this world as VideoAlign scores real ones: learned from votes, so that it is sometimes wrong.

It looks at a few frames and at the words of the prompt, and reads visual quality, motion quality and text alignment at three tokens of their own.
As in VideoAlign the first two do not see the prompt. The judge (judge.py) knows the truth and this network does not: where a policy
raises its score alone, it has been fooled. `research/pretraining/scenes/reward.py` trains it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from research.scenes.scene import SIDE, words
from sage_grpo.types import FileSource, RewardFacts
from sage_grpo.utils.json_schema import demand, read_object
from sage_grpo.utils.pretrained import weights_fault
from sage_grpo.utils.safe_io import replace_text, replacing

PARTS = ("VQ", "MQ", "TA")
CONFIG, WEIGHTS = "config.json", "model.safetensors"
PADDING, UNKNOWN = 0, 1
"""Numbers of no word, and of a word that the network does not know."""
AT_ONCE = 64
"""Clips that go through the network together."""
_SPECIAL = len(PARTS)


@dataclass(frozen=True, kw_only=True)
class ScorerConfig:
    """The content of config.json."""

    vocabulary: tuple[str, ...] = field(default_factory=words)
    """The words that the network knows."""
    tokens: int = 40
    """Words of a prompt that it reads."""
    frames: int = 6
    """Frames that it looks at, evenly spread from the first to the last."""
    side: int = SIDE
    """Height and width to which frames are resized; a multiple of 16."""
    width: int = 192
    """Width of the network; a multiple of 8 x heads."""
    heads: int = 4
    """Attention heads."""
    layers: int = 3
    """Layers that see words and pictures."""
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Of the raw scores of VQ, MQ and TA over training clips; what is reported has mean 0 and standard deviation 1 there."""
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    """Their standard deviation."""

    def __post_init__(self) -> None:
        if self.side % 16 or self.width % (8 * self.heads) or min(self.frames, self.layers, self.tokens) < 1:
            raise ValueError(
                f"A scorer needs a side that is a multiple of 16 (got {self.side}), a width that is a multiple of 8 x heads (got {self.width} "
                f"and {self.heads}), and at least one frame, layer and token (got {self.frames}, {self.layers} and {self.tokens})."
            )
        if len(self.mean) != _SPECIAL or len(self.std) != _SPECIAL or min(self.std) <= 0:
            raise ValueError(f"mean and std have one value for each of {', '.join(PARTS)}, and std is positive.")


class Block(nn.Module):
    """Attention with a mask, then a feed-forward layer, both on normalized inputs and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """x: B x N x width; visible: B x 1 x N x N, true where a row may look at a column."""
        query, key, value = (
            self.mixed(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class Scorer(nn.Module):
    """Frames and words to three raw scores."""

    def __init__(self, config: ScorerConfig) -> None:
        super().__init__()
        self.config, width = config, config.width
        channels = (6, width // 8, width // 4, width // 2, width)  # a frame, and its difference from the one before
        layers: list[nn.Module] = []
        for inner, outer in pairwise(channels):
            convolution = nn.Conv2d(inner, outer, 3, stride=2, padding=1)
            assert convolution.bias is not None
            # PyTorch's own start shrinks what differs between clips to a fifth of the biases, and learning hardly begins.
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            convolution.bias = nn.Parameter(torch.zeros(outer))
            layers += [convolution, nn.SiLU()]
        self.pictures = nn.Sequential(*layers)
        patches = (config.side // 16) ** 2
        self.where = nn.Parameter(0.02 * torch.randn(patches, width))
        self.when = nn.Parameter(0.02 * torch.randn(config.frames, width))
        self.words = nn.Embedding(2 + len(config.vocabulary), width)
        nn.init.normal_(self.words.weight, std=0.2)  # as large as what is seen
        self.order = nn.Parameter(0.02 * torch.randn(config.tokens, width))
        self.parts = nn.Parameter(0.02 * torch.randn(_SPECIAL, width))
        self.blocks = nn.ModuleList(Block(width, config.heads) for _ in range(config.layers))
        self.last = nn.LayerNorm(width)
        self.heads = nn.Parameter(torch.randn(_SPECIAL, width) / math.sqrt(width))
        self._numbers = {word: 2 + place for place, word in enumerate(config.vocabulary)}

    def forward(self, videos: Tensor, text: Tensor) -> Tensor:
        """Raw scores B x 3 of uint8 clips B x F x H x W x 3 and the numbers of their words, B x tokens."""
        seen = self._look(videos)
        x = torch.cat([self.parts.expand(len(videos), -1, -1), self.words(text) + self.order, seen], dim=1)
        visible = self._visible(text, seen.shape[1])
        for block in self.blocks:
            x = block(x, visible)
        return (self.last(x[:, :_SPECIAL]) * self.heads).sum(-1)

    def read(self, prompts: Sequence[str]) -> Tensor:
        """The numbers of the words of prompts, B x tokens."""
        rows = [[self._numbers.get(word.strip(".,;:!?"), UNKNOWN) for word in text.lower().split()] for text in prompts]
        rows = [row[: self.config.tokens] + [PADDING] * (self.config.tokens - len(row)) for row in rows]
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, self.config.tokens)

    def _look(self, videos: Tensor) -> Tensor:
        """A token for every patch of every frame that is looked at."""
        side, (count, length) = self.config.side, videos.shape[:2]
        chosen = looked_at(length, self.config.frames, videos.device)
        pixels = videos[:, chosen].permute(0, 1, 4, 2, 3).float() / 127.5 - 1
        if pixels.shape[-2:] != (side, side):
            pixels = F.interpolate(pixels.flatten(0, 1), (side, side), mode="area").unflatten(0, (count, -1))
        change = torch.cat([torch.zeros_like(pixels[:, :1]), pixels.diff(dim=1)], dim=1)
        tokens = self.pictures(torch.cat([pixels, change], dim=2).flatten(0, 1)).flatten(2).transpose(1, 2)
        return (tokens.unflatten(0, (count, -1)) + self.where + self.when[:, None]).flatten(1, 2)

    def _visible(self, text: Tensor, patches: int) -> Tensor:
        """Pictures see pictures; words see words and pictures; VQ and MQ see pictures, TA sees all. Nothing sees padding."""
        length = text.shape[1]
        counts = ((part, 1) for part in range(_SPECIAL)), ((3, length), (4, patches))
        kinds = torch.cat([torch.full((count,), kind, device=text.device) for kind, count in chain(*counts)])
        own = kinds[:, None] == kinds
        words_seen = (kinds == 3) & ((kinds == 2) | (kinds == 3))[:, None]
        allowed = own | words_seen | (kinds == 4)
        told = torch.ones(len(text), len(kinds), dtype=torch.bool, device=text.device)
        told[:, _SPECIAL : _SPECIAL + length] = text != PADDING
        return (allowed & told[:, None]).unsqueeze(1)


class LearnedReward:
    """VQ, MQ and TA of the scenes world as a network sees them that learned from votes: a reward that can be fooled.

    Scores are in standard deviations of the clips that it was trained on. There is no Overall, so that where the judge watches a run, Overall is the truth.
    """

    facts = RewardFacts(
        what="a small network for the scenes world that learned from imperfect votes and can be fooled",
        parts="VQ, MQ, TA",
        files={
            "checkpoint": FileSource(
                text="a folder that `python -m research.pretraining.scenes reward` writes: config.json and model.safetensors"
            )
        },
        parameters=1.6e6,
        gigabytes=0.0064,
    )
    names = PARTS

    def __init__(self, *, checkpoint: str, device: str = "cpu") -> None:
        """Load the network from a folder."""
        self.scorer = load_scorer(Path(checkpoint).expanduser())
        self.to(torch.device(device))

    def to(self, device: torch.device) -> Self:
        """Move to a device."""
        self.scorer.to(device)
        self.device = torch.device(device)
        return self

    def frames_read(self, count: int, fps: float) -> list[int]:
        """The frames that it looks at."""
        return looked_at(count, self.scorer.config.frames).unique().tolist()

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: Sequence[str], fps: float) -> Mapping[str, Tensor]:
        """Score uint8 clips B x F x H x W x 3 against their prompts; frames are taken by their number, so that fps does not matter."""
        if videos.dtype != torch.uint8 or videos.ndim != 5 or videos.shape[-1] != 3 or not videos.shape[1]:
            raise ValueError(f"Expected uint8 clips B x F x H x W x 3, got {videos.dtype} {tuple(videos.shape)}.")
        if len(videos) != len(prompts):
            raise ValueError(f"Got {len(videos)} clips but {len(prompts)} prompts; give one prompt a clip.")
        scores = standardised(self.scorer, raw_scores(self.scorer, videos, prompts)).cpu()
        return {part: scores[:, place] for place, part in enumerate(PARTS)}


def looked_at(length: int, frames: int, device: torch.device | None = None) -> Tensor:
    """Which frames of a clip are looked at: evenly spread from the first to the last."""
    return torch.linspace(0, length - 1, frames, device=device).round().long()


def raw_scores(scorer: Scorer, videos: Tensor, prompts: Sequence[str]) -> Tensor:
    """Raw scores B x 3 on the network's device, a portion of clips at a time."""
    device, text = scorer.heads.device, scorer.read(prompts)
    with torch.autocast(device.type, enabled=False):
        found = [
            scorer(clips.to(device), numbers.to(device))
            for clips, numbers in zip(videos.split(AT_ONCE), text.split(AT_ONCE))
            if len(clips)
        ]
    return torch.cat(found) if found else torch.zeros(0, _SPECIAL, device=device)


def standardised(scorer: Scorer, scores: Tensor) -> Tensor:
    """Raw scores in standard deviations from the mean of training clips."""
    mean, std = (torch.tensor(values, device=scores.device) for values in (scorer.config.mean, scorer.config.std))
    return (scores - mean) / std


def save_scorer(scorer: Scorer, folder: Path) -> None:
    """Write config.json and model.safetensors."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / CONFIG, json.dumps(asdict(scorer.config), indent=1) + "\n")
    with replacing(folder / WEIGHTS) as fresh:
        save_file({name: value.detach().cpu().contiguous() for name, value in scorer.state_dict().items()}, fresh)


def load_scorer(folder: Path) -> Scorer:
    """Read a scorer; what is missing or does not fit is named."""
    from safetensors.torch import load_file

    lacking = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if lacking:
        raise FileNotFoundError(
            f"{folder} has no {' and no '.join(lacking)}: give the folder of a learned reward, which `python -m research.pretraining.scenes reward` writes."
        )
    scorer = Scorer(_read_config(folder / CONFIG))
    state, own = load_file(folder / WEIGHTS), scorer.state_dict()
    shared = own.keys() & state.keys()
    fault = weights_fault(
        missing=own.keys() - state.keys(),
        unexpected=state.keys() - own.keys(),
        mismatched=[name for name in shared if own[name].shape != state[name].shape],
    )
    if fault is not None:
        raise ValueError(f"{folder / WEIGHTS} does not belong to {CONFIG} beside it: it {fault}.")
    scorer.load_state_dict(state)
    return scorer.eval().requires_grad_(False)


def _read_config(path: Path) -> ScorerConfig:
    raw = read_object(path)
    lists, numbers = ("vocabulary", "mean", "std"), ("tokens", "frames", "side", "width", "heads", "layers")
    demand(raw, {**dict.fromkeys(lists, list), **dict.fromkeys(numbers, int)}, str(path))
    known = {one.name for one in fields(ScorerConfig)}
    if raw.keys() - known:
        raise ValueError(f"{path} says {', '.join(sorted(raw.keys() - known))}, which no learned reward has.")
    values: dict[str, Any] = {name: tuple(value) if name in lists else value for name, value in raw.items()}
    return ScorerConfig(**values)
