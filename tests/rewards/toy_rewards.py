"""Rewards as users write them, good and bad."""

from __future__ import annotations

import asyncio
import json

import torch

from sage_grpo.rewards.spec import RewardSpec

CALLS: list[int] = []
"""How many clips each call had."""


def toy(name: str, **kwargs) -> RewardSpec:
    return RewardSpec(name=f"toy_rewards:{name}", **kwargs)


def clips(count: int = 5) -> torch.Tensor:
    levels = (torch.arange(count) * 10 + 5).to(torch.uint8)
    return levels.view(-1, 1, 1, 1, 1).expand(count, 4, 6, 6, 3).contiguous()


def level_of(videos):
    return videos.float().mean(dim=(1, 2, 3, 4))


def mean_level(videos, prompts, fps):
    CALLS.append(len(prompts))
    return level_of(videos)


def as_list(videos, prompts, fps, offset=0.0):
    return [float(len(prompt)) + offset for prompt in prompts]


def worth(videos, prompts, fps, metadata):
    return [float(row["worth"]) for row in metadata]


def two_parts(videos, prompts, fps):
    level = level_of(videos)
    return {"level": level, "rate": torch.full_like(level, fps)}


def two_levels(videos, prompts, fps):
    return {"level": level_of(videos), "half": level_of(videos) / 2}


def root_of_level(videos, prompts, fps):
    """NaN below 0, and at 0 without a slope."""
    return level_of(videos).sqrt() * (videos.flatten(1).amax(1) != 0)


def nan_on_bad(videos, prompts, fps):
    level = mean_level(videos, prompts, fps)
    for index, prompt in enumerate(prompts):
        if "bad" in prompt:
            level[index] = torch.inf if "inf" in prompt else torch.nan
    return level


def too_few(videos, prompts, fps):
    return mean_level(videos, prompts, fps)[:-1]


def out_of_memory_above_two(videos, prompts, fps):
    if len(prompts) > 2:
        raise torch.OutOfMemoryError("too many clips")
    return mean_level(videos, prompts, fps)


def in_place(videos, prompts, fps):
    videos.zero_()
    return [0.0] * len(prompts)


class Movable:
    names = ("moved",)

    def __init__(self, *, gain: float = 1.0) -> None:
        self.gain, self.places = gain, []

    def to(self, device):
        self.places.append(str(device))
        return self

    def __call__(self, videos, prompts, fps):
        return {"moved": self.gain * level_of(videos)}


def content(videos, prompts, fps):
    weights = torch.arange(1, videos[0].numel() + 1, dtype=torch.float64)
    pixels = videos.flatten(1).double() @ weights
    texts = torch.tensor([sum(i * ord(char) for i, char in enumerate(prompt, 1)) for prompt in prompts])
    return ((pixels * 31 + texts * 7 + fps) % 65521).float()


def through_numpy(videos, prompts, fps):
    level = level_of(videos)
    videos.numpy()[...] = 0
    prompts.clear()
    return level


def one_none(videos, prompts, fps):
    CALLS.append(len(prompts))
    return [None if "bad" in prompt else 6.0 for prompt in prompts]


def raises_on_bad(videos, prompts, fps):
    level = mean_level(videos, prompts, fps)
    if any("bad" in prompt for prompt in prompts):
        raise TimeoutError("the judge takes too long")
    return level


async def asks_a_network(videos, prompts, fps):
    await asyncio.sleep(0)
    return raises_on_bad(videos, prompts, fps)


class AsyncJudge:
    names = ("judged",)

    async def __call__(self, videos, prompts, fps):
        return {"judged": level_of(videos)}


def counts_words(videos, prompts, fps, metadata):
    right = [len(prompt.split()) == int(row.get("words", -1)) for prompt, row in zip(prompts, metadata)]
    for row in metadata:
        row.clear()
    return [float(one) for one in right]


class TakesMetadata:
    names = ("image",)

    def __call__(self, videos, prompts, fps, metadata=None):
        return {"image": [float("image" in row) for row in metadata]}


def with_reasons(videos, prompts, fps):
    scores = [None if prompt == "bad" else 1.0 for prompt in prompts]
    return {"with_reasons": scores, "reasons": [None if one == "two" else f"because of {one}" for one in prompts]}


BOTH = None
"""A barrier that two rewards pass only when they run at the same time."""


def meets_first(videos, prompts, fps):
    BOTH.wait()
    return [1.0] * len(prompts)


def meets_second(videos, prompts, fps):
    BOTH.wait()
    assert not torch.is_grad_enabled()
    raise KeyError("second")


class Picky:
    names = ("picky",)

    def __init__(self, *, frames: int) -> None:
        self.frames, self.seen = frames, []

    def __call__(self, videos, prompts, fps):
        self.seen.append((tuple(videos.shape), list(prompts), fps))
        if videos.shape[1] != self.frames:
            raise ValueError(f"needs {self.frames} frames")
        return {"picky": videos.float().std(dim=(1, 2, 3, 4))}


def lost_in_a_library(videos, prompts, fps):
    return json.loads("scores")


class NeedsAFile:
    names = ("file",)

    def __init__(self):
        raise OSError("there is no such file")

    def __call__(self, videos, prompts, fps):
        """Never called."""


def ranked(videos, prompts, fps):
    """Gets all clips of a group: the brightest is 1, the darkest 0, equal ones share."""
    assert len(set(prompts)) == 1
    level = mean_level(videos, prompts, fps)
    ahead = (level[:, None] > level).float() + 0.5 * (level[:, None] == level)
    return (ahead.sum(1) - 0.5) / (len(level) - 1)


def only_nan(videos, prompts, fps):
    return [float("nan")] * len(prompts)


def half_nan(videos, prompts, fps):
    return {"level": mean_level(videos, prompts, fps), "broken": only_nan(videos, prompts, fps)}


def never_finds(videos, prompts, fps):
    return {"never_finds": only_nan(videos, prompts, fps), "reasons": ["no face in any frame"] * len(prompts)}
