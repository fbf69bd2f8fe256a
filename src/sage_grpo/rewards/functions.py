"""Any Python function as a reward, and the check of its return value."""

from __future__ import annotations

import asyncio
import inspect
import math
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from sage_grpo.types import PartScores, Sound
from sage_grpo.utils.suggest import did_you_mean

REASONS = "reasons"
"""Key of a returned mapping for the reward's reasons: one text (or None) a clip, or index -> text."""
Takes = Literal["clips", "group"]
"""The clips of one call of a reward: any clips, or all clips of one group."""


class RewardConfigError(ValueError):
    """The configuration of a reward is wrong: never masked, it always stops the run."""


class BadReturn(ValueError):
    """A reward's return value is not one float per clip."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A remedy for a misspelled name: the nearest known one, and the whole list."""
    known = sorted(known)
    return f"{did_you_mean(name, known, 0.4)} Known: {', '.join(known) or '(none)'}."


def check_known(names: Iterable[str], known: Collection[str], what: str) -> None:
    """RewardConfigError for the first unknown name; `what` begins the message ("weights: 'clip' has no part")."""
    for name in names:
        if name not in known:
            raise RewardConfigError(f"{what} {name!r}.{nearest(name, known)}")


def where_raised(error: BaseException) -> str:
    """File, line and source line of the user's code that raised an exception: the last frame that is neither ours nor a library's."""
    ours, *libraries = str(Path(__file__).parents[1]), *(sysconfig.get_path(name) for name in ("stdlib", "purelib"))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    users = [frame for frame in frames if not frame.filename.startswith(tuple(libraries))]
    if not frames:
        return ""
    frame = users[-1] if users else frames[0]  # for an installed reward: the first frame outside our code
    return f" ({frame.filename}, line {frame.lineno}{f': {frame.line}' if frame.line else ''})"


def finish(result: Any) -> Any:
    """The result of a reward's call, awaited if the reward is async."""
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    with ThreadPoolExecutor(max_workers=1) as executor:  # a notebook's thread has a loop already
        return executor.submit(asyncio.run, wait()).result()


def check_return(result: object, parts: Sequence[str], count: int) -> PartScores:
    """Turn a reward's return value into float32 tensors of `count` values, or raise BadReturn.

    A mapping must hold every part; a tensor or list of floats is accepted for a reward of one part. None in a list marks a clip without a score.
    """
    reasons: dict[int, str] = {}
    if isinstance(result, Mapping):
        given: Any = result.reasons if isinstance(result, PartScores) else {}
        if REASONS in result and REASONS not in parts:
            given = result[REASONS]
        if isinstance(given, Sequence) and not isinstance(given, str) and len(given) == count:
            given = dict(enumerate(given))
        if not isinstance(given, Mapping | None):
            raise BadReturn(f"reasons must be one text a clip, or index -> text; got {given!r} for {count} clips")
        reasons = {int(index): str(reason) for index, reason in (given or {}).items() if reason not in (None, "")}
        check_known(parts, [str(part) for part in result], "The reward returned no part")
        values = {part: result[part] for part in parts}
    elif len(parts) == 1:
        values = {parts[0]: result}
    else:
        raise RewardConfigError(f"Parts {list(parts)} were asked for, the reward returned a {type(result).__name__}.")
    return PartScores({part: _as_floats(part, value, count, reasons) for part, value in values.items()}, reasons)


def _as_floats(part: str, value: object, count: int, reasons: dict[int, str]) -> Tensor:
    if value is None:
        raise BadReturn(f"part {part!r} is None")
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            if one is None:
                reasons.setdefault(index, f"part {part!r} is None")
        value = [math.nan if one is None else one for one in value]
    try:
        tensor = torch.as_tensor(value).detach().to("cpu", torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadReturn(f"part {part!r} is not numbers: {error}") from error
    if tensor.ndim != 1 or tensor.shape[0] != count:
        raise BadReturn(f"part {part!r} has shape {tuple(tensor.shape)} for {count} clips; expected ({count},)")
    return tensor


class FunctionReward:
    """A function `(videos, prompts, fps) -> tensor, list or mapping` as a reward; it may be async.

    A parameter called `metadata` receives the prompt file's other columns. With `takes: group` every call has all clips of one group and no others.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        parts: Sequence[str] = (),
        reads: Literal["clips", "latents"] = "clips",
        takes: Takes = "clips",
        **arguments: Any,
    ) -> None:
        check_known([reads], ("clips", "latents"), "A reward reads clips or latents, not")
        check_known([takes], get_args(Takes), "takes: a reward takes clips or a whole group, not")
        self.compares = takes == "group"
        self.function, self.reads = function, reads
        self.names = tuple(parts) or (function.__name__,)
        self._arguments = arguments
        taken = _check_arguments(function, arguments)
        self._takes_metadata, self.hears = "metadata" in taken, "sound" in taken

    def __call__(
        self,
        videos: Tensor,
        prompts: Sequence[str],
        fps: float,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        sound: Sound | None = None,
    ) -> Mapping[str, Tensor]:
        extra = {"sound": sound} if self.hears else {}
        return check_return(finish(self._call(videos, prompts, fps, metadata, **extra)), self.names, len(prompts))

    def _call(
        self,
        videos: Tensor,
        prompts: Sequence[str],
        fps: float,
        metadata: Sequence[Mapping[str, Any]] | None,
        **extra: Any,
    ) -> Any:
        if self._takes_metadata:
            extra["metadata"] = list(metadata or [{} for _ in prompts])
        return self.function(videos, list(prompts), fps, **self._arguments, **extra)


class DifferentiableFunction(FunctionReward):
    """A function in torch whose scores have a gradient.

    It gets float clips in [0, 255] where the reward is differentiated, uint8 elsewhere; latents are the same in both.
    """

    def differentiable(
        self, videos: Tensor, prompts: Sequence[str], fps: float, metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> Mapping[str, Tensor]:
        result = self._call(videos, prompts, fps, metadata)
        if isinstance(result, Mapping):
            return {str(part): value for part, value in result.items() if isinstance(value, Tensor)}
        if isinstance(result, Tensor) and len(self.names) == 1:
            return {self.names[0]: result}
        raise RewardConfigError(
            f"A differentiable reward returns a tensor, or a mapping of tensors; {self.function.__name__} returned a "
            f"{type(result).__name__}."
        )


def _check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> set[str]:
    """The optional parameters (metadata, sound) that the function has; RewardConfigError when it cannot be called."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some C functions have no signature: a misfit shows in the first call
        return set()
    title = f"{function.__module__}:{getattr(function, '__name__', type(function).__name__)}"
    taken = {"metadata", "sound"} & signature.parameters.keys()
    for name in sorted(taken & arguments.keys()):
        raise RewardConfigError(f"{title}: `{name}` is passed by the run, so it cannot be an option.")
    given = {**arguments, **dict.fromkeys(taken)}
    try:
        signature.bind(None, None, None, **given)
    except TypeError as error:
        raise RewardConfigError(
            f"{title}{signature} cannot be called with 3 positional arguments and options {sorted(given)}: {error}."
        ) from error
    return taken
