"""Clips that are wrong in known ways: rendered well, then spoilt, or of another scene than the prompt names."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from research.pretraining.imperfect import blur
from research.scenes.render import render, to_uint8
from research.scenes.scene import ATTRIBUTES, FRAMES, SIDE, Scene, batch_of, to_text
from research.scenes.scene import TEMPLATES as FORMS

OFTEN = 0.08
"""Share of clips that have a given fault, so that about half have none: what a fault hides of a clip, it hides of all its parts."""
MISTAKEN = 0.5
"""Share of clips that show another scene than the prompt names, in one to three attributes."""
SHAKE = 0.12
"""Strongest jitter, world units r.m.s. an axis."""
AT_ONCE = 512
"""Clips that are rendered together."""

Fault = Callable[[Tensor, Tensor, torch.Generator], Tensor]
"""Float clips B x F x H x W x 3 in [0, 1], strengths B in [0, 1] and a generator on the CPU to spoilt clips."""


def too_colourful(videos: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Saturation of up to three times what it was; more than the world ever has."""
    grey = videos.mean(-1, keepdim=True)
    return (grey + (1 + 2 * _wide(strength)) * (videos - grey)).clamp(0, 1)


def pale(videos: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Down to a fifth of the saturation."""
    return torch.lerp(videos, videos.mean(-1, keepdim=True).expand_as(videos), 0.8 * _wide(strength))


def blurred(videos: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Up to three pixels of 64."""
    return blur(videos, 3 * strength * videos.shape[2] / SIDE)


def noisy(videos: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Up to 0.2 of a pixel's range, in every frame anew."""
    drawn = torch.randn(videos.shape, generator=generator).to(videos.device)
    return (videos + 0.2 * _wide(strength) * drawn).clamp(0, 1)


def ghostly(videos: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Another clip shines through, by up to a half."""
    return torch.lerp(videos, videos.roll(1, 0), 0.5 * _wide(strength))


def flashing(videos: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Every other frame is brighter."""
    bright = torch.arange(videos.shape[1], device=videos.device)[:, None, None, None] % 2
    return (videos + 0.6 * _wide(strength) * bright).clamp(0, 1)


def frozen(videos: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Stops, at the latest with a quarter of the clip to go, at the earliest with the first frame."""
    last = ((1 - strength) * 0.75 * (videos.shape[1] - 1)).round().long()
    return _at_frames(videos, torch.minimum(_frame_numbers(videos), last[:, None]))


def too_fast(videos: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Up to three times as fast, to the end and back again."""
    length = videos.shape[1] - 1
    way = ((1 + 2 * strength[:, None]) * _frame_numbers(videos)).round().long() % (2 * length)
    return _at_frames(videos, torch.where(way > length, 2 * length - way, way))


def shuffled(videos: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Frames change places with others that are up to four away."""
    numbers = _frame_numbers(videos)
    off = 8 * (torch.rand(numbers.shape, generator=generator).to(videos.device) - 0.5) * strength[:, None]
    return _at_frames(videos, (numbers + off).argsort(1))


FAULTS: Mapping[str, Fault] = {
    fault.__name__: fault
    for fault in (shuffled, frozen, too_fast, ghostly, blurred, noisy, flashing, too_colourful, pale)
}
"""Faults of a clip, in the order in which it happens."""


def mistaken(scene: Scene, draw: random.Random) -> Scene:
    """Another scene of the training split that differs in about one to three attributes."""
    for _ in range(100):
        changed = draw.sample(list(ATTRIBUTES), draw.randint(1, 3))
        values = {name: draw.choice(ATTRIBUTES[name]) for name in changed}
        try:
            other = replace(scene, **values)
        except ValueError:  # cannot be shown together
            continue
        if other != scene and not other.heldout:
            return other
    return scene


def spoilt_groups(
    scenes: list[Scene], group: int, generator: torch.Generator, device: torch.device
) -> tuple[list[str], Tensor]:
    """For every scene a prompt, as often as it has clips, and `group` clips one after another, each with faults of its own; uint8 on the CPU."""
    draw = random.Random(int(torch.randint(2**31, (1,), generator=generator)))
    prompts = [to_text(scene, draw.randrange(len(FORMS))) for scene in scenes]
    shown = [mistaken(scene, draw) if draw.random() < MISTAKEN else scene for scene in scenes for _ in range(group)]
    clips = []
    for start in range(0, len(shown), AT_ONCE):
        batch = batch_of(shown[start : start + AT_ONCE], generator).to(device)
        shake = _strengths(len(batch), generator) * SHAKE
        displacement = torch.randn(len(batch), FRAMES, 2, generator=generator) * shake[:, None, None]
        videos = render(batch, FRAMES, SIDE, SIDE, displacement=displacement.to(device))
        for fault in FAULTS.values():
            videos = spoil(videos, fault, _strengths(len(batch), generator).to(device), generator)
        clips.append(to_uint8(videos).cpu())
    return [prompt for prompt in prompts for _ in range(group)], torch.cat(clips)


def spoil(videos: Tensor, fault: Fault, strength: Tensor, generator: torch.Generator) -> Tensor:
    """The clips with a fault where its strength is not 0."""
    hit = strength.nonzero().squeeze(1)
    if len(hit):
        videos[hit] = fault(videos[hit], strength[hit], generator)
    return videos


def _strengths(n: int, generator: torch.Generator) -> Tensor:
    hit = torch.rand(n, generator=generator) < OFTEN
    return hit * (0.1 + 0.9 * torch.rand(n, generator=generator).square())  # mild ones more often


def _wide(strength: Tensor) -> Tensor:
    return strength[:, None, None, None, None]


def _frame_numbers(videos: Tensor) -> Tensor:
    return torch.arange(videos.shape[1], device=videos.device).expand(len(videos), -1)


def _at_frames(videos: Tensor, frames: Tensor) -> Tensor:
    """Clips whose frames are those of these numbers, B x F."""
    return videos[torch.arange(len(videos), device=videos.device)[:, None], frames]
