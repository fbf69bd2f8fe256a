"""Rewards as users write them, good and bad."""

from __future__ import annotations

import torch

CALLS: list[int] = []


def mean_level(videos, prompts, fps):
    """A plain function: one float a clip, the clip's mean value."""
    CALLS.append(len(prompts))
    return videos.float().mean(dim=(1, 2, 3, 4))


def as_list(videos, prompts, fps, offset=0.0):
    """A list of floats, with an option."""
    return [float(len(prompt)) + offset for prompt in prompts]


def worth(videos, prompts, fps, metadata):
    """What the prompt file says in its column `worth`."""
    return [float(row["worth"]) for row in metadata]


def two_parts(videos, prompts, fps):
    """A mapping."""
    level = videos.float().mean(dim=(1, 2, 3, 4))
    return {"level": level, "rate": torch.full_like(level, fps)}


def red_frames(frames, prompts):
    """Sees frames only."""
    assert frames.ndim == 4
    assert len(prompts) == frames.shape[0]
    return frames[..., 0].float().mean(dim=(1, 2))


def raises_on_bad(videos, prompts, fps):
    """Raises for a whole batch because of one prompt."""
    for prompt in prompts:
        if "bad" in prompt:
            raise KeyError(prompt)
    return mean_level(videos, prompts, fps)


def nan_on_bad(videos, prompts, fps):
    """NaN and infinity for some prompts."""
    level = mean_level(videos, prompts, fps)
    for index, prompt in enumerate(prompts):
        if "bad" in prompt:
            level[index] = torch.inf if "inf" in prompt else torch.nan
    return level


def too_few(videos, prompts, fps):
    """One value short."""
    return mean_level(videos, prompts, fps)[:-1]


def wrong_shape(videos, prompts, fps):
    """One value a frame."""
    return videos.float().mean(dim=(2, 3, 4))


def words(videos, prompts, fps):
    """No numbers."""
    return ["good"] * len(prompts)


def nothing(videos, prompts, fps):
    """Forgets to return."""


def interrupts(videos, prompts, fps):
    """The user presses Ctrl-C."""
    raise KeyboardInterrupt


def exits(videos, prompts, fps):
    """A library calls sys.exit."""
    raise SystemExit(3)


def out_of_memory_above_two(videos, prompts, fps):
    """Fits two clips."""
    if len(prompts) > 2:
        raise torch.OutOfMemoryError("too many clips")
    return mean_level(videos, prompts, fps)


def in_place(videos, prompts, fps):
    """Falsifies what the next reward sees."""
    videos.zero_()
    return [0.0] * len(prompts)


class Movable:
    """A reward with weights."""

    def __init__(self, *, gain: float = 1.0) -> None:
        self.gain, self.places = gain, []

    names = ("moved",)

    def to(self, device):
        self.places.append(str(device))
        return self

    def __call__(self, videos, prompts, fps):
        return {"moved": self.gain * videos.float().mean(dim=(1, 2, 3, 4))}


class NoReward:
    """Lacks everything."""


def content(videos, prompts, fps):
    """A number that only this clip with this prompt and fps has."""
    weights = torch.arange(1, videos[0].numel() + 1, dtype=torch.float64)
    pixels = videos.flatten(1).double() @ weights
    texts = torch.tensor([sum(i * ord(char) for i, char in enumerate(prompt, 1)) for prompt in prompts])
    return ((pixels * 31 + texts * 7 + fps) % 65521).float()


def slow_content(videos, prompts, fps):
    """As `content`, with the time that a model takes."""
    import time

    time.sleep(0.02)
    return content(videos, prompts, fps)
