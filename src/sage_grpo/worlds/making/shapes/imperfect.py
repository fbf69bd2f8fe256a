"""Deliberately imperfect training data: wrong words, jittered motion, blur and noise.

A model that learns this data well is good but not perfect, in known ways, and leaves RL something to improve.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from sage_grpo.worlds.making.shapes.options import Flaws
from sage_grpo.worlds.shapes.render import render, to_uint8
from sage_grpo.worlds.shapes.scene import ATTRIBUTES, FRAMES, SIDE, SceneBatch, random_scenes, to_text, train_scenes


def jitter(strength: Tensor, frames: int, generator: torch.Generator) -> Tensor:
    """Displacements n x frames x 2 for `render`, independent in every frame and axis.

    `strength` (n) is their standard deviation in world units; one world unit is half the shorter side, so
    0.0625 is one pixel in a frame of 32.
    """
    return torch.randn(len(strength), frames, 2, generator=generator) * strength[:, None, None]


def blur(videos: Tensor, strength: Tensor) -> Tensor:
    """Gaussian blur of each clip with a standard deviation of `strength` pixels; the border is repeated outwards."""
    sigma = strength.clamp_min(1e-3)[:, None]
    reach = int(3 * float(sigma.max()) + 0.999)
    taps = torch.arange(-reach, reach + 1, device=videos.device)
    kernel = torch.exp(-0.5 * (taps / sigma).square())
    kernel = kernel * (taps.abs() <= 3 * sigma)  # so a clip's blur does not depend on its neighbours
    kernel = kernel / kernel.sum(1, keepdim=True)
    for axis in (2, 3):
        at = torch.arange(videos.shape[axis], device=videos.device)
        shifted = (
            videos.index_select(axis, (at + tap).clamp(0, len(at) - 1)) * weight[:, None, None, None, None]
            for tap, weight in zip(taps, kernel.T)
        )
        videos = sum(shifted, torch.zeros_like(videos))
    return videos


def imperfect_clips(batch: SceneBatch, flaws: Flaws, generator: torch.Generator, device: torch.device) -> Tensor:
    """Clips of these scenes with the flaws of the data, uint8 n x F x H x W x 3 on the device."""
    n = len(batch)

    def strengths(share: float, most: float) -> Tensor:
        hit = torch.rand(n, generator=generator) < share
        return hit * most * (0.3 + 0.7 * torch.rand(n, generator=generator))

    displacement = jitter(strengths(flaws.jitter_share, flaws.jitter), FRAMES, generator)
    blurs = strengths(flaws.blur_share, flaws.blur)
    noises = strengths(flaws.noise_share, flaws.noise).to(device)
    videos = render(batch.to(device), FRAMES, SIDE, SIDE, displacement=displacement.to(device))
    hit = (blurs > 0).nonzero().squeeze(1)
    if len(hit):
        videos[hit.to(device)] = blur(videos[hit.to(device)], blurs[hit].to(device))
    # On a GPU the noise is drawn there: a host generator would take longer than everything else together.
    drawn = torch.randn(videos.shape, device=device)
    return to_uint8(videos + drawn * noises[:, None, None, None, None])


def decoder_clips(n: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Clips for the VAE, uint8: half clean, the rest spoilt more than the flow's data, some with two objects.

    RL explores outside the data; a decoder that has seen such clips shows them as they are.
    """
    clean = n // 2
    perfect = Flaws(wrong_word=0, jitter_share=0, blur_share=0, noise_share=0)
    rough = Flaws(jitter_share=0.5, jitter=0.2, blur_share=0.4, blur=1.5, noise_share=0.3, noise=0.08)
    scenes = random_scenes(n, generator, split="train")
    videos = torch.cat(
        [
            imperfect_clips(scenes[:clean], perfect, generator, device),
            imperfect_clips(scenes[clean:], rough, generator, device),
        ]
    )
    blend = n // 20  # two clips laid over one another: faint and double objects
    if blend:
        weight = torch.rand(blend, 1, 1, 1, 1, device=device)
        videos[-blend:] = torch.lerp(videos[-blend:].float(), videos[:blend].float(), weight).to(torch.uint8)
    return videos


def clean_clips(n: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Perfect clips, uint8, of combinations that no training has seen."""
    scenes = random_scenes(n, generator, split="heldout").to(device)
    return to_uint8(render(scenes, FRAMES, SIDE, SIDE))


def imperfect_captions(batch: SceneBatch, flaws: Flaws, generator: torch.Generator) -> list[str]:
    """A caption for every clip; some name wrong values, but never a combination that is held out."""
    return [
        to_text(scene, int(template))
        for scene, template in zip(
            misnamed(batch, flaws.wrong_word, generator).scenes(),
            torch.randint(1 << 16, (len(batch),), generator=generator).tolist(),
        )
    ]


@cache
def _allowed() -> Tensor:
    """True at the attribute indices of every training combination."""
    allowed = torch.zeros([len(values) for values in ATTRIBUTES.values()], dtype=torch.bool)
    allowed[tuple(torch.tensor([scene.indices for scene in train_scenes()]).T)] = True
    return allowed


def misnamed(batch: SceneBatch, wrong_word: float, generator: torch.Generator) -> SceneBatch:
    """The scenes that the captions name: each attribute is another value with this probability.

    A draw that lands on a held-out combination is drawn again, so held-out captions never occur.
    """
    allowed = _allowed()
    true = torch.stack([getattr(batch, name) for name in ATTRIBUTES], dim=1)
    named = true.clone()
    todo = torch.arange(len(batch))
    while len(todo):
        columns = []
        for column, values in enumerate(ATTRIBUTES.values()):
            step = torch.randint(1, len(values), (len(todo),), generator=generator)
            wrong = torch.rand(len(todo), generator=generator) < wrong_word
            columns.append((true[todo, column] + step * wrong) % len(values))
        named[todo] = torch.stack(columns, dim=1)
        todo = todo[~allowed[tuple(named[todo].T)]]
    return replace(batch, **dict(zip(ATTRIBUTES, named.unbind(1))))
