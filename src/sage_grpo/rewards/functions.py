"""Any Python function as a reward, and the check of what a reward returned."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_grpo.rewards.frames import sample_indices
from sage_grpo.types import PartScores


class RewardConfigError(ValueError):
    """The configuration of a reward is wrong: never masked, it always stops the run."""


class BadReturn(ValueError):
    """A reward returned something that is not one float a clip."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A remedy for a misspelt name: the nearest known one, and the whole list."""
    known = list(known)
    folded = {candidate.lower(): candidate for candidate in known}
    match = difflib.get_close_matches(name.lower(), list(folded), n=1, cutoff=0.4)
    hint = f" Did you mean {folded[match[0]]!r}?" if match else ""
    return f"{hint} Known: {', '.join(sorted(known)) or '(none)'}."


def check_return(result: object, parts: Sequence[str], count: int) -> PartScores:
    """Turn what a reward returned into float32 tensors of `count` values, or raise BadReturn.

    A mapping must hold every part (a missing one is a configuration error, with the nearest name); a tensor
    or list of floats is accepted for a reward of one part.
    """
    reasons: dict[int, str] = {}
    if isinstance(result, Mapping):
        reasons = result.reasons if isinstance(result, PartScores) else {}
        for part in parts:
            if part not in result:
                raise RewardConfigError(f"The reward returned no part {part!r}.{nearest(part, map(str, result))}")
        values = {part: result[part] for part in parts}
    elif len(parts) == 1:
        values = {parts[0]: result}
    else:
        raise RewardConfigError(
            f"Parts {list(parts)} were asked for, but the reward returned a {type(result).__name__}."
        )
    return PartScores({part: _as_floats(part, value, count) for part, value in values.items()}, reasons)


def _as_floats(part: str, value: object, count: int) -> Tensor:
    if value is None:
        raise BadReturn(f"part {part!r} is None")
    try:
        tensor = torch.as_tensor(value).detach().to("cpu", torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadReturn(f"part {part!r} is not numbers: {error}") from error
    if tensor.ndim != 1 or tensor.shape[0] != count:
        raise BadReturn(f"part {part!r} has shape {tuple(tensor.shape)} for {count} clips; expected ({count},)")
    return tensor


class FunctionReward:
    """A function `(videos, prompts, fps) -> tensor, list or mapping` as a reward.

    With `per_frame` the function sees frames only, `(frames: uint8 N x H x W x 3, N prompts) -> N floats`, and
    a clip's score is the mean over its sampled frames.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        parts: Sequence[str] = (),
        per_frame: bool = False,
        sample_fps: float = 2.0,
        num_frames: int = 0,
        **arguments: Any,
    ) -> None:
        self._function = function
        self._parts = tuple(parts) or (function.__name__,)
        self._per_frame = per_frame
        self._sample_fps = sample_fps
        self._num_frames = num_frames
        self._arguments = arguments
        self._takes_metadata = takes_metadata(function) and "metadata" not in arguments
        told = {"metadata": None} if self._takes_metadata else {}
        _check_arguments(function, {**arguments, **told}, positional=2 if per_frame else 3)

    @property
    def names(self) -> tuple[str, ...]:
        """The parts: the keys of the weights, or the function's own name."""
        return self._parts

    def __call__(
        self,
        videos: Tensor,
        prompts: Sequence[str],
        fps: float,
        metadata: Sequence[Mapping[str, Any]] | None = None,
    ) -> Mapping[str, Tensor]:
        """Score the clips."""
        count = videos.shape[0]
        rows = [{} for _ in prompts] if metadata is None else list(metadata)
        told: dict[str, Any] = {"metadata": rows} if self._takes_metadata else {}
        if not self._per_frame:
            result = self._function(videos, list(prompts), fps, **self._arguments, **told)
            return check_return(result, self._parts, count)
        total = videos.shape[1]
        indices = sample_indices(total, fps, sample_fps=self._sample_fps, max_frames=self._num_frames)
        frames = videos[:, indices].flatten(0, 1)
        repeated = [prompt for prompt in prompts for _ in indices]
        if told:
            told = {"metadata": [row for row in rows for _ in indices]}
        result = self._function(frames, repeated, **self._arguments, **told)
        flat = check_return(result, self._parts, len(repeated))
        return PartScores({part: value.view(count, len(indices)).mean(dim=1) for part, value in flat.items()})


def takes_metadata(function: Callable[..., Any]) -> bool:
    """Whether a reward's signature has a parameter `metadata`."""
    try:
        return "metadata" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some C functions have no signature
        return False


def _check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], *, positional: int) -> None:
    try:
        signature = inspect.signature(function)
    except (
        TypeError,
        ValueError,
    ):  # some C functions have no signature: the first call will tell
        return
    try:
        signature.bind(*[None] * positional, **arguments)
    except TypeError as error:
        raise RewardConfigError(
            f"{function.__module__}:{function.__name__}{signature} cannot be called with {positional} "
            f"positional arguments and options {sorted(arguments)}: {error}."
        ) from error
