"""Simulated annotators: what they see of a clip, how they are wrong, and how they vote between clips of one prompt.

An annotator sees what the judge sees in a few frames, takes saturated color for quality and change for motion, hardly looks at textures, and is
not quite sure of anything. The judge on all frames is the truth that votes are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from research.pretraining.scenes.reward_options import Biases
from research.scenes.judge import WEIGHTS
from research.scenes.learned import PARTS, looked_at
from research.scenes.scene import FPS
from sage_grpo.types import Reward

FEW = 9
"""Frames of a clip that annotators see: every other one. What happens between them they do not know."""
AT_ONCE = 256
"""Clips that are judged together."""


def people(biases: Biases, generator: torch.Generator) -> Tensor:
    """Strength of each annotator's liking of color, liking of motion and blindness for textures, as factors: annotators x 3."""
    return 0.5 + torch.rand(biases.annotators, len(PARTS), generator=generator)


def judged(judge: Reward, clips: Tensor, prompts: Sequence[str], device: torch.device, names: Sequence[str]) -> Tensor:
    """Parts of the judge's scores, N x names, on the CPU."""
    found = []
    for start in range(0, len(clips), AT_ONCE):
        scores = judge(clips[start : start + AT_ONCE].to(device), prompts[start : start + AT_ONCE], FPS)
        found.append(torch.stack([scores[name].float().cpu() for name in names], dim=1))
    return torch.cat(found)


def impressions(
    judge: Reward,
    clips: Tensor,
    prompts: Sequence[str],
    biases: Biases,
    factors: Tensor,
    generator: torch.Generator,
    device: torch.device,
) -> Tensor:
    """Impressions of every annotator of every clip's VQ, MQ and TA, annotators x N x 3."""
    few = clips[:, looked_at(clips.shape[1], FEW)]
    *seen, texture = judged(judge, few, prompts, device, (*PARTS, "TA/texture")).unbind(1)
    missed = WEIGHTS["texture"] * (1 - texture)
    likes = torch.stack(
        [biases.colour * _spread(saturation(few)), biases.motion * _spread(change(few)), biases.forgiven * missed],
        dim=1,
    )
    told = torch.stack(seen, dim=1) + factors[:, None] * likes
    return told + biases.noise * torch.randn(told.shape, generator=generator)


def saturation(clips: Tensor) -> Tensor:
    """Mean distance between the strongest and the weakest color of a pixel, N in [0, 1]."""
    return (clips.amax(-1).float() - clips.amin(-1).float()).mean((1, 2, 3)) / 255


def change(clips: Tensor) -> Tensor:
    """Mean change of a pixel from one frame to the next, N in [0, 1]."""
    return (clips[:, 1:].float() - clips[:, :-1].float()).abs().mean((1, 2, 3, 4)) / 255


def differences(scores: Tensor, group: int) -> Tensor:
    """First minus second of all pairs within groups: ... x N x 3 to ... x (N / group) x pairs x 3."""
    # Made where the scores are: a copy to a GPU cannot be part of a captured step.
    first, second = torch.triu_indices(group, group, offset=1, device=scores.device)
    grouped = scores.unflatten(-2, (-1, group))
    return grouped[..., first, :] - grouped[..., second, :]


def votes(told: Tensor, group: int) -> Tensor:
    """Share of the annotators who prefer the first clip of each pair, (N / group) x pairs x 3."""
    return (differences(told, group) > 0).float().mean(0)


def agreement(scores: Tensor, wanted: Tensor, group: int, least: float = 0.0) -> dict[str, float]:
    """By part, the share of pairs that scores (N x 3) order as `wanted` does: differences of pairs, positive where the first is better.

    Pairs that `wanted` does not tell apart by more than `least` are left out.
    """
    own = differences(scores, group)
    found = {}
    for place, part in enumerate(PARTS):
        target = wanted[..., place]
        told = target.abs() > least
        found[part] = float((own[..., place][told].sign() == target[told].sign()).float().mean())
    return found


def _spread(values: Tensor) -> Tensor:
    return (values - values.mean()) / values.std().clamp_min(1e-6)
